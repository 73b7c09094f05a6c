"""`Link`: what moves arrays along routes. The ways it can be done are its subclasses."""

from __future__ import annotations

import abc
import types
from typing import Any, ClassVar

import jax

from meshwright.errors import TransferError, listing, short
from meshwright.mpmd.transfers.jobs import Job
from meshwright.mpmd.transfers.routes import Route

Name = tuple[str, str]  # a route's name, a key
Arrays = dict[int, jax.Array]  # by item, or by piece


class Link(abc.ABC):
    """Moves arrays between processes, or inside one. Made by `connect`; `with` closes it.

    The processes that hold the arrays `send` them, those that shall hold them `receive` them,
    under the same key, in any order; or all of them `move`. Nothing waits: results are arrays
    that become ready. A key can be used again and again, the n-th send meets the n-th receive:
    use few of them, such as (stage, microbatch), not ever new ones.
    """

    way: ClassVar[str]

    def __init__(self, processes: tuple[int, ...]) -> None:
        self.processes = processes
        self.process = int(jax.process_index())
        self.closed = False
        self._jobs: dict[Any, Job] = {}  # by what a route moves: pipelines come and go

    @abc.abstractmethod
    def send(self, route: Route, key: Any, arrays: Any) -> None:
        """Offer this process's part of the arrays. They must live until they are pulled: dropping
        them is fine, deleting or donating them is not."""

    @abc.abstractmethod
    def receive(self, route: Route, key: Any) -> Any:
        """The arrays on their target shardings, as the route's tree.

        It may be called before they are sent, ahead of other work too unless the route
        `joins_on_arrival`.
        """

    @abc.abstractmethod
    def move(self, route: Route, key: Any, arrays: Any = None, *, donate: bool = False) -> Any:
        """Send what this process holds, receive what it shall hold, and return the tree.

        A process that holds nothing of the arrays may leave them out. `donate=True` gives up the
        arrays once they are copied, inside a process only.
        """

    def close(self) -> None:
        """Stop listening and forget what nobody fetched. Arrays on their way still arrive."""
        self.closed = True
        self._jobs.clear()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<Link {self.way!r} of processes {listing(self.processes)}{state}>"

    @abc.abstractmethod
    def _plan(self, route: Route) -> Job:
        """What this process does for a route, once."""

    def _job(self, route: Route) -> Job:
        if self.closed:
            raise TransferError("this link is closed. Make another with meshwright.connect().")
        what = (route.name, route.treedef) if isinstance(route, Route) else None
        known = self._jobs.get(what)
        if known is None:
            known = self._jobs[what] = self._plan(self._checked(route))
        return known

    def _checked(self, route: Route) -> Route:
        if not isinstance(route, Route):
            raise TransferError(f"{short(route)} is not a Route. Make one with meshwright.route().")
        strange = sorted((route.senders | route.receivers) - set(self.processes))
        if strange:
            raise TransferError(
                f"the route has devices of process {listing(strange)}, this link joins "
                f"{listing(self.processes)}. Connect with these processes too."
            )
        return route

    def _refuse_donation(self) -> None:
        raise TransferError(
            f"move: donate=True with way={self.way!r}: the arrays may still be on their way "
            "when this returns. Drop your references instead."
        )
