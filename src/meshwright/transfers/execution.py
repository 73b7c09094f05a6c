"""Carry out one process's part of a route: its steps, as compiled programs and copies of devices.

A `Job` is planned once per route and link. Arrays go in, checked; `LocalWork` cuts and packs them,
a link transports the chunks, `LocalWork` joins and copies them; arrays come out, as a tree.
Nothing here waits: everything is dispatched to devices and becomes ready on its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from meshwright.errors import TransferError, short
from meshwright.transfers.boxes import Box, relative_to
from meshwright.transfers.message_plan import Device, process_of
from meshwright.transfers.moves import array_without_shards, x64_if
from meshwright.transfers.routes import Route, fits, misfit, refuse
from meshwright.transfers.transfer_plan import Item, Step, TransferPlan

# Arrays by the number of their chunk in the plan.
Store = dict[int, jax.Array]
Program = Callable[..., Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """The part of one process in a route. `whole` items are not cut: JAX takes them as they are."""

    route: Route
    whole: frozenset[int]
    work: LocalWork
    holds: tuple[bool, ...]  # per item: whether this process holds a part of it
    wide: bool  # whether some arrays have 64 bits
    transport_plan: Any = None  # what the link's transport has planned for itself

    def check(self, arrays: Any) -> list[Any]:
        """Return the arrays of a tree as they travel; refuse what is not of the route."""
        leaves, treedef = jax.tree.flatten(arrays)
        if treedef != self.route.treedef:
            raise TransferError(
                f"send: the tree {short(treedef, 200)} is not that of the route, "
                f"{short(self.route.treedef, 200)}. Pass the same tree, or make a route for it."
            )
        known = list(zip(leaves, self.route.items, self.holds, strict=True))
        if not all(fits(leaf, item) for leaf, item, holds in known if holds):
            wrong = [(leaf, item) for leaf, item, holds in known if holds and not fits(leaf, item)]
            refuse("send", [misfit(leaf, item) for leaf, item in wrong])
        return [
            jax.random.key_data(leaf) if holds and item.key_impl is not None else leaf
            for leaf, item, holds in known
        ]

    def finish(self, arrays: Mapping[int, jax.Array]) -> Any:
        """Return the tree; arrays without elements, or none of which comes here, are made here."""
        with self.context():
            finished = [self._finished(number, arrays) for number in range(len(self.route.items))]
            return jax.tree.unflatten(self.route.treedef, finished)

    def _finished(self, number: int, arrays: Mapping[int, jax.Array]) -> jax.Array:
        item = self.route.items[number]
        array = arrays[number] if number in arrays else _make_empty(item)
        if item.key_impl is not None:
            array = jax.random.wrap_key_data(array, impl=item.key_impl)
        return array

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Keep 64-bit arrays so while they are worked on, whatever JAX is set to."""
        return x64_if(self.wide)


def make_job(route: Route, process: int, whole: frozenset[int], transport_plan: Any = None) -> Job:
    wide = any(item.dtype.itemsize >= 8 for item in route.items)
    holds = tuple(
        any(process_of(device) == process for device in item.source_boxes) for item in route.items
    )
    with x64_if(wide):
        work = plan_work(route, process, whole)
    return Job(route, whole, work, holds, wide, transport_plan)


def _make_empty(item: Item) -> jax.Array:
    """Make an array that does not arrive: one without shards here, or one without elements."""
    if item.bytes or not item.target.has_addressable_devices:
        return array_without_shards(item.shape, item.dtype, item.target)
    # An array without elements has (empty) shards here, which no process sends.
    return jax.make_array_from_callback(
        item.shape,
        item.target,
        lambda index: np.zeros(item.shape, item.dtype)[index],
        dtype=item.dtype,
    )


# The steps of one process.


@dataclasses.dataclass(frozen=True)
class Run:
    """A program on one device: the chunks it takes, and those it makes."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    program: Program


@dataclasses.dataclass(frozen=True)
class Copies:
    """Chunks that are copied between devices of this process, in one call."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    devices: tuple[Device, ...]


@dataclasses.dataclass(frozen=True)
class LocalWork:
    """The steps of this process, for arrays that do not travel whole."""

    route: Route
    shards: Mapping[int, tuple[tuple[int, int], ...]]  # item: positions of shards, their chunks
    cut: tuple[Run, ...]
    gather: Copies
    pack: tuple[Run, ...]
    send_inside: Copies
    in_place: tuple[int, ...]  # chunks that already lie where they are needed
    join: tuple[Run, ...]
    copy: Copies
    results: Mapping[int, tuple[int, ...]]  # item: the chunks that are its new shards here

    @property
    def sends_to_itself(self) -> bool:
        return bool(self.in_place or self.send_inside.inputs)

    def make_outgoing(self, data: Sequence[Any]) -> Store:
        """Cut and pack the arrays: returns all chunks that devices of this process send."""
        store: Store = {}
        for item, positions in self.shards.items():
            # Not `addressable_data`: of a replicated array it always returns the first shard.
            shards = data[item].addressable_shards
            for position, chunk in positions:
                store[chunk] = shards[position].data
        _run(self.cut, store)
        _copy(self.gather, store)
        _run(self.pack, store)
        return store

    def send_to_itself(self, outgoing: Store) -> Store:
        """Return what this process receives from itself, on the devices that need it."""
        received = {chunk: outgoing[chunk] for chunk in self.in_place}
        if self.send_inside.inputs:
            _copy(self.send_inside, outgoing)
            received.update({chunk: outgoing[chunk] for chunk in self.send_inside.outputs})
        return received

    def make_arrays(self, received: Store) -> dict[int, jax.Array]:
        """Join and copy all that this process received: returns the arrays, by item."""
        _run(self.join, received)
        _copy(self.copy, received)
        items = self.route.items
        return {
            item: _array(items[item], [received[chunk] for chunk in chunks])
            for item, chunks in self.results.items()
        }


def _run(runs: Iterable[Run], store: Store) -> None:
    for run in runs:
        outputs = run.program(*[store[chunk] for chunk in run.inputs])
        store.update(zip(run.outputs, outputs, strict=True))


def _copy(copies: Copies, store: Store) -> None:
    if copies.inputs:
        values = [store[chunk] for chunk in copies.inputs]
        placed = jax.device_put(values, list(copies.devices))
        store.update(zip(copies.outputs, placed, strict=True))


def _array(item: Item, shards: Sequence[jax.Array]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(
        item.shape, item.target, list(shards), dtype=item.dtype
    )


# Which steps of a route one process does, and with which programs.


def plan_work(route: Route, process: int, whole: frozenset[int]) -> LocalWork:
    """Return what `process` does; the items in `whole` are left to JAX."""
    plan = _local_steps(route.plan, process, whole)
    results = {
        number: tuple(
            route.target_chunk(number, device)
            for device in item.target_boxes
            if process_of(device) == process
        )
        for number, item in enumerate(route.items)
        if number not in whole and item.bytes
    }
    results = {number: chunks for number, chunks in results.items() if chunks}
    # A chunk that is used on the receiving side but made by none of its steps is a part of a
    # source shard on the very device that needs it.
    used = {chunk for step in (*plan.join, *plan.copy) for chunk in step.inputs}
    used |= {chunk for chunks in results.values() for chunk in chunks}
    arriving = {step.output for step in (*plan.send, *plan.join, *plan.copy)}
    in_place = tuple(sorted(used - arriving))
    # Likewise, what the sending side uses and none of its steps makes is a whole source shard.
    early = (*plan.cut, *plan.gather, *plan.pack)
    needed = {chunk for step in early for chunk in step.inputs} | set(in_place)
    needed |= {step.inputs[0] for step in plan.send if plan.pair(step)[0] == process}
    return LocalWork(
        route,
        _shard_positions(route, process, sorted(needed - {step.output for step in early})),
        _runs(plan, plan.cut, _make_cutter),
        _copies(plan, plan.gather),
        _runs(plan, plan.pack, _make_joiner),
        _copies(plan, [step for step in plan.send if plan.pair(step) == (process, process)]),
        in_place,
        _runs(plan, plan.join, _make_joiner),
        _copies(plan, plan.copy),
        results,
    )


def _local_steps(plan: TransferPlan, process: int, whole: frozenset[int]) -> TransferPlan:
    """Return the plan with only the steps in which a process takes part."""

    def local(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(
            step
            for step in steps
            if process in plan.pair(step) and plan.chunks[step.output].item not in whole
        )

    return TransferPlan(
        plan.chunks,
        local(plan.cut),
        local(plan.gather),
        local(plan.pack),
        local(plan.send),
        local(plan.join),
        local(plan.copy),
    )


def _shard_positions(
    route: Route, process: int, chunks: Sequence[int]
) -> Mapping[int, tuple[tuple[int, int], ...]]:
    positions: dict[int, list[tuple[int, int]]] = {}
    for number in chunks:
        chunk = route.plan.chunks[number]
        devices = route.items[chunk.item].source_boxes
        addressable = [device for device in devices if process_of(device) == process]
        positions.setdefault(chunk.item, []).append((addressable.index(chunk.device), number))
    return {item: tuple(pairs) for item, pairs in positions.items()}


Maker = Callable[[TransferPlan, Sequence[Step], Mapping[int, int]], Program]


def _runs(plan: TransferPlan, steps: Sequence[Step], make: Maker) -> tuple[Run, ...]:
    """Return one program per device, for all steps on it: every dispatch takes time."""
    by_device: dict[Device, list[Step]] = {}
    for step in steps:
        by_device.setdefault(plan.chunks[step.output].device, []).append(step)
    runs = []
    for on_device in by_device.values():
        inputs = tuple(dict.fromkeys(chunk for step in on_device for chunk in step.inputs))
        slots = {chunk: slot for slot, chunk in enumerate(inputs)}
        outputs = tuple(step.output for step in on_device)
        runs.append(Run(inputs, outputs, make(plan, on_device, slots)))
    return tuple(runs)


def _make_cutter(plan: TransferPlan, steps: Sequence[Step], slots: Mapping[int, int]) -> Program:
    chunks = plan.chunks
    cuts = [
        (slots[step.inputs[0]], relative_to(chunks[step.inputs[0]].box, chunks[step.output].box))
        for step in steps
    ]
    return cutter(chunks[steps[0].output].device, tuple(cuts))


def _make_joiner(plan: TransferPlan, steps: Sequence[Step], slots: Mapping[int, int]) -> Program:
    chunks = plan.chunks
    joins = [tuple((slots[chunk], chunks[chunk].box) for chunk in step.inputs) for step in steps]
    return joiner(chunks[steps[0].output].device, tuple(joins))


def _copies(plan: TransferPlan, steps: Sequence[Step]) -> Copies:
    return Copies(
        tuple(step.inputs[0] for step in steps),
        tuple(step.output for step in steps),
        tuple(plan.chunks[step.output].device for step in steps),
    )


# Small compiled programs on one device: shards cut into chunks, chunks joined into shards.

Cuts = tuple[tuple[int, Box], ...]  # of which argument, which part of it
Joins = tuple[tuple[tuple[int, Box], ...], ...]  # per result: which arguments, where they go


# Cached beyond one route: pipelines make many that cut equal shards equally, and jit caches
# compiled programs by function object.
@functools.lru_cache(maxsize=4096)
def cutter(device: Device, cuts: Cuts) -> Program:
    """Return a program that takes shards and returns parts of them."""

    def cut(*shards: jax.Array) -> list[jax.Array]:
        return [_slice(shards[number], part) for number, part in cuts]

    return _on(device, cut)


@functools.lru_cache(maxsize=4096)
def joiner(device: Device, joins: Joins) -> Program:
    """Return a program that takes chunks and returns the shards they are parts of."""

    def join(*chunks: jax.Array) -> list[jax.Array]:
        return [_join([(chunks[number], box) for number, box in parts]) for parts in joins]

    return _on(device, join)


def _on(device: Device, function: Any) -> Program:
    # Not compiled ahead: compiled programs refuse 4-bit integers for their layout (jax 0.10).
    program: Program = jax.jit(function)
    alone = Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))

    def run(*arguments: jax.Array) -> Sequence[jax.Array]:
        if jax.sharding.get_abstract_mesh().empty:
            return program(*arguments)
        # A mesh that the caller has set would be taken for the program's own.
        with jax.set_mesh(alone):
            return program(*arguments)

    return run


def _slice(shard: jax.Array, part: Box) -> jax.Array:
    starts, stops = [start for start, _ in part], [stop for _, stop in part]
    piece = jax.lax.slice(_as_integers(shard), starts, stops)
    return _from_integers(piece, shard.dtype)


def _join(parts: Sequence[tuple[jax.Array, Box]]) -> jax.Array:
    """Join the parts of a shard, which form a grid, dim by dim, the last dim first."""
    dtype = parts[0][0].dtype
    joined = _join_grid([(_as_integers(value), box) for value, box in parts], 0)
    return _from_integers(joined, dtype)


def _join_grid(parts: Sequence[tuple[jax.Array, Box]], dim: int) -> jax.Array:
    if len(parts) == 1:
        return parts[0][0]
    rows: dict[int, list[tuple[jax.Array, Box]]] = {}
    for value, box in parts:
        rows.setdefault(box[dim][0], []).append((value, box))
    joined = [_join_grid(rows[start], dim + 1) for start in sorted(rows)]
    return joined[0] if len(joined) == 1 else jnp.concatenate(joined, axis=dim)


def _as_integers(array: jax.Array) -> jax.Array:
    """View short floats as integers: a compiler may pass them through longer ones, losing NaNs."""
    width = jax.dtypes.itemsize_bits(array.dtype)
    if width < 32 and jnp.issubdtype(array.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(array, f"uint{width}")
    return array


def _from_integers(array: jax.Array, dtype: Any) -> jax.Array:
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
