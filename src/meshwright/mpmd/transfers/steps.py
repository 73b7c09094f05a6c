"""The steps of a transfer: boxes of arrays on devices, and what each is made of. Pure data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from meshwright.mpmd.transfers.items import Device, process_of
from meshwright.partitioning.moving.boxes import Box, box_shape


@dataclasses.dataclass(frozen=True)
class Lot:
    """A box of array `item` on one device."""

    item: int
    device: Device
    box: Box


@dataclasses.dataclass(frozen=True)
class Step:
    """A lot and those it is made of, as numbers: a part of one, a copy of one, several joined."""

    made: int
    of: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """All steps of a transfer, in the order they are done.

    On devices of the source: `cut` shards, `gather` the parts on one device of the process,
    `pack` them. Then `send`, to another process or inside one. On devices of the target: `join`
    what came to shards, `copy` them to other devices of the process.
    """

    lots: tuple[Lot, ...] = ()
    cut: tuple[Step, ...] = ()
    gather: tuple[Step, ...] = ()
    pack: tuple[Step, ...] = ()
    send: tuple[Step, ...] = ()
    join: tuple[Step, ...] = ()
    copy: tuple[Step, ...] = ()

    def pair(self, step: Step) -> tuple[int, int]:
        """The processes that a step goes from and to."""
        return process_of(self.lots[step.of[0]].device), process_of(self.lots[step.made].device)


class Book:
    """Writes a plan; what is made twice is written once."""

    def __init__(self) -> None:
        self._numbers: dict[Lot, int] = {}
        self._lots: list[Lot] = []
        self._steps: dict[str, dict[Step, None]] = {
            name: {} for name in ("cut", "gather", "pack", "send", "join", "copy")
        }

    def plan(self) -> Plan:
        return Plan(tuple(self._lots), **{name: tuple(s) for name, s in self._steps.items()})

    def cut(self, item: int, device: Device, shard: Box, part: Box) -> int:
        return self._made("cut", (self._lot(Lot(item, device, shard)),), Lot(item, device, part))

    def gather(self, lot: int, device: Device) -> int:
        return self._moved("gather", lot, device)

    def pack(self, parts: Sequence[int], device: Device, box: Box) -> int:
        return self._made("pack", tuple(parts), Lot(self._lots[parts[0]].item, device, box))

    def send(self, lot: int, device: Device) -> int:
        return self._moved("send", lot, device)

    def join(self, parts: Sequence[int], device: Device, box: Box) -> int:
        return self._made("join", tuple(parts), Lot(self._lots[parts[0]].item, device, box))

    def copy(self, lot: int, device: Device) -> int:
        return self._moved("copy", lot, device)

    def _moved(self, step: str, lot: int, device: Device) -> int:
        old = self._lots[lot]
        return self._made(step, (lot,), Lot(old.item, device, old.box))

    def _made(self, step: str, of: tuple[int, ...], lot: Lot) -> int:
        made = self._lot(lot)
        if of != (made,):
            self._steps[step][Step(made, of)] = None
        return made

    def _lot(self, lot: Lot) -> int:
        if lot not in self._numbers:
            self._numbers[lot] = len(self._lots)
            self._lots.append(lot)
        return self._numbers[lot]


def bounds(parts: Sequence[Box]) -> Box:
    """The smallest box around some.

    >>> bounds([((0, 2), (0, 4)), ((2, 4), (0, 4))])
    ((0, 4), (0, 4))
    """
    return tuple(
        (min(start for start, _ in dim), max(stop for _, stop in dim))
        for dim in zip(*parts, strict=True)
    )


def fill(parts: Sequence[Box], box: Box) -> bool:
    """Whether boxes that do not overlap leave no gap in the one around them."""
    return sum(math.prod(box_shape(part)) for part in parts) == math.prod(box_shape(box))
