"""`MpmdArray`: one array that several groups hold, whole in each of them."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshwright._text import plural_noun
from meshwright.errors import GroupError, listing, short
from meshwright.mpmd.groups import Groups, clip
from meshwright.mpmd.mpmd_sharding import MpmdSharding, groups_text
from meshwright.partitioning.report import array_type
from meshwright.transfers.moves import array_without_shards
from meshwright.trees.specs import make_spec, mesh_axes, spec_problems
from meshwright.trees.walk import is_key


# Compared by identity: `==` of the values would move them, and give an array rather than a boolean.
@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class MpmdArray:
    """An array that lives in one or several groups; each of them holds all of it, sharded its way.

    To `jax.tree` functions it is a leaf, like any array, so a tree has the same structure and
    paths in groups as out of them. Where one group is enough, a plain `jax.Array` on its mesh is
    better.

    Args:
      arrays: the `jax.Array`s of the groups, one each, in any order. A process passes those of
        which it holds shards, and leaves out the others: asking for one that was left out raises.
      sharding: the groups, and the spec in each.
      shape, dtype: needed in a process that passes no array; elsewhere they are checked.

    Raises `GroupError` if the arrays differ in shape or dtype, or are not where `sharding` says.

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
    arrays: ArrayByGroup

    def __init__(
        self,
        arrays: jax.Array | Iterable[jax.Array],
        sharding: MpmdSharding,
        *,
        shape: Iterable[int] | None = None,
        dtype: Any = None,
    ):
        by_group, full_shape, full_dtype = check_arrays(arrays, sharding, shape, dtype)
        object.__setattr__(self, "sharding", sharding)
        object.__setattr__(self, "shape", full_shape)
        object.__setattr__(self, "dtype", full_dtype)
        object.__setattr__(self, "arrays", by_group)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the array itself, however many groups hold it."""
        return self.size * int(self.dtype.itemsize)

    @property
    def spec(self) -> PartitionSpec:
        """The spec of all its groups. Raises `GroupError` where they differ."""
        return self.sharding.spec

    @property
    def mesh_ids(self) -> tuple[int, ...]:
        """The groups that hold it."""
        return self.sharding.mesh_ids

    @property
    def is_partially_addressable(self) -> bool:
        """Whether this process holds shards of it."""
        return bool(self.arrays)

    @property
    def is_mpmd_replicated(self) -> bool:
        """Whether several groups hold it."""
        return len(self.mesh_ids) > 1

    @property
    def local(self) -> jax.Array | None:
        """The array in this process's group, in the first of several, or `None` without any."""
        return next(iter(self.arrays.values()), None)

    @property
    def to_mpmd_local_array(self) -> jax.Array | list[jax.Array] | None:
        """The array in this process's group; a list where it holds several; `None` without any.

        `local` is simpler: it is never a list. Raises `GroupError` if the array was deleted.
        """
        held = self._not_deleted()
        return held[0] if len(held) == 1 else held or None

    @property
    def first(self) -> jax.Array:
        """The first replica: the array in the group with the lowest number."""
        return self.on(self.mesh_ids[0])

    @property
    def first_mpmd_replica(self) -> jax.Array | None:
        """The array in the group with the lowest number, or `None` if another process holds it.

        `first` gives an array without shards there. Raises `GroupError` if the array was deleted.
        """
        held = self._not_deleted()
        return held[0] if self.mesh_ids[0] in self.arrays else None

    @property
    def aval(self) -> Any:
        """Its shape and dtype, as JAX's abstract value."""
        return jax.core.ShapedArray(self.shape, self.dtype)

    def on(self, group: int) -> jax.Array:
        """Return the array in a group; without shards where only other processes hold them."""
        sharding = self.sharding.sharding_of(group)
        if group in self.arrays:
            return self.arrays[group]
        if group in self.sharding.local_ids:
            raise GroupError(
                f"group {group} has devices of this process, but its array was not given when "
                f"{self!r} was made. Pass one for each group, or name fewer groups.",
                option="arrays",
            )
        return array_without_shards(self.shape, self.dtype, sharding)

    def _not_deleted(self) -> list[jax.Array]:
        if self.is_deleted():
            raise GroupError(f"{self!r}: it was deleted or donated. Use the one it went into.")
        return list(self.arrays.values())

    def delete(self) -> None:
        """Free this process's memory of it, in all groups."""
        for array in self.arrays.values():
            array.delete()

    def is_deleted(self) -> bool:
        """Whether it was deleted or donated in at least one group."""
        return any(array.is_deleted() for array in self.arrays.values())

    def block_until_ready(self) -> MpmdArray:
        """Wait until this process's shards are computed, in all groups. Returns itself."""
        for array in self.arrays.values():
            array.block_until_ready()
        return self

    def __int__(self) -> int:
        return int(np.asarray(self))

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __format__(self, spec: str) -> str:
        # As JAX: only scalars take a format, e.g. a loss that is printed with `:.3f`.
        return format(np.asarray(self)[()], spec) if spec and not self.shape else str(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.local is None:
            raise GroupError(f"this process holds no shard of {self!r}. Move it with from_groups.")
        return np.array(self.local, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        specs = list(dict.fromkeys(self.sharding.specs))
        notes = f"{groups_text(self.mesh_ids)} of {self.sharding.mpmd_mesh.mpmd_dim}"
        notes += f" as {listing(specs, 3)}" if len(specs) > 1 else ""
        notes += ", deleted" if self.is_deleted() else ""
        missing = [group for group in self.sharding.local_ids if group not in self.arrays]
        notes += f", not given here: {listing(missing)}" if missing and self.arrays else ""
        notes += "" if self.is_partially_addressable else ", none of it in this process"
        shown = specs[0] if len(specs) == 1 else make_spec()
        return clip(f"MpmdArray({array_type(self.shape, self.dtype, shown)} in {notes})")


Shape = tuple[int, ...]
ArrayByGroup = dict[int, jax.Array]


def check_arrays(
    arrays: Any, sharding: MpmdSharding, shape: Iterable[int] | None, dtype: Any
) -> tuple[ArrayByGroup, Shape, Any]:
    """Return the arrays by group, in order of the groups, and the shape and dtype they share."""
    if not isinstance(sharding, MpmdSharding):
        raise GroupError(f"sharding: {short(sharding)} is not an MpmdSharding.", option="sharding")
    by_group = _by_group(arrays, sharding)
    full_shape, full_dtype = _shape_and_dtype(shape, dtype, by_group)
    for group, array in by_group.items():
        if (array.shape, array.dtype) != (full_shape, full_dtype):
            raise GroupError(
                f"group {group}: {array.dtype}{list(array.shape)} is not the same array as "
                f"{full_dtype}{list(full_shape)}, given explicitly or by the array in group "
                f"{next(iter(by_group))}. All groups hold one array.",
                option="arrays",
            )
    # The specs of all groups, not only of those held here, so that every process raises alike.
    for group, wanted in sharding.shardings.items():
        for problem in spec_problems(
            f"group {group}", full_shape, wanted.spec, mesh_axes(wanted.mesh)
        ):
            raise GroupError(f"sharding: {problem}", option="sharding")
        if group in by_group:
            _check_sharding(group, by_group[group], wanted)
    return by_group, full_shape, full_dtype


def _shape_and_dtype(
    shape: Iterable[int] | None, dtype: Any, by_group: ArrayByGroup
) -> tuple[Shape, Any]:
    """Return the shape and dtype that were given, or else those of the first array."""
    first = next(iter(by_group.values()), None)
    shape = first.shape if shape is None and first is not None else shape
    dtype = first.dtype if dtype is None and first is not None else dtype
    if shape is None or dtype is None:
        raise GroupError("this process holds no part of the array: say its shape= and dtype=.")
    try:
        # NumPy does not know the dtypes of typed PRNG keys.
        holds_keys = is_key(dtype)
        return tuple(map(operator.index, shape)), dtype if holds_keys else np.dtype(dtype)
    except TypeError:
        raise GroupError(
            f"shape {short(shape)} or dtype {short(dtype)} is not a valid shape or dtype."
        ) from None


def _by_group(arrays: Any, sharding: MpmdSharding) -> ArrayByGroup:
    given = [arrays] if isinstance(arrays, jax.Array) else list(arrays)
    by_group: ArrayByGroup = {}
    for number, array in enumerate(given):
        # A tracer is a jax.Array too, but is on no device.
        if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
            raise GroupError(
                f"array {number}: {short(array)} is not a jax.Array with values.", option="arrays"
            )
        group = _group_of(sharding.mpmd_mesh, array.sharding)
        if group not in sharding.mesh_ids:
            raise GroupError(
                f"array {number} is in group {group}; the sharding names "
                f"{groups_text(sharding.mesh_ids)}.",
                option="arrays",
            )
        if group in by_group:
            raise GroupError(
                f"array {number} is in group {group}, as one before. Pass one each.",
                option="arrays",
            )
        by_group[group] = array
    return dict(sorted(by_group.items()))


# Cached because the arrays of a model have few different shardings, and the answer takes a look at
# every device.
@functools.lru_cache(maxsize=1024)
def _group_of(groups: Groups, sharding: Sharding) -> int:
    """Return the one group whose devices hold an array."""
    group_of = groups.device_mpmd_idx
    devices: set[Any] = sharding.device_set
    outside = sorted(device.id for device in devices if device not in group_of)
    if outside:
        raise GroupError(
            f"an array is on {plural_noun(len(outside), 'device')} {listing(outside)}, which "
            f"no group of {groups!r} has. Move it there with to_groups.",
            option="arrays",
        )
    ids = sorted({group_of[device] for device in devices})
    if len(ids) > 1:
        raise GroupError(
            f"an array is spread over {groups_text(ids)}. A group's array is in that group alone: "
            "move it with to_groups.",
            option="arrays",
        )
    return ids[0]


def _check_sharding(group: int, array: jax.Array, wanted: NamedSharding) -> None:
    # `==` first, the usual case: `is_equivalent_to` builds two HLO shardings to compare them.
    if array.sharding != wanted and not array.sharding.is_equivalent_to(wanted, array.ndim):
        actual = getattr(array.sharding, "spec", array.sharding)
        raise GroupError(
            f"group {group}: the array is sharded as {short(actual)}, the sharding says "
            f"{wanted.spec}. Reshard it, or give the group a spec of its own: {{group: spec}}.",
            option="arrays",
        )
