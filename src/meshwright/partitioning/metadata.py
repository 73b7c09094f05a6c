"""Logical names that a tree carries itself, as Flax's NNX and Linen write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright.partitioning.leaves import Leaf, path_text
from meshwright.partitioning.nodes import flatten


def read_metadata(tree: Any, leaves: Sequence[Leaf]) -> list[tuple[str | None, ...] | None]:
    """Names per leaf from the boxes around the arrays; `None` where there are none.

    Linen's `Partitioned` and `LogicallyPartitioned` boxes hold `names`. NNX variables hold them as
    metadata (`sharding_names`, or `sharding` in older versions). Nothing of Flax is imported.
    """
    boxes, _ = flatten(tree, _is_box)
    named = {path_text(path): _names(box) for path, box in boxes if _is_box(box)}
    return [_nearest(leaf.path, named) for leaf in leaves]


def _nearest(path: str, named: dict[str, tuple[str | None, ...] | None]) -> Any:
    """The box a leaf stands in: its own path, or the one that ends where the leaf begins."""
    while True:
        if path in named:
            return named[path]
        if "/" not in path:
            return named.get("")
        path = path.rpartition("/")[0]


def _is_box(value: Any) -> bool:
    return _names(value) is not None


def _names(value: Any) -> tuple[str | None, ...] | None:
    if isinstance(value, (jax.Array, type)):
        return None
    kind = type(value)
    if not any(base.__module__.startswith("flax") for base in kind.__mro__):
        return None
    # A module may have an attribute `names` of its own; only boxes can be unboxed.
    fields = getattr(value, "__dict__", {}) if hasattr(value, "unbox") else {}
    for source in (_metadata(value), fields):
        for key in ("names", "sharding_names", "out_sharding", "sharding"):
            found = source.get(key) if isinstance(source, dict) else None
            if isinstance(found, (tuple, list, PartitionSpec)) and all(
                entry is None or isinstance(entry, str) for entry in found
            ):
                return tuple(found)
    return None


def _metadata(value: Any) -> dict[str, Any]:
    get = getattr(value, "get_metadata", None)
    try:
        return dict(get()) if callable(get) else {}
    except TypeError:
        return {}
