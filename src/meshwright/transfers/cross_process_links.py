"""Across processes by pulling: the sender offers arrays under a number, the receiver fetches them.

Only the two ends take part, in any order. All that one process sends to another in a transfer is
one message.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from meshwright.errors import TransferError
from meshwright.transfers.boxes import Shape, box_shape
from meshwright.transfers.execution import Job, job
from meshwright.transfers.links import (
    Arrays,
    KeyedLink,
    Link,
    Name,
    key_text,
    message_number,
    whole_pulled,
    whole_put,
)
from meshwright.transfers.routes import Pair, Route
from meshwright.transfers.transfer_plan import Device, Step


@dataclasses.dataclass(frozen=True)
class Letter:
    """What one process sends to another: arrays as they are, then pieces."""

    whole: tuple[int, ...]
    steps: tuple[Step, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...] = ()  # what the receiver asks for


@dataclasses.dataclass(frozen=True)
class Post:
    """The letters of one process, by whom they go to and by whom they come from."""

    outgoing: Mapping[int, Letter]
    incoming: Mapping[int, Letter]


class PullLink(KeyedLink):
    """A link of processes that pull from one another."""

    way = "pull"

    def __init__(self, processes: tuple[int, ...], server: Any, peers: Mapping[int, Any]) -> None:
        super().__init__(processes)
        self._server, self._peers = server, dict(peers)

    @property
    def address(self) -> str:
        """Where this process listens."""
        return "" if self._server is None else str(self._server.address())

    def close(self) -> None:
        super().close()
        # The server stops when nobody holds it; what was offered can still be pulled.
        self._server, self._peers = None, {}

    def _plan(self, route: Route) -> Job:
        whole = whole_pulled(route)
        letters = plan_letters(route, whole)
        outgoing = {to: one for (me, to), one in letters.items() if me == self.process}
        incoming = {
            sender: dataclasses.replace(one, shapes=_shapes(route, one))
            for (sender, me), one in letters.items()
            if me == self.process
        }
        return job(route, self.process, whole, Post(outgoing, incoming))

    def _send(self, ours: Job, name: Name, turn: int, data: list[Any]) -> Arrays | None:
        given = ours.work.give(data)
        for receiver, letter in ours.load.outgoing.items():
            message = [data[item] for item in letter.whole]
            message += [given[step.of[0]] for step in letter.steps]
            self._server.await_pull(message_number(*name, turn, self.process, receiver), message)
        return ours.work.keep(given) if ours.work.near else None

    def _receive(self, ours: Job, name: Name, turn: int, kept: Arrays) -> Arrays:
        arrays: Arrays = {}
        for sender, letter in ours.load.incoming.items():
            code = message_number(*name, turn, sender, self.process)
            message = self._peers[sender].pull(code, list(letter.shapes))
            count = len(letter.whole)
            arrays.update(zip(letter.whole, message[:count], strict=True))
            kept.update(zip((step.made for step in letter.steps), message[count:], strict=True))
        arrays.update(ours.work.take(kept))
        return arrays


def plan_letters(route: Route, whole: frozenset[int]) -> dict[Pair, Letter]:
    """All messages of a route between different processes; the same in each of them."""
    plan = route.plan
    arrays: dict[Pair, dict[int, None]] = collections.defaultdict(dict)
    steps: dict[Pair, list[Step]] = collections.defaultdict(list)
    for step in plan.send:
        pair, item = plan.pair(step), plan.lots[step.made].item
        if pair[0] != pair[1] and item in whole:
            arrays[pair][item] = None
        elif pair[0] != pair[1]:
            steps[pair].append(step)
    return {
        pair: Letter(tuple(arrays.get(pair, ())), tuple(steps.get(pair, ())))
        for pair in sorted({*arrays, *steps})
    }


def _shapes(route: Route, letter: Letter) -> tuple[jax.ShapeDtypeStruct, ...]:
    items = [route.items[item] for item in letter.whole]
    shapes: list[Any] = [(item.shape, item.dtype, item.target) for item in items]
    for step in letter.steps:
        lot = route.plan.lots[step.made]
        dtype = route.items[lot.item].dtype
        shapes.append((box_shape(lot.box), dtype, SingleDeviceSharding(lot.device)))
    return tuple(
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]
        for shape, dtype, sharding in shapes
    )


# Across processes by `jax.device_put`: every process calls `move`, all in one order.
#
# A process that holds nothing of an array takes part with an empty one.


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one call puts: arrays or lots, stand-ins for those that are not here, and targets.

    JAX mixes up or never delivers what goes between different devices in one call (jax 0.10 to
    0.12): a batch has one list of devices that give, and one of those that take.
    """

    takes: tuple[int, ...]
    makes: tuple[int, ...]
    stand_ins: tuple[jax.Array, ...]
    targets: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Batches:
    arrays: tuple[Batch, ...]
    pieces: tuple[Batch, ...]


class PutLink(Link):
    """A link of processes that put arrays together."""

    way = "put"

    def send(self, route: Route, key: Any, arrays: Any) -> None:
        raise TransferError("send: with way='put' all processes take part in order. Use move.")

    def receive(self, route: Route, key: Any) -> Any:
        raise TransferError("receive: with way='put' all processes take part in order. Use move.")

    def move(self, route: Route, key: Any, arrays: Any = None, *, donate: bool = False) -> Any:
        if donate:
            self._refuse_donation()
        ours = self._job(route)
        key_text(key)
        holds = self.process in route.senders
        with ours.as_asked():
            data = ours.check(arrays) if holds else []
            held = {n: data[n] for n, gives in enumerate(ours.gives) if gives}
            given = ours.work.give(data) if holds else {}
            moved, pieces = _put(ours.load.arrays, held), _put(ours.load.pieces, given)
            if ours.work.near:
                pieces.update(ours.work.keep(given))
            if self.process in route.receivers:
                moved.update(ours.work.take(pieces))
        return ours.finish(moved)

    def _plan(self, route: Route) -> Job:
        whole = whole_put(route)
        with jax.enable_x64(True):
            batches = Batches(_array_batches(route, whole), _piece_batches(route, whole))
        return job(route, self.process, whole, batches)


def _put(batches: tuple[Batch, ...], held: Arrays) -> Arrays:
    moved: Arrays = {}
    for batch in batches:
        values = [
            held.get(number, stand_in)
            for number, stand_in in zip(batch.takes, batch.stand_ins, strict=True)
        ]
        moved.update(zip(batch.makes, jax.device_put(values, list(batch.targets)), strict=True))
    return moved


def _array_batches(route: Route, whole: frozenset[int]) -> tuple[Batch, ...]:
    together: dict[Any, list[int]] = {}
    for number in sorted(whole):
        item = route.items[number]
        together.setdefault((tuple(item.held), tuple(item.wanted)), []).append(number)
    return tuple(
        Batch(
            tuple(numbers),
            tuple(numbers),
            tuple(_array_stand_in(route, number) for number in numbers),
            tuple(route.items[number].target for number in numbers),
        )
        for numbers in together.values()
    )


def _piece_batches(route: Route, whole: frozenset[int]) -> tuple[Batch, ...]:
    plan = route.plan
    together: dict[tuple[Device, Device], list[Step]] = {}
    for step in plan.send:
        giver, taker = plan.lots[step.of[0]], plan.lots[step.made]
        sender, receiver = plan.pair(step)
        if taker.item not in whole and sender != receiver:
            together.setdefault((giver.device, taker.device), []).append(step)
    return tuple(
        Batch(
            tuple(step.of[0] for step in steps),
            tuple(step.made for step in steps),
            tuple(_piece_stand_in(route, step.of[0]) for step in steps),
            (SingleDeviceSharding(taker),) * len(steps),
        )
        for (_, taker), steps in together.items()
    )


def _array_stand_in(route: Route, number: int) -> Any:
    item = route.items[number]
    return _stand_in(item.shape, item.dtype, item.source)


def _piece_stand_in(route: Route, number: int) -> Any:
    lot = route.plan.lots[number]
    where = SingleDeviceSharding(lot.device)
    return _stand_in(box_shape(lot.box), route.items[lot.item].dtype, where)


def _stand_in(shape: Shape, dtype: Any, where: Sharding) -> Any:
    """An array as processes see it that hold none of it; those that hold some put the real one."""
    if where.has_addressable_devices:
        return None
    return jax.make_array_from_single_device_arrays(shape, where, [], dtype=dtype)
