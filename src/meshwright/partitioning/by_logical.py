"""Specs by logical axes: a name per dim, and a table from names to mesh axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright.errors import PartitionError, listing, near, short
from meshwright.partitioning.leaves import Leaf, path_text
from meshwright.partitioning.specs import make_spec

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


def read_names(leaves: Sequence[Leaf], names: Any) -> list[Names | None]:
    """Names per leaf from a tree of tuples that mirrors the arrays' tree."""
    flat, _ = jax.tree_util.tree_flatten_with_path(names, is_leaf=_is_names)
    by_path = {path_text(path): value for path, value in flat}
    missing = [leaf.path for leaf in leaves if leaf.path not in by_path and leaf.shape]
    if missing:
        raise PartitionError(
            f"names: nothing for {listing(missing, 4)}. Give a tuple of names for every array, "
            "in a tree like the arrays' own."
        )
    extra = sorted(set(by_path) - {leaf.path for leaf in leaves})
    if extra:
        raise PartitionError(f"names: {listing(extra, 4)} is not in the tree of arrays.")
    for path, value in by_path.items():
        if not _is_names(value):
            raise PartitionError(
                f"names: {path}: {short(value)} is not a tuple such as ('embed', 'mlp')."
            )
    return [by_path.get(leaf.path) for leaf in leaves]


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
                f"{leaf.where}: {leaf.shape} has no logical names. Give them with names=..., or "
                "create it with metadata (nnx.with_partitioning, nn.with_logical_partitioning)."
            )
        return
    if len(names) != len(leaf.shape):
        yield (
            f"{leaf.where}: {len(names)} names {tuple(names)} for {len(leaf.shape)} dims "
            f"{leaf.shape}. Give one name, or None, per dim."
        )
    for dim, name in enumerate(names):
        if name is not None and name not in table:
            yield (
                f"{leaf.where}: dim {dim}: no rule for logical axis {short(name)}."
                f"{near(str(name), table)} Add it to the table, with None to keep the dim whole."
            )
