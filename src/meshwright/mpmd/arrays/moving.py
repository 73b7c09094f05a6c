"""`to_groups(...)` and `from_groups(...)`: whole trees into groups and back, checked first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from meshwright.mpmd.arrays.array import MpmdArray
from meshwright.mpmd.arrays.copying import give_up, move_all, once
from meshwright.mpmd.arrays.homes import Home, find_homes, in_group
from meshwright.mpmd.arrays.sharding import MpmdSharding
from meshwright.mpmd.groups import Groups, as_groups
from meshwright.partitioning.leaves import Walk, refuse, walk
from meshwright.partitioning.moving import reshard
from meshwright.partitioning.moving.agreement import agree
from meshwright.partitioning.moving.movable import plan, spans_processes
from meshwright.partitioning.moving.moves import Move

Finish = Callable[[jax.Array], Any]


def to_groups(
    tree: Any,
    groups: Groups | Sequence[Mesh],
    where: Any,
    specs: Any = None,
    *,
    donate: bool = False,
) -> Any:
    """The tree with every array in its group or groups; other leaves pass through.

    `where` says the groups: a number or several for all arrays, a function of the path
    (`"layers/0/w"`), or a tree of those or a prefix of one. A list is a list of the tree where
    the tree has one there; a set, `{0, 3}`, always means several groups. An array in one group
    becomes a plain `jax.Array` on that group's mesh, one in several an `MpmdArray`.

    `specs` is a `PartitionSpec`, or a tree of them or a prefix of one, with `{group: spec}` where
    groups differ; without it `partition` decides on each group's mesh. The axis along which an
    `MpmdMesh` was cut is dropped. As in `reshard` no bit changes, memory is bounded, several
    processes all call it, and `donate=True` gives arrays up, each after its last copy.

    >>> import numpy as np, meshwright as mw
    >>> groups = mw.MpmdMesh(mw.mesh("pp:2, fsdp:4"), "pp")
    >>> params = {"embed": np.ones((64, 64), "float32"), "layers": [np.ones((8, 8), "float32")] * 2}
    >>> placed = mw.to_groups(params, groups, {"embed": {0, 1}, "layers": [0, 1]})
    >>> placed["embed"]
    MpmdArray(f32[64@fsdp,64] in groups 0, 1 of 2)
    >>> [groups.mpmd_idx_for_mesh[layer.sharding.mesh] for layer in placed["layers"]]
    [0, 1]
    """
    groups = as_groups(groups)
    found = walk(tree)
    homes, problems = find_homes(tree, found, groups, where, specs)
    pairs = [] if problems else list(_moves(homes, groups))
    moves = [move for move, _ in pairs]
    spans = groups.spans_processes or spans_processes(walk(_firsts(found)), groups.meshes[0])
    if spans:
        problems = agree(problems, moves)
    refuse("to_groups", problems)
    # What is one object here may be two in another process: there each is moved on its own.
    moved = (move_all if spans else once)(moves, donate=donate)
    done = iter([finish(value) for (_, finish), value in zip(pairs, moved, strict=True)])
    placed = [_settled(home, [next(done) for _ in home.specs], groups) for home in homes]
    if donate:
        give_up(_replicas(found), moved)
    return found.rebuild(placed)


def from_groups(tree: Any, mesh: Mesh, specs: Any, *, donate: bool = False) -> Any:
    """The tree on one ordinary mesh: `reshard`, for arrays of groups from their first replica.

    >>> import numpy as np, meshwright as mw
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = mw.mesh("pp:2, fsdp:4")
    >>> placed = mw.to_groups(np.ones((64, 64), "float32"), mw.MpmdMesh(mesh, "pp"), {0, 1})
    >>> mw.from_groups(placed, mesh, P(("pp", "fsdp"))).sharding.shard_shape((64, 64))
    (8, 64)
    """
    found = walk(tree)
    moved = reshard(found.rebuild(_firsts(found)), mesh, specs, donate=donate)
    if donate:
        give_up(_replicas(found), jax.tree.leaves(moved))
    return moved


def _moves(homes: Sequence[Home], groups: Groups) -> Iterator[tuple[Move, Finish]]:
    """Array by array, so that one goes to all its groups before the next; with the last step."""
    planned = []
    for group, mesh in enumerate(groups.meshes):
        here = [home for home in homes if group in home.specs]
        values = [home.source(group, groups) for home in here]
        leaves = tuple(
            in_group(home.leaf, group)._replace(place=place, value=value)
            for place, (home, value) in enumerate(zip(here, values, strict=True))
        )
        found = Walk(tuple(values), leaves, jax.tree.structure(values))
        made = plan(values, found, mesh, [home.specs[group] for home in here])
        planned.append(zip(made.moves, made.finish, strict=True))
    for home in homes:
        for group in home.specs:
            yield next(planned[group])


def _settled(home: Home, arrays: Sequence[jax.Array], groups: Groups) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    return MpmdArray(arrays, MpmdSharding(groups, list(home.specs), home.specs))


def _firsts(found: Walk) -> list[Any]:
    """The arrays of a tree, of those in groups the first replica."""
    values = [leaf.value for leaf in found.arrays]
    return [value.first if isinstance(value, MpmdArray) else value for value in values]


def _replicas(found: Walk) -> Iterator[jax.Array]:
    """The arrays that make up those of a tree that are in groups."""
    for leaf in found.arrays:
        if isinstance(leaf.value, MpmdArray):
            yield from leaf.value.arrays.values()
