"""Inside one process: devices copy from one another, nothing is opened."""

from __future__ import annotations

from typing import Any

import jax

from meshwright.mpmd.transfers.jobs import Job, job
from meshwright.mpmd.transfers.keyed import KeyedLink
from meshwright.mpmd.transfers.keys import key_text
from meshwright.mpmd.transfers.links import Arrays, Name
from meshwright.mpmd.transfers.routes import Route
from meshwright.mpmd.transfers.wholes import whole_here
from meshwright.partitioning.moving.donating import memory, own_memory
from meshwright.partitioning.moving.moves import Move


class LocalLink(KeyedLink):
    """A link inside a process. What was sent waits here until it is received."""

    way = "local"

    def __init__(self) -> None:
        super().__init__((int(jax.process_index()),))

    def move(self, route: Route, key: Any, arrays: Any = None, *, donate: bool = False) -> Any:
        ours = self._job(route)
        key_text(key)
        with ours.as_asked():
            data = ours.check(arrays)
            owned = own_memory(_moves(route, data)) if donate else []
            moved = _moved(ours, data)
            for number, own in enumerate(owned):
                if own and not own & memory(moved.get(number)):
                    data[number].delete()
            return ours.finish(moved)

    def _plan(self, route: Route) -> Job:
        return job(route, self.process, whole_here(route))

    def _keeps(self, ours: Job) -> bool:
        return True

    def _send(self, ours: Job, name: Name, turn: int, data: list[Any]) -> Arrays:
        return _moved(ours, data)

    def _receive(self, ours: Job, name: Name, turn: int, kept: Arrays) -> Arrays:
        return kept


def _moved(ours: Job, data: list[Any]) -> Arrays:
    whole = sorted(ours.whole)
    moved: Arrays = {}
    if whole:
        targets = [ours.route.items[number].target for number in whole]
        placed = jax.device_put([data[number] for number in whole], targets)
        moved.update(zip(whole, placed, strict=True))
    moved.update(ours.work.take(ours.work.keep(ours.work.give(data))))
    return moved


def _moves(route: Route, data: list[Any]) -> list[Move]:
    ends: list[Any] = [item.target for item in route.items]
    return [
        Move(item.where, item.shape, item.dtype, value, item.source, end)
        for item, end, value in zip(route.items, ends, data, strict=True)
    ]
