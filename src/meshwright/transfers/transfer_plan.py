"""Plan transfers between devices: which one cuts, packs, sends, joins and copies which box. Pure.

The choice of the sending process is that of `message_plan`; this adds the devices, for transports
where arrays stay on them (`Route` and `Link`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from meshwright._show import short_repr
from meshwright.transfers.boxes import (
    Box,
    Overlap,
    Shape,
    bounding_box,
    box_size,
    device_boxes,
    tile,
)
from meshwright.transfers.message_plan import (
    Device,
    Load,
    Need,
    Pair,
    choose_senders,
    find_needs,
    process_of,
)
from meshwright.trees.walk import Leaf, bits, is_key


@dataclasses.dataclass(frozen=True, repr=False)
class Item:
    """An array of a route. Random keys travel as the integers they are made of.

    `key_impl` is then the implementation to wrap them with again.
    """

    where: str
    shape: Shape
    dtype: np.dtype[Any]
    source: Sharding
    target: Sharding
    key_impl: Any = None

    def __repr__(self) -> str:
        return short_repr(self, f"{self.where}: {self.dtype}{list(self.shape)}")

    @property
    def bytes(self) -> int:
        return self.bytes_of(math.prod(self.shape))

    def bytes_of(self, elements: int) -> int:
        return math.ceil(elements * bits(self.dtype) / 8)

    @functools.cached_property
    def source_boxes(self) -> dict[Device, Box]:
        """What each device of the source holds, in the source's order."""
        return dict(device_boxes(self.source, self.shape))

    @functools.cached_property
    def target_boxes(self) -> dict[Device, Box]:
        """What each device of the target shall hold, in the target's order."""
        return dict(device_boxes(self.target, self.shape))

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


def make_item(leaf: Leaf, source: Sharding, target: Sharding) -> Item:
    if not is_key(leaf.dtype):
        return Item(leaf.where, leaf.shape, np.dtype(leaf.dtype), source, target)
    keys = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]
    key_impl, data = key_data_shape(keys)
    return Item(leaf.where, data.shape, np.dtype(data.dtype), source, target, key_impl)


def key_data_shape(keys: jax.ShapeDtypeStruct) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Return the implementation of keys known by shape only, and the shape of their integers."""
    impls = []

    def key_data(traced: Any) -> Any:
        # A shape has no implementation to ask for; the tracer made of it has.
        impls.append(jax.random.key_impl(traced))
        return jax.random.key_data(traced)

    data = jax.eval_shape(key_data, keys)
    return impls[0], data


# The steps of a plan.


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A box of array `item` on one device."""

    item: int
    device: Device
    box: Box


@dataclasses.dataclass(frozen=True)
class Step:
    """Make chunk `output` of the chunks `inputs`: a part of one, a copy of one, several joined."""

    output: int
    inputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TransferPlan:
    """All steps of a transfer, in the order they are done; steps name chunks by number.

    On devices of the source: `cut` shards, `gather` the parts on one device of the process,
    `pack` them. Then `send`, to another process or inside one. On devices of the target: `join`
    what came to shards, `copy` them to other devices of the process.
    """

    chunks: tuple[Chunk, ...] = ()
    cut: tuple[Step, ...] = ()
    gather: tuple[Step, ...] = ()
    pack: tuple[Step, ...] = ()
    send: tuple[Step, ...] = ()
    join: tuple[Step, ...] = ()
    copy: tuple[Step, ...] = ()

    def pair(self, step: Step) -> Pair:
        """Return the processes that a step goes from and to."""
        sender, receiver = self.chunks[step.inputs[0]], self.chunks[step.output]
        return process_of(sender.device), process_of(receiver.device)


class TransferPlanBuilder:
    """Collects the steps of a plan; a chunk or step that is asked for twice is made once.

    Each method returns the number of the chunk it makes. A step that would make a chunk of
    itself, such as a copy to the device it is on, is left out.
    """

    def __init__(self) -> None:
        self._numbers: dict[Chunk, int] = {}
        self._chunks: list[Chunk] = []
        self._steps: dict[str, dict[Step, None]] = {
            name: {} for name in ("cut", "gather", "pack", "send", "join", "copy")
        }

    def device(self, chunk: int) -> Device:
        return self._chunks[chunk].device

    def plan(self) -> TransferPlan:
        steps = {name: tuple(named) for name, named in self._steps.items()}
        return TransferPlan(tuple(self._chunks), **steps)

    def cut(self, item: int, device: Device, shard: Box, part: Box) -> int:
        whole = self._number(Chunk(item, device, shard))
        return self._add("cut", (whole,), Chunk(item, device, part))

    def gather(self, chunk: int, device: Device) -> int:
        return self._move("gather", chunk, device)

    def pack(self, parts: Sequence[int], device: Device, box: Box) -> int:
        return self._add("pack", tuple(parts), Chunk(self._chunks[parts[0]].item, device, box))

    def send(self, chunk: int, device: Device) -> int:
        return self._move("send", chunk, device)

    def join(self, parts: Sequence[int], device: Device, box: Box) -> int:
        return self._add("join", tuple(parts), Chunk(self._chunks[parts[0]].item, device, box))

    def copy(self, chunk: int, device: Device) -> int:
        return self._move("copy", chunk, device)

    def _move(self, name: str, chunk: int, device: Device) -> int:
        return self._add(name, (chunk,), dataclasses.replace(self._chunks[chunk], device=device))

    def _add(self, name: str, inputs: tuple[int, ...], chunk: Chunk) -> int:
        output = self._number(chunk)
        if inputs != (output,):
            self._steps[name][Step(output, inputs)] = None
        return output

    def _number(self, chunk: Chunk) -> int:
        if chunk not in self._numbers:
            self._numbers[chunk] = len(self._chunks)
            self._chunks.append(chunk)
        return self._numbers[chunk]


# Which device does each step.
#
# A device that holds what it needs keeps it; else one of its process gives it; else the process
# that `choose_senders` picks. What comes from another process is put together there first, as far
# as it can be, so that it crosses in few pieces and the receiver need not compute; it crosses once
# for each process that needs it, and is copied there.


def plan_transfer(items: Sequence[Item]) -> TransferPlan:
    """Plan the transfer of all arrays of a route; those without elements need no steps."""
    builder, load = TransferPlanBuilder(), Load()
    for number, item in enumerate(items):
        if item.bytes:
            _ItemPlanner(number, item, builder, load).add_steps()
    return builder.plan()


class _ItemPlanner:
    """Adds the steps of one array to a plan."""

    def __init__(self, number: int, item: Item, builder: TransferPlanBuilder, load: Load) -> None:
        self.number, self.item, self.builder, self.load = number, item, builder, load
        self.holders = _by_process_and_box(item.source_boxes)
        self.receivers = _by_process_and_box(item.target_boxes)
        self.packed: dict[tuple[int, Box], int] = {}

    def add_steps(self) -> None:
        item = self.item
        for need in find_needs(item.source, item.target, item.shape):
            devices = self.receivers[need.process, need.box]
            if need.is_local:
                for device in devices:
                    self._receive_locally(need, device)
            else:
                self._receive_once(need, devices)

    def _receive_locally(self, need: Need, device: Device) -> None:
        """Every device fetches its shard from devices of its own process."""
        parts = [
            self.builder.send(self._cut(need.process, overlap, device), device)
            for overlap in need.overlaps
        ]
        self.builder.join(parts, device, need.box)

    def _receive_once(self, need: Need, devices: tuple[Device, ...]) -> None:
        """One device receives the shard from other processes; the rest of its process copy it."""
        # The network between processes is slower than that between devices of one.
        leader = self.load.assign("receive", devices, self._bytes(need.box))
        senders: dict[int, list[Overlap]] = collections.defaultdict(list)
        itemsize = self.item.dtype.itemsize
        for sender, overlap in choose_senders(need, itemsize, self.load, prefer_one=True):
            senders[sender].append(overlap)
        parts = [
            self.builder.send(chunk, leader)
            for sender, overlaps in senders.items()
            for chunk in self._pack(sender, overlaps, leader)
        ]
        shard = self.builder.join(parts, leader, need.box)
        for device in devices:
            self.builder.copy(shard, device)

    def _pack(self, sender: int, overlaps: Sequence[Overlap], receiver: Device) -> Iterator[int]:
        """Yield what one process gives to a shard: on one device, as one box if they tile one."""
        parts = [overlap.box for overlap in overlaps]
        box = bounding_box(parts)
        if len(parts) == 1 or not tile(parts, box):
            # The box around them has elements in it that others were chosen to send.
            yield from (self._cut(sender, overlap, receiver) for overlap in overlaps)
            return
        # Several processes may need the same box: it is packed for the first of them.
        if (sender, box) not in self.packed:
            cuts = [self._cut(sender, overlap, receiver) for overlap in overlaps]
            packer = self.load.assign(
                "pack",
                tuple(dict.fromkeys(self.builder.device(chunk) for chunk in cuts)),
                self._bytes(box),
            )
            gathered = [self.builder.gather(chunk, packer) for chunk in cuts]
            self.packed[sender, box] = self.builder.pack(gathered, packer, box)
        yield self.packed[sender, box]

    def _cut(self, sender: int, overlap: Overlap, receiver: Device) -> int:
        """Cut a part of a shard on a device of `sender`: on the receiver, if it has the shard."""
        has_shard = self.item.source_boxes.get(receiver) == overlap.source
        if has_shard and process_of(receiver) == sender:
            device = receiver
        else:
            holders = self.holders[sender, overlap.source]
            device = self.load.assign("send", holders, self._bytes(overlap.box))
        return self.builder.cut(self.number, device, overlap.source, overlap.box)

    def _bytes(self, box: Box) -> int:
        return self.item.bytes_of(box_size(box))


def _by_process_and_box(boxes: Mapping[Device, Box]) -> dict[tuple[int, Box], tuple[Device, ...]]:
    grouped: dict[tuple[int, Box], list[Device]] = collections.defaultdict(list)
    for device, box in boxes.items():
        grouped[process_of(device), box].append(device)
    return {key: tuple(devices) for key, devices in grouped.items()}
