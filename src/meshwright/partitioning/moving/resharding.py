"""`reshard(...)`: a tree of arrays from any meshes and splits to another, checked first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.partitioning.leaves import refuse, walk
from meshwright.partitioning.moving.agreement import agree
from meshwright.partitioning.moving.boxes import in_one_piece, in_place
from meshwright.partitioning.moving.crossing import bring, needs
from meshwright.partitioning.moving.donating import Memory, memory, own_memory
from meshwright.partitioning.moving.movable import plan, spans_processes
from meshwright.partitioning.moving.moves import Move, held, read_whole
from meshwright.partitioning.moving.pieces import build
from meshwright.partitioning.specs import AnyMesh

# Arrays are moved in batches: small ones together, for speed, large ones alone, for memory.
_LARGEST_BATCH = 64 * 2**20
_SMALLEST_BATCH = 4 * 2**20
_SMALL = 64 * 2**10

Way = Callable[[Sequence[Move]], list[jax.Array]]


def reshard(tree: Any, mesh: AnyMesh, specs: Any, *, donate: bool = False) -> Any:
    """The tree with every array on `mesh`, split by `specs`; other leaves pass through.

    No bit changes. Arrays may come from any mesh, split, single device or from host memory, and
    go to fewer, more or other devices. `specs` is a tree of `PartitionSpec`s, a prefix of one, or
    one spec for all. An array that already lies as asked is not copied. `donate=True` gives up
    the arrays as they are moved, so that little more than one of them exists twice; one whose
    memory is shared with another live array is left alone.

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
    found = walk(tree)
    planned = plan(tree, found, mesh, specs)
    problems: Sequence[str] = planned.problems
    if spans_processes(found, mesh):
        problems = agree(problems, planned.moves)
    refuse("reshard", problems)
    with _as_asked(planned.moves):
        moved = _all(planned.moves, donate)
    return found.rebuild(
        [finish(value) for finish, value in zip(planned.finish, moved, strict=True)]
    )


def _all(moves: Sequence[Move], donate: bool) -> list[jax.Array]:
    """One result per move; what the tree holds twice is moved once."""
    places: dict[tuple[int, NamedSharding], int] = {}
    which = [places.setdefault((id(move.value), move.target), len(places)) for move in moves]
    once: list[Move] = []
    for move, place in zip(moves, which, strict=True):
        if place == len(once):
            once.append(move)
    owned = own_memory(once) if donate else []
    results: list[jax.Array] = []
    for batch in batches(once):
        values = move_batch(batch)
        if donate:
            _give_up(batch, values, owned[len(results) :])
        results += values
    return [results[place] for place in which]


def _give_up(batch: Sequence[Move], values: Sequence[jax.Array], owned: Sequence[Memory]) -> None:
    """Delete what was moved, unless its memory is shared or the result lives on in it."""
    for move, value, own in zip(batch, values, owned, strict=False):
        if own and (way(move) is put_from_host or not own & memory(value)):
            move.value.delete()


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


def way(move: Move) -> Way:
    """How to move an array; the same in every process."""
    if stays(move):
        return keep
    if copies_whole(move):
        return put
    return put_from_host if is_small_and_here(move) else assemble


def stays(move: Move) -> bool:
    """Whether every device already holds what it shall."""
    return (
        move.source is not None
        and isinstance(move.value, jax.Array)
        and in_place(move.source, move.target, move.shape)
    )


def keep(moves: Sequence[Move]) -> list[jax.Array]:
    """The same memory under the new sharding."""
    return [move.value if move.source == move.target else _relabelled(move) for move in moves]


def _relabelled(move: Move) -> jax.Array:
    wanted = move.target.addressable_devices
    data = [shard.data for shard in move.value.addressable_shards if shard.device in wanted]
    return jax.make_array_from_single_device_arrays(move.shape, move.target, data, dtype=move.dtype)


def copies_whole(move: Move) -> bool:
    """Whether `jax.device_put` keeps to the devices, with no detour through host memory.

    It does between equal sets of devices, by a compiled program (on CPUs slower than copying),
    and for shards that only change their device. It fails for arrays without elements. Its own
    `donate=True` is not used: between CPU devices it leaves an array that crashes when touched
    (jax 0.10 to 0.12).
    """
    if move.source is None or not move.bytes or not isinstance(move.value, jax.Array):
        return False
    if move.source.device_set == move.target.device_set:
        return isinstance(move.source, NamedSharding) and not _on_cpu(move.target)
    here = move.source.is_fully_addressable and move.target.is_fully_addressable
    return here and in_one_piece(move.source, move.target, move.shape)


def put(moves: Sequence[Move]) -> list[jax.Array]:
    """One call of JAX for all."""
    values = [move.value for move in moves]
    placed: list[jax.Array] = jax.device_put(values, [move.target for move in moves])
    return placed


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


@contextlib.contextmanager
def _as_asked(moves: Sequence[Move]) -> Iterator[None]:
    """Transfers are what was asked for; 64-bit arrays stay so whatever JAX is set to."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.transfer_guard("allow"))
        if any(move.dtype.itemsize >= 8 for move in moves):
            stack.enter_context(jax.enable_x64(True))
        yield
