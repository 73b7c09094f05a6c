"""Giving up the memory of arrays that were moved, without breaking others that share it."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from meshwright.partitioning.moving.moves import Move

Memory = tuple[Any, int]  # device, address
# Where a platform does not tell: all that lies on a device may then be shared.
_UNTOLD = -1


def free_to_go(moves: Sequence[Move]) -> list[bool]:
    """For each array, whether no other array, of these or of any that lives, shares its memory."""
    arrays = [move.value for move in moves]
    users = collections.Counter(place for array in arrays for place in set(memory(array)))
    taken = others_memory(arrays)
    return [
        isinstance(array, jax.Array)
        and array.size > 0
        and all(users[place] == 1 and place not in taken for place in memory(array))
        for array in arrays
    ]


def others_memory(arrays: Sequence[Any]) -> set[Memory]:
    """The memory of live arrays that are not among these and might share theirs."""
    own = [array for array in arrays if isinstance(array, jax.Array)]
    known = {id(array) for array in own}
    known |= {id(shard.data) for array in own for shard in array.addressable_shards}
    # Arrays can share memory only if their shards are alike.
    kinds = {_kind(array) for array in own}
    devices: set[Any] = set().union(*(array.sharding.device_set for array in own))
    return {
        place
        for platform in {device.platform for device in devices}
        for array in jax.live_arrays(platform)  # type: ignore[no-untyped-call]
        if id(array) not in known and _kind(array) in kinds
        for place in memory(array)
    }


def memory(array: Any) -> Iterator[Memory]:
    """Where the array's shards of this process lie."""
    if isinstance(array, jax.Array) and not array.is_deleted() and array.size:
        for shard in array.addressable_shards:
            yield shard.device, _address(shard.data)


def _address(data: Any) -> int:
    try:
        return int(data.unsafe_buffer_pointer())
    except (AttributeError, jax.errors.JaxRuntimeError):
        return _UNTOLD


def give_up(move: Move, result: jax.Array) -> None:
    """Delete a moved array, unless the result lives on in its memory."""
    if not set(memory(move.value)) & set(memory(result)):
        move.value.delete()


def _kind(array: jax.Array) -> tuple[Any, ...]:
    return array.dtype, array.sharding.shard_shape(array.shape)
