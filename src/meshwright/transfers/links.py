"""`Link`: moves arrays along routes; and `LocalLink`, inside one process.

How arrays cross between processes is up to the links of `cross_process_links`.
"""

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
from meshwright.transfers.execution import Job, make_job
from meshwright.transfers.message_plan import Device, by_process, process_of
from meshwright.transfers.moves import memory, own_memory
from meshwright.transfers.routes import Route
from meshwright.transfers.transfer_plan import Item

Name = tuple[str, str]  # a route's name, a key
Arrays = dict[int, jax.Array]  # by item, or by chunk


class Link(abc.ABC):
    """Moves arrays between processes, or inside one. Made by `connect`; `with` closes it.

    The processes that hold the arrays `send` them, those that shall hold them `receive` them,
    under the same key, in any order; or all of them `move`. Nothing waits: results are arrays
    that become ready. A key can be used again and again, the n-th send meets the n-th receive:
    use few of them, such as (stage, microbatch), not ever new ones. `transport` says how arrays
    travel: "local", "pull" or "put".
    """

    transport: ClassVar[str]

    def __init__(self, processes: tuple[int, ...]) -> None:
        self.processes = processes
        self.process = int(jax.process_index())
        self.closed = False
        # By what a route moves, not by the object: pipelines come and go, and make equal routes.
        self._jobs: dict[Any, Job] = {}

    @abc.abstractmethod
    def send(self, route: Route, key: Any, arrays: Any) -> None:
        """Offer this process's part of the arrays.

        They must live until they are pulled: dropping them is fine, deleting or donating is not.
        """

    @abc.abstractmethod
    def receive(self, route: Route, key: Any) -> Any:
        """Return the arrays on their target shardings, as the route's tree.

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
        """Stop listening and drop what was not fetched. Arrays on their way still arrive."""
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
        return f"<Link {self.transport!r} of processes {listing(self.processes)}{state}>"

    @abc.abstractmethod
    def _plan(self, route: Route) -> Job:
        """Plan what this process does for a route; called once per route."""

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
                f"{short(route)} is not a Route. Make one with meshwright.transfers.route().",
                option="route",
            )
        strangers = sorted((route.senders | route.receivers) - set(self.processes))
        if strangers:
            raise TransferError(
                f"the route has devices of process {listing(strangers)}, this link joins "
                f"{listing(self.processes)}. Connect with these processes too.",
                option="route",
            )
        return route

    def _refuse_donation(self) -> None:
        raise TransferError(
            f"move: donate=True with transport={self.transport!r}: the arrays may still be on "
            "their way when this returns. Drop your references instead.",
            option="donate",
        )


# Links whose ends send and receive under a key, each in its own time.


class KeyedLink(Link):
    """What pulling and copying inside a process have in common."""

    def __init__(self, processes: tuple[int, ...]) -> None:
        super().__init__(processes)
        self._sent, self._received = UseCounter(), UseCounter()
        # What this process sent to itself, first come first served.
        self._kept: dict[Name, collections.deque[Arrays]] = collections.defaultdict(
            collections.deque
        )

    def send(self, route: Route, key: Any, arrays: Any) -> None:
        job = self._job(route)
        self._check_end("send", "source", route.senders)
        name = (route.name, key_text(key))
        with job.context():
            data = job.check(arrays)
            kept = self._send(job, name, self._sent.next(name), data)
        if kept is not None:
            self._kept[name].append(kept)

    def receive(self, route: Route, key: Any) -> Any:
        job = self._job(route)
        self._check_end("receive", "target", route.receivers)
        name = (route.name, key_text(key))
        # First, for it may refuse, and a receive that was refused does not count.
        kept = self._take(name) if self._sends_to_itself(job) else {}
        with job.context():
            arrays = self._receive(job, name, self._received.next(name), kept)
        return job.finish(arrays)

    def move(self, route: Route, key: Any, arrays: Any = None, *, donate: bool = False) -> Any:
        if donate:
            self._refuse_donation()
        job = self._job(route)
        if self.process in route.senders:
            self.send(route, key, arrays)
        if self.process in route.receivers:
            return self.receive(route, key)
        return job.finish({})

    def close(self) -> None:
        super().close()
        self._kept.clear()

    @abc.abstractmethod
    def _send(self, job: Job, name: Name, use: int, data: list[Any]) -> Arrays | None:
        """Offer arrays to other processes; return what this one sends to itself."""

    @abc.abstractmethod
    def _receive(self, job: Job, name: Name, use: int, kept: Arrays) -> Arrays:
        """Return the arrays by item, of what others offer and what this process sent itself."""

    def _sends_to_itself(self, job: Job) -> bool:
        return job.work.sends_to_itself

    def _take(self, name: Name) -> Arrays:
        waiting = self._kept.get(name)
        if not waiting:
            raise TransferError(
                f"receive: key {name[1]}: this process has not sent it yet, and takes some of it "
                "itself. Inside a process send first, or move.",
                option="key",
            )
        return waiting.popleft()

    def _check_end(self, verb: str, end: str, processes: frozenset[int]) -> None:
        if self.process not in processes:
            raise TransferError(
                f"{verb}: process {self.process} has no device of the {end}, which lies in "
                f"process {listing(sorted(processes))}. Call {verb} there, or move everywhere."
            )


# What both ends of a transfer call it: a number made of the route, a key and how often it was used.


def key_text(key: Any) -> str:
    """Return a key as text that is the same in every process.

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
            f"key {short(key)}: a {type(key).__name__} may read differently in another process. "
            "Use an int, a str or a tuple of them, such as (stage, microbatch).",
            option="key",
        ) from None


def message_number(name: str, key: str, use: int, sender: int, receiver: int) -> int:
    """Return a number of 63 bits for a message, the same at both ends and used for no other.

    >>> message_number("a", "1", 0, 0, 1) != message_number("a", "1", 1, 0, 1)
    True
    """
    text = f"{name} {key} {use} {sender} {receiver}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class UseCounter:
    """How often each key was used on each route: the n-th send meets the n-th receive."""

    def __init__(self) -> None:
        self._counts: dict[Name, itertools.count[int]] = {}

    def next(self, name: Name) -> int:
        """Return how often the key was used before, and count this use."""
        return next(self._counts.setdefault(name, itertools.count()))


# Inside one process: devices copy from one another, nothing is opened.


class LocalLink(KeyedLink):
    """A link inside a process. What was sent waits here until it is received."""

    transport = "local"

    def __init__(self) -> None:
        super().__init__((int(jax.process_index()),))

    def move(self, route: Route, key: Any, arrays: Any = None, *, donate: bool = False) -> Any:
        job = self._job(route)
        key_text(key)  # refuses a bad key
        with job.context():
            data = job.check(arrays)
            owned = own_memory(data) if donate else []
            moved = _move_here(job, data)
            for number, own in enumerate(owned):
                if own and not own & memory(moved.get(number)):
                    data[number].delete()
            return job.finish(moved)

    def _plan(self, route: Route) -> Job:
        return make_job(route, self.process, whole_here(route))

    def _sends_to_itself(self, job: Job) -> bool:
        return True

    def _send(self, job: Job, name: Name, use: int, data: list[Any]) -> Arrays:
        return _move_here(job, data)

    def _receive(self, job: Job, name: Name, use: int, kept: Arrays) -> Arrays:
        return kept


def _move_here(job: Job, data: list[Any]) -> Arrays:
    whole = sorted(job.whole)
    moved: Arrays = {}
    if whole:
        targets = [job.route.items[number].target for number in whole]
        placed = jax.device_put([data[number] for number in whole], targets)
        moved.update(zip(whole, placed, strict=True))
    received = job.work.send_to_itself(job.work.make_outgoing(data))
    moved.update(job.work.make_arrays(received))
    return moved


# Arrays that travel whole: nothing of them is cut, and JAX takes all their shards in one call.
#
# A call per array instead of one per shard; but JAX pairs the shards of the two ends in an order
# of its own, so that order must be the plan's.

DevicePairs = list[tuple[Device, Device]]  # sender, receiver


def whole_here(route: Route) -> frozenset[int]:
    """Return the arrays that `jax.device_put` copies on the devices, in one call.

    Between equal sets of devices it would run a program over all of them.
    """
    return frozenset(
        number
        for number, item, pairs in _uncut(route)
        if item.source_boxes.keys() != item.target_boxes.keys()
        and _in_order(pairs, tuple(item.source_boxes), tuple(item.target_boxes))
    )


def whole_pulled(route: Route) -> frozenset[int]:
    """Return arrays whose shards map one to one from a single sending process to each receiver."""
    return frozenset(
        number for number, item, pairs in _uncut(route) if _process_by_process(item, pairs)
    )


def whole_put(route: Route) -> frozenset[int]:
    """Return arrays that `jax.device_put` takes across processes: one split, other processes."""
    return frozenset(
        number
        for number, item, pairs in _uncut(route)
        if not {*map(process_of, item.source_boxes)} & {*map(process_of, item.target_boxes)}
        and _in_order(pairs, tuple(item.source_boxes), tuple(item.target_boxes))
        and item.splits_alike
    )


def _uncut(route: Route) -> Iterator[tuple[int, Item, DevicePairs]]:
    """Yield arrays that are only sent, and from which device to which their shards go."""
    plan = route.plan
    busy = (*plan.cut, *plan.gather, *plan.pack, *plan.join, *plan.copy)
    touched = {plan.chunks[step.output].item for step in busy}
    device_pairs: dict[int, DevicePairs] = collections.defaultdict(list)
    for step in plan.send:
        sender, receiver = plan.chunks[step.inputs[0]], plan.chunks[step.output]
        if receiver.item not in touched:
            device_pairs[receiver.item].append((sender.device, receiver.device))
    for number, pairs in device_pairs.items():
        yield number, route.items[number], pairs


def _process_by_process(item: Item, pairs: DevicePairs) -> bool:
    between: dict[tuple[int, int], DevicePairs] = collections.defaultdict(list)
    for sender, receiver in pairs:
        between[process_of(sender), process_of(receiver)].append((sender, receiver))
    sources, targets = by_process(item.source_boxes), by_process(item.target_boxes)
    return sorted(receiver for _, receiver in between) == sorted(targets) and all(
        sender != receiver and _in_order(some, sources[sender], targets[receiver])
        for (sender, receiver), some in between.items()
    )


def _in_order(pairs: DevicePairs, senders: Sequence[Device], receivers: Sequence[Device]) -> bool:
    """Whether sender i gives to receiver i, for all of both."""
    return len(pairs) == len(senders) == len(receivers) and {
        receiver: sender for sender, receiver in pairs
    } == dict(zip(receivers, senders, strict=True))
