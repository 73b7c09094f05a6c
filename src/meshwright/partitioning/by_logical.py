"""Specs by logical axes: a name per dim, and a table from names to mesh axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.errors import PartitionError, near, short
from meshwright.partitioning.leaves import Leaf, path_text, shown
from meshwright.partitioning.nodes import flatten
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
