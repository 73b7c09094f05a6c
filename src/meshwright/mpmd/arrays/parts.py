"""The arrays that make up an `MpmdArray`: one per group, alike, and where the sharding says."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from meshwright.errors import GroupError, listing, short
from meshwright.mpmd.arrays.sharding import MpmdSharding, named
from meshwright.mpmd.groups import Groups
from meshwright.partitioning.specs import mesh_axes, problems

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
        for problem in problems(f"group {group}", whole, split.spec, mesh_axes(split.mesh)):
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
