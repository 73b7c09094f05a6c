"""One array on its way: what it is, where it lies, where it goes, what is held of it here."""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import dataclasses
import functools
import itertools
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from meshwright import _compat
from meshwright.errors import listing
from meshwright.transfers.boxes import (
    Box,
    Shape,
    box_at,
    box_shape,
    boxes,
    places_here,
    recipe,
    whole,
)

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


# Building an array's shards in this process out of the pieces it has.


# Pieces of one array that came from other processes, as bits.
Arrived = Mapping[Box, HostArray]

# What JAX asks of host memory to use it as a CPU device's memory without a copy.
_ALIGNMENT = 64
_SMALL = 2**20


def build(move: Move, held: Held, arrived: Arrived) -> jax.Array:
    """The array on its new mesh, from the shards held here and the pieces that arrived."""
    if not move.target.addressable_devices:
        return without_shards(move)
    shards = held_whole(move, held)
    missing = [box for box in target_boxes(move) if box not in shards]
    shards.update(zip(missing, join_all(move, missing, held, arrived), strict=True))
    return jax.make_array_from_callback(
        move.shape,
        move.target,
        lambda index: shards[box_at(index or (), move.shape)],
        dtype=move.dtype,
    )


def without_shards(move: Move) -> jax.Array:
    """The array as a process sees it that holds no part of it."""
    return jax.make_array_from_single_device_arrays(move.shape, move.target, [], dtype=move.dtype)


def target_boxes(move: Move) -> set[Box]:
    """The boxes that this process makes."""
    where = boxes(move.target, move.shape)
    return {where[device] for device in move.target.addressable_devices}


def held_whole(move: Move, held: Held) -> dict[Box, Any]:
    """Shards on devices that need no cutting: JAX copies them from device to device."""
    kind = move.target.memory_kind
    shards = ((box, held.shards.get(box)) for box in target_boxes(move))
    return {
        box: shard
        for box, shard in shards
        if isinstance(shard, jax.Array) and shard.sharding.memory_kind == kind
    }


def join_all(
    move: Move, missing: Sequence[Box], held: Held, arrived: Arrived
) -> Iterable[HostArray]:
    """Large shards side by side: copying memory leaves Python free."""
    one = functools.partial(join, move, held, arrived)
    if len(missing) < 2 or move.bytes < _SMALL:
        return map(one, missing)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return pool.map(one, missing)


def join(move: Move, held: Held, arrived: Arrived, box: Box) -> HostArray:
    """One shard in fresh memory: it never shares any with what the caller holds."""
    out = aligned_empty(box_shape(box), move.dtype)
    if out.size:
        bits = bit_pattern(out)
        for cut in recipe(move.source, move.target, move.shape)[box]:
            if cut.origin in held.shards:
                bits[cut.put] = held.bits(cut.origin)[cut.take]
            else:
                bits[cut.put] = arrived[cut.part]
    return out


def aligned_empty(shape: Shape, dtype: np.dtype[Any]) -> HostArray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


# Giving up the memory of arrays that were moved, without breaking others that share it.


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


# All processes go ahead, or all refuse with the same words, before any device works.
#
# They tell each other through JAX's coordination service: each says what is wrong and what it was
# given, the first one compares, and its verdict is everyone's.


# How long to wait for a process that does not call; it may still be loading or compiling.
PATIENCE = 600.0
_MOST_PROBLEMS = 50
_calls = itertools.count()


def agree(problems: Sequence[str], moves: Sequence[Move]) -> list[str]:
    """The problems of all processes, the same in each; all of them call it."""
    client = _compat.coordination_client()
    if client is None:
        return list(problems)
    call = next(_calls)
    room = f"meshwright/reshard/{call}"
    report = {"problems": list(problems)[:_MOST_PROBLEMS], "arrays": list(map(fingerprint, moves))}
    client.key_value_set(f"{room}/{jax.process_index()}", json.dumps(report))
    if jax.process_index() == 0:
        client.key_value_set(f"{room}/verdict", json.dumps(_verdict(client, room, moves)))
        if call:
            client.key_value_delete(f"meshwright/reshard/{call - 1}/")
    verdict = _get(client, f"{room}/verdict", time.monotonic() + 2 * PATIENCE)
    return ["process 0 did not call reshard, or left."] if verdict is None else verdict


def _verdict(client: Any, room: str, moves: Sequence[Move]) -> list[str]:
    end = time.monotonic() + PATIENCE
    reports = [_get(client, f"{room}/{process}", end) for process in range(jax.process_count())]
    absent = [process for process, report in enumerate(reports) if report is None]
    if absent:
        return [
            f"{_named(absent)} did not call it within {PATIENCE:.0f} s. "
            "Every process must, also one that holds none of the arrays."
        ]
    found = dict.fromkeys(problem for report in reports for problem in report["problems"])
    return list(found) or list(differences([report["arrays"] for report in reports], moves))


def differences(prints: Sequence[Sequence[int]], moves: Sequence[Move]) -> Iterator[str]:
    """What processes were given otherwise than the first, whose moves these are."""
    first = prints[0]
    for process, other in enumerate(prints):
        if len(other) != len(first):
            yield f"process {process} passed {len(other)} arrays, process 0 passed {len(first)}."
            return
    for number, move in enumerate(moves):
        odd = [process for process, other in enumerate(prints) if other[number] != first[number]]
        if odd:
            yield (
                f"{move.where}: {_named(odd)} passed another shape, split, spec or other values "
                f"than process 0 ({move.dtype}{list(move.shape)} to {move.target.spec}). Pass the "
                "same global array everywhere: a process that holds none of it passes "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=its sharding)."
            )


def _named(processes: Sequence[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {listing(processes)}"


def fingerprint(move: Move) -> int:
    """A number that tells arrays, splits and destinations apart; of host arrays the values too."""
    if move.source is None:
        values = np.ascontiguousarray(on_host(move.value))
        source = zlib.crc32(values.reshape(-1).view(np.uint8).data)
    else:
        source = _split(move.source, move.shape)
    what = (move.where, move.shape, move.dtype.name, source, move.target.mesh.axis_names)
    return zlib.crc32(repr((*what, move.target.spec, _split(move.target, move.shape))).encode())


@functools.lru_cache(maxsize=1024)
def _split(sharding: Sharding, shape: Shape) -> int:
    where = [(device.id, box) for device, box in boxes(sharding, shape).items()]
    return zlib.crc32(repr(sorted(where)).encode())


def _get(client: Any, key: str, end: float) -> Any:
    wait = max(200, int(1000 * (end - time.monotonic())))
    try:
        return json.loads(client.blocking_key_value_get(key, wait))
    except jax.errors.JaxRuntimeError:
        return None
