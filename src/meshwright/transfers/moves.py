"""Move one array inside a process: its shards read, joined on the host, and safely donated.

A `Move` is an array, where it lies and where it goes. `build` makes its new shards in host memory
from the shards held here and the pieces that came from other processes; `own_memory` says what
may be deleted afterwards; `agree` makes all processes go ahead, or refuse with the same words.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from meshwright._processes import combine_texts
from meshwright._text import plural_noun
from meshwright.errors import listing
from meshwright.transfers.boxes import (
    Box,
    Shape,
    addressable_positions,
    as_slices,
    box_at,
    box_shape,
    device_boxes,
    find_overlaps,
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


# Reading what this process holds.


@dataclasses.dataclass(frozen=True)
class LocalShards:
    """What this process holds of an array: one shard per box, each read to the host once."""

    shards: dict[Box, Any]
    read: dict[Box, HostArray] = dataclasses.field(default_factory=dict)

    def bits(self, box: Box) -> HostArray:
        known = self.read.get(box)
        if known is None:
            known = self.read[box] = bit_pattern(on_host(self.shards[box]))
        return known


def local_shards(move: Move) -> LocalShards:
    if move.source is None:
        return LocalShards({whole(move.shape): move.value})
    if not isinstance(move.value, jax.Array):  # a shape that stands for an array held elsewhere
        return LocalShards({})
    positions = addressable_positions(move.source, move.shape)
    return LocalShards({box: move.value.addressable_data(n) for box, n in positions.items()})


def read_whole(move: Move) -> HostArray:
    """Return the whole array in fresh host memory; all of it is held here."""
    out = np.empty(move.shape, move.dtype)
    bits, local = bit_pattern(out), local_shards(move)
    for box in local.shards if out.size else ():
        bits[as_slices(box)] = local.bits(box)
    return out


def on_host(data: Any) -> HostArray:
    """Return the values of one shard in host memory; of a CPU device its memory, not a copy."""
    if isinstance(data, jax.Array) and platform(data.sharding) != "cpu":
        # JAX keeps the host copy on the array it was asked of: ask one that goes away.
        data = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.asarray(data)


@functools.lru_cache(maxsize=4096)
def platform(sharding: Sharding) -> str:
    devices: set[Any] = sharding.device_set
    return str(next(iter(devices)).platform)


def bit_pattern(array: HostArray) -> HostArray:
    """View the memory as unsigned integers: copying them keeps every bit, for all dtypes alike."""
    size = array.dtype.itemsize
    return array.view(f"u{size}") if size in (1, 2, 4, 8) else array


# Building an array's new shards on the host.

# Pieces of one array that came from other processes, as bits.
Received = Mapping[Box, HostArray]

# What JAX asks of host memory to use it as a CPU device's memory without a copy.
_ALIGNMENT = 64
# Below this, starting threads takes longer than copying.
_SMALL = 2**20


def build(move: Move, local: LocalShards, received: Received) -> jax.Array:
    """Return the array on its new mesh, from the shards held here and the pieces received."""
    if not move.target.addressable_devices:
        return moved_without_shards(move)
    shards = _uncut_shards(move, local)
    missing = [box for box in _target_boxes_here(move) if box not in shards]
    shards.update(zip(missing, _join_all(move, missing, local, received), strict=True))
    return jax.make_array_from_callback(
        move.shape,
        move.target,
        lambda index: shards[box_at(index or (), move.shape)],
        dtype=move.dtype,
    )


def moved_without_shards(move: Move) -> jax.Array:
    return array_without_shards(move.shape, move.dtype, move.target)


def array_without_shards(shape: Shape, dtype: Any, sharding: Sharding) -> jax.Array:
    """Make an array as a process sees it that holds none of its shards."""
    # JAX takes the dtype from the shards, and wants it given where there are none.
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def _target_boxes_here(move: Move) -> set[Box]:
    boxes = device_boxes(move.target, move.shape)
    return {boxes[device] for device in move.target.addressable_devices}


def _uncut_shards(move: Move, local: LocalShards) -> dict[Box, Any]:
    """Return shards on devices that need no cutting: JAX copies them from device to device."""
    kind = move.target.memory_kind
    shards = ((box, local.shards.get(box)) for box in _target_boxes_here(move))
    return {
        box: shard
        for box, shard in shards
        if isinstance(shard, jax.Array) and shard.sharding.memory_kind == kind
    }


def _join_all(
    move: Move, missing: Sequence[Box], local: LocalShards, received: Received
) -> Iterable[HostArray]:
    """Join large shards in threads: numpy releases the GIL while it copies memory."""
    join = functools.partial(_join, move, local, received)
    if len(missing) < 2 or move.bytes < _SMALL:
        return map(join, missing)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return pool.map(join, missing)


def _join(move: Move, local: LocalShards, received: Received, box: Box) -> HostArray:
    """Build one shard in fresh memory: it never shares any with what the caller holds."""
    out = aligned_empty(box_shape(box), move.dtype)
    if out.size:
        bits = bit_pattern(out)
        for overlap in find_overlaps(move.source, move.target, move.shape)[box]:
            if overlap.source in local.shards:
                bits[overlap.put] = local.bits(overlap.source)[overlap.take]
            else:
                bits[overlap.put] = received[overlap.box]
    return out


def aligned_empty(shape: Shape, dtype: np.dtype[Any]) -> HostArray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def x64_if(needed: bool) -> contextlib.AbstractContextManager[Any]:
    """Keep 64-bit arrays so, whatever JAX is set to; it narrows them else, even in a copy."""
    return jax.enable_x64(True) if needed else contextlib.nullcontext()


# Giving up the memory of arrays that were moved, without breaking others that share it.
#
# `Array.delete` frees the buffers of all arrays that share them, and JAX shares buffers freely:
# between an array and its renamed view, or what it keeps once an array was printed. So an array
# is deleted only if no other live array uses the same addresses.

Memory = frozenset[tuple[Any, int]]  # devices and addresses
# Where a platform does not tell addresses: all that lies on a device may then be shared.
_UNKNOWN_ADDRESS = -1


def own_memory(arrays: Sequence[Any]) -> list[Memory]:
    """Return the memory of each array; none if another, of these or of any alive, shares it."""
    memories = list(map(memory, arrays))
    users = collections.Counter(place for places in memories for place in places)
    owners = {
        place: array for array, places in zip(arrays, memories, strict=True) for place in places
    }
    taken = _used_by_others(owners)
    return [
        frozenset() if any(users[place] > 1 or place in taken for place in places) else places
        for places in memories
    ]


def memory(value: Any) -> Memory:
    """Return where the shards of this process lie."""
    if not isinstance(value, jax.Array) or value.is_deleted() or not value.size:
        return frozenset()
    return frozenset((shard.device, _address(shard.data)) for shard in value.addressable_shards)


def _address(data: Any) -> int:
    try:
        return int(data.unsafe_buffer_pointer())
    except (AttributeError, jax.errors.JaxRuntimeError):
        return _UNKNOWN_ADDRESS


def _used_by_others(owners: Mapping[tuple[Any, int], jax.Array]) -> set[tuple[Any, int]]:
    """Return what of this memory live arrays use that are not among the owners, nor their parts."""
    arrays = list({id(array): array for array in owners.values()}.values())
    known = {id(array) for array in arrays}
    known |= {id(shard.data) for array in arrays for shard in array.addressable_shards}
    # Arrays can share memory only if their shards are alike. A process may have many thousands
    # of live arrays, and asking each for its addresses is what takes time here.
    kinds = {_kind(array) for array in arrays}
    used = set()
    for name in {platform(array.sharding) for array in arrays}:
        for other in jax.live_arrays(name):  # type: ignore[no-untyped-call]
            if id(other) not in known and _kind(other) in kinds:
                shared = memory(other) & owners.keys()
                used |= {place for place in shared if not _is_part(other, owners[place])}
    return used


def _kind(array: jax.Array) -> tuple[Any, ...]:
    return array.dtype, array.sharding.shard_shape(array.shape)


def _is_part(other: jax.Array, array: jax.Array) -> bool:
    """Whether it is one of the arrays that JAX keeps for an array once it was read or printed."""
    if other.sharding.num_devices > 1:
        return False
    parts = [array.addressable_data(0), *(shard.data for shard in array.addressable_shards)]
    return any(other is part or other is part.addressable_data(0) for part in parts)


def return_freed_memory() -> None:
    """Return freed memory of CPU devices to the system: glibc keeps what it might use again."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return None


# All processes go ahead, or all refuse with the same words, before any device works: each tells
# what is wrong and what it was given, process 0 compares, and its verdict is everyone's. A process
# that went ahead alone would wait for the others for ever.


# Seconds to wait for a process that does not call; it may still be loading or compiling.
TIMEOUT = 600.0
_MOST_PROBLEMS = 50


def agree(problems: Sequence[str], moves: Sequence[Move]) -> list[str]:
    """Return the problems of all processes, the same in each; all of them call it."""
    report = {"problems": list(problems)[:_MOST_PROBLEMS], "arrays": list(map(fingerprint, moves))}
    verdict = combine_texts(
        "reshard",
        json.dumps(report),
        lambda reports: json.dumps(_verdict(list(map(json.loads, reports)), moves)),
        timeout=TIMEOUT,
        on_absent=lambda absent: json.dumps(
            [
                f"{_named(absent)} did not call it within {TIMEOUT:.0f} s. "
                "Every process must, also one that holds none of the arrays."
            ]
        ),
    )
    if verdict is None:
        return ["process 0 did not call reshard, or left."]
    return list(json.loads(verdict))


def _verdict(reports: Sequence[Mapping[str, Any]], moves: Sequence[Move]) -> list[str]:
    problems = dict.fromkeys(problem for report in reports for problem in report["problems"])
    return list(problems) or list(_differences([report["arrays"] for report in reports], moves))


def _differences(prints: Sequence[Sequence[int]], moves: Sequence[Move]) -> Iterator[str]:
    """Yield what processes were given otherwise than the first, whose moves these are."""
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
    return f"{plural_noun(len(processes), 'process')} {listing(processes)}"


def fingerprint(move: Move) -> int:
    """Return a number that tells arrays, splits and targets apart; of host arrays the values."""
    if move.source is None:
        values = np.ascontiguousarray(on_host(move.value))
        source = zlib.crc32(values.reshape(-1).view(np.uint8).data)
    else:
        source = _split_checksum(move.source, move.shape)
    target = _split_checksum(move.target, move.shape)
    what = (move.where, move.shape, move.dtype.name, source, move.target.mesh.axis_names)
    return zlib.crc32(repr((*what, move.target.spec, target)).encode())


@functools.lru_cache(maxsize=1024)
def _split_checksum(sharding: Sharding, shape: Shape) -> int:
    boxes = [(device.id, box) for device, box in device_boxes(sharding, shape).items()]
    return zlib.crc32(repr(sorted(boxes)).encode())
