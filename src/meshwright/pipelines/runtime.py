"""This process's part of a step: its operations, its arguments in slots, its results.

`local_operations` picks the part of the step that this process runs and turns transfers into puts,
or into sends and receives; `bind_arguments` fills the slots before a step, `collect_results` reads
them after.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshwright.errors import listing
from meshwright.mpmd.arrays import MpmdArray
from meshwright.mpmd.assign import delete_donated
from meshwright.mpmd.groups import Groups
from meshwright.pipelines.step_graph import Operation, StepBuilder
from meshwright.transfers.links import Link
from meshwright.transfers.moves import array_without_shards, own_memory
from meshwright.transfers.routes import Route
from meshwright.transfers.routes import route as plan_route
from meshwright.trees.walk import is_key


def local_groups(groups: Groups) -> frozenset[int]:
    """Return the groups that this process runs: its own, or all if there is one process."""
    if groups.spans_processes:
        return frozenset({groups.my_mpmd_axis_index})
    return frozenset(range(groups.mpmd_dim))


# Input: the operations of all groups. Output: those that this process runs, with `call` set on all
# but the compiled ones. Invariant: each transfer keeps its number, by which a send in one process
# meets its receive in another. Of "transfer 7 from group 0 to group 1" process 0 has
# `link.send(route, 7, values)` and process 1 has `link.receive(route, 7)`.
def local_operations(
    builder: StepBuilder, local_groups: frozenset[int], link: Link | None
) -> list[Operation]:
    """Return the operations of these groups; transfers become puts, or sends and receives."""
    operations: list[Operation] = []
    late: list[Operation] = []
    for number, operation in enumerate(builder.operations):
        operation.number = number
        if operation.source is None:
            if operation.group in local_groups:
                operations.append(operation)
        elif link is None:
            shardings = [builder.slot_shardings[slot] for slot in operation.outs]
            operation.call = functools.partial(put, shardings)
            operations.append(operation)
        else:
            route = _route(builder, operation)
            if operation.source in local_groups:
                operations.append(_send(link, route, operation))
            if operation.group in local_groups:
                # A receive stands where the transfer does, so that data flow while the group
                # works; but not one that is joined on arrival, which blocks its devices.
                received = _receive(link, route, operation)
                (late if route.joins_on_arrival else operations).append(received)
                if _on_cpu(builder, operation):
                    late.append(_wait(builder, operation))
    return _insert_before_first_use(operations, late)


def _route(builder: StepBuilder, operation: Operation) -> Route:
    shapes = [builder.shape(slot) for slot in operation.ins]
    return plan_route(shapes, [builder.slot_shardings[slot] for slot in operation.outs])


def _send(link: Link, route: Route, operation: Operation) -> Operation:
    def send(*values: Any) -> Sequence[Any]:
        link.send(route, operation.number, list(values))
        return ()

    return dataclasses.replace(operation, outs=(), call=send)


def _receive(link: Link, route: Route, operation: Operation) -> Operation:
    receive = functools.partial(link.receive, route, operation.number)
    return dataclasses.replace(operation, ins=(), call=receive)


def _wait(builder: StepBuilder, operation: Operation) -> Operation:
    """Make an operation that waits for received values, before a program that reads them.

    On CPUs a program that waits for its inputs occupies one of few threads, and enough of them
    leave none to receive with.
    """

    def wait(*values: Any) -> Sequence[Any]:
        jax.block_until_ready(values)  # type: ignore[no-untyped-call]
        return values

    source = builder.shardings.meshes[operation.source or 0].devices.flat
    processes = listing(sorted({device.process_index for device in source}))
    name = f"{operation.name} (process {processes})"
    slots = operation.outs
    return Operation(operation.group, name, slots, slots, waits=True, call=wait)


def _on_cpu(builder: StepBuilder, operation: Operation) -> bool:
    device: Any = builder.shardings.meshes[operation.group].devices.flat[0]
    return bool(device.platform == "cpu")


def _insert_before_first_use(
    operations: Sequence[Operation], late: Sequence[Operation]
) -> list[Operation]:
    """Insert the late operations, in their order, before the first one that reads their results."""
    waiting: dict[int, list[Operation]] = {}
    for operation in late:
        for slot in operation.outs:
            waiting.setdefault(slot, []).append(operation)
    ordered: list[Operation] = []
    inserted: set[int] = set()
    for operation in operations:
        for slot in operation.ins:
            for arriving in waiting.pop(slot, ()):
                if id(arriving) not in inserted:
                    inserted.add(id(arriving))
                    ordered.append(arriving)
        ordered.append(operation)
    return ordered


# Values into slots before a step, and out of them after it.


def place_constants(builder: StepBuilder, local_groups: frozenset[int]) -> None:
    """Place the constants of these groups on their devices, once for all steps."""
    slots = [slot for slot in builder.constants if builder.group_of_slot[slot] in local_groups]
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
    """Make the slots of a step, with its constants and arguments in them.

    Arrays that have the right sharding already are used as they are, the others are copied.
    Donated arrays that were copied are deleted, unless another array shares their memory.
    """
    slots: list[Any] = [None] * len(builder.avals)
    for slot, value in builder.constants.items():
        slots[slot] = value
    in_use = [array for n, array in enumerate(arrays) if n not in donated]
    not_in_place = []
    for argument in builder.placed:
        value = _copy_in_group(arrays[argument.number], argument.group)
        if argument.group in local_groups and getattr(value, "sharding", None) == argument.sharding:
            slots[argument.slot] = value
            in_use.append(value)
        else:
            not_in_place.append((argument, value))
    copied = [
        (argument, value) for argument, value in not_in_place if argument.group in local_groups
    ]
    placed = put([argument.sharding for argument, _ in copied], *(value for _, value in copied))
    for (argument, _), value in zip(copied, placed, strict=True):
        slots[argument.slot] = value
    # What this process passed for other groups is donated too, although nothing is copied here.
    unused = [
        value for argument, value in not_in_place if argument.number in donated and is_local(value)
    ]
    if unused:
        delete_donated(unused, in_use)
    return slots


def donated_alone(arrays: Sequence[Any], numbers: frozenset[int]) -> list[jax.Array]:
    """Return those of these donated arrays that may be deleted once the step was dispatched.

    Not those that another live array shares memory with. Asked before the step: the results that
    it is about to make need not be looked at then.
    """
    if not numbers:
        return []
    kept = {id(array) for n, array in enumerate(arrays) if n not in numbers}
    candidates = {
        id(arrays[n]): arrays[n]
        for n in numbers
        if is_local(arrays[n]) and id(arrays[n]) not in kept and not is_key(arrays[n].dtype)
    }
    alone = own_memory(list(candidates.values()))
    return [array for array, own in zip(candidates.values(), alone, strict=True) if own]


def is_local(value: Any) -> bool:
    """Whether this process holds shards of an array."""
    return isinstance(value, jax.Array) and bool(value.addressable_shards)


def _copy_in_group(value: Any, group: int) -> Any:
    """Return the copy of a multi-group array in this group, or its first; others as they are."""
    if not isinstance(value, MpmdArray):
        return value
    return value.on(group) if group in value.mesh_ids else value.first


def collect_results(
    builder: StepBuilder,
    slots: Sequence[Any],
    results: Sequence[dict[int, int]],
    local_groups: frozenset[int],
) -> list[Any]:
    """Return the results of the step; arrays without shards where another process holds them.

    `results` has for each the slot by group, as in `Assembled`.
    """
    arrays = []
    for by_group in results:
        local = [slot for group, slot in by_group.items() if group in local_groups]
        arrays.append(slots[local[0]] if local else _remote_array(builder, by_group))
    return arrays


def _remote_array(builder: StepBuilder, by_group: dict[int, int]) -> Any:
    slot = next(iter(by_group.values()))
    aval, sharding = builder.avals[slot], builder.slot_shardings[slot]
    # The compiler's choice of a sharding is known only in the process that compiled the program.
    sharding = sharding or builder.shardings.replicated(builder.group_of_slot[slot])
    return array_without_shards(aval.shape, aval.dtype, sharding)


def put(targets: Sequence[NamedSharding | None], *values: Any) -> list[Any]:
    """Place values with one call of JAX; shard by shard where other processes hold the rest."""
    if all(target is None or target.is_fully_addressable for target in targets):
        placed: list[Any] = jax.device_put(list(values), list(targets))
        return placed
    return [_put_shards(value, target) for value, target in zip(values, targets, strict=True)]


def _put_shards(value: Any, target: Any) -> Any:
    # `jax.device_put` refuses arrays committed to devices when the target spans processes (jax
    # 0.10). Every process has the whole value, so each makes the shards of its own devices.
    if is_key(getattr(value, "dtype", np.float32)):
        array: Any = value  # keys have no NumPy form
    else:
        array = np.asarray(value)
    dtype: Any = jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)
    return jax.make_array_from_callback(
        np.shape(array), target, lambda index: array[index], dtype=dtype
    )
