"""Which device gives which box of an array to which. Pure, and the same in every process.

A device that holds what it needs keeps it; else one of its process gives it; else the holders
take turns. What comes from another process is put together there first, as far as it can be, so
that it crosses in few pieces and the receiver need not compute; it crosses once for each process
that needs it, and is copied there.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.mpmd.transfers.items import Device, Item, process_of
from meshwright.mpmd.transfers.steps import Book, Plan, bounds, fill
from meshwright.partitioning.moving.boxes import Box, Cut, recipe

Givers = list[tuple[Device, Cut]]


class Turns:
    """Whose turn it is among some devices or processes; each is asked as often as the others."""

    def __init__(self) -> None:
        self._count: collections.Counter[Any] = collections.Counter()

    def next(self, among: tuple[Any, ...]) -> Any:
        turn = self._count[among]
        self._count[among] += 1
        return among[turn % len(among)]


def plan(items: Sequence[Item]) -> Plan:
    book, turns = Book(), Turns()
    for number, item in enumerate(items):
        if item.bytes:
            _Planner(number, item, book, turns).write()
    return book.plan()


class _Planner:
    """Writes the steps of one array into the book."""

    def __init__(self, number: int, item: Item, book: Book, turns: Turns) -> None:
        self.number, self.item, self.book, self.turns = number, item, book, turns
        self.holders = by_box(item.held)
        self.nearby = {
            (process, box): devices
            for box, holders in self.holders.items()
            for process, devices in by_process(holders).items()
        }
        self.packed: dict[tuple[int, Box], int] = {}

    def write(self) -> None:
        cuts = recipe(self.item.source, self.item.target, self.item.shape)
        for box, takers in by_box(self.item.wanted).items():
            for process, some in by_process(takers).items():
                if all((process, cut.origin) in self.nearby for cut in cuts[box]):
                    for taker in some:
                        self._feed(taker, box, self._near_givers(taker, cuts[box]))
                else:
                    self._feed_once(process, some, box, cuts[box])

    def _feed(self, taker: Device, box: Box, givers: Givers) -> int:
        """A shard from devices of its own process."""
        lots = [self._cut(giver, cut) for giver, cut in givers]
        parts = [self.book.send(lot, taker) for lot in lots]
        return self.book.join(parts, taker, box)

    def _feed_once(
        self, process: int, takers: tuple[Device, ...], box: Box, cuts: Sequence[Cut]
    ) -> None:
        """A shard from other processes to one device, which the others of its process copy."""
        leader = self.turns.next(takers)
        parts = [
            self.book.send(lot, leader)
            for sender, givers in self._far_givers(process, cuts).items()
            for lot in self._pack(sender, givers)
        ]
        shard = self.book.join(parts, leader, box)
        for taker in takers:
            self.book.copy(shard, taker)

    def _near_givers(self, taker: Device, cuts: Sequence[Cut]) -> Givers:
        held, process = self.item.held.get(taker), process_of(taker)
        return [
            (
                taker if held == cut.origin else self.turns.next(self.nearby[process, cut.origin]),
                cut,
            )
            for cut in cuts
        ]

    def _far_givers(self, process: int, cuts: Sequence[Cut]) -> Mapping[int, Givers]:
        """By process: one that holds everything, if there is any; each cut on its own, if not."""
        owners = [{process_of(device) for device in self.holders[cut.origin]} for cut in cuts]
        full = tuple(sorted(set.intersection(*owners)))
        sender = self.turns.next(full) if full else None
        found: dict[int, Givers] = collections.defaultdict(list)
        for cut in cuts:
            near = process if sender is None else sender
            giver = self.turns.next(self.nearby.get((near, cut.origin), self.holders[cut.origin]))
            found[process_of(giver)].append((giver, cut))
        return found

    def _pack(self, sender: int, givers: Givers) -> Iterator[int]:
        """What one process gives to a shard: in one box, where it makes one, on one device."""
        whole = bounds([cut.part for _, cut in givers])
        if len(givers) == 1 or not fill([cut.part for _, cut in givers], whole):
            yield from (self._cut(giver, cut) for giver, cut in givers)
            return
        known = self.packed.get((sender, whole))
        if known is None:
            chief = self.turns.next(tuple(dict.fromkeys(giver for giver, _ in givers)))
            parts = [self.book.gather(self._cut(giver, cut), chief) for giver, cut in givers]
            known = self.packed[sender, whole] = self.book.pack(parts, chief, whole)
        yield known

    def _cut(self, giver: Device, cut: Cut) -> int:
        return self.book.cut(self.number, giver, cut.origin, cut.part)


def by_box(where: Mapping[Device, Box]) -> dict[Box, tuple[Device, ...]]:
    found: dict[Box, list[Device]] = collections.defaultdict(list)
    for device, box in where.items():
        found[box].append(device)
    return {box: tuple(devices) for box, devices in found.items()}


def by_process(devices: Iterable[Device]) -> dict[int, tuple[Device, ...]]:
    found: dict[int, list[Device]] = collections.defaultdict(list)
    for device in devices:
        found[process_of(device)].append(device)
    return {process: tuple(some) for process, some in found.items()}
