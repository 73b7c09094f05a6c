"""The ways to move arrays, and which one an array takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.partitioning.moving.boxes import in_one_piece, in_place
from meshwright.partitioning.moving.crossing import bring, needs
from meshwright.partitioning.moving.moves import Move, held, read_whole
from meshwright.partitioning.moving.pieces import build, without_shards

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
