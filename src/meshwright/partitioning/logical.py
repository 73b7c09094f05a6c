"""Specs by logical axes: a name per dim, and a table from names to mesh axes.

The names come from the user, or from the metadata that Flax puts around arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright._text import plural
from meshwright.errors import PartitionError, near, option_text, short
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import Leaf, flatten, path_text, shown_path

Table = Mapping[str, Any] | Sequence[tuple[str, Any]]
Names = tuple[str | None, ...]


def read_table(logical: Any) -> dict[str, tuple[str, ...]]:
    """Read the table as `{logical name: mesh axes}`; a name mapped to `None` has no axes."""
    if isinstance(logical, Mapping):
        logical = list(logical.items())
    if isinstance(logical, str) or not isinstance(logical, (list, tuple)):
        raise PartitionError(
            f"logical: {short(logical)} is not a table such as "
            "{'embed': 'fsdp', 'mlp': 'tp', 'layers': None}.",
            option="logical",
        )
    table: dict[str, tuple[str, ...]] = {}
    for entry in logical:
        if not isinstance(entry, (list, tuple)) or len(entry) != 2 or not isinstance(entry[0], str):
            raise PartitionError(
                f"logical: {short(entry)} is not a (name, mesh axes) pair.", option="logical"
            )
        name, axes = entry
        if name in table:
            # Flax takes the first of two entries that is free; here one entry must say it all.
            raise PartitionError(
                f"logical: {name!r} appears twice. Give it one entry.", option="logical"
            )
        axes = () if axes is None else ((axes,) if isinstance(axes, str) else axes)
        if not isinstance(axes, (list, tuple)) or not all(isinstance(a, str) for a in axes):
            raise PartitionError(
                f"logical: {name!r}: {short(axes)} is not an axis name or several.",
                option="logical",
            )
        table[name] = tuple(axes)
    return table


def read_names(leaves: Sequence[Leaf], names: Any) -> tuple[list[Names | None], list[str]]:
    """Read names per leaf from a tree of tuples like the arrays' tree; return what is wrong too."""
    flat, _ = flatten(names, _is_names)
    # Matched by path, not by structure: leaves may lack names, and containers may differ in kind.
    by_path = {path_text(path): value for path, value in flat}
    ranks = {leaf.path: len(leaf.shape) for leaf in leaves}
    wrong = []
    for path, value in by_path.items():
        where = shown_path(path)
        if path not in ranks:
            wrong.append(f"names: {where} is not in the tree of arrays. Fix its path or remove it.")
        elif not _is_names(value):
            wrong.append(f"names: {where}: {short(value)} is not a tuple such as ('embed', 'mlp').")
            by_path[path] = (None,) * ranks[path]  # fits, so that nothing more is said of it
    return [by_path.get(leaf.path) for leaf in leaves], wrong


def _is_names(value: Any) -> bool:
    if isinstance(value, PartitionSpec):
        return True
    plain = isinstance(value, (tuple, list)) and not hasattr(value, "_fields")
    return plain and all(entry is None or isinstance(entry, str) for entry in value)


def logical_spec(names: Names, table: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    """Translate names into a spec; replicated dims at the end are left out."""
    entries: list[Any] = []
    for name in names:
        axes = () if name is None else table.get(name, ())
        entries.append(axes if len(axes) > 1 else (axes[0] if axes else None))
    return make_spec(entries)


def logical_problems(
    leaf: Leaf, names: Names | None, table: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """Yield what is wrong with the names of a leaf: missing, too few, or not in the table."""
    if names is None:
        if leaf.shape:
            yield (
                f"{leaf.where}: {leaf.shape} has no logical names. Give them with names=..., "
                "create it with metadata (nnx.with_partitioning, nn.with_logical_partitioning), "
                f"or pass {option_text('unmatched', 'replicate', 'shape')}."
            )
        return
    if not fits(leaf, names):
        yield (
            f"{leaf.where}: {plural(len(names), 'name')} {tuple(names)} for "
            f"{plural(len(leaf.shape), 'dim')} {leaf.shape}. Give one name, or None, per dim."
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


# Logical names that a tree carries itself, as Flax writes them. Linen's `Partitioned` and
# `LogicallyPartitioned` boxes hold `names`. NNX variables hold them as metadata (`sharding_names`,
# or `sharding` in older versions). Boxes are recognised by the module of their class and by
# attributes, so that Flax is never imported here.


def read_metadata(tree: Any, leaves: Sequence[Leaf]) -> list[Names | None]:
    """Read names per leaf from the Flax boxes around the arrays; `None` where there are none."""
    boxes, _ = flatten(tree, _is_box)
    named = {path_text(path): _names(box) for path, box in boxes if _is_box(box)}
    return [_nearest(leaf.path, named) for leaf in leaves]


def _nearest(path: str, named: dict[str, Names | None]) -> Names | None:
    """Return the names of the innermost box around a leaf: at its own path, or above it."""
    while True:
        if path in named:
            return named[path]
        if "/" not in path:
            return named.get("")
        path = path.rpartition("/")[0]


def _is_box(value: Any) -> bool:
    return _names(value) is not None


def _names(value: Any) -> Names | None:
    """Return the names that a box of Flax holds, or `None` for anything else."""
    if isinstance(value, (jax.Array, type)):
        return None
    kind = type(value)
    if not any(base.__module__.startswith("flax") for base in kind.__mro__):
        return None
    # A module may have an attribute `names` of its own; only boxes can be unboxed.
    fields = getattr(value, "__dict__", {}) if hasattr(value, "unbox") else {}
    for source in (_metadata(value), fields):
        for key in ("names", "sharding_names", "out_sharding", "sharding"):
            names = source.get(key) if isinstance(source, dict) else None
            # `sharding` may also be a `NamedSharding`, which has no logical names.
            if isinstance(names, (tuple, list, PartitionSpec)) and all(
                entry is None or isinstance(entry, str) for entry in names
            ):
                return tuple(names)
    return None


def _metadata(value: Any) -> dict[str, Any]:
    get = getattr(value, "get_metadata", None)
    try:
        return dict(get()) if callable(get) else {}
    except TypeError:  # another library's `get_metadata`, which takes arguments
        return {}
