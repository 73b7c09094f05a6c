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
from jax.sharding import Sharding

from meshwright.partitioning.moving.boxes import Box, Cut, Shape, box_shape, boxes, recipe
from meshwright.partitioning.moving.carrying import Pair, carry
from meshwright.partitioning.moving.moves import Held, HostArray, Move, bit_pattern
from meshwright.partitioning.moving.pieces import Arrived


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
