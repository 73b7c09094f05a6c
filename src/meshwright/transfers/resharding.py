"""`reshard`: move a tree of arrays from any meshes and splits to another, checked first.

All problems of all arrays are found first, the same in every process. Then the arrays are moved in
batches, each array by the cheapest of four methods (`choose_method`); with `donate` the sources of
a batch are deleted as soon as it has moved.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshwright import _compat
from meshwright._checks import check_flag
from meshwright.errors import PartitionError, short
from meshwright.transfers.boxes import is_in_place, keeps_boxes
from meshwright.transfers.message_plan import crosses_processes, process_of
from meshwright.transfers.moves import (
    Memory,
    Move,
    agree,
    build,
    local_shards,
    memory,
    moved_without_shards,
    own_memory,
    platform,
    read_whole,
    return_freed_memory,
    x64_if,
)
from meshwright.transfers.ppermute_transport import exchange_pieces
from meshwright.transfers.transfer_plan import key_data_shape
from meshwright.trees.specs import (
    AnyMesh,
    is_reduction_free,
    match_specs,
    mesh_axes,
    spec_problems,
    specs_on_mesh,
)
from meshwright.trees.walk import Leaf, Walk, for_distinct, is_key, refuse, tie_problems, walk

# Arrays are moved in batches: small ones together, for speed, large ones alone, for memory.
_LARGEST_BATCH = 64 * 2**20
_SMALLEST_BATCH = 4 * 2**20


def reshard(tree: Any, mesh: AnyMesh, specs: Any, *, donate: bool = False) -> Any:
    """Move every array of a tree to `mesh`, split by `specs`; other leaves pass through.

    No bit changes. Arrays may come from any mesh, split, single device or from host memory, and
    go to fewer, more or other devices. Pieces that already lie as asked are not copied: the result
    then shares its memory with the array that was given, so donating one of the two to a jitted
    function deletes the other.

    Args:
      tree: any pytree. In several processes all call this with the same global arrays. A process
        that holds no part of an array passes the global array without shards, as JAX makes it, or a
        `jax.ShapeDtypeStruct(shape, dtype, sharding=...)`; host arrays must be equal everywhere.
      mesh: where the arrays go.
      specs: a tree of `PartitionSpec`s (or of `NamedSharding`s on `mesh`), a prefix of one, or one
        spec for all.
      donate: gives up the arrays as they are moved, so that little more than one of them exists
        twice. An array is not deleted when its pieces already lie in place, or when its memory is
        shared with another live array.

    Raises:
      PartitionError: the same in every process, before anything moves.

    >>> import jax, numpy as np, meshwright as mw
    >>> from jax.sharding import PartitionSpec as P
    >>> train, serve = mw.mesh("fsdp:8"), mw.mesh("tp:2", devices=jax.devices()[:2])
    >>> params = {"w": jax.device_put(np.ones((8, 8)), jax.NamedSharding(train, P("fsdp")))}
    >>> mw.reshard(params, serve, P(None, "tp"))["w"].sharding.shard_shape((8, 8))
    (8, 4)
    """
    donate = check_flag("donate", donate)
    leaves = walk(tree)
    planned = plan_reshard(tree, leaves, mesh, specs)
    problems: Sequence[str] = planned.problems
    spans = spans_processes(leaves, mesh)
    if spans:
        problems = agree(problems, planned.moves)
    refuse("reshard", problems)
    with transfer_context(planned.moves):
        # What is one object here may be two in another process: there each is moved on its own.
        move_arrays = _move_each if spans else _move_distinct
        moved = move_arrays(planned.moves, donate)
    return leaves.rebuild(
        [finish(value) for finish, value in zip(planned.finish, moved, strict=True)]
    )


def _move_distinct(moves: Sequence[Move], donate: bool) -> list[jax.Array]:
    """Move an array that the tree holds twice only once, so that it stays one."""
    keys = [(id(move.value), move.target) for move in moves]
    return for_distinct(keys, moves, lambda distinct: _move_each(distinct, donate))


def _move_each(moves: Sequence[Move], donate: bool) -> list[jax.Array]:
    owned = own_memory([move.value for move in moves]) if donate else []
    results: list[jax.Array] = []
    for batch in batches(moves):
        values = move_batch(batch)
        if donate:
            _delete_sources(batch, values, owned[len(results) :])
        results += values
    return results


def _delete_sources(
    batch: Sequence[Move], values: Sequence[jax.Array], owned: Sequence[Memory]
) -> None:
    """Delete what was moved, unless its memory is shared or the result lives on in it."""
    freed = 0
    for move, value, own in zip(batch, values, owned, strict=False):
        # What was put from a host copy shares nothing, and for arrays that small asking every
        # shard for its address would take longer than moving them.
        if own and (choose_method(move) is put_from_host or not own & memory(value)):
            freed += move.bytes if platform(move.value.sharding) == "cpu" else 0
            move.value.delete()
    if freed >= _SMALLEST_BATCH // 2:
        return_freed_memory()


def batches(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Yield the moves in order; a batch is no larger than the largest array, within reason."""
    largest = max((move.bytes for move in moves), default=0)
    limit = min(_LARGEST_BATCH, max(_SMALLEST_BATCH, largest))
    batch: list[Move] = []
    size = 0
    for move in moves:
        if batch and size + move.bytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(move)
        size += move.bytes
    if batch:
        yield batch


def move_batch(batch: Sequence[Move]) -> list[jax.Array]:
    """Move arrays together, and wait for them: what is on its way stays bounded."""
    # Methods run in this order in every process: `assemble` may be a collective.
    by_method: dict[Method, list[int]] = {keep: [], put: [], put_from_host: [], assemble: []}
    for number, move in enumerate(batch):
        by_method[choose_method(move)].append(number)
    results: dict[int, jax.Array] = {}
    for method, numbers in by_method.items():
        if numbers:
            results.update(zip(numbers, method([batch[n] for n in numbers]), strict=True))
    ready = [results[number] for number in range(len(batch))]
    jax.block_until_ready(ready)  # type: ignore[no-untyped-call]
    return ready


@contextlib.contextmanager
def transfer_context(moves: Sequence[Move]) -> Iterator[None]:
    """Allow transfers, which are what was asked for, and keep 64-bit arrays as they are."""
    wide = any(move.dtype.itemsize >= 8 for move in moves)
    with jax.transfer_guard("allow"), x64_if(wide):
        yield


# The methods: how arrays are moved, and which one an array takes.

Method = Callable[[Sequence[Move]], list[jax.Array]]
# Up to here an array's shards cost more one by one than their bytes do.
_SMALL = 64 * 2**10


def choose_method(move: Move) -> Method:
    """Return how to move an array; processes choose alike where more than one takes part."""
    if move.source is not None and is_in_place(move.source, move.target, move.shape):
        return keep
    if _stays_on_devices(move):
        return put
    return put_from_host if _is_small_and_here(move) else assemble


def keep(moves: Sequence[Move]) -> list[jax.Array]:
    """Return the memory of arrays that already lie as asked, under the new sharding."""
    return [_kept(move) for move in moves]


def _kept(move: Move) -> jax.Array:
    wanted = move.target.addressable_devices
    if not wanted:
        return moved_without_shards(move)
    if move.source == move.target:
        value: jax.Array = move.value
        return value
    data = [shard.data for shard in move.value.addressable_shards if shard.device in wanted]
    return jax.make_array_from_single_device_arrays(move.shape, move.target, data, dtype=move.dtype)


def put(moves: Sequence[Move]) -> list[jax.Array]:
    """Make one call of `jax.device_put` for all that concerns this process.

    Its own `donate=True` is not used: between CPU devices it leaves an array that crashes when
    touched (jax 0.10 to 0.12).
    """
    here = [move for move in moves if move.target.addressable_devices]
    placed = iter(jax.device_put([move.value for move in here], [move.target for move in here]))
    return [
        next(placed) if move.target.addressable_devices else moved_without_shards(move)
        for move in moves
    ]


def _stays_on_devices(move: Move) -> bool:
    """Whether `jax.device_put` keeps to the devices, with no detour through host memory.

    It does between equal sets of devices, by a compiled program (on CPUs slower than copying),
    and for shards that only change their device. It fails for arrays without elements.
    """
    if move.source is None or not move.bytes:
        return False
    if move.source.device_set == move.target.device_set:
        return isinstance(move.source, NamedSharding) and not _on_cpu(move.target)
    here = move.source.is_fully_addressable and move.target.is_fully_addressable
    return here and keeps_boxes(move.source, move.target, move.shape)


def _on_cpu(target: NamedSharding) -> bool:
    devices: set[Any] = target.device_set
    return all(device.platform == "cpu" for device in devices)


def put_from_host(moves: Sequence[Move]) -> list[jax.Array]:
    """Read arrays to the host and put them from there, all in one call."""
    values = [read_whole(move) for move in moves]
    placed: list[jax.Array] = jax.device_put(values, [move.target for move in moves])
    return placed


def _is_small_and_here(move: Move) -> bool:
    """Whether work per shard would cost more than copying the whole array once more."""
    here = move.source is None or move.source.is_fully_addressable
    return move.bytes <= _SMALL and here and move.target.is_fully_addressable


def assemble(moves: Sequence[Move]) -> list[jax.Array]:
    """Build each array's shards from pieces, those of other processes included."""
    local = [local_shards(move) for move in moves]
    # All processes find the same answer, so all of them enter the exchange, or none.
    crossing = jax.process_count() > 1 and any(map(crosses_processes, moves))
    received = exchange_pieces(moves, local) if crossing else [{}] * len(moves)
    return [build(*parts) for parts in zip(moves, local, received, strict=True)]


# Plan the moves of a tree, and list every reason to refuse it. Touches no device.

Finish = Callable[[jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class ReshardPlan:
    """The moves and how each result is finished; or the problems, and no moves."""

    moves: tuple[Move, ...] = ()
    finish: tuple[Finish, ...] = ()
    problems: tuple[str, ...] = ()


def plan_reshard(tree: Any, leaves: Walk, mesh: AnyMesh, specs: Any) -> ReshardPlan:
    """Plan the moves of all arrays of a tree onto one mesh, or collect what is wrong with them."""
    sizes = mesh_axes(mesh)
    wrong = [*_mesh_problems(mesh), *tie_problems(tree)]
    try:
        per_leaf = match_specs(leaves, _broadcast(specs_on_mesh(specs, mesh), tree))
    except PartitionError as error:
        return ReshardPlan(problems=(*wrong, str(error)))
    for leaf, spec in zip(leaves.arrays, per_leaf, strict=True):
        wrong += value_problems(leaf)
        wrong += target_spec_problems(leaf, spec, sizes)
    if wrong:
        return ReshardPlan(problems=tuple(wrong))
    pairs = [
        _move(leaf, NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves.arrays, per_leaf, strict=True)
    ]
    return ReshardPlan(tuple(move for move, _ in pairs), tuple(finish for _, finish in pairs))


def spans_processes(leaves: Walk, mesh: AnyMesh) -> bool:
    """Whether arrays or mesh lie in more than one process; then all processes take part."""
    if jax.process_count() == 1:
        return False
    device_sets = [set(mesh.devices.flat)] if isinstance(mesh, Mesh) else []
    sources = {_source(leaf.value) for leaf in leaves.arrays}
    device_sets += [source.device_set for source in sources if source is not None]
    return len({process_of(device) for devices in device_sets for device in devices}) > 1


def _broadcast(specs: Any, tree: Any) -> Any:
    """Return `specs` as a full tree if it is a prefix; else leave it to `match_specs` to refuse."""
    if isinstance(specs, PartitionSpec):
        return specs
    try:
        return jax.tree.broadcast(specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
    except ValueError:
        return specs


def _mesh_problems(mesh: AnyMesh) -> Iterator[str]:
    if not isinstance(mesh, Mesh):
        yield (
            f"mesh: an AbstractMesh ({short(mesh)}) has no devices. "
            "Make one that has: meshwright.mesh('fsdp:-1')."
        )
    elif _compat.is_compile_only(mesh.devices.flat[0]):
        yield "mesh: its devices exist only for the compiler. Make a mesh of jax.devices()."


def value_problems(leaf: Leaf) -> Iterator[str]:
    """Yield why the values of a leaf cannot be moved."""
    where, value = leaf.where, leaf.value
    if isinstance(value, jax.core.Tracer):
        yield (
            f"{where}: a tracer. Under jit use jax.lax.with_sharding_constraint or "
            "jax.sharding.reshard."
        )
    elif isinstance(value, jax.Array):
        if value.is_deleted():
            yield f"{where}: the array was deleted or donated. Use the one it went into."
        elif getattr(getattr(value.sharding, "spec", None), "unreduced", None):
            yield (
                f"{where}: an unreduced array ({value.sharding}): its shards are terms of a sum. "
                "Reduce it first."
            )
    elif isinstance(value, jax.ShapeDtypeStruct):
        if value.sharding is None or value.sharding.has_addressable_devices:
            yield (
                f"{where}: a shape without values. It may stand for an array only in a process "
                "that holds no part of it, and names its sharding."
            )
    elif isinstance(value, (np.ndarray, np.generic)):
        yield from _dtype_problems(where, value.dtype)
    else:
        yield f"{where}: {short(value)} holds no values yet. Place it with shard."


def _dtype_problems(where: str, dtype: np.dtype[Any]) -> Iterator[str]:
    if not dtype.isnative:
        yield f"{where}: {dtype} is in another byte order. Use x.astype({dtype.name!r})."
        return
    try:
        jax.typeof(np.empty(0, dtype))
        known = dtype != jax.dtypes.float0
    except TypeError:
        known = False
    kept = jax.dtypes.canonicalize_dtype(dtype) if known else None
    if kept is None:
        yield f"{where}: {dtype} is no dtype that a device can hold. Leave it out of the tree."
    elif kept != dtype:
        yield f"{where}: {dtype} would become {kept}. Convert it, or enable jax_enable_x64."


def target_spec_problems(
    leaf: Leaf, spec: PartitionSpec, sizes: Mapping[str, int]
) -> Iterator[str]:
    """Yield why an array cannot be split as its spec says."""
    yield from spec_problems(leaf.path, leaf.shape, spec, sizes)
    if is_reduction_free(spec) and PartitionSpec.UNCONSTRAINED in tuple(spec):
        yield (
            f"{leaf.where}: {short(spec)} leaves a dim open. Say how to split it, or None not to."
        )


def _move(leaf: Leaf, target: NamedSharding) -> tuple[Move, Finish]:
    """Return the move of a leaf, and what makes the result of it: keys travel as integers."""
    value: Any = leaf.value
    finish: Finish = _unchanged
    if is_key(leaf.dtype):
        value, finish = _key_data(leaf)
    shape, dtype = tuple(value.shape), np.dtype(value.dtype)
    return Move(leaf.where, shape, dtype, value, _source(value), target), finish


def _key_data(leaf: Leaf) -> tuple[Any, Finish]:
    if isinstance(leaf.value, jax.Array):
        impl: Any = jax.random.key_impl(leaf.value)
        data: Any = jax.random.key_data(leaf.value)
    else:
        impl, shape = key_data_shape(leaf.value)
        data = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            shape.shape, shape.dtype, sharding=leaf.value.sharding
        )
    return data, lambda moved: jax.random.wrap_key_data(moved, impl=impl)


def _unchanged(moved: jax.Array) -> Any:
    return moved


def _source(value: Any) -> Sharding | None:
    """Return where an array lies; None for one that every process has whole, on its own."""
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, jax.Array) and jax.process_count() > 1 and not value.committed:
        return None
    sharding: Sharding | None = getattr(value, "sharding", None)
    return sharding
