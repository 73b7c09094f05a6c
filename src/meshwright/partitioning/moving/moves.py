"""One array on its way: what it is, where it lies, where it goes, what is held of it here."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from meshwright.partitioning.moving.boxes import Box, Shape, places_here, whole

HostArray = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Move:
    """An array to move. A `source` of None: every process has all of it."""

    where: str
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
        known = self.read.get(box)
        if known is None:
            known = self.read[box] = bit_pattern(on_host(self.shards[box]))
        return known


def held(move: Move) -> Held:
    if move.source is None:
        return Held({whole(move.shape): move.value})
    if not isinstance(move.value, jax.Array):
        return Held({})
    places = places_here(move.source, move.shape)
    return Held({box: move.value.addressable_data(place) for box, place in places.items()})


def on_host(data: Any) -> HostArray:
    """The values of one shard in host memory; of a CPU device its own memory, not a copy."""
    if isinstance(data, jax.Array) and platform(data.sharding) != "cpu":
        # JAX keeps the host copy on the array it was asked of: ask one that goes away.
        data = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.asarray(data)


@functools.lru_cache(maxsize=4096)
def platform(sharding: Sharding) -> str:
    devices: set[Any] = sharding.device_set
    return str(next(iter(devices)).platform)


def read_whole(move: Move) -> HostArray:
    """The whole array in fresh host memory; all of it is held here."""
    out = np.empty(move.shape, move.dtype)
    bits, shards = bit_pattern(out), held(move)
    for box in shards.shards if out.size else ():
        bits[tuple(slice(*side) for side in box)] = shards.bits(box)
    return out


def bit_pattern(array: HostArray) -> HostArray:
    """The same memory as unsigned integers: copying them keeps every bit, for all dtypes alike."""
    size = array.dtype.itemsize
    return array.view(f"u{size}") if size in (1, 2, 4, 8) else array
