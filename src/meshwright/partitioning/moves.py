"""One array on its way: what it is, where it lies, where it goes, what is held of it here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from meshwright.partitioning.boxes import Box, Shape, boxes, whole

HostArray = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Move:
    """An array to move. A `source` of None: every process has all of it."""

    path: str
    shape: Shape
    dtype: np.dtype[Any]
    value: Any
    source: Sharding | None
    target: NamedSharding

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Held:
    """What this process holds of an array: one shard per box, read to the host once."""

    shards: dict[Box, Any]
    read: dict[Box, HostArray] = dataclasses.field(default_factory=dict)

    def bits(self, box: Box) -> HostArray:
        if box not in self.read:
            self.read[box] = bit_pattern(on_host(self.shards[box]))
        return self.read[box]


def held(move: Move) -> Held:
    if move.source is None:
        return Held({whole(move.shape): move.value})
    if not isinstance(move.value, jax.Array):
        return Held({})
    where = boxes(move.source, move.shape)
    return Held({where[shard.device]: shard.data for shard in move.value.addressable_shards})


def on_host(data: Any) -> HostArray:
    """The values in host memory; of a CPU device its own memory, not a copy."""
    if isinstance(data, jax.Array) and next(iter(data.devices())).platform != "cpu":
        # JAX keeps the host copy on the array it was asked of: ask one that goes away.
        data = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.asarray(data)


def bit_pattern(array: HostArray) -> HostArray:
    """The same memory as unsigned integers: copying them keeps every bit, for all dtypes alike."""
    size = array.dtype.itemsize
    return array.view(f"u{size}") if size in (1, 2, 4, 8) else array
