"""Links between processes: `PullLink`, where receivers fetch, and `PutLink`, by `device_put`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from meshwright.errors import TransferError
from meshwright.transfers.boxes import Shape, box_shape
from meshwright.transfers.execution import Job, make_job
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
from meshwright.transfers.message_plan import Device, Pair
from meshwright.transfers.moves import array_without_shards
from meshwright.transfers.routes import Route
from meshwright.transfers.transfer_plan import Step

# Pulling: the sender offers arrays under a number, the receiver fetches them. Only the two ends
# take part, in any order. All that one process sends to another in a transfer is one message.


@dataclasses.dataclass(frozen=True)
class Message:
    """What one process sends to another: arrays that travel whole, then chunks.

    `shapes` is what the receiver asks for; the sender needs none.
    """

    whole: tuple[int, ...]
    steps: tuple[Step, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...] = ()


@dataclasses.dataclass(frozen=True)
class PullPlan:
    """The messages of one process: by the process they go to, and by the one they come from."""

    outgoing: Mapping[int, Message]
    incoming: Mapping[int, Message]


class PullLink(KeyedLink):
    """A link of processes that pull from one another."""

    transport = "pull"

    def __init__(self, processes: tuple[int, ...], server: Any, peers: Mapping[int, Any]) -> None:
        super().__init__(processes)
        self._server, self._peers = server, dict(peers)

    @property
    def address(self) -> str:
        """Where this process listens; nothing once the link is closed."""
        return "" if self._server is None else str(self._server.address())

    def close(self) -> None:
        super().close()
        # The server stops when its last reference is dropped; what was offered can still be pulled.
        self._server, self._peers = None, {}

    def _plan(self, route: Route) -> Job:
        whole = whole_pulled(route)
        messages = _route_messages(route, whole)
        outgoing = {to: message for (me, to), message in messages.items() if me == self.process}
        incoming = {
            sender: dataclasses.replace(message, shapes=_shapes(route, message))
            for (sender, me), message in messages.items()
            if me == self.process
        }
        return make_job(route, self.process, whole, PullPlan(outgoing, incoming))

    def _send(self, job: Job, name: Name, use: int, data: list[Any]) -> Arrays | None:
        chunks = job.work.make_outgoing(data)
        for receiver, message in job.transport_plan.outgoing.items():
            arrays = [data[item] for item in message.whole]
            arrays += [chunks[step.inputs[0]] for step in message.steps]
            number = message_number(*name, use, self.process, receiver)
            # The server holds the arrays until they are pulled, so the caller may drop them.
            self._server.await_pull(number, arrays)
        return job.work.send_to_itself(chunks) if job.work.sends_to_itself else None

    def _receive(self, job: Job, name: Name, use: int, kept: Arrays) -> Arrays:
        arrays: Arrays = {}
        chunks = dict(kept)
        for sender, message in job.transport_plan.incoming.items():
            number = message_number(*name, use, sender, self.process)
            pulled = self._peers[sender].pull(number, list(message.shapes))
            count = len(message.whole)
            arrays.update(zip(message.whole, pulled[:count], strict=True))
            chunks.update(zip((step.output for step in message.steps), pulled[count:], strict=True))
        arrays.update(job.work.make_arrays(chunks))
        return arrays


def _route_messages(route: Route, whole: frozenset[int]) -> dict[Pair, Message]:
    """Return all messages of a route between different processes; the same in each of them."""
    plan = route.plan
    arrays: dict[Pair, dict[int, None]] = collections.defaultdict(dict)
    steps: dict[Pair, list[Step]] = collections.defaultdict(list)
    for step in plan.send:
        pair, item = plan.pair(step), plan.chunks[step.output].item
        if pair[0] != pair[1] and item in whole:
            arrays[pair][item] = None
        elif pair[0] != pair[1]:
            steps[pair].append(step)
    return {
        pair: Message(tuple(arrays.get(pair, ())), tuple(steps.get(pair, ())))
        for pair in sorted({*arrays, *steps})
    }


def _shapes(route: Route, message: Message) -> tuple[jax.ShapeDtypeStruct, ...]:
    items = [route.items[item] for item in message.whole]
    shapes: list[Any] = [(item.shape, item.dtype, item.target) for item in items]
    for step in message.steps:
        chunk = route.plan.chunks[step.output]
        dtype = route.items[chunk.item].dtype
        shapes.append((box_shape(chunk.box), dtype, SingleDeviceSharding(chunk.device)))
    return tuple(
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]
        for shape, dtype, sharding in shapes
    )


# Putting: `jax.device_put` crosses processes where all of them make the same calls in one order.
# A process that holds nothing of an array takes part with an array without shards.


@dataclasses.dataclass(frozen=True)
class PutBatch:
    """What one call puts: arrays or chunks, stand-ins for those that are not here, and targets.

    JAX mixes up or never delivers what goes between different devices in one call (jax 0.10 to
    0.12): a batch has one list of devices that send, and one of those that receive.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stand_ins: tuple[jax.Array | None, ...]
    targets: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class PutPlan:
    """The calls of a route, in the order all processes make them."""

    arrays: tuple[PutBatch, ...]
    chunks: tuple[PutBatch, ...]


class PutLink(Link):
    """A link of processes that put arrays together."""

    transport = "put"

    def send(self, route: Route, key: Any, arrays: Any) -> None:
        raise TransferError(
            "send: with transport='put' all processes take part in order. Use move."
        )

    def receive(self, route: Route, key: Any) -> Any:
        raise TransferError(
            "receive: with transport='put' all processes take part in order. Use move."
        )

    def move(self, route: Route, key: Any, arrays: Any = None, *, donate: bool = False) -> Any:
        if donate:
            self._refuse_donation()
        job = self._job(route)
        key_text(key)  # refuses a bad key
        sends = self.process in route.senders
        with job.context():
            data = job.check(arrays) if sends else []
            held = {number: data[number] for number, holds in enumerate(job.holds) if holds}
            outgoing = job.work.make_outgoing(data) if sends else {}
            moved = _put(job.transport_plan.arrays, held)
            received = _put(job.transport_plan.chunks, outgoing)
            if job.work.sends_to_itself:
                received.update(job.work.send_to_itself(outgoing))
            if self.process in route.receivers:
                moved.update(job.work.make_arrays(received))
        return job.finish(moved)

    def _plan(self, route: Route) -> Job:
        whole = whole_put(route)
        with jax.enable_x64(True):
            puts = PutPlan(_array_batches(route, whole), _chunk_batches(route, whole))
        return make_job(route, self.process, whole, puts)


def _put(batches: tuple[PutBatch, ...], held: Arrays) -> Arrays:
    moved: Arrays = {}
    for batch in batches:
        values = [
            held.get(number, stand_in)
            for number, stand_in in zip(batch.inputs, batch.stand_ins, strict=True)
        ]
        moved.update(zip(batch.outputs, jax.device_put(values, list(batch.targets)), strict=True))
    return moved


def _array_batches(route: Route, whole: frozenset[int]) -> tuple[PutBatch, ...]:
    together: dict[Any, list[int]] = {}
    for number in sorted(whole):
        item = route.items[number]
        together.setdefault((tuple(item.source_boxes), tuple(item.target_boxes)), []).append(number)
    return tuple(
        PutBatch(
            tuple(numbers),
            tuple(numbers),
            tuple(_array_stand_in(route, number) for number in numbers),
            tuple(route.items[number].target for number in numbers),
        )
        for numbers in together.values()
    )


def _chunk_batches(route: Route, whole: frozenset[int]) -> tuple[PutBatch, ...]:
    plan = route.plan
    together: dict[tuple[Device, Device], list[Step]] = {}
    for step in plan.send:
        source, target = plan.chunks[step.inputs[0]], plan.chunks[step.output]
        sender, receiver = plan.pair(step)
        if target.item not in whole and sender != receiver:
            together.setdefault((source.device, target.device), []).append(step)
    return tuple(
        PutBatch(
            tuple(step.inputs[0] for step in steps),
            tuple(step.output for step in steps),
            tuple(_chunk_stand_in(route, step.inputs[0]) for step in steps),
            (SingleDeviceSharding(device),) * len(steps),
        )
        for (_, device), steps in together.items()
    )


def _array_stand_in(route: Route, number: int) -> jax.Array | None:
    item = route.items[number]
    return _stand_in(item.shape, item.dtype, item.source)


def _chunk_stand_in(route: Route, number: int) -> jax.Array | None:
    chunk = route.plan.chunks[number]
    where = SingleDeviceSharding(chunk.device)
    return _stand_in(box_shape(chunk.box), route.items[chunk.item].dtype, where)


def _stand_in(shape: Shape, dtype: np.dtype[Any], where: Sharding) -> jax.Array | None:
    """Return an array without shards to put here; None where this process holds the real one."""
    return None if where.has_addressable_devices else array_without_shards(shape, dtype, where)
