"""One array of a route: what it is, where it lies, where it goes. Touches no device."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from meshwright.transfers.boxes import Box, Cut, Shape, box_shape, boxes, recipe
from meshwright.trees.walk import Leaf, bits

Device = Any


@dataclasses.dataclass(frozen=True)
class Item:
    """An array as it travels: keys as the integers they are made of, `kind` says of which kind."""

    where: str
    shape: Shape
    dtype: np.dtype[Any]
    source: Sharding
    target: Sharding
    kind: Any = None

    @property
    def bytes(self) -> int:
        return self.bytes_of(self.shape)

    def bytes_of(self, shape: Shape) -> int:
        return math.ceil(math.prod(shape) * bits(self.dtype) / 8)

    @functools.cached_property
    def held(self) -> dict[Device, Box]:
        """What each device of the source holds, in the source's order."""
        return dict(boxes(self.source, self.shape))

    @functools.cached_property
    def wanted(self) -> dict[Device, Box]:
        """What each device of the target shall hold, in the target's order."""
        return dict(boxes(self.target, self.shape))

    @property
    def splits_alike(self) -> bool:
        """Whether the target is the source's split on other devices, as JAX compares them."""
        source, target = self.source, self.target
        if not isinstance(source, NamedSharding) or not isinstance(target, NamedSharding):
            return False
        if source.mesh.size != target.mesh.size:
            return False
        devices = target.mesh.devices.reshape(source.mesh.devices.shape)
        moved = NamedSharding(Mesh(devices, source.mesh.axis_names), source.spec)
        return moved.is_equivalent_to(target, len(self.shape))


def item(leaf: Leaf, source: Sharding, target: Sharding) -> Item:
    if not is_key(leaf.dtype):
        return Item(leaf.where, leaf.shape, np.dtype(leaf.dtype), source, target)
    found = []

    def look(keys: Any) -> Any:
        found.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]
    plain = jax.eval_shape(look, shape)
    return Item(leaf.where, plain.shape, np.dtype(plain.dtype), source, target, found[0])


def is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def process_of(device: Device) -> int:
    return int(device.process_index)


# The steps of a transfer: boxes of arrays on devices, and what each is made of. Pure data.


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


# Which device gives which box of an array to which. Pure, and the same in every process.
#
# A device that holds what it needs keeps it; else one of its process gives it; else the holders
# take turns. What comes from another process is put together there first, as far as it can be, so
# that it crosses in few pieces and the receiver need not compute; it crosses once for each process
# that needs it, and is copied there.


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
