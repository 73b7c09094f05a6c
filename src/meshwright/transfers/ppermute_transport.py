"""Pieces that cross from one process to another, once for every process that needs them.

Every process knows where all arrays lie and where they go, so all of them plan the same
messages. A message is the bytes of its pieces, end to end.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from meshwright.transfers.boxes import Box, Cut, Shape, box_shape, boxes, recipe
from meshwright.transfers.moves import Arrived, Held, HostArray, Move, bit_pattern
from meshwright.trees.specs import make_spec


@dataclasses.dataclass(frozen=True)
class Need:
    """A piece that the process `receiver` lacks, and the processes that hold it."""

    receiver: int
    holders: tuple[int, ...]
    cut: Cut


@dataclasses.dataclass(frozen=True)
class Parcel:
    """A piece of array number `number` in a message."""

    number: int
    cut: Cut
    bytes: int


def bring(moves: Sequence[Move], held: Sequence[Held]) -> list[Arrived]:
    """For each array, the pieces that this process needs and lacks. All processes call it."""
    arrived: list[dict[Box, HostArray]] = [{} for _ in moves]
    messages = plan_messages(moves)
    sizes = {pair: sum(parcel.bytes for parcel in message) for pair, message in messages.items()}
    me = jax.process_index()
    for pairs in rounds(sizes):
        sent = next((pair for pair in pairs if pair[0] == me), None)
        received = next((pair for pair in pairs if pair[1] == me), None)
        outgoing = pack(messages[sent], held) if sent else None
        incoming = carry(pairs, max(sizes[pair] for pair in pairs), outgoing)
        if received and incoming is not None:
            unpack(messages[received], incoming, moves, arrived)
    return list(arrived)


def plan_messages(moves: Sequence[Move]) -> dict[Pair, list[Parcel]]:
    """Who sends what to whom; of several holders, the one with the least to send so far."""
    messages: dict[Pair, list[Parcel]] = collections.defaultdict(list)
    load: collections.Counter[int] = collections.Counter()
    for number, move in enumerate(moves):
        for need in needs(move):
            size = math.prod(box_shape(need.cut.part)) * move.dtype.itemsize
            sender = min(need.holders, key=lambda holder: (load[holder], holder))
            load[sender] += size
            messages[sender, need.receiver].append(Parcel(number, need.cut, size))
    return messages


def needs(move: Move) -> Sequence[Need]:
    """Every piece that some process needs and lacks; the same in all processes."""
    if move.source is None or not move.bytes:
        return ()
    return _needs(move.source, move.target, move.shape)


@functools.lru_cache(maxsize=1024)
def _needs(source: Sharding, target: Sharding, shape: Shape) -> tuple[Need, ...]:
    holders, receivers = _processes(source, shape), _processes(target, shape)
    cuts = recipe(source, target, shape)
    return tuple(
        Need(process, tuple(sorted(holders[cut.origin])), cut)
        for box in sorted(receivers)
        for process in sorted(receivers[box])
        for cut in cuts[box]
        if process not in holders[cut.origin]
    )


def _processes(sharding: Sharding, shape: Shape) -> Mapping[Box, set[int]]:
    found: dict[Box, set[int]] = collections.defaultdict(set)
    for device, box in boxes(sharding, shape).items():
        found[box].add(process_of(device))
    return found


def process_of(device: Any) -> int:
    return int(device.process_index)


def rounds(sizes: Mapping[Pair, int]) -> list[tuple[Pair, ...]]:
    """Messages that travel together: in a round nobody sends or receives twice.

    >>> rounds({(0, 1): 9, (0, 2): 9, (2, 1): 5, (1, 0): 5})
    [((0, 1), (1, 0)), ((0, 2), (2, 1))]
    """
    found: list[dict[int, int]] = []
    for sender, receiver in sorted(sizes, key=lambda pair: (-sizes[pair], pair)):
        for together in found:
            if sender not in together and receiver not in together.values():
                break
        else:
            together = {}
            found.append(together)
        together[sender] = receiver
    return [tuple(together.items()) for together in found]


def pack(message: Sequence[Parcel], held: Sequence[Held]) -> HostArray:
    out = np.empty(sum(parcel.bytes for parcel in message), np.uint8)
    at = 0
    for parcel in message:
        piece = held[parcel.number].bits(parcel.cut.origin)[parcel.cut.take]
        room = out[at : at + parcel.bytes].view(piece.dtype).reshape(piece.shape)
        room[...] = piece
        at += parcel.bytes
    return out


def unpack(
    message: Sequence[Parcel],
    incoming: HostArray,
    moves: Sequence[Move],
    arrived: Sequence[dict[Box, Any]],
) -> None:
    at = 0
    for parcel in message:
        values = incoming[at : at + parcel.bytes].view(moves[parcel.number].dtype)
        shape = box_shape(parcel.cut.part)
        arrived[parcel.number][parcel.cut.part] = bit_pattern(values).reshape(shape)
        at += parcel.bytes


# Bytes from process to process, by a program that shifts rows of integers between devices.
#
# The same on CPUs, GPUs and TPUs; it needs no ports or flags of its own, and no value is ever
# computed with. It spans all devices, for some TPUs run nothing less, so all processes call it.


Pair = tuple[int, int]  # sending process, receiving process

# A row is made of blocks of 32-bit integers that fill whole tiles of a TPU's memory, unpadded.
_LANES = 128
_BLOCK = 8 * _LANES * 4
# Bytes that a process sends at once, over all its devices.
_LOAD = 8 * 2**20
_ROWS = make_spec(["device"])


@dataclasses.dataclass(frozen=True)
class Network:
    """All devices in a line, where each process's stand in it, and how many of them send."""

    mesh: Mesh
    places: dict[int, list[int]]
    width: int


@functools.lru_cache(maxsize=8)
def network(devices: tuple[Any, ...]) -> Network:
    places: dict[int, list[int]] = {}
    for place, device in enumerate(devices):
        places.setdefault(device.process_index, []).append(place)
    mesh = Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,))
    return Network(mesh, places, min(map(len, places.values())))


def carry(pairs: Sequence[Pair], size: int, outgoing: HostArray | None) -> HostArray | None:
    """Send one message per pair, all at once; returns the message to this process, if any.

    `size` is that of the longest message, known to all. What arrives is padded to it or more.
    """
    devices, me = tuple(jax.devices()), jax.process_index()
    net = network(devices)
    row = row_bytes(size, net.width)
    load = row * net.width
    loads = range(0, size, load)
    incoming = None
    if any(receiver == me for _, receiver in pairs):
        incoming = np.empty(len(loads) * load, np.uint8)
    program = carrier(devices, tuple(sorted(pairs)))
    for start in loads:
        # A mesh that the caller has set would be taken for the program's own.
        with jax.set_mesh(net.mesh):
            shifted = program(_loaded(net, row, outgoing, start))
            jax.block_until_ready(shifted)  # type: ignore[no-untyped-call]
        if incoming is not None:
            _unload(net, shifted, incoming[start : start + load].reshape(net.width, row))
    return incoming


def row_bytes(size: int, width: int) -> int:
    """Bytes per device and program: whole blocks, and few different sizes to compile for.

    >>> row_bytes(1, 4), row_bytes(100_000, 1), row_bytes(2**30, 4)
    (4096, 106496, 2097152)
    """
    row = min(-(-size // width), _LOAD // width)
    step = max(_BLOCK, 1 << max(0, row.bit_length() - 4))
    return -(-row // step) * step


@functools.lru_cache(maxsize=256)
def carrier(devices: tuple[Any, ...], pairs: tuple[Pair, ...]) -> Any:
    """The program that shifts rows; device by device from the sender's to the receiver's."""
    net = network(devices)
    shifts = [
        (net.places[sender][line], net.places[receiver][line])
        for sender, receiver in pairs
        for line in range(net.width)
    ]
    shifted = jax.shard_map(
        lambda row: jax.lax.ppermute(row, "device", shifts),  # type: ignore[no-untyped-call]
        mesh=net.mesh,
        in_specs=_ROWS,
        out_specs=_ROWS,
    )
    return jax.jit(shifted, donate_argnums=0)


def _loaded(net: Network, row: int, outgoing: HostArray | None, start: int) -> jax.Array:
    """The message from `start`, a row for each device of this process; the others' are theirs."""
    height = row // 4 // _LANES
    places = net.places[jax.process_index()]

    def fill(index: Any) -> HostArray:
        room = np.zeros(row, np.uint8)
        line = places.index((index[0].start or 0) // height)
        if outgoing is not None and line < net.width:
            part = outgoing[start + line * row : start + (line + 1) * row]
            room[: part.size] = part
        return room.view(np.uint32).reshape(height, _LANES)

    shape = (net.mesh.size * height, _LANES)
    rows = NamedSharding(net.mesh, _ROWS)
    return jax.make_array_from_callback(shape, rows, fill, dtype=np.dtype(np.uint32))


def _unload(net: Network, shifted: jax.Array, room: HostArray) -> None:
    """What arrived on this process's devices, line by line."""
    data = {shard.device: shard.data for shard in shifted.addressable_shards}
    for line, place in enumerate(net.places[jax.process_index()][: net.width]):
        room[line] = np.asarray(data[net.mesh.devices[place]]).reshape(-1).view(np.uint8)
