"""Plan which process sends which part of an array to which. Pure; touches no device.

Shardings say where every box lies, on the devices of all processes, so each process computes the
same plan alone, and nothing is exchanged about it. What a process holds it does not receive
again, and what several of its devices need it receives once.

`find_needs` says which boxes each process needs and who holds their parts; `choose_senders` picks
one holder for each part. Transports that read and write host memory need no more: `plan_messages`
is their plan. `transfer_plan` goes on from here to the devices.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from jax.sharding import Sharding

from meshwright.transfers.boxes import (
    Box,
    Overlap,
    Shape,
    box_size,
    device_boxes,
    find_overlaps,
)

Device = Any
Pair = tuple[int, int]  # sending process, receiving process


@dataclasses.dataclass(frozen=True)
class Need:
    """A box of the target that a process needs: the overlaps it is made of, and who holds each."""

    process: int
    box: Box
    overlaps: tuple[Overlap, ...]
    holders: tuple[tuple[int, ...], ...]  # per overlap: processes, in order of their numbers

    @property
    def is_local(self) -> bool:
        """Whether the process holds all of it already, on whichever devices."""
        return all(self.process in processes for processes in self.holders)


# Cached: the many arrays of a model have few distinct shardings and shapes, and on a pod every call
# lists every box of every process.
@functools.lru_cache(maxsize=1024)
def find_needs(source: Sharding, target: Sharding, shape: Shape) -> tuple[Need, ...]:
    """Return what every process needs, once for each box however many of its devices want it.

    In the order of boxes and process numbers, not of devices: two processes may name the same
    split by meshes of another order, and must still plan the same messages.
    """
    overlaps = find_overlaps(source, target, shape)
    holders = {
        box: tuple(sorted(processes)) for box, processes in _processes_by_box(source, shape).items()
    }
    return tuple(
        Need(process, box, overlaps[box], tuple(holders[part.source] for part in overlaps[box]))
        for box, processes in sorted(_processes_by_box(target, shape).items())
        for process in sorted(processes)
    )


def _processes_by_box(sharding: Sharding, shape: Shape) -> Mapping[Box, set[int]]:
    processes: dict[Box, set[int]] = collections.defaultdict(set)
    for device, box in device_boxes(sharding, shape).items():
        processes[box].add(process_of(device))
    return processes


Candidate = TypeVar("Candidate", bound=Hashable)


class Load:
    """Bytes assigned so far, by role and candidate; the candidate with the fewest gets new work.

    Replicas thus share the sending, whatever the sizes of the arrays. The first of equals wins,
    so the choice is the same in every process.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, dict[Hashable, int]] = collections.defaultdict(
            lambda: collections.defaultdict(int)
        )

    def assign(self, role: str, candidates: Sequence[Candidate], size: int) -> Candidate:
        assigned = self._bytes[role]
        # A replicated array has as many candidates as devices: no Python call for each of them.
        chosen = min(candidates, key=assigned.__getitem__)
        assigned[chosen] += size
        return chosen


def choose_senders(
    need: Need, itemsize: int, load: Load, *, prefer_one: bool = False
) -> Iterator[tuple[int, Overlap]]:
    """Yield the process that gives each overlap of a need: the needing one, where it holds it.

    That moves the fewest bytes. With `prefer_one`, a box that is not all here comes from one
    process that holds all of it, if there is any, even the parts that are here: more bytes, but
    it arrives ready to use, and the receiver need not compute to put it together.
    """
    if prefer_one and not need.is_local:
        # Sorted: the order of a set differs between processes, and so would the first of equals.
        full = sorted(set.intersection(*map(set, need.holders)))
        if full:
            sender = load.assign("send", full, itemsize * box_size(need.box))
            yield from ((sender, overlap) for overlap in need.overlaps)
            return
    for overlap, holders in zip(need.overlaps, need.holders, strict=True):
        if need.process in holders:
            yield need.process, overlap
        else:
            yield load.assign("send", holders, itemsize * box_size(overlap.box)), overlap


class ArrayMove(Protocol):
    """What `plan_messages` must know of an array; `None` for a source that all processes have."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def source(self) -> Sharding | None: ...
    @property
    def target(self) -> Sharding: ...


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of array number `array` in a message, and its bytes in host memory."""

    array: int
    overlap: Overlap
    bytes: int


def plan_messages(arrays: Sequence[ArrayMove]) -> dict[Pair, list[Piece]]:
    """Return what crosses from process to process, with the fewest bytes; the same everywhere."""
    messages: dict[Pair, list[Piece]] = collections.defaultdict(list)
    load = Load()
    for number, array in enumerate(arrays):
        if array.source is None or not math.prod(array.shape):
            continue
        # Of the host: numpy gives a 4-bit integer a whole byte.
        size = array.dtype.itemsize
        for need in find_needs(array.source, array.target, array.shape):
            for sender, overlap in choose_senders(need, size, load):
                if sender != need.process:
                    piece = Piece(number, overlap, size * box_size(overlap.box))
                    messages[sender, need.process].append(piece)
    return messages


def crosses_processes(array: ArrayMove) -> bool:
    """Whether some process needs a part of the array that it does not hold."""
    return (
        array.source is not None
        and math.prod(array.shape) > 0
        and not all(need.is_local for need in find_needs(array.source, array.target, array.shape))
    )


def process_of(device: Device) -> int:
    return int(device.process_index)


def by_process(devices: Iterable[Device]) -> dict[int, tuple[Device, ...]]:
    processes: dict[int, list[Device]] = collections.defaultdict(list)
    for device in devices:
        processes[process_of(device)].append(device)
    return {process: tuple(some) for process, some in processes.items()}
