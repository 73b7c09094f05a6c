"""Links whose ends send and receive under a key, each in its own time."""

from __future__ import annotations

import abc
import collections
from typing import Any

from meshwright.errors import TransferError, listing
from meshwright.mpmd.transfers.jobs import Job
from meshwright.mpmd.transfers.keys import Turns, key_text
from meshwright.mpmd.transfers.links import Arrays, Link, Name
from meshwright.mpmd.transfers.routes import Route


class KeyedLink(Link):
    """What pulling and copying inside a process have in common."""

    def __init__(self, processes: tuple[int, ...]) -> None:
        super().__init__(processes)
        self._sent, self._received = Turns(), Turns()
        # What this process sent to itself, first come first served.
        self._kept: dict[Name, collections.deque[Arrays]] = collections.defaultdict(
            collections.deque
        )

    def send(self, route: Route, key: Any, arrays: Any) -> None:
        ours = self._job(route)
        self._must("send", self.process in route.senders, route.senders)
        name = (route.name, key_text(key))
        with ours.as_asked():
            data = ours.check(arrays)
            kept = self._send(ours, name, self._sent.next(name), data)
        if kept is not None:
            self._kept[name].append(kept)

    def receive(self, route: Route, key: Any) -> Any:
        ours = self._job(route)
        self._must("receive", self.process in route.receivers, route.receivers)
        name = (route.name, key_text(key))
        kept = self._take(name) if self._keeps(ours) else {}
        with ours.as_asked():
            arrays = self._receive(ours, name, self._received.next(name), kept)
        return ours.finish(arrays)

    def move(self, route: Route, key: Any, arrays: Any = None, *, donate: bool = False) -> Any:
        if donate:
            self._refuse_donation()
        ours = self._job(route)
        if self.process in route.senders:
            self.send(route, key, arrays)
        if self.process in route.receivers:
            return self.receive(route, key)
        return ours.finish({})

    def close(self) -> None:
        super().close()
        self._kept.clear()

    @abc.abstractmethod
    def _send(self, ours: Job, name: Name, turn: int, data: list[Any]) -> Arrays | None:
        """Offer arrays to other processes; returns what this one keeps for itself."""

    @abc.abstractmethod
    def _receive(self, ours: Job, name: Name, turn: int, kept: Arrays) -> Arrays:
        """The arrays by item, of what others offer and what was kept."""

    def _keeps(self, ours: Job) -> bool:
        """Whether this process sends something to itself."""
        return bool(ours.work.near)

    def _take(self, name: Name) -> Arrays:
        waiting = self._kept.get(name)
        if not waiting:
            raise TransferError(
                f"receive: key {name[1]}: this process has not sent it yet, and takes some of it "
                "itself. Inside a process send first, or move."
            )
        return waiting.popleft()

    def _must(self, verb: str, holds: bool, processes: frozenset[int]) -> None:
        if not holds:
            end = "source" if verb == "send" else "target"
            raise TransferError(
                f"{verb}: process {self.process} has no device of the {end}, which lies in "
                f"process {listing(sorted(processes))}. Call {verb} there, or move everywhere."
            )
