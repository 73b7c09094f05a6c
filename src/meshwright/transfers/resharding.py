"""`reshard(...)`: a tree of arrays from any meshes and splits to another, checked first."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshwright import _compat
from meshwright._checks import check_flag
from meshwright.errors import PartitionError, short
from meshwright.transfers.boxes import in_one_piece, in_place
from meshwright.transfers.moves import (
    Memory,
    Move,
    agree,
    build,
    held,
    memory,
    own_memory,
    platform,
    read_whole,
    return_freed_memory,
    without_shards,
)
from meshwright.transfers.ppermute_transport import bring, needs
from meshwright.trees.specs import (
    AnyMesh,
    is_reduction_free,
    match_specs,
    mesh_axes,
    spec_problems,
    specs_on_mesh,
)
from meshwright.trees.walk import Leaf, Walk, refuse, tie_problems, walk

# Arrays are moved in batches: small ones together, for speed, large ones alone, for memory.
_LARGEST_BATCH = 64 * 2**20
_SMALLEST_BATCH = 4 * 2**20


def reshard(tree: Any, mesh: AnyMesh, specs: Any, *, donate: bool = False) -> Any:
    """The tree with every array on `mesh`, split by `specs`; other leaves pass through.

    No bit changes. Arrays may come from any mesh, split, single device or from host memory, and
    go to fewer, more or other devices. `specs` is a tree of `PartitionSpec`s (or of
    `NamedSharding`s on `mesh`), a prefix of one, or one spec for all. Pieces that already lie as
    asked are not copied: the result then shares its memory with the array that was given, so
    donating one of the two to a jitted function deletes the other.

    `donate=True` gives up the arrays as they are moved, so that little more than one of them
    exists twice. An array stays as it was, not deleted, when its pieces already lie in place, or
    when its memory is shared with another live array.

    In several processes all call it with the same global arrays. A process that holds no part of
    an array passes the global array without shards, as JAX makes it, or a
    `jax.ShapeDtypeStruct(shape, dtype, sharding=...)`; host arrays must be equal everywhere.
    What cannot be done is refused with the same words in each.

    >>> import jax, numpy as np, meshwright as mw
    >>> from jax.sharding import PartitionSpec as P
    >>> train, serve = mw.mesh("fsdp:8"), mw.mesh("tp:2", devices=jax.devices()[:2])
    >>> params = {"w": jax.device_put(np.ones((8, 8)), jax.NamedSharding(train, P("fsdp")))}
    >>> mw.reshard(params, serve, P(None, "tp"))["w"].sharding.shard_shape((8, 8))
    (8, 4)
    """
    donate = check_flag("donate", donate)
    found = walk(tree)
    planned = plan(tree, found, mesh, specs)
    problems: Sequence[str] = planned.problems
    spans = spans_processes(found, mesh)
    if spans:
        problems = agree(problems, planned.moves)
    refuse("reshard", problems)
    with _as_asked(planned.moves):
        # What is one object here may be two in another process: there each is moved on its own.
        moved = _each(planned.moves, donate) if spans else _once(planned.moves, donate)
    return found.rebuild(
        [finish(value) for finish, value in zip(planned.finish, moved, strict=True)]
    )


def _once(moves: Sequence[Move], donate: bool) -> list[jax.Array]:
    """An array that the tree holds twice is moved once, and stays one."""
    names = [(id(move.value), move.target) for move in moves]
    single = dict(zip(names, moves, strict=True))
    moved = dict(zip(single, _each(list(single.values()), donate), strict=True))
    return [moved[name] for name in names]


def _each(moves: Sequence[Move], donate: bool) -> list[jax.Array]:
    owned = own_memory(moves) if donate else []
    results: list[jax.Array] = []
    for batch in batches(moves):
        values = move_batch(batch)
        if donate:
            _give_up(batch, values, owned[len(results) :])
        results += values
    return results


def _give_up(batch: Sequence[Move], values: Sequence[jax.Array], owned: Sequence[Memory]) -> None:
    """Delete what was moved, unless its memory is shared or the result lives on in it."""
    freed = 0
    for move, value, own in zip(batch, values, owned, strict=False):
        if own and (way(move) is put_from_host or not own & memory(value)):
            freed += move.bytes if platform(move.value.sharding) == "cpu" else 0
            move.value.delete()
    if freed >= _SMALLEST_BATCH // 2:
        return_freed_memory()


def batches(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """In order; a batch is no larger than the largest array, within reason."""
    largest = max((move.bytes for move in moves), default=0)
    room = min(_LARGEST_BATCH, max(_SMALLEST_BATCH, largest))
    batch: list[Move] = []
    filled = 0
    for move in moves:
        if batch and filled + move.bytes > room:
            yield batch
            batch, filled = [], 0
        batch.append(move)
        filled += move.bytes
    if batch:
        yield batch


def move_batch(batch: Sequence[Move]) -> list[jax.Array]:
    """Move arrays together, and wait for them: what is on its way stays bounded."""
    by_way: dict[Way, list[int]] = {keep: [], put: [], put_from_host: [], assemble: []}
    for number, move in enumerate(batch):
        by_way[way(move)].append(number)
    results: dict[int, jax.Array] = {}
    for do, numbers in by_way.items():
        if numbers:
            results.update(zip(numbers, do([batch[n] for n in numbers]), strict=True))
    ready = [results[number] for number in range(len(batch))]
    jax.block_until_ready(ready)  # type: ignore[no-untyped-call]
    return ready


@contextlib.contextmanager
def _as_asked(moves: Sequence[Move]) -> Iterator[None]:
    """Transfers are what was asked for; 64-bit arrays stay so whatever JAX is set to."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.transfer_guard("allow"))
        if any(move.dtype.itemsize >= 8 for move in moves):
            stack.enter_context(jax.enable_x64(True))
        yield


# What is to be moved, and everything that speaks against it. Touches no device.


Finish = Callable[[jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The moves and how each result is finished, or the problems."""

    moves: tuple[Move, ...] = ()
    finish: tuple[Finish, ...] = ()
    problems: tuple[str, ...] = ()


def plan(tree: Any, found: Walk, mesh: AnyMesh, specs: Any) -> Plan:
    sizes = mesh_axes(mesh)
    wrong = [*_mesh_problems(mesh), *tie_problems(tree)]
    try:
        per_leaf = match_specs(found, _broadcast(specs_on_mesh(specs, mesh), tree))
    except PartitionError as error:
        return Plan(problems=(*wrong, str(error)))
    for leaf, spec in zip(found.arrays, per_leaf, strict=True):
        wrong += value_problems(leaf)
        wrong += target_spec_problems(leaf, spec, sizes)
    if wrong:
        return Plan(problems=tuple(wrong))
    pairs = [
        _move(leaf, NamedSharding(mesh, spec))
        for leaf, spec in zip(found.arrays, per_leaf, strict=True)
    ]
    return Plan(tuple(move for move, _ in pairs), tuple(finish for _, finish in pairs))


def spans_processes(found: Walk, mesh: AnyMesh) -> bool:
    """Whether arrays or mesh lie in more than one process; then all processes take part."""
    if jax.process_count() == 1:
        return False
    places = [set(mesh.devices.flat)] if isinstance(mesh, Mesh) else []
    splits = {_source(leaf.value) for leaf in found.arrays}
    places += [split.device_set for split in splits if split is not None]
    return len({device.process_index for devices in places for device in devices}) > 1


def _broadcast(specs: Any, tree: Any) -> Any:
    """`specs` as a full tree where it is a prefix; what is none is left for `match_specs`."""
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
    """Why the values of a leaf cannot be moved."""
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
            yield f"{where}: a sum is still open ({value.sharding}). Reduce it first."
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
    """Why an array cannot lie as its spec says."""
    yield from spec_problems(leaf.path, leaf.shape, spec, sizes)
    if is_reduction_free(spec) and PartitionSpec.UNCONSTRAINED in tuple(spec):
        yield (
            f"{leaf.where}: {short(spec)} leaves a dim open. Say how to split it, or None for "
            "whole."
        )


def _move(leaf: Leaf, target: NamedSharding) -> tuple[Move, Finish]:
    """Keys travel as the integers they are made of."""
    value: Any = leaf.value
    finish: Finish = _as_it_is
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        value, finish = _key_data(leaf)
    shape, dtype = tuple(value.shape), np.dtype(value.dtype)
    return Move(leaf.where, shape, dtype, value, _source(value), target), finish


def _key_data(leaf: Leaf) -> tuple[Any, Finish]:
    if isinstance(leaf.value, jax.Array):
        kind: Any = jax.random.key_impl(leaf.value)
        data: Any = jax.random.key_data(leaf.value)
    else:
        kind, data = _key_shape(leaf.value)
    return data, lambda moved: jax.random.wrap_key_data(moved, impl=kind)


def _key_shape(keys: jax.ShapeDtypeStruct) -> tuple[Any, jax.ShapeDtypeStruct]:
    """The kind of keys that are not here, and the integers they are made of."""
    kinds = []

    def look(traced: Any) -> Any:
        kinds.append(jax.random.key_impl(traced))
        return jax.random.key_data(traced)

    plain = jax.eval_shape(look, keys)
    data = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        plain.shape, plain.dtype, sharding=keys.sharding
    )
    return kinds[0], data


def _as_it_is(moved: jax.Array) -> Any:
    return moved


def _source(value: Any) -> Sharding | None:
    """Where an array lies; None for one that every process has whole, on its own."""
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, jax.Array) and jax.process_count() > 1 and not value.committed:
        return None
    sharding: Sharding | None = getattr(value, "sharding", None)
    return sharding


# The ways to move arrays, and which one an array takes.


Way = Callable[[Sequence[Move]], list[jax.Array]]
# Up to here an array's shards cost more one by one than their bytes do.
_SMALL = 64 * 2**10


def way(move: Move) -> Way:
    """How to move an array. All processes choose alike where more than one takes part."""
    if stays(move):
        return keep
    if copies_whole(move):
        return put
    return put_from_host if is_small_and_here(move) else assemble


def stays(move: Move) -> bool:
    """Whether every device already holds what it shall."""
    return move.source is not None and in_place(move.source, move.target, move.shape)


def keep(moves: Sequence[Move]) -> list[jax.Array]:
    """The same memory under the new sharding."""
    return [_kept(move) for move in moves]


def _kept(move: Move) -> jax.Array:
    wanted = move.target.addressable_devices
    if not wanted:
        return without_shards(move)
    if move.source == move.target:
        value: jax.Array = move.value
        return value
    data = [shard.data for shard in move.value.addressable_shards if shard.device in wanted]
    return jax.make_array_from_single_device_arrays(move.shape, move.target, data, dtype=move.dtype)


def copies_whole(move: Move) -> bool:
    """Whether `jax.device_put` keeps to the devices, with no detour through host memory.

    It does between equal sets of devices, by a compiled program (on CPUs slower than copying),
    and for shards that only change their device. It fails for arrays without elements. Its own
    `donate=True` is not used: between CPU devices it leaves an array that crashes when touched
    (jax 0.10 to 0.12).
    """
    if move.source is None or not move.bytes:
        return False
    if move.source.device_set == move.target.device_set:
        return isinstance(move.source, NamedSharding) and not _on_cpu(move.target)
    here = move.source.is_fully_addressable and move.target.is_fully_addressable
    return here and in_one_piece(move.source, move.target, move.shape)


def put(moves: Sequence[Move]) -> list[jax.Array]:
    """One call of JAX for all that concerns this process."""
    here = [move for move in moves if move.target.addressable_devices]
    placed = iter(jax.device_put([move.value for move in here], [move.target for move in here]))
    return [
        next(placed) if move.target.addressable_devices else without_shards(move) for move in moves
    ]


def is_small_and_here(move: Move) -> bool:
    """Whether per-shard work would cost more than copying the whole array once more."""
    here = move.source is None or move.source.is_fully_addressable
    return move.bytes <= _SMALL and here and move.target.is_fully_addressable


def put_from_host(moves: Sequence[Move]) -> list[jax.Array]:
    values = [read_whole(move) for move in moves]
    placed: list[jax.Array] = jax.device_put(values, [move.target for move in moves])
    return placed


def assemble(moves: Sequence[Move]) -> list[jax.Array]:
    """Build each array's shards from pieces, those of other processes included."""
    shards = [held(move) for move in moves]
    crossing = jax.process_count() > 1 and any(needs(move) for move in moves)
    arrived = bring(moves, shards) if crossing else [{}] * len(moves)
    return [build(*parts) for parts in zip(moves, shards, arrived, strict=True)]


def _on_cpu(target: NamedSharding) -> bool:
    devices: set[Any] = target.device_set
    return all(device.platform == "cpu" for device in devices)
