"""Across processes by `jax.device_put`: every process calls `move`, all in one order.

A process that holds nothing of an array takes part with an empty one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from meshwright.errors import TransferError
from meshwright.mpmd.transfers.items import Device
from meshwright.mpmd.transfers.jobs import Job, job
from meshwright.mpmd.transfers.keys import key_text
from meshwright.mpmd.transfers.links import Arrays, Link
from meshwright.mpmd.transfers.routes import Route
from meshwright.mpmd.transfers.steps import Step
from meshwright.mpmd.transfers.wholes import whole_put
from meshwright.partitioning.moving.boxes import Shape, box_shape


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
