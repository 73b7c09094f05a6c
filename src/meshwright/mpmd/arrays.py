"""`MpmdArray`: one array that lives in several groups, whole in each of them."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshwright.errors import GroupError, listing, short
from meshwright.mpmd.groups import Groups, as_groups, check_ids
from meshwright.partitioning.report import array_type
from meshwright.trees.specs import make_spec, mesh_axes, spec_problems


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
        return f"MpmdArray({array_type(self.shape, self.dtype, shown)} in {notes})"


# The arrays that make up an `MpmdArray`: one per group, alike, and where the sharding says.


Shape = tuple[int, ...]
Parts = dict[int, jax.Array]


def check_parts(
    arrays: Any, sharding: MpmdSharding, shape: Iterable[int] | None, dtype: Any
) -> tuple[Parts, Shape, Any]:
    """The arrays by group, in order; and the shape and dtype they share."""
    if not isinstance(sharding, MpmdSharding):
        raise GroupError(f"sharding: {short(sharding)} is not an MpmdSharding.")
    parts = _by_group(arrays, sharding)
    whole, kind = _said(shape, dtype, parts)
    for group, array in parts.items():
        if (array.shape, array.dtype) != (whole, kind):
            raise GroupError(
                f"group {group}: {array.dtype}{list(array.shape)} is not the same array as "
                f"{kind}{list(whole)}, which was said or lies in group {next(iter(parts))}. "
                "All groups hold one array."
            )
    for group, split in sharding.shardings.items():
        for problem in spec_problems(f"group {group}", whole, split.spec, mesh_axes(split.mesh)):
            raise GroupError(f"sharding: {problem}")
        if group in parts:
            _check_split(group, parts[group], split)
    return parts, whole, kind


def without_shards(shape: Shape, dtype: Any, split: NamedSharding) -> jax.Array:
    """An array as a process sees it that holds no part of it."""
    return jax.make_array_from_single_device_arrays(shape, split, [], dtype=dtype)


def _said(shape: Iterable[int] | None, dtype: Any, parts: Parts) -> tuple[Shape, Any]:
    first = next(iter(parts.values()), None)
    shape = first.shape if shape is None and first is not None else shape
    dtype = first.dtype if dtype is None and first is not None else dtype
    if shape is None or dtype is None:
        raise GroupError("this process holds no part of the array: say its shape= and dtype=.")
    try:
        key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        return tuple(map(operator.index, shape)), dtype if key else np.dtype(dtype)
    except TypeError:
        raise GroupError(
            f"shape {short(shape)} or dtype {short(dtype)} is none that an array can have."
        ) from None


def _by_group(arrays: Any, sharding: MpmdSharding) -> Parts:
    given = [arrays] if isinstance(arrays, jax.Array) else list(arrays)
    found: Parts = {}
    for place, array in enumerate(given):
        if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
            raise GroupError(f"array {place}: {short(array)} is not a jax.Array with values.")
        group = _group_of(sharding.mpmd_mesh, array.sharding)
        if group not in sharding.mesh_ids:
            raise GroupError(
                f"array {place} lies in group {group}; the sharding names "
                f"{named(sharding.mesh_ids)}."
            )
        if group in found:
            raise GroupError(f"array {place} lies in group {group}, as one before. Pass one each.")
        found[group] = array
    for group in sharding.local_ids:
        if group not in found:
            raise GroupError(
                f"group {group} has devices of this process, but none of the {len(given)} arrays "
                "lies there. Pass one for each group, or name fewer groups."
            )
    return dict(sorted(found.items()))


@functools.lru_cache(maxsize=1024)
def _group_of(groups: Groups, sharding: Sharding) -> int:
    """The one group whose devices hold an array."""
    where = groups.device_mpmd_idx
    devices: set[Any] = sharding.device_set
    outside = sorted(device.id for device in devices if device not in where)
    if outside:
        raise GroupError(
            f"an array lies on device{'s' if len(outside) > 1 else ''} {listing(outside)}, which "
            f"no group of {groups!r} has. Move it there with to_groups."
        )
    found = sorted({where[device] for device in devices})
    if len(found) > 1:
        raise GroupError(
            f"an array is spread over {named(found)}. A group's array lies in that group alone: "
            "move it with to_groups."
        )
    return found[0]


def _check_split(group: int, array: jax.Array, said: NamedSharding) -> None:
    if array.sharding != said and not array.sharding.is_equivalent_to(said, array.ndim):
        lies = getattr(array.sharding, "spec", array.sharding)
        raise GroupError(
            f"group {group}: the array lies as {short(lies)}, the sharding says {said.spec}. "
            "Reshard it, or give the group a spec of its own: {group: spec}."
        )


# `MpmdSharding`: in which groups an array lives, and how each of them splits it.


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class MpmdSharding:
    """Where an array of groups lies: the groups, the numbers of those that hold it, the split.

    `mesh_ids` is a number or several. `spec` holds in all of them, or is a dict with one per
    group. The axis along which an `MpmdMesh` was cut is dropped from it: whether an array lives
    in several groups is what `mesh_ids` says.

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
        ids = read_ids("mesh_ids", mesh_ids, groups)
        object.__setattr__(self, "mpmd_mesh", groups)
        object.__setattr__(self, "mesh_ids", ids)
        object.__setattr__(self, "specs", tuple(_specs(groups, ids, spec)))

    @property
    def spec(self) -> PartitionSpec:
        """The spec of all groups; refused where they disagree."""
        for group, spec in zip(self.mesh_ids, self.specs, strict=True):
            if not _alike(spec, self.specs[0]):
                raise GroupError(
                    f"the groups split the array in different ways: {self.specs[0]} in group "
                    f"{self.mesh_ids[0]}, {spec} in group {group}. Ask sharding_of(group)."
                )
        return self.specs[0]

    @functools.cached_property
    def shardings(self) -> dict[int, NamedSharding]:
        """`{group: its sharding}`; shared, so nobody may write to it."""
        pairs = zip(self.mesh_ids, self.specs, strict=True)
        return {group: NamedSharding(self.mpmd_mesh.meshes[group], spec) for group, spec in pairs}

    def sharding_of(self, group: int) -> NamedSharding:
        """The sharding inside a group."""
        if group not in self.shardings:
            raise GroupError(
                f"group {short(group)} does not hold the array; groups {listing(self.mesh_ids)} do."
            )
        return self.shardings[group]

    @functools.cached_property
    def local_ids(self) -> tuple[int, ...]:
        """The groups among them that have devices of this process."""
        if self.mpmd_mesh.compile_only:
            return ()
        held = self.shardings.items()
        return tuple(group for group, split in held if split.has_addressable_devices)

    @property
    def local(self) -> NamedSharding | None:
        """The sharding in this process's group, the first where it has several; None without."""
        return self.shardings[self.local_ids[0]] if self.local_ids else None

    def __repr__(self) -> str:
        specs = listing(dict.fromkeys(self.specs), 3)
        return f"MpmdSharding({specs} in {named(self.mesh_ids)} of {self.mpmd_mesh.mpmd_dim})"


def named(ids: Sequence[int]) -> str:
    """
    >>> named([3]), named([0, 2])
    ('group 3', 'groups 0, 2')
    """
    return f"group{'s' if len(ids) > 1 else ''} {listing(ids)}"


def read_ids(what: str, ids: Any, groups: Groups) -> tuple[int, ...]:
    """A group or several, in order of their numbers."""
    several = [ids] if isinstance(ids, numbers.Integral) else ids
    return tuple(sorted(check_ids(what, several, groups.mpmd_dim)))


def _alike(one: PartitionSpec, other: PartitionSpec) -> bool:
    """Whether two specs split alike; whole dims at the end do not count."""
    return make_spec(one) == make_spec(other)


def _specs(groups: Groups, ids: Sequence[int], spec: Any) -> Iterator[PartitionSpec]:
    per_group = spec if isinstance(spec, Mapping) else dict.fromkeys(ids, spec)
    strangers = [group for group in per_group if group not in ids]
    if strangers:
        raise GroupError(
            f"spec: group {short(strangers[0])} has a spec but is not one of {named(ids)}."
        )
    for group in ids:
        if group not in per_group:
            raise GroupError(f"spec: group {group} has none. Give one for each of {named(ids)}.")
        yield _checked(groups, group, per_group[group])


def _checked(groups: Groups, group: int, spec: Any) -> PartitionSpec:
    if not isinstance(spec, PartitionSpec):
        raise GroupError(f"spec: group {group}: {short(spec)} is not a PartitionSpec.")
    if spec.unreduced or spec.reduced:
        raise GroupError(f"spec: group {group}: {spec} asks for more than a split. Name axes only.")
    inside = groups.local_spec(spec)
    # Dims are not known here; a size of zero is divisible by everything.
    wrong = spec_problems(
        f"group {group}", (0,) * len(inside), inside, mesh_axes(groups.meshes[group])
    )
    for problem in wrong:
        raise GroupError(f"spec: {problem}")
    return inside
