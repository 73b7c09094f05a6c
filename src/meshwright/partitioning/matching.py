"""A tree of specs against the tree it is meant for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright.errors import PartitionError, short
from meshwright.partitioning.leaves import Leaf, Walk, path_text, refuse
from meshwright.partitioning.specs import AnyMesh, mesh_axes, problems


def match_specs(found: Walk, specs: Any) -> list[PartitionSpec]:
    """The spec of every array, from a tree like the arrays' own, or one spec for all."""
    if isinstance(specs, PartitionSpec):
        return [specs] * len(found.arrays)
    flat, treedef = jax.tree_util.tree_flatten_with_path(specs, is_leaf=_is_spec)
    if treedef != found.treedef:  # a None in place of a spec is named, one beside arrays is fine
        flat, treedef = jax.tree_util.tree_flatten_with_path(specs, is_leaf=_is_spec_or_none)
    if treedef != found.treedef:
        raise PartitionError(
            f"specs: the tree differs from the arrays' tree. {_difference(found, flat)}"
        )
    values = [value for _, value in flat]
    chosen = [values[leaf.place] for leaf in found.arrays]
    for leaf, spec in zip(found.arrays, chosen, strict=True):
        if not isinstance(spec, PartitionSpec):
            raise PartitionError(
                f"specs: {leaf.where}: {short(spec)} is not a PartitionSpec. "
                "Use PartitionSpec() for an array that stays whole."
            )
    return chosen


def check_specs(
    what: str, leaves: Sequence[Leaf], specs: Sequence[PartitionSpec], mesh: AnyMesh
) -> None:
    """Refuse specs that do not fit their arrays or the mesh, all at once."""
    sizes = mesh_axes(mesh)
    refuse(
        what,
        [
            problem
            for leaf, spec in zip(leaves, specs, strict=True)
            for problem in problems(leaf.path, leaf.shape, spec, sizes)
        ],
    )


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _is_spec_or_none(value: Any) -> bool:
    return value is None or _is_spec(value)


def _difference(found: Walk, flat: list[tuple[Any, Any]]) -> str:
    """The first leaf that only one of the two trees has."""
    whole, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(found.treedef, found.leaves))
    ours = [path_text(path) for path, _ in whole]
    theirs = [path_text(path) for path, _ in flat]
    missing, extra = set(ours) - set(theirs), set(theirs) - set(ours)
    if missing:
        return f"First difference: {next(p for p in ours if p in missing)!r} has no spec."
    if extra:
        first = next(path for path in theirs if path in extra)
        return f"First difference: {first!r} has a spec but is not in the tree."
    return "They have the same leaves in containers of different kinds."
