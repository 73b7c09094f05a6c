"""`to_groups` and `from_groups`: move whole trees of arrays into groups of devices and back.

Everything is checked, in all processes, before the first array moves.
"""

from __future__ import annotations

import collections
import dataclasses
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from meshwright.errors import GroupError, short
from meshwright.mpmd.arrays import MpmdArray
from meshwright.mpmd.groups import Groups, as_groups
from meshwright.mpmd.mpmd_sharding import MpmdSharding, read_ids
from meshwright.partitioning.decide import Options, decide
from meshwright.transfers.moves import (
    Memory,
    Move,
    agree,
    memory,
    own_memory,
    platform,
    return_freed_memory,
)
from meshwright.transfers.resharding import (
    batches,
    choose_method,
    move_batch,
    plan_reshard,
    put_from_host,
    reshard,
    spans_processes,
    target_spec_problems,
    transfer_context,
    value_problems,
)
from meshwright.trees.specs import mesh_axes
from meshwright.trees.split import broadcast_prefix
from meshwright.trees.walk import Leaf, Walk, for_distinct, is_key, refuse, walk

# What turns a moved array into the result, e.g. key data into a key array again.
Finish = Callable[[jax.Array], Any]


def to_groups(
    tree: Any,
    groups: Groups | Sequence[Mesh],
    where: Any,
    specs: Any = None,
    *,
    donate: bool = False,
) -> Any:
    """Move every array of a tree into its group or groups; other leaves are returned as they are.

    An array in one group becomes a plain `jax.Array` on that group's mesh, one in several an
    `MpmdArray`. As in `reshard` no bit changes, memory is bounded, and in several processes all
    must call it.

    Args:
      tree: any pytree; arrays may be NumPy's, on any devices, or in groups already.
      groups: an `MpmdMesh`, `MeshGroups`, or a list of meshes.
      where: the groups: a number or several for all arrays, a function of the path
        (`"layers/0/w"`), or a tree of those or a prefix of one. A list is a list of the tree
        where the tree has one there; a set, `{0, 3}`, always means several groups.
      specs: a `PartitionSpec`, or a tree of them or a prefix of one, with `{group: spec}` where
        groups differ. Without it `partition` decides on each group's mesh. The axis along which
        an `MpmdMesh` was cut is dropped.
      donate: whether to free the arrays that are moved, each after its last copy.

    Raises `PartitionError` with all problems at once, and `GroupError` if `groups` are none.

    >>> import numpy as np, meshwright as mw
    >>> groups = mw.MpmdMesh(mw.mesh("pp:2, fsdp:4"), "pp")
    >>> layer = np.ones((8, 8), "float32")
    >>> params = {"embed": np.ones((256, 64), "float32"), "layers": [layer, layer]}
    >>> placed = mw.to_groups(params, groups, {"embed": {0, 1}, "layers": [0, 1]})
    >>> placed["embed"]
    MpmdArray(f32[256@fsdp,64] in groups 0, 1 of 2)
    >>> [groups.mpmd_idx_for_mesh[layer.sharding.mesh] for layer in placed["layers"]]
    [0, 1]
    """
    groups = as_groups(groups)
    walked = walk(tree)
    assignments, problems = assign_groups(tree, walked, groups, where, specs)
    pairs = [] if problems else list(_moves(assignments, groups))
    moves = [move for move, _ in pairs]
    spans = groups.spans_processes or spans_processes(walk(_firsts(walked)), groups.meshes[0])
    if spans:
        # If one process refuses, all must: the others would wait for it in a collective.
        problems = agree(problems, moves)
    refuse("to_groups", problems)
    # What is one object here may be two in another process: there each is moved on its own.
    moved = (move_all if spans else move_each_once)(moves, donate=donate)
    results = iter([finish(value) for (_, finish), value in zip(pairs, moved, strict=True)])
    placed = [
        _join_groups(assignment, [next(results) for _ in assignment.specs], groups)
        for assignment in assignments
    ]
    if donate:
        delete_donated(_replicas(walked), moved)
    return walked.rebuild(placed)


def from_groups(tree: Any, mesh: Mesh, specs: Any, *, donate: bool = False) -> Any:
    """Move a tree out of its groups onto one ordinary mesh.

    Works as `reshard(tree, mesh, specs)`, which takes plain arrays, and reads arrays that are in
    several groups from their first replica. `donate=True` frees all replicas. Raises
    `PartitionError` with all problems at once.

    >>> import numpy as np, meshwright as mw
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = mw.mesh("pp:2, fsdp:4")
    >>> placed = mw.to_groups(np.ones((64, 64), "float32"), mw.MpmdMesh(mesh, "pp"), {0, 1})
    >>> mw.from_groups(placed, mesh, P(("pp", "fsdp"))).sharding.shard_shape((64, 64))
    (8, 64)
    """
    walked = walk(tree)
    moved = reshard(walked.rebuild(_firsts(walked)), mesh, specs, donate=donate)
    if donate:
        delete_donated(_replicas(walked), jax.tree.leaves(moved))
    return moved


def _moves(assignments: Sequence[GroupAssignment], groups: Groups) -> Iterator[tuple[Move, Finish]]:
    """Yield the moves array by array, so that one is in all its groups before the next begins.

    `plan_reshard` works on one mesh at a time, so the moves are made group by group and then
    interleaved.
    """
    planned = []
    for group, mesh in enumerate(groups.meshes):
        here = [assignment for assignment in assignments if group in assignment.specs]
        values = [assignment.source(group, groups) for assignment in here]
        leaves = tuple(
            in_group(assignment.leaf, group)._replace(position=place, value=value)
            for place, (assignment, value) in enumerate(zip(here, values, strict=True))
        )
        walked = Walk(tuple(values), leaves, jax.tree.structure(values))
        specs = [assignment.specs[group] for assignment in here]
        plan_here = plan_reshard(values, walked, mesh, specs)
        planned.append(zip(plan_here.moves, plan_here.finish, strict=True))
    for assignment in assignments:
        for group in assignment.specs:
            yield next(planned[group])


def _join_groups(
    assignment: GroupAssignment, arrays: Sequence[jax.Array], groups: Groups
) -> jax.Array | MpmdArray:
    if len(arrays) == 1:
        return arrays[0]
    specs = assignment.specs
    return MpmdArray(arrays, MpmdSharding(groups, list(specs), specs))


def _firsts(walked: Walk) -> list[Any]:
    """Return the arrays of a tree, the first replica of those that are in groups."""
    values = [leaf.value for leaf in walked.arrays]
    return [value.first if isinstance(value, MpmdArray) else value for value in values]


def _replicas(walked: Walk) -> Iterator[jax.Array]:
    """Yield every replica, in any group, of the arrays that are in groups."""
    for leaf in walked.arrays:
        if isinstance(leaf.value, MpmdArray):
            yield from leaf.value.arrays.values()


@dataclasses.dataclass(frozen=True)
class GroupAssignment:
    """An array and the groups it goes to, each with its spec there."""

    leaf: Leaf
    specs: Mapping[int, PartitionSpec]

    def source(self, group: int, groups: Groups) -> Any:
        """Return what is moved into a group: the replica that is there already, or the first."""
        value = self.leaf.value
        if not isinstance(value, MpmdArray):
            return value
        is_there = value.sharding.mpmd_mesh == groups and group in value.mesh_ids
        return value.on(group) if is_there else value.first


def assign_groups(
    tree: Any, walked: Walk, groups: Groups, where: Any, specs: Any
) -> tuple[list[GroupAssignment], list[str]]:
    """Return the groups and specs of every array, and all that is wrong. Touches no device."""
    wrong = list(_groups_problems(groups))
    try:
        ids_per_leaf = _ids_per_leaf(tree, walked, where)
        given = None if specs is None else broadcast_prefix("specs", specs, tree, _are_specs)
    except GroupError as error:
        return [], [*wrong, str(error)]
    leaves_and_ids: list[tuple[Leaf, tuple[int, ...]]] = []
    for leaf, ids in zip(walked.arrays, ids_per_leaf, strict=True):
        # All leaves are looked at before any is refused: the error lists every problem.
        wrong += value_problems(leaf._replace(value=_first_or_deleted(leaf.value)))
        try:
            leaves_and_ids.append((leaf, read_ids(leaf.where, ids, groups)))
        except GroupError as error:
            wrong.append(str(error))
    if given is None:
        return list(_assign_by_shape(leaves_and_ids, groups)), wrong
    assignments = [
        GroupAssignment(leaf, _local_specs(given[leaf.position], ids, groups))
        for leaf, ids in leaves_and_ids
    ]
    return assignments, [*wrong, *_spec_problems(assignments, groups)]


def _groups_problems(groups: Groups) -> Iterator[str]:
    if groups.compile_only:
        yield "groups: their devices exist only for the compiler. Use meshes of jax.devices()."


def _first_or_deleted(value: Any) -> Any:
    """Return the replica that decides whether an array can be moved: a deleted one, if any is."""
    if not isinstance(value, MpmdArray):
        return value
    return next((array for array in value.arrays.values() if array.is_deleted()), value.first)


def _ids_per_leaf(tree: Any, walked: Walk, where: Any) -> list[Any]:
    # A model with `__call__` may itself be a tree of group numbers: it is one if JAX flattens it.
    if callable(where) and jax.tree_util.all_leaves([where]):
        return [where(leaf.path) for leaf in walked.arrays]
    per_leaf = broadcast_prefix("where", where, tree, _are_numbers, ", such as 0 or the set {0, 1}")
    return [per_leaf[leaf.position] for leaf in walked.arrays]


def _are_numbers(value: Any, node: Any) -> bool:
    """Whether a list means several groups, rather than one entry per item of a list of the tree."""
    is_list = isinstance(value, (list, tuple)) and not isinstance(node, (list, tuple))
    return is_list and all(map(_is_number, value))


def _are_specs(value: Any, node: Any) -> bool:
    """Whether a dict has a spec per group, rather than one entry per item of a dict of the tree."""
    is_mapping = isinstance(value, Mapping) and all(map(_is_number, value))
    return is_mapping and not (isinstance(node, Mapping) and any(map(_is_number, node)))


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Integral)


def _assign_by_shape(
    leaves_and_ids: Sequence[tuple[Leaf, tuple[int, ...]]], groups: Groups
) -> Iterator[GroupAssignment]:
    """Let each group decide about what it gets, as `partition` does on its mesh."""
    specs_of: dict[int, dict[int, PartitionSpec]] = collections.defaultdict(dict)
    for group, mesh in enumerate(groups.meshes):
        leaves = tuple(leaf for leaf, ids in leaves_and_ids if group in ids)
        specs = decide(Walk((), leaves, None), None, mesh, Options())
        for leaf, spec in zip(leaves, specs, strict=True):
            specs_of[leaf.position][group] = groups.local_spec(spec)
    for leaf, _ in leaves_and_ids:
        yield GroupAssignment(leaf, specs_of[leaf.position])


def _local_specs(given: Any, ids: Sequence[int], groups: Groups) -> dict[int, Any]:
    """Return the spec of each group; what is no spec is left for `_spec_problems` to name."""
    per_group = given if isinstance(given, Mapping) else dict.fromkeys(ids, given)
    specs = {group: per_group.get(group) for group in ids}
    return {
        group: groups.local_spec(spec) if isinstance(spec, PartitionSpec) else spec
        for group, spec in specs.items()
    }


def _spec_problems(assignments: Sequence[GroupAssignment], groups: Groups) -> Iterator[str]:
    axes = [mesh_axes(mesh) for mesh in groups.meshes]
    for assignment in assignments:
        for group, spec in assignment.specs.items():
            leaf = in_group(assignment.leaf, group)
            if isinstance(spec, PartitionSpec):
                yield from target_spec_problems(leaf, spec, axes[group])
            else:
                yield (
                    f"{leaf.where}: {short(spec)} is not a PartitionSpec. "
                    "Use PartitionSpec() for an array that is replicated."
                )


def in_group(leaf: Leaf, group: int) -> Leaf:
    """Return the leaf with a path that names the group, for messages."""
    return leaf._replace(path=f"{leaf.where} (group {group})")


# One array may move to several groups, so `reshard`'s own loop, in which every source has one
# target, does not do: a donated source is freed after its last copy, and only if neither another
# live array nor one of its own results shares its memory.

# Bytes freed on the host after which the allocator is asked to return them to the system; the call
# walks the heap, so small arrays are not worth it.
_WORTH_RETURNING = 2 * 2**20


def move_all(moves: Sequence[Move], *, donate: bool) -> list[jax.Array]:
    """Return the moved arrays, in order. Memory is bounded as in `reshard`."""
    owned = _owned(moves) if donate else {}
    last = {id(move.value): place for place, move in enumerate(moves)}
    # Memory of each source's results so far: a copy may be a view of its source.
    in_results: dict[int, set[Any]] = collections.defaultdict(set)
    results: list[jax.Array] = []
    with transfer_context(moves):
        for batch in batches(moves):
            freed = 0
            for move, value in zip(batch, move_batch(batch), strict=True):
                source = id(move.value)
                if source in owned and choose_method(move) is not put_from_host:
                    in_results[source] |= memory(value)
                own = owned.get(source)
                if own and last[source] == len(results) and not own & in_results[source]:
                    freed += _delete(move)
                results.append(value)
            _return_to_system(freed)
    return results


def move_each_once(moves: Sequence[Move], *, donate: bool) -> list[jax.Array]:
    """Move an array that goes to one place twice only once: tied weights stay one array."""
    keys = [(id(move.value), move.target) for move in moves]
    return for_distinct(keys, moves, lambda distinct: move_all(distinct, donate=donate))


def delete_donated(arrays: Iterable[jax.Array], results: Iterable[Any]) -> None:
    """Delete arrays that are no results, unless another live array shares their memory."""
    kept = {id(_data(value)) for value in results if isinstance(value, jax.Array)}
    distinct = {id(array): array for array in arrays if not array.is_deleted()}
    moves = [_stationary(_data(array)) for array in distinct.values()]
    freed = 0
    for move, own in zip(moves, own_memory([move.value for move in moves]), strict=True):
        if own and id(move.value) not in kept:
            freed += _delete(move)
    _return_to_system(freed)


def _owned(moves: Sequence[Move]) -> dict[int, Memory]:
    """Return the memory of each source that nothing else uses."""
    sources = {id(move.value): move for move in moves}
    values = [move.value for move in sources.values()]
    return dict(zip(sources, own_memory(values), strict=True))


def _delete(move: Move) -> int:
    """Delete the source; return the bytes that this frees on the host."""
    on_cpu = platform(move.value.sharding) == "cpu"
    move.value.delete()
    return move.bytes if on_cpu else 0


def _return_to_system(freed: int) -> None:
    if freed >= _WORTH_RETURNING:
        return_freed_memory()


def _data(array: jax.Array) -> jax.Array:
    """Return the array itself; of keys, the integers they are made of, which own the memory."""
    holds_keys = is_key(array.dtype)
    return jax.random.key_data(array) if holds_keys else array


def _stationary(array: jax.Array) -> Move:
    """Make a move to where the array is, for the functions that look at a move's memory."""
    sharding: Any = array.sharding
    return Move("", array.shape, np.dtype(array.dtype), array, sharding, sharding)
