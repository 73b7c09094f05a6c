"""Bring a step's arguments and constants to the groups that need them, and its results out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshwright.errors import listing
from meshwright.mpmd.arrays import MpmdArray
from meshwright.mpmd.assign import delete_donated
from meshwright.mpmd.groups import Groups
from meshwright.pipelines.step_graph import Operation, StepBuilder
from meshwright.transfers.links import Link
from meshwright.transfers.routes import Route, route


def place_constants(builder: StepBuilder, local_groups: frozenset[int]) -> None:
    """Constants are placed once, not in every step."""
    slots = [slot for slot in builder.constants if builder.group_of[slot] in local_groups]
    placed = put(
        [builder.slot_shardings[slot] for slot in slots],
        *(builder.constants[slot] for slot in slots),
    )
    builder.constants = dict(zip(slots, placed, strict=True))


def bind_arguments(
    builder: StepBuilder,
    arrays: Sequence[Any],
    local_groups: frozenset[int],
    donated: frozenset[int] = frozenset(),
) -> list[Any]:
    """Fresh slots with the constants and the arguments; those that lie right stay.

    Of the others those that are donated are given up: what is theirs alone is freed.
    """
    slots: list[Any] = [None] * len(builder.avals)
    for slot, value in builder.constants.items():
        slots[slot] = value
    away, stay = [], [array for n, array in enumerate(arrays) if n not in donated]
    for argument in builder.placed:
        value = _in_group(arrays[argument.number], argument.group)
        if argument.group in local_groups and getattr(value, "sharding", None) == argument.sharding:
            slots[argument.slot] = value
            stay.append(value)
        else:
            away.append((argument, value))
    moved = [(argument, value) for argument, value in away if argument.group in local_groups]
    placed = put([argument.sharding for argument, _ in moved], *(value for _, value in moved))
    for (argument, _), value in zip(moved, placed, strict=True):
        slots[argument.slot] = value
    free = [value for argument, value in away if argument.number in donated and is_here(value)]
    if free:
        delete_donated(free, stay)
    return slots


def is_here(value: Any) -> bool:
    """Whether this process holds an array, or a part of it."""
    return isinstance(value, jax.Array) and bool(value.addressable_shards)


def _in_group(value: Any, group: int) -> Any:
    """The copy of an array that lives in several groups."""
    if not isinstance(value, MpmdArray):
        return value
    return value.on(group) if group in value.mesh_ids else value.first


def results(
    builder: StepBuilder,
    slots: Sequence[Any],
    wanted: Sequence[dict[int, int]],
    local_groups: frozenset[int],
) -> list[Any]:
    """What the step returns; without shards where another process holds it."""
    found = []
    for by_group in wanted:
        here = [slot for group, slot in by_group.items() if group in local_groups]
        found.append(slots[here[0]] if here else _elsewhere(builder, by_group))
    return found


def _elsewhere(builder: StepBuilder, by_group: dict[int, int]) -> Any:
    slot = next(iter(by_group.values()))
    aval, lies = (
        builder.avals[slot],
        builder.slot_shardings[slot] or builder.layouts.whole(builder.group_of[slot]),
    )
    return jax.make_array_from_single_device_arrays(aval.shape, lies, [], dtype=aval.dtype)


def put(targets: Sequence[NamedSharding | None], *values: Any) -> list[Any]:
    """One call of JAX for all values; piece by piece where other processes hold the rest."""
    if all(target is None or target.is_fully_addressable for target in targets):
        found: list[Any] = jax.device_put(list(values), list(targets))
        return found
    return [_piecewise(value, target) for value, target in zip(values, targets, strict=True)]


def _piecewise(value: Any, target: Any) -> Any:
    if jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key):
        whole: Any = value
    else:
        whole = np.asarray(value)
    dtype: Any = jax.dtypes.canonicalize_dtype(whole.dtype, allow_extended_dtype=True)
    return jax.make_array_from_callback(
        np.shape(whole), target, lambda index: whole[index], dtype=dtype
    )


# Which operations of a step this process runs, and how its transfers are done.


def local_groups(groups: Groups) -> frozenset[int]:
    """The groups that this process runs: its own, or in a single process all."""
    if groups.spans_processes:
        return frozenset({groups.my_mpmd_axis_index})
    return frozenset(range(groups.mpmd_dim))


def local_operations(
    builder: StepBuilder, local_groups: frozenset[int], link: Link | None
) -> list[Operation]:
    """The operations of these groups; transfers become puts, or sends and receives by key."""
    found: list[Operation] = []
    late: list[Operation] = []
    for number, operation in enumerate(builder.operations):
        operation.number = number
        if operation.source is None:
            if operation.group in local_groups:
                found.append(operation)
        elif link is None:
            layouts = [builder.slot_shardings[slot] for slot in operation.outs]
            operation.call = functools.partial(put, layouts)
            found.append(operation)
        else:
            way = _route(builder, operation)
            if operation.source in local_groups:
                found.append(_send(link, way, operation))
            if operation.group in local_groups:
                arriving = _receive(link, way, operation)
                (late if way.joins_on_arrival else found).append(arriving)
                if _on_cpu(builder, operation):
                    late.append(_wait(builder, operation))
    return _just_in_time(found, late)


def _route(builder: StepBuilder, operation: Operation) -> Route:
    shapes = [
        jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            builder.avals[slot].shape,
            builder.avals[slot].dtype,
            sharding=builder.slot_shardings[slot],
        )
        for slot in operation.ins
    ]
    return route(shapes, [builder.slot_shardings[slot] for slot in operation.outs])


def _send(link: Link, way: Route, operation: Operation) -> Operation:
    def send(*values: Any) -> Sequence[Any]:
        link.send(way, operation.number, list(values))
        return ()

    return dataclasses.replace(operation, outs=(), call=send)


def _receive(link: Link, way: Route, operation: Operation) -> Operation:
    receive = functools.partial(link.receive, way, operation.number)
    return dataclasses.replace(operation, ins=(), call=receive)


def _wait(builder: StepBuilder, operation: Operation) -> Operation:
    """Wait for what arrives before a program that takes it is dispatched.

    On CPUs a program that waits for its inputs occupies one of few threads, and enough of them
    leave none to receive with.
    """

    def wait(*values: Any) -> Sequence[Any]:
        jax.block_until_ready(values)  # type: ignore[no-untyped-call]
        return values

    source = builder.layouts.meshes[operation.source or 0].devices.flat
    processes = listing(sorted({device.process_index for device in source}))
    name = f"{operation.name} (process {processes})"
    slots = operation.outs
    return Operation(operation.group, name, slots, slots, waits=True, call=wait)


def _on_cpu(builder: StepBuilder, operation: Operation) -> bool:
    device: Any = builder.layouts.meshes[operation.group].devices.flat[0]
    return bool(device.platform == "cpu")


def _just_in_time(operations: list[Operation], late: Sequence[Operation]) -> list[Operation]:
    """Put late operations, in their order, before the first one that takes their results."""
    waiting: dict[int, list[Operation]] = {}
    for operation in late:
        for slot in operation.outs:
            waiting.setdefault(slot, []).append(operation)
    found: list[Operation] = []
    done: set[int] = set()
    for operation in operations:
        for slot in operation.ins:
            for arriving in waiting.pop(slot, ()):
                if id(arriving) not in done:
                    done.add(id(arriving))
                    found.append(arriving)
        found.append(operation)
    return found
