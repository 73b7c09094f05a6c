"""`MpmdArray`, one array that several groups hold, whole in each of them, and `MpmdSharding`, which
groups those are and how each of them shards it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshwright._text import plural_noun
from meshwright.errors import GroupError, listing, short
from meshwright.mpmd.groups import Groups, as_groups, check_ids, clip
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
        which it holds shards, and leaves out the others.
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
        return bool(self.sharding.local_ids)

    @property
    def local(self) -> jax.Array | None:
        """The array in this process's group, in the first of several, or `None` without any."""
        ids = self.sharding.local_ids
        return self.arrays[ids[0]] if ids else None

    @property
    def first(self) -> jax.Array:
        """The first replica: the array in the group with the lowest number."""
        return self.on(self.mesh_ids[0])

    def on(self, group: int) -> jax.Array:
        """Return the array in a group; without shards where only other processes hold them."""
        sharding = self.sharding.sharding_of(group)
        array = self.arrays.get(group)
        return array_without_shards(self.shape, self.dtype, sharding) if array is None else array

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

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.local is None:
            raise GroupError(f"this process holds no shard of {self!r}. Move it with from_groups.")
        return np.array(self.local, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        specs = list(dict.fromkeys(self.sharding.specs))
        notes = f"{groups_text(self.mesh_ids)} of {self.sharding.mpmd_mesh.mpmd_dim}"
        notes += f" as {listing(specs, 3)}" if len(specs) > 1 else ""
        notes += ", deleted" if self.is_deleted() else ""
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
    for group in sharding.local_ids:
        if group not in by_group:
            raise GroupError(
                f"group {group} has devices of this process, but none of the {len(given)} arrays "
                "is there. Pass one for each group, or name fewer groups.",
                option="arrays",
            )
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


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class MpmdSharding:
    """The groups that hold an array, and how each of them shards it.

    Args:
      mpmd_mesh: all the groups, or a list of meshes.
      mesh_ids: the number of the group that holds the array, or several numbers.
      spec: the `PartitionSpec` in all of them, or a dict with one per group. The axis along which
        an `MpmdMesh` was cut is dropped from it: whether an array lives in several groups is what
        `mesh_ids` says.

    Raises `GroupError` for a group that is not there, or a spec that its mesh cannot have.

    >>> import meshwright as mw
    >>> from jax.sharding import PartitionSpec as P
    >>> groups = mw.MpmdMesh(mw.mesh("pp:2, fsdp:4"), "pp")
    >>> split = mw.MpmdSharding(groups, {1, 0}, P(("pp", "fsdp")))
    >>> split
    MpmdSharding(P('fsdp',) in groups 0, 1 of 2)
    >>> dict(split.sharding_of(1).mesh.shape)
    {'pp': 1, 'fsdp': 4}
    """

    mpmd_mesh: Groups
    mesh_ids: tuple[int, ...]
    specs: tuple[PartitionSpec, ...]

    def __init__(
        self,
        mpmd_mesh: Groups | Sequence[Mesh],
        mesh_ids: int | Iterable[int],
        spec: PartitionSpec | Mapping[int, PartitionSpec],
    ):
        groups = as_groups(mpmd_mesh)
        ids = read_ids("mesh_ids", mesh_ids, groups, option="mesh_ids")
        object.__setattr__(self, "mpmd_mesh", groups)
        object.__setattr__(self, "mesh_ids", ids)
        object.__setattr__(self, "specs", tuple(_local_specs(groups, ids, spec)))

    @property
    def spec(self) -> PartitionSpec:
        """The spec of all groups. Raises `GroupError` where they differ."""
        for group, spec in zip(self.mesh_ids, self.specs, strict=True):
            # `make_spec` drops trailing None entries, which mean nothing.
            if make_spec(spec) != make_spec(self.specs[0]):
                raise GroupError(
                    f"the groups split the array in different ways: {self.specs[0]} in group "
                    f"{self.mesh_ids[0]}, {spec} in group {group}. Ask sharding_of(group)."
                )
        return self.specs[0]

    @functools.cached_property
    def shardings(self) -> dict[int, NamedSharding]:
        """`{group: its sharding}`; shared, so do not write to it."""
        pairs = zip(self.mesh_ids, self.specs, strict=True)
        return {group: NamedSharding(self.mpmd_mesh.meshes[group], spec) for group, spec in pairs}

    def sharding_of(self, group: int) -> NamedSharding:
        """Return the sharding inside a group. Raises `GroupError` if it does not hold the array."""
        if group not in self.shardings:
            raise GroupError(
                f"group {short(group)} does not hold the array; groups {listing(self.mesh_ids)} do."
            )
        return self.shardings[group]

    @functools.cached_property
    def local_ids(self) -> tuple[int, ...]:
        """Those of `mesh_ids` that have devices of this process."""
        if self.mpmd_mesh.compile_only:
            return ()  # their devices belong to no process
        shardings = self.shardings.items()
        return tuple(group for group, sharding in shardings if sharding.has_addressable_devices)

    @property
    def local(self) -> NamedSharding | None:
        """The sharding in this process's group, in the first of several, or `None` without any."""
        return self.shardings[self.local_ids[0]] if self.local_ids else None

    def __repr__(self) -> str:
        specs = listing(dict.fromkeys(self.specs), 3)
        held_by = f"{groups_text(self.mesh_ids)} of {self.mpmd_mesh.mpmd_dim}"
        return clip(f"MpmdSharding({specs} in {held_by})")


def groups_text(ids: Sequence[int]) -> str:
    """
    >>> groups_text([3]), groups_text([0, 2])
    ('group 3', 'groups 0, 2')
    """
    return f"{plural_noun(len(ids), 'group')} {listing(ids)}"


def read_ids(what: str, ids: Any, groups: Groups, *, option: str | None = None) -> tuple[int, ...]:
    """Return a group's number or several, sorted and checked; messages begin with `what`."""
    several = [ids] if isinstance(ids, numbers.Integral) else ids
    return tuple(sorted(check_ids(what, several, groups.mpmd_dim, option=option)))


def _local_specs(groups: Groups, ids: Sequence[int], spec: Any) -> Iterator[PartitionSpec]:
    """Yield the spec of each group, checked, as it holds inside the group."""
    per_group = spec if isinstance(spec, Mapping) else dict.fromkeys(ids, spec)
    unexpected = [group for group in per_group if group not in ids]
    if unexpected:
        raise GroupError(
            f"spec: group {short(unexpected[0])} has a spec but is not one of {groups_text(ids)}.",
            option="spec",
        )
    for group in ids:
        if group not in per_group:
            raise GroupError(
                f"spec: group {group} has none. Give one for each of {groups_text(ids)}.",
                option="spec",
            )
        yield _local_spec(groups, group, per_group[group])


def _local_spec(groups: Groups, group: int, spec: Any) -> PartitionSpec:
    if not isinstance(spec, PartitionSpec):
        raise GroupError(
            f"spec: group {group}: {short(spec)} is not a PartitionSpec.", option="spec"
        )
    # Unreduced values are partial sums within one program; an array that is kept holds whole ones.
    if spec.unreduced or spec.reduced:
        raise GroupError(
            f"spec: group {group}: {spec} asks for more than a split. Name axes only.",
            option="spec",
        )
    inside = groups.local_spec(spec)
    # The sizes of the dims are not known here; a size of zero is divisible by everything.
    unknown = (0,) * len(inside)
    for problem in spec_problems(
        f"group {group}", unknown, inside, mesh_axes(groups.meshes[group])
    ):
        raise GroupError(f"spec: {problem}", option="spec")
    return inside
