"""Giving up the memory of arrays that were moved, without breaking others that share it."""

from __future__ import annotations

import collections
import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshwright.partitioning.moving.moves import Move, platform

Memory = frozenset[tuple[Any, int]]  # devices and addresses
# Where a platform does not tell: all that lies on a device may then be shared.
_UNTOLD = -1


def own_memory(moves: Sequence[Move]) -> list[Memory]:
    """The memory of each array; nothing if another one, of these or of any alive, shares it."""
    memories = [memory(move.value) for move in moves]
    users = collections.Counter(place for places in memories for place in places)
    owners = {
        place: move.value for move, places in zip(moves, memories, strict=True) for place in places
    }
    taken = used_by_others(owners)
    return [
        frozenset() if any(users[place] > 1 or place in taken for place in places) else places
        for places in memories
    ]


def used_by_others(owners: Mapping[tuple[Any, int], jax.Array]) -> set[tuple[Any, int]]:
    """What of this memory live arrays use that are not among the owners, nor parts of them."""
    arrays = list({id(array): array for array in owners.values()}.values())
    known = {id(array) for array in arrays}
    known |= {id(shard.data) for array in arrays for shard in array.addressable_shards}
    # Arrays can share memory only if their shards are alike.
    kinds = {_kind(array) for array in arrays}
    used = set()
    for name in {platform(array.sharding) for array in arrays}:
        for other in jax.live_arrays(name):  # type: ignore[no-untyped-call]
            if id(other) not in known and _kind(other) in kinds:
                shared = memory(other) & owners.keys()
                used |= {place for place in shared if not _is_part(other, owners[place])}
    return used


def _is_part(other: jax.Array, array: jax.Array) -> bool:
    """Whether it is one of the arrays that JAX keeps for an array once it was read or printed."""
    if other.sharding.num_devices > 1:
        return False
    parts = [array.addressable_data(0), *(shard.data for shard in array.addressable_shards)]
    return any(other is part or other is part.addressable_data(0) for part in parts)


def memory(value: Any) -> Memory:
    """Where the shards of this process lie."""
    if not isinstance(value, jax.Array) or value.is_deleted() or not value.size:
        return frozenset()
    return frozenset((shard.device, _address(shard.data)) for shard in value.addressable_shards)


def _address(data: Any) -> int:
    try:
        return int(data.unsafe_buffer_pointer())
    except (AttributeError, jax.errors.JaxRuntimeError):
        return _UNTOLD


def return_freed_memory() -> None:
    """Freed memory of CPU devices goes back to the system: glibc keeps what it might use again."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return None


def _kind(array: jax.Array) -> tuple[Any, ...]:
    return array.dtype, array.sharding.shard_shape(array.shape)
