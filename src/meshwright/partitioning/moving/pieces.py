"""Building an array's shards in this process out of the pieces it has."""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshwright.partitioning.moving.boxes import Box, Shape, box_at, box_shape, boxes, recipe
from meshwright.partitioning.moving.moves import Held, HostArray, Move, bit_pattern

# Pieces of one array that came from other processes, as bits.
Arrived = Mapping[Box, HostArray]

# What JAX asks of host memory to use it as a CPU device's memory without a copy.
_ALIGNMENT = 64
_SMALL = 2**20


def build(move: Move, held: Held, arrived: Arrived) -> jax.Array:
    """The array on its new mesh, from the shards held here and the pieces that arrived."""
    if not move.target.addressable_devices:
        return without_shards(move)
    shards = held_whole(move, held)
    missing = [box for box in target_boxes(move) if box not in shards]
    shards.update(zip(missing, join_all(move, missing, held, arrived), strict=True))
    return jax.make_array_from_callback(
        move.shape,
        move.target,
        lambda index: shards[box_at(index or (), move.shape)],
        dtype=move.dtype,
    )


def without_shards(move: Move) -> jax.Array:
    """The array as a process sees it that holds no part of it."""
    return jax.make_array_from_single_device_arrays(move.shape, move.target, [], dtype=move.dtype)


def target_boxes(move: Move) -> set[Box]:
    """The boxes that this process makes."""
    where = boxes(move.target, move.shape)
    return {where[device] for device in move.target.addressable_devices}


def held_whole(move: Move, held: Held) -> dict[Box, Any]:
    """Shards on devices that need no cutting: JAX copies them from device to device."""
    kind = move.target.memory_kind
    shards = ((box, held.shards.get(box)) for box in target_boxes(move))
    return {
        box: shard
        for box, shard in shards
        if isinstance(shard, jax.Array) and shard.sharding.memory_kind == kind
    }


def join_all(
    move: Move, missing: Sequence[Box], held: Held, arrived: Arrived
) -> Iterable[HostArray]:
    """Large shards side by side: copying memory leaves Python free."""
    one = functools.partial(join, move, held, arrived)
    if len(missing) < 2 or move.bytes < _SMALL:
        return map(one, missing)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return pool.map(one, missing)


def join(move: Move, held: Held, arrived: Arrived, box: Box) -> HostArray:
    """One shard in fresh memory: it never shares any with what the caller holds."""
    out = aligned_empty(box_shape(box), move.dtype)
    if out.size:
        bits = bit_pattern(out)
        for cut in recipe(move.source, move.target, move.shape)[box]:
            if cut.origin in held.shards:
                bits[cut.put] = held.bits(cut.origin)[cut.take]
            else:
                bits[cut.put] = arrived[cut.part]
    return out


def aligned_empty(shape: Shape, dtype: np.dtype[Any]) -> HostArray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
