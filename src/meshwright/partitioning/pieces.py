"""Building an array's shards in this process out of the pieces it has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshwright.partitioning.boxes import Box, Shape, box_at, box_shape, recipe
from meshwright.partitioning.moves import Held, HostArray, Move, bit_pattern

# Pieces of one array that came from other processes, as bits.
Arrived = Mapping[Box, HostArray]

# What JAX asks of host memory to use it as a CPU device's memory without a copy.
_ALIGNMENT = 64


def build(move: Move, held: Held, arrived: Arrived) -> jax.Array:
    """The array on its new mesh, from the shards held here and the pieces that arrived."""
    if not move.target.addressable_devices:
        return jax.make_array_from_single_device_arrays(
            move.shape, move.target, [], dtype=move.dtype
        )
    made: dict[Box, Any] = {}

    def shard(index: Any) -> Any:
        box = box_at(index, move.shape)
        if box not in made:
            known = held.shards.get(box)
            made[box] = known if isinstance(known, jax.Array) else join(move, box, held, arrived)
        return made[box]

    return jax.make_array_from_callback(move.shape, move.target, shard, dtype=move.dtype)


def join(move: Move, box: Box, held: Held, arrived: Arrived) -> HostArray:
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
