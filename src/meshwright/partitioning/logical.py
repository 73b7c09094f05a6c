"""Specs by logical axes: a name per dim, and a table from names to mesh axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright.errors import PartitionError, near, short
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import Leaf, flatten, path_text, shown

Table = Mapping[str, Any] | Sequence[tuple[str, Any]]
Names = tuple[str | None, ...]


def read_table(logical: Any) -> dict[str, tuple[str, ...]]:
    """The table as `{logical name: mesh axes}`; a name mapped to `None` stays whole."""
    if isinstance(logical, Mapping):
        logical = list(logical.items())
    if isinstance(logical, str) or not isinstance(logical, (list, tuple)):
        raise PartitionError(
            f"logical: {short(logical)} is not a table such as "
            "{'embed': 'fsdp', 'mlp': 'tp', 'layers': None}."
        )
    table: dict[str, tuple[str, ...]] = {}
    for entry in logical:
        if not isinstance(entry, (list, tuple)) or len(entry) != 2 or not isinstance(entry[0], str):
            raise PartitionError(f"logical: {short(entry)} is not a (name, mesh axes) pair.")
        name, axes = entry
        if name in table:
            raise PartitionError(f"logical: {name!r} appears twice. Give it one entry.")
        axes = () if axes is None else ((axes,) if isinstance(axes, str) else axes)
        if not isinstance(axes, (list, tuple)) or not all(isinstance(a, str) for a in axes):
            raise PartitionError(
                f"logical: {name!r}: {short(axes)} is not an axis name or several."
            )
        table[name] = tuple(axes)
    return table


def read_names(leaves: Sequence[Leaf], names: Any) -> tuple[list[Names | None], list[str]]:
    """Names per leaf from a tree of tuples that mirrors the arrays' tree, and what is wrong."""
    flat, _ = flatten(names, _is_names)
    by_path = {path_text(path): value for path, value in flat}
    ranks = {leaf.path: len(leaf.shape) for leaf in leaves}
    wrong = []
    for path, value in by_path.items():
        where = shown(path)
        if path not in ranks:
            wrong.append(f"names: {where} is not in the tree of arrays. Mend its path or drop it.")
        elif not _is_names(value):
            wrong.append(f"names: {where}: {short(value)} is not a tuple such as ('embed', 'mlp').")
            by_path[path] = (None,) * ranks[path]
    return [by_path.get(leaf.path) for leaf in leaves], wrong


def _is_names(value: Any) -> bool:
    if isinstance(value, PartitionSpec):
        return True
    plain = isinstance(value, (tuple, list)) and not hasattr(value, "_fields")
    return plain and all(entry is None or isinstance(entry, str) for entry in value)


def logical_spec(names: Names, table: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    """The spec these names give; trailing whole dims are left out."""
    entries: list[Any] = []
    for name in names:
        axes = () if name is None else table.get(name, ())
        entries.append(axes if len(axes) > 1 else (axes[0] if axes else None))
    return make_spec(entries)


def logical_problems(
    leaf: Leaf, names: Names | None, table: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """Names that do not fit the leaf or the table."""
    if names is None:
        if leaf.shape:
            yield (
                f"{leaf.where}: {leaf.shape} has no logical names. Give them with names=..., "
                "create it with metadata (nnx.with_partitioning, nn.with_logical_partitioning), "
                "or pass unmatched='replicate' or 'shape'."
            )
        return
    if not fits(leaf, names):
        yield (
            f"{leaf.where}: {_count(len(names), 'name')} {tuple(names)} for "
            f"{_count(len(leaf.shape), 'dim')} {leaf.shape}. Give one name, or None, per dim."
        )
        return
    for dim, name in enumerate(names):
        if name is not None and name not in table:
            yield (
                f"{leaf.where}: dim {dim}: no rule for logical axis {short(name)}."
                f"{near(str(name), table)} Add it to the table, with None to keep the dim whole."
            )


def fits(leaf: Leaf, names: Names) -> bool:
    """Whether there is a name for every dim."""
    return len(names) == len(leaf.shape)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


# Logical names that a tree carries itself, as Flax's NNX and Linen write them.


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
