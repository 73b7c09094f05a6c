"""What one process does in a transfer: its steps, as programs and copies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, Sharding

from meshwright.errors import TransferError, short
from meshwright.transfers.boxes import Box
from meshwright.transfers.routes import Route, fits, misfit, refuse
from meshwright.transfers.transfer_plan import Device, Item, Plan, Step, process_of

# Arrays by the number of their lot in the plan.
Store = dict[int, jax.Array]


@dataclasses.dataclass(frozen=True)
class Run:
    """A program on one device: the lots it takes, and those it makes."""

    takes: tuple[int, ...]
    makes: tuple[int, ...]
    program: Program


@dataclasses.dataclass(frozen=True)
class Copies:
    """Lots that are copied between devices of this process, in one call."""

    takes: tuple[int, ...]
    makes: tuple[int, ...]
    devices: tuple[Device, ...]


@dataclasses.dataclass(frozen=True)
class Work:
    """The steps of this process, for arrays that do not travel whole."""

    route: Route
    shards: Mapping[int, tuple[tuple[int, int], ...]]  # item: positions of shards, and their lots
    cut: tuple[Run, ...]
    gather: Copies
    pack: tuple[Run, ...]
    inside: Copies
    stay: tuple[int, ...]  # lots that already lie where they are needed
    join: tuple[Run, ...]
    copy: Copies
    arrays: Mapping[int, tuple[int, ...]]  # item: the lots that are its new shards here

    @property
    def near(self) -> bool:
        """Whether this process gives something to itself."""
        return bool(self.stay or self.inside.takes)

    def give(self, data: Sequence[Any]) -> Store:
        """What the devices of this process give, made of the arrays."""
        store: Store = {}
        for item, places in self.shards.items():
            # Not `addressable_data`: of a replicated array it always returns the first shard.
            shards = data[item].addressable_shards
            for place, lot in places:
                store[lot] = shards[place].data
        _run(self.cut, store)
        _copy(self.gather, store)
        _run(self.pack, store)
        return store

    def keep(self, store: Store) -> Store:
        """Of what this process gives, that which it takes itself, on the devices that take it."""
        kept = {lot: store[lot] for lot in self.stay}
        if self.inside.takes:
            _copy(self.inside, store)
            kept.update({lot: store[lot] for lot in self.inside.makes})
        return kept

    def take(self, store: Store) -> dict[int, jax.Array]:
        """The arrays, by item, made of all that this process takes."""
        _run(self.join, store)
        _copy(self.copy, store)
        items = self.route.items
        return {
            item: _array(items[item], [store[lot] for lot in lots])
            for item, lots in self.arrays.items()
        }


def _run(runs: Iterable[Run], store: Store) -> None:
    for run in runs:
        made = run.program(*[store[lot] for lot in run.takes])
        store.update(zip(run.makes, made, strict=True))


def _copy(copies: Copies, store: Store) -> None:
    if copies.takes:
        values = [store[lot] for lot in copies.takes]
        store.update(zip(copies.makes, jax.device_put(values, list(copies.devices)), strict=True))


def _array(item: Item, shards: Sequence[jax.Array]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(
        item.shape, item.target, list(shards), dtype=item.dtype
    )


def empty(item: Item, end: Sharding) -> jax.Array:
    """An array as a process sees it that holds none of it, or one without elements."""
    if item.bytes or not end.has_addressable_devices:
        return jax.make_array_from_single_device_arrays(item.shape, end, [], dtype=item.dtype)
    return jax.make_array_from_callback(
        item.shape, end, functools.partial(_nothing, item), dtype=item.dtype
    )


def _nothing(item: Item, index: Any) -> Any:
    return np.zeros(item.shape, item.dtype)[index]


# A route as one process works it off: arrays in, checked; arrays out, as a tree.


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """The part of one process in a route. `whole` items are not cut: JAX takes them as they are."""

    route: Route
    whole: frozenset[int]
    work: Work
    gives: tuple[bool, ...]  # per item: whether this process holds a part of it
    wide: bool  # whether some arrays have 64 bits
    load: Any = None  # what else the way of the link has planned

    def check(self, arrays: Any) -> list[Any]:
        """The arrays of a tree as they travel, refused if they are not those of the route."""
        leaves, treedef = jax.tree.flatten(arrays)
        if treedef != self.route.treedef:
            raise TransferError(
                f"send: the tree {short(treedef, 200)} is not that of the route, "
                f"{short(self.route.treedef, 200)}. Pass the same tree, or make a route for it."
            )
        known = list(zip(leaves, self.route.items, self.gives, strict=True))
        if not all(fits(leaf, item) for leaf, item, gives in known if gives):
            wrong = [(leaf, item) for leaf, item, gives in known if gives and not fits(leaf, item)]
            refuse("send", [misfit(leaf, item) for leaf, item in wrong])
        return [
            jax.random.key_data(leaf) if gives and item.kind is not None else leaf
            for leaf, item, gives in known
        ]

    def finish(self, arrays: Mapping[int, jax.Array]) -> Any:
        """The tree; arrays without elements, or of which nothing comes here, are made here."""
        with self.as_asked():
            return jax.tree.unflatten(self.route.treedef, self._finished(arrays))

    def _finished(self, arrays: Mapping[int, jax.Array]) -> Sequence[Any]:
        finished = []
        for number, item in enumerate(self.route.items):
            array = arrays[number] if number in arrays else empty(item, item.target)
            if item.kind is not None:
                array = jax.random.wrap_key_data(array, impl=item.kind)
            finished.append(array)
        return finished

    def as_asked(self) -> contextlib.AbstractContextManager[Any]:
        """64-bit arrays stay so whatever JAX is set to."""
        return jax.enable_x64(True) if self.wide else contextlib.nullcontext()


def job(route: Route, process: int, whole: frozenset[int], load: Any = None) -> Job:
    wide = any(item.dtype.itemsize >= 8 for item in route.items)
    gives = tuple(
        any(process_of(device) == process for device in item.held) for item in route.items
    )
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        return Job(route, whole, work(route, process, whole), gives, wide, load)


# Small compiled programs on one device: shards cut into pieces, pieces joined into shards.


Cuts = tuple[tuple[int, Box], ...]  # of which argument, which part of it
Joins = tuple[tuple[tuple[int, Box], ...], ...]  # per result: which arguments, where they go
Program = Callable[..., Sequence[jax.Array]]


@functools.lru_cache(maxsize=4096)
def cutter(device: Device, cuts: Cuts) -> Program:
    """A program that takes shards and returns pieces of them."""

    def cut(*shards: jax.Array) -> list[jax.Array]:
        return [_slice(shards[number], part) for number, part in cuts]

    return _on(device, cut)


@functools.lru_cache(maxsize=4096)
def joiner(device: Device, joins: Joins) -> Program:
    """A program that takes pieces and returns the shards they are parts of."""

    def join(*pieces: jax.Array) -> list[jax.Array]:
        return [_join([(pieces[number], place) for number, place in some]) for some in joins]

    return _on(device, join)


def _on(device: Device, function: Any) -> Program:
    """Not compiled ahead: compiled programs refuse 4-bit integers for their layout (jax 0.10)."""
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
    piece = jax.lax.slice(_bits(shard), starts, stops)
    return _unbits(piece, shard.dtype)


def _join(parts: Sequence[tuple[jax.Array, Box]]) -> jax.Array:
    """The parts of a shard form a grid: join them dim by dim, the last dim first."""
    dtype = parts[0][0].dtype
    return _unbits(_grid([(_bits(value), place) for value, place in parts], 0), dtype)


def _grid(parts: Sequence[tuple[jax.Array, Box]], dim: int) -> jax.Array:
    if len(parts) == 1:
        return parts[0][0]
    rows: dict[int, list[tuple[jax.Array, Box]]] = {}
    for value, place in parts:
        rows.setdefault(place[dim][0], []).append((value, place))
    joined = [_grid(rows[start], dim + 1) for start in sorted(rows)]
    return joined[0] if len(joined) == 1 else jnp.concatenate(joined, axis=dim)


def _bits(array: jax.Array) -> jax.Array:
    """Short floats as integers: a compiler may pass them through longer ones, and lose NaNs."""
    width = jax.dtypes.itemsize_bits(array.dtype)
    if width < 32 and jnp.issubdtype(array.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(array, f"uint{width}")
    return array


def _unbits(array: jax.Array, dtype: Any) -> jax.Array:
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


# Which steps of a route one process does, and with which programs. Planned once per route.


Maker = Callable[[Plan, Sequence[Step], Mapping[int, int]], Program]


def work(route: Route, process: int, whole: frozenset[int]) -> Work:
    """What `process` does; the items in `whole` are left to JAX."""
    plan = _part(route.plan, process, whole)
    lots = plan.lots
    inside = [step for step in plan.send if plan.pair(step) == (process, process)]
    arrays = {
        number: tuple(
            route.lot(number, device) for device in item.wanted if process_of(device) == process
        )
        for number, item in enumerate(route.items)
        if number not in whole and item.bytes
    }
    arrays = {number: some for number, some in arrays.items() if some}
    came = {step.made for step in (*plan.send, *plan.join, *plan.copy)}
    used = {lot for step in (*plan.join, *plan.copy) for lot in step.of}
    used |= {lot for some in arrays.values() for lot in some}
    stay = tuple(sorted(used - came))
    early = (*plan.cut, *plan.gather, *plan.pack)
    given = {step.of[0] for step in plan.send if process_of(lots[step.of[0]].device) == process}
    needed = {lot for step in early for lot in step.of} | given | set(stay)
    return Work(
        route,
        _shards(route, process, sorted(needed - {step.made for step in early})),
        _runs(plan, plan.cut, _cutter),
        _copies(plan, plan.gather),
        _runs(plan, plan.pack, _joiner),
        _copies(plan, inside),
        stay,
        _runs(plan, plan.join, _joiner),
        _copies(plan, plan.copy),
        arrays,
    )


def _part(plan: Plan, process: int, whole: frozenset[int]) -> Plan:
    """The steps in which a process takes part."""

    def some(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(
            step
            for step in steps
            if process in plan.pair(step) and plan.lots[step.made].item not in whole
        )

    return Plan(
        plan.lots,
        some(plan.cut),
        some(plan.gather),
        some(plan.pack),
        some(plan.send),
        some(plan.join),
        some(plan.copy),
    )


def _shards(
    route: Route, process: int, lots: Sequence[int]
) -> Mapping[int, tuple[tuple[int, int], ...]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for number in lots:
        lot = route.plan.lots[number]
        near = [device for device in route.items[lot.item].held if process_of(device) == process]
        found.setdefault(lot.item, []).append((near.index(lot.device), number))
    return {item: tuple(places) for item, places in found.items()}


def _runs(plan: Plan, steps: Sequence[Step], make: Maker) -> tuple[Run, ...]:
    """A program per device, for all steps on it."""
    found: dict[Device, list[Step]] = {}
    for step in steps:
        found.setdefault(plan.lots[step.made].device, []).append(step)
    runs = []
    for some in found.values():
        takes = tuple(dict.fromkeys(lot for step in some for lot in step.of))
        slots = {lot: slot for slot, lot in enumerate(takes)}
        runs.append(Run(takes, tuple(step.made for step in some), make(plan, some, slots)))
    return tuple(runs)


def _cutter(plan: Plan, steps: Sequence[Step], slots: Mapping[int, int]) -> Program:
    lots = plan.lots
    cuts = [
        (slots[step.of[0]], _within(lots[step.made].box, lots[step.of[0]].box)) for step in steps
    ]
    return cutter(lots[steps[0].made].device, tuple(cuts))


def _joiner(plan: Plan, steps: Sequence[Step], slots: Mapping[int, int]) -> Program:
    lots = plan.lots
    joins = [tuple((slots[lot], lots[lot].box) for lot in step.of) for step in steps]
    return joiner(lots[steps[0].made].device, tuple(joins))


def _within(part: Box, outer: Box) -> Box:
    return tuple(
        (start - base, stop - base) for (start, stop), (base, _) in zip(part, outer, strict=True)
    )


def _copies(plan: Plan, steps: Sequence[Step]) -> Copies:
    return Copies(
        tuple(step.of[0] for step in steps),
        tuple(step.made for step in steps),
        tuple(plan.lots[step.made].device for step in steps),
    )
