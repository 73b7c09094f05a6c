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
from jax.sharding import SingleDeviceSharding

from meshwright.mpmd.transfers.jobs import Job, job
from meshwright.mpmd.transfers.keyed import KeyedLink
from meshwright.mpmd.transfers.keys import number
from meshwright.mpmd.transfers.links import Arrays, Name
from meshwright.mpmd.transfers.routes import Pair, Route
from meshwright.mpmd.transfers.steps import Step
from meshwright.mpmd.transfers.wholes import whole_pulled
from meshwright.partitioning.moving.boxes import box_shape


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
            self._server.await_pull(number(*name, turn, self.process, receiver), message)
        return ours.work.keep(given) if ours.work.near else None

    def _receive(self, ours: Job, name: Name, turn: int, kept: Arrays) -> Arrays:
        arrays: Arrays = {}
        for sender, letter in ours.load.incoming.items():
            code = number(*name, turn, sender, self.process)
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
