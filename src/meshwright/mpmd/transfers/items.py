"""One array of a route: what it is, where it lies, where it goes. Touches no device."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from meshwright.partitioning.leaves import Leaf, bits
from meshwright.partitioning.moving.boxes import Box, Shape, boxes

Device = Any


@dataclasses.dataclass(frozen=True)
class Item:
    """An array as it travels: keys as the integers they are made of, `kind` says of which kind."""

    where: str
    shape: Shape
    dtype: np.dtype[Any]
    source: Sharding
    target: Sharding
    kind: Any = None

    @property
    def bytes(self) -> int:
        return self.bytes_of(self.shape)

    def bytes_of(self, shape: Shape) -> int:
        return math.ceil(math.prod(shape) * bits(self.dtype) / 8)

    @functools.cached_property
    def held(self) -> dict[Device, Box]:
        """What each device of the source holds, in the source's order."""
        return dict(boxes(self.source, self.shape))

    @functools.cached_property
    def wanted(self) -> dict[Device, Box]:
        """What each device of the target shall hold, in the target's order."""
        return dict(boxes(self.target, self.shape))

    @property
    def splits_alike(self) -> bool:
        """Whether the target is the source's split on other devices, as JAX compares them."""
        source, target = self.source, self.target
        if not isinstance(source, NamedSharding) or not isinstance(target, NamedSharding):
            return False
        if source.mesh.size != target.mesh.size:
            return False
        devices = target.mesh.devices.reshape(source.mesh.devices.shape)
        moved = NamedSharding(Mesh(devices, source.mesh.axis_names), source.spec)
        return moved.is_equivalent_to(target, len(self.shape))


def item(leaf: Leaf, source: Sharding, target: Sharding) -> Item:
    if not is_key(leaf.dtype):
        return Item(leaf.where, leaf.shape, np.dtype(leaf.dtype), source, target)
    found = []

    def look(keys: Any) -> Any:
        found.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]
    plain = jax.eval_shape(look, shape)
    return Item(leaf.where, plain.shape, np.dtype(plain.dtype), source, target, found[0])


def is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def process_of(device: Device) -> int:
    return int(device.process_index)
