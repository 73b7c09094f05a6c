"""`to_groups(...)` and `from_groups(...)`: whole trees into groups and back, checked first."""

from __future__ import annotations

import collections
import dataclasses
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from meshwright.errors import GroupError, short
from meshwright.mpmd.arrays import MpmdArray, MpmdSharding, read_ids
from meshwright.mpmd.groups import Groups, as_groups
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
    plan,
    put_from_host,
    reshard,
    spans_processes,
    spec_problems,
    transfer_context,
    value_problems,
)
from meshwright.trees.specs import mesh_axes
from meshwright.trees.split import spread
from meshwright.trees.walk import Leaf, Walk, refuse, walk

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


# Where each array of a tree goes: its groups, and a split for each. Touches no device.


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


# Moving arrays, some of them to several places; a source is given up after its last copy.


# Freed memory goes back to the system once it is worth the call.
_WORTH_RETURNING = 2 * 2**20


def move_all(moves: Sequence[Move], *, donate: bool) -> list[jax.Array]:
    """The results in order. Memory is bounded as in `reshard`."""
    owned = _owned(moves) if donate else {}
    last = {id(move.value): place for place, move in enumerate(moves)}
    living: dict[int, set[Any]] = collections.defaultdict(set)
    results: list[jax.Array] = []
    with transfer_context(moves):
        for batch in batches(moves):
            freed = 0
            for move, value in zip(batch, move_batch(batch), strict=True):
                source = id(move.value)
                if source in owned and choose_method(move) is not put_from_host:
                    living[source] |= memory(value)
                own = owned.get(source)
                if own and last[source] == len(results) and not own & living[source]:
                    freed += _delete(move)
                results.append(value)
            _return(freed)
    return results


def once(moves: Sequence[Move], *, donate: bool) -> list[jax.Array]:
    """The same, where an array that goes to one place twice is moved once, and stays one."""
    names = [(id(move.value), move.target) for move in moves]
    single = dict(zip(names, moves, strict=True))
    moved = dict(zip(single, move_all(list(single.values()), donate=donate), strict=True))
    return [moved[name] for name in names]


def give_up(arrays: Iterable[jax.Array], results: Iterable[Any]) -> None:
    """Delete arrays that are no results, but for those whose memory another live array shares."""
    kept = {id(_data(value)) for value in results if isinstance(value, jax.Array)}
    single = {id(array): array for array in arrays if not array.is_deleted()}
    moves = [_resting(_data(array)) for array in single.values()]
    freed = 0
    for move, own in zip(moves, own_memory([move.value for move in moves]), strict=True):
        if own and id(move.value) not in kept:
            freed += _delete(move)
    _return(freed)


def _owned(moves: Sequence[Move]) -> dict[int, Memory]:
    """The memory of each source that nothing else uses."""
    sources = {id(move.value): move for move in moves}
    values = [move.value for move in sources.values()]
    return dict(zip(sources, own_memory(values), strict=True))


def _delete(move: Move) -> int:
    """Returns the bytes that the host got back."""
    on_cpu = platform(move.value.sharding) == "cpu"
    move.value.delete()
    return move.bytes if on_cpu else 0


def _return(freed: int) -> None:
    if freed >= _WORTH_RETURNING:
        return_freed_memory()


def _data(array: jax.Array) -> jax.Array:
    """The array itself; of keys the integers they are made of."""
    keys = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if keys else array


def _resting(array: jax.Array) -> Move:
    """An array that goes nowhere."""
    split: Any = array.sharding
    return Move("", array.shape, np.dtype(array.dtype), array, split, split)
