"""Specs by logical axes: a name per dim, and a table from names to mesh axes.

The names come from the user, or from the metadata that Flax and penzai put around arrays
(`trees.metadata`). A name that is not in the table but is an axis of the mesh stands for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from meshwright._text import plural
from meshwright.errors import PartitionError, near, option_text, short
from meshwright.trees.metadata import Names
from meshwright.trees.specs import entry_axes, make_spec
from meshwright.trees.walk import Leaf, flatten, path_text, shown_path

Table = Mapping[str, Any] | Sequence[tuple[str, Any]]


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
                f"logical: {name!r}: {short(axes)} is not a mesh axis or several. Write e.g. "
                "'fsdp', ('fsdp', 'sp'), or None not to shard the dim.",
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
            wrong.append(
                f"names: {where}: {short(value)} is not one name or None per dim, such "
                "as ('embed', None, 'mlp'). Let the table map one name to several mesh axes."
            )
            by_path[path] = (None,) * ranks[path]  # fits, so that nothing more is said of it
    return [by_path.get(leaf.path) for leaf in leaves], wrong


def _is_names(value: Any) -> bool:
    if isinstance(value, PartitionSpec):
        return True
    plain = isinstance(value, (tuple, list)) and not hasattr(value, "_fields")
    return plain and all(entry is None or isinstance(entry, str) for entry in value)


def logical_spec(
    names: Names, table: Mapping[str, tuple[str, ...]], mesh_axes: Collection[str]
) -> PartitionSpec:
    """Translate names into a spec; dims with unknown names are not sharded."""
    entries: list[Any] = []
    for entry in names:
        axes = [axis for name in entry_axes(entry) for axis in _axes(name, table, mesh_axes) or ()]
        entries.append(tuple(axes) if len(axes) > 1 else (axes[0] if axes else None))
    return make_spec(entries)


def _axes(
    name: str, table: Mapping[str, tuple[str, ...]], mesh_axes: Collection[str]
) -> tuple[str, ...] | None:
    """Return the mesh axes of a name: by the table, or itself if it is one; `None` if unknown."""
    if name in table:
        return table[name]
    return (name,) if name in mesh_axes else None


def missing_problem(leaf: Leaf) -> str:
    """Say that a leaf has no names."""
    return (
        f"{leaf.where}: {leaf.shape} has no logical names. Give them with names=..., "
        "create it with metadata (nnx.with_partitioning, nn.with_logical_partitioning), "
        f"or pass {option_text('unmatched', 'replicate', 'shape')}."
    )


def count_problem(leaf: Leaf, names: Names, given: bool) -> str | None:
    """Say that a leaf has too many names, or too few where they are `given` by hand.

    Flax writes fewer names than dims where a layer reshapes its kernel: the rest have none.
    """
    if len(names) == len(leaf.shape) or (len(names) < len(leaf.shape) and not given):
        return None
    return (
        f"{leaf.where}: {plural(len(names), 'name')} {tuple(names)} for "
        f"{plural(len(leaf.shape), 'dim')} {leaf.shape}. Give one name, or None, per dim."
    )


def unknown_problems(
    leaf: Leaf, names: Names, table: Mapping[str, tuple[str, ...]], mesh_axes: Collection[str]
) -> Iterator[str]:
    """Yield the names of a leaf that are neither in the table nor axes of the mesh."""
    for dim, entry in enumerate(names):
        for name in entry_axes(entry):
            if _axes(name, table, mesh_axes) is None:
                yield (
                    f"{leaf.where}: dim {dim}: no rule for logical axis {short(name)}."
                    f"{near(name, (*table, *mesh_axes))} Add it to the table, with None not to "
                    f"shard the dim, or pass {option_text('unmatched', 'replicate', 'shape')}."
                )
