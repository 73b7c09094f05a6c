"""Where each array of a tree goes: its groups, and a split for each. Touches no device."""

from __future__ import annotations

import collections
import dataclasses
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright.errors import GroupError, short
from meshwright.mpmd.arrays.array import MpmdArray
from meshwright.mpmd.arrays.prefixes import spread
from meshwright.mpmd.arrays.sharding import read_ids
from meshwright.mpmd.groups import Groups
from meshwright.partitioning.decide import decide
from meshwright.partitioning.leaves import Leaf, Walk
from meshwright.partitioning.moving.movable import spec_problems, value_problems
from meshwright.partitioning.options import Options
from meshwright.partitioning.specs import mesh_axes


@dataclasses.dataclass(frozen=True)
class Home:
    """An array and the groups it goes to, each with its spec there."""

    leaf: Leaf
    specs: Mapping[int, PartitionSpec]

    def source(self, group: int, groups: Groups) -> Any:
        """What is moved into a group: what lies there already, or else the first replica."""
        value = self.leaf.value
        if not isinstance(value, MpmdArray):
            return value
        there = value.sharding.mpmd_mesh == groups and group in value.mesh_ids
        return value.on(group) if there else value.first


def find_homes(
    tree: Any, found: Walk, groups: Groups, where: Any, specs: Any
) -> tuple[list[Home], list[str]]:
    """A home for every array, or everything that is wrong."""
    wrong = list(_groups_problems(groups))
    try:
        ids = _ids_of_each(tree, found, where)
        given = None if specs is None else spread("specs", specs, tree, _are_specs)
    except GroupError as error:
        return [], [*wrong, str(error)]
    homes: list[tuple[Leaf, tuple[int, ...]]] = []
    for leaf, asked in zip(found.arrays, ids, strict=True):
        wrong += value_problems(leaf._replace(value=_first_or_deleted(leaf.value)))
        try:
            homes.append((leaf, read_ids(leaf.where, asked, groups)))
        except GroupError as error:
            wrong.append(str(error))
    if given is None:
        return list(_by_shape(homes, groups)), wrong
    placed = [Home(leaf, _specs(given[leaf.place], ids, groups)) for leaf, ids in homes]
    return placed, [*wrong, *_spec_problems(placed, groups)]


def _groups_problems(groups: Groups) -> Iterator[str]:
    if groups.compile_only:
        yield "groups: their devices exist only for the compiler. Use meshes of jax.devices()."


def _first_or_deleted(value: Any) -> Any:
    """What tells whether an array can be moved."""
    if not isinstance(value, MpmdArray):
        return value
    return next((array for array in value.arrays.values() if array.is_deleted()), value.first)


def _ids_of_each(tree: Any, found: Walk, where: Any) -> list[Any]:
    if callable(where) and jax.tree_util.all_leaves([where]):  # a model may be a callable tree
        return [where(leaf.path) for leaf in found.arrays]
    spread_out = spread("where", where, tree, _are_numbers, ", such as 0 or the set {0, 1}")
    return [spread_out[leaf.place] for leaf in found.arrays]


def _are_numbers(value: Any, node: Any) -> bool:
    """Several groups as a list, where nobody can take it for a list of the tree."""
    listed = isinstance(value, (list, tuple)) and not isinstance(node, (list, tuple))
    return listed and all(map(_is_number, value))


def _are_specs(value: Any, node: Any) -> bool:
    """A spec per group, where nobody can take it for a dict of the tree."""
    mapped = isinstance(value, Mapping) and all(map(_is_number, value))
    return mapped and not (isinstance(node, Mapping) and any(map(_is_number, node)))


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Integral)


def _by_shape(homes: Sequence[tuple[Leaf, tuple[int, ...]]], groups: Groups) -> Iterator[Home]:
    """Each group decides for what it gets, as `partition` does on its mesh."""
    chosen: dict[int, dict[int, PartitionSpec]] = collections.defaultdict(dict)
    for group, mesh in enumerate(groups.meshes):
        leaves = tuple(leaf for leaf, ids in homes if group in ids)
        specs = decide(Walk((), leaves, None), None, mesh, Options())
        for leaf, spec in zip(leaves, specs, strict=True):
            chosen[leaf.place][group] = groups.local_spec(spec)
    for leaf, _ in homes:
        yield Home(leaf, chosen[leaf.place])


def _specs(given: Any, ids: Sequence[int], groups: Groups) -> dict[int, Any]:
    """The spec of each group; what is no spec is left for the checks to name."""
    per_group = given if isinstance(given, Mapping) else dict.fromkeys(ids, given)
    specs = {group: per_group.get(group) for group in ids}
    return {
        group: groups.local_spec(spec) if isinstance(spec, PartitionSpec) else spec
        for group, spec in specs.items()
    }


def _spec_problems(homes: Sequence[Home], groups: Groups) -> Iterator[str]:
    axes = [mesh_axes(mesh) for mesh in groups.meshes]
    for home in homes:
        for group, spec in home.specs.items():
            leaf = in_group(home.leaf, group)
            if isinstance(spec, PartitionSpec):
                yield from spec_problems(leaf, spec, axes[group])
            else:
                yield (
                    f"{leaf.where}: {short(spec)} is not a PartitionSpec. "
                    "Use PartitionSpec() for an array that stays whole."
                )


def in_group(leaf: Leaf, group: int) -> Leaf:
    """The leaf under a name that says where it goes."""
    return leaf._replace(path=f"{leaf.where} (group {group})")
