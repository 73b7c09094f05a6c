"""`MpmdArray`: one array that lives in several groups, whole in each of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.errors import GroupError, listing
from meshwright.mpmd.arrays.parts import Parts, check_parts, without_shards
from meshwright.mpmd.arrays.sharding import MpmdSharding, named
from meshwright.partitioning.report import typed
from meshwright.partitioning.specs import make_spec


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class MpmdArray:
    """An array that lives in one or several groups; each of them holds all of it, split its way.

    `arrays` are the `jax.Array`s of the groups, one each. A process passes those of which it
    holds shards; one that holds none says `shape` and `dtype`. Where one group is enough, a plain
    `jax.Array` on its mesh is better. To `jax.tree` functions it is a leaf, like any array, so a
    tree has the same structure and paths in groups as out of them.

    >>> import jax, numpy as np, meshwright as mw
    >>> from jax.sharding import PartitionSpec as P
    >>> groups = mw.MpmdMesh(mw.mesh("pp:2, fsdp:4"), "pp")
    >>> split = mw.MpmdSharding(groups, [0, 1], P("fsdp"))
    >>> ones = np.ones((8, 8), "float32")
    >>> mw.MpmdArray([jax.device_put(ones, split.sharding_of(group)) for group in (0, 1)], split)
    MpmdArray(f32[8@fsdp,8] in groups 0, 1 of 2)
    """

    sharding: MpmdSharding
    shape: tuple[int, ...]
    dtype: Any
    arrays: Parts

    def __init__(
        self,
        arrays: jax.Array | Iterable[jax.Array],
        sharding: MpmdSharding,
        *,
        shape: Iterable[int] | None = None,
        dtype: Any = None,
    ):
        parts, whole, kind = check_parts(arrays, sharding, shape, dtype)
        object.__setattr__(self, "sharding", sharding)
        object.__setattr__(self, "shape", whole)
        object.__setattr__(self, "dtype", kind)
        object.__setattr__(self, "arrays", parts)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the array itself, however many groups hold it."""
        return self.size * int(self.dtype.itemsize)

    @property
    def spec(self) -> PartitionSpec:
        """The spec of all its groups; refused where they disagree."""
        return self.sharding.spec

    @property
    def mesh_ids(self) -> tuple[int, ...]:
        """The groups that hold it."""
        return self.sharding.mesh_ids

    @property
    def is_partially_addressable(self) -> bool:
        """Whether this process holds a part of it."""
        return bool(self.sharding.local_ids)

    @property
    def local(self) -> jax.Array | None:
        """The array in this process's group, the first where it has several; None without."""
        ids = self.sharding.local_ids
        return self.arrays[ids[0]] if ids else None

    @property
    def first(self) -> jax.Array:
        """The first replica: the array in the group of the lowest number."""
        return self.on(self.mesh_ids[0])

    def on(self, group: int) -> jax.Array:
        """The array in a group; without shards where other processes hold them."""
        split = self.sharding.sharding_of(group)
        there = self.arrays.get(group)
        return without_shards(self.shape, self.dtype, split) if there is None else there

    def delete(self) -> None:
        """Give up the memory in all groups, as far as it is this process's."""
        for array in self.arrays.values():
            array.delete()

    def is_deleted(self) -> bool:
        """Whether the array of a group was deleted or donated."""
        return any(array.is_deleted() for array in self.arrays.values())

    def block_until_ready(self) -> MpmdArray:
        """Wait for the values in all groups, as far as they are this process's."""
        for array in self.arrays.values():
            array.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.local is None:
            raise GroupError(f"this process holds no part of {self!r}. Bring it with from_groups.")
        return np.array(self.local, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        specs = list(dict.fromkeys(self.sharding.specs))
        notes = f"{named(self.mesh_ids)} of {self.sharding.mpmd_mesh.mpmd_dim}"
        notes += f" as {listing(specs, 3)}" if len(specs) > 1 else ""
        notes += ", deleted" if self.is_deleted() else ""
        notes += "" if self.is_partially_addressable else ", none of it in this process"
        shown = specs[0] if len(specs) == 1 else make_spec()
        return f"MpmdArray({typed(self.shape, self.dtype, shown)} in {notes})"
