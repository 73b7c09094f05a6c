"""`Link`: what moves arrays along routes. The ways it can be done are its subclasses."""

from __future__ import annotations

import abc
import collections
import hashlib
import itertools
import operator
import types
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax

from meshwright.errors import TransferError, listing, short
from meshwright.transfers.execution import Job, job
from meshwright.transfers.moves import Move, memory, own_memory
from meshwright.transfers.routes import Route
from meshwright.transfers.transfer_plan import Device, Item, by_process, process_of

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
            raise TransferError(
                "this link is closed. Make another with meshwright.transfers.connect()."
            )
        what = (route.name, route.treedef) if isinstance(route, Route) else None
        known = self._jobs.get(what)
        if known is None:
            known = self._jobs[what] = self._plan(self._checked(route))
        return known

    def _checked(self, route: Route) -> Route:
        if not isinstance(route, Route):
            raise TransferError(
                f"{short(route)} is not a Route. Make one with meshwright.transfers.route()."
            )
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


# Links whose ends send and receive under a key, each in its own time.


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


# What both ends of a transfer call it: a number made of the route, a key and a turn.


def key_text(key: Any) -> str:
    """A key as text that is the same in every process.

    >>> key_text((3, "grads")), key_text(7)
    ("(3, 'grads')", '7')
    """
    if isinstance(key, str):
        return repr(str(key))
    if isinstance(key, tuple):
        return f"({', '.join(map(key_text, key))})"
    try:
        return str(operator.index(key))
    except TypeError:
        raise TransferError(
            f"key {short(key)}: a {type(key).__name__} is not told apart alike in every process. "
            "Use an int, a str or a tuple of them, such as (stage, microbatch)."
        ) from None


def message_number(name: str, key: str, turn: int, sender: int, receiver: int) -> int:
    """63 bits that nobody else uses, the same at both ends.

    >>> message_number("a", "1", 0, 0, 1) != message_number("a", "1", 1, 0, 1)
    True
    """
    text = f"{name} {key} {turn} {sender} {receiver}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Turns:
    """How often each key was used on each route: the n-th send meets the n-th receive."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], itertools.count[int]] = {}

    def next(self, name: tuple[str, str]) -> int:
        """The turn of a route's name and a key, counted from 0."""
        return next(self._counts.setdefault(name, itertools.count()))


# Inside one process: devices copy from one another, nothing is opened.


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


# Arrays that need no cutting: whose shards travel as they are, in an order that JAX keeps.


Pairs = list[tuple[Device, Device]]  # giver, taker


def whole_here(route: Route) -> frozenset[int]:
    """Those that `jax.device_put` copies on the devices, in one call.

    Between equal sets of devices it would run a program over all of them.
    """
    return frozenset(
        number
        for number, item, pairs in _untouched(route)
        if item.held.keys() != item.wanted.keys()
        and _in_order(pairs, tuple(item.held), tuple(item.wanted))
    )


def whole_pulled(route: Route) -> frozenset[int]:
    """Those of which each process gets, shard for shard, all that one other process holds."""
    return frozenset(
        number for number, item, pairs in _untouched(route) if _process_by_process(item, pairs)
    )


def whole_put(route: Route) -> frozenset[int]:
    """Those that `jax.device_put` takes across processes: one split, on devices of others."""
    return frozenset(
        number
        for number, item, pairs in _untouched(route)
        if not {*map(process_of, item.held)} & {*map(process_of, item.wanted)}
        and _in_order(pairs, tuple(item.held), tuple(item.wanted))
        and item.splits_alike
    )


def _untouched(route: Route) -> Iterator[tuple[int, Item, Pairs]]:
    """Arrays that are only sent, and from which device to which their shards go."""
    plan = route.plan
    busy = (*plan.cut, *plan.gather, *plan.pack, *plan.join, *plan.copy)
    touched = {plan.lots[step.made].item for step in busy}
    found: dict[int, Pairs] = collections.defaultdict(list)
    for step in plan.send:
        giver, taker = plan.lots[step.of[0]], plan.lots[step.made]
        if taker.item not in touched:
            found[taker.item].append((giver.device, taker.device))
    for number, pairs in found.items():
        yield number, route.items[number], pairs


def _process_by_process(item: Item, pairs: Pairs) -> bool:
    between: dict[tuple[int, int], Pairs] = collections.defaultdict(list)
    for giver, taker in pairs:
        between[process_of(giver), process_of(taker)].append((giver, taker))
    held, wanted = by_process(item.held), by_process(item.wanted)
    return sorted(receiver for _, receiver in between) == sorted(wanted) and all(
        sender != receiver and _in_order(some, held[sender], wanted[receiver])
        for (sender, receiver), some in between.items()
    )


def _in_order(pairs: Pairs, givers: Sequence[Device], takers: Sequence[Device]) -> bool:
    """Whether device i of the givers gives to device i of the takers, all of them."""
    return len(pairs) == len(givers) == len(takers) and {
        taker: giver for giver, taker in pairs
    } == dict(zip(takers, givers, strict=True))
