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
from meshwright.mpmd.assign import give_up
from meshwright.mpmd.groups import Groups
from meshwright.pipelines.step_graph import Board, Operation
from meshwright.transfers.links import Link
from meshwright.transfers.routes import Route, route


def settle_constants(board: Board, mine: frozenset[int]) -> None:
    """Constants are placed once, not in every step."""
    cells = [cell for cell in board.fixed if board.group_of[cell] in mine]
    placed = put([board.lies[cell] for cell in cells], *(board.fixed[cell] for cell in cells))
    board.fixed = dict(zip(cells, placed, strict=True))


def begin(
    board: Board,
    arrays: Sequence[Any],
    mine: frozenset[int],
    donated: frozenset[int] = frozenset(),
) -> list[Any]:
    """Fresh cells with the constants and the arguments; those that lie right stay.

    Of the others those that are donated are given up: what is theirs alone is freed.
    """
    cells: list[Any] = [None] * len(board.avals)
    for cell, value in board.fixed.items():
        cells[cell] = value
    away, stay = [], [array for n, array in enumerate(arrays) if n not in donated]
    for argument in board.placed:
        value = _in_group(arrays[argument.number], argument.group)
        if argument.group in mine and getattr(value, "sharding", None) == argument.sharding:
            cells[argument.cell] = value
            stay.append(value)
        else:
            away.append((argument, value))
    moved = [(argument, value) for argument, value in away if argument.group in mine]
    placed = put([argument.sharding for argument, _ in moved], *(value for _, value in moved))
    for (argument, _), value in zip(moved, placed, strict=True):
        cells[argument.cell] = value
    free = [value for argument, value in away if argument.number in donated and is_here(value)]
    if free:
        give_up(free, stay)
    return cells


def is_here(value: Any) -> bool:
    """Whether this process holds an array, or a part of it."""
    return isinstance(value, jax.Array) and bool(value.addressable_shards)


def _in_group(value: Any, group: int) -> Any:
    """The copy of an array that lives in several groups."""
    if not isinstance(value, MpmdArray):
        return value
    return value.on(group) if group in value.mesh_ids else value.first


def results(
    board: Board, cells: Sequence[Any], wanted: Sequence[dict[int, int]], mine: frozenset[int]
) -> list[Any]:
    """What the step returns; without shards where another process holds it."""
    found = []
    for by_group in wanted:
        here = [cell for group, cell in by_group.items() if group in mine]
        found.append(cells[here[0]] if here else _elsewhere(board, by_group))
    return found


def _elsewhere(board: Board, by_group: dict[int, int]) -> Any:
    cell = next(iter(by_group.values()))
    aval, lies = board.avals[cell], board.lies[cell] or board.layouts.whole(board.group_of[cell])
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


def share(board: Board, mine: frozenset[int], link: Link | None) -> list[Operation]:
    """The operations of these groups; transfers become puts, or sends and receives by key."""
    found: list[Operation] = []
    late: list[Operation] = []
    for number, operation in enumerate(board.operations):
        operation.number = number
        if operation.source is None:
            if operation.group in mine:
                found.append(operation)
        elif link is None:
            layouts = [board.lies[cell] for cell in operation.outs]
            operation.call = functools.partial(put, layouts)
            found.append(operation)
        else:
            way = _route(board, operation)
            if operation.source in mine:
                found.append(_send(link, way, operation))
            if operation.group in mine:
                arriving = _receive(link, way, operation)
                (late if way.joins_on_arrival else found).append(arriving)
                if _on_cpu(board, operation):
                    late.append(_wait(board, operation))
    return _just_in_time(found, late)


def _route(board: Board, operation: Operation) -> Route:
    shapes = [
        jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            board.avals[cell].shape, board.avals[cell].dtype, sharding=board.lies[cell]
        )
        for cell in operation.ins
    ]
    return route(shapes, [board.lies[cell] for cell in operation.outs])


def _send(link: Link, way: Route, operation: Operation) -> Operation:
    def send(*values: Any) -> Sequence[Any]:
        link.send(way, operation.number, list(values))
        return ()

    return dataclasses.replace(operation, outs=(), call=send)


def _receive(link: Link, way: Route, operation: Operation) -> Operation:
    receive = functools.partial(link.receive, way, operation.number)
    return dataclasses.replace(operation, ins=(), call=receive)


def _wait(board: Board, operation: Operation) -> Operation:
    """Wait for what arrives before a program that takes it is dispatched.

    On CPUs a program that waits for its inputs occupies one of few threads, and enough of them
    leave none to receive with.
    """

    def wait(*values: Any) -> Sequence[Any]:
        jax.block_until_ready(values)  # type: ignore[no-untyped-call]
        return values

    source = board.layouts.meshes[operation.source or 0].devices.flat
    processes = listing(sorted({device.process_index for device in source}))
    name = f"{operation.name} (process {processes})"
    cells = operation.outs
    return Operation(operation.group, name, cells, cells, waits=True, call=wait)


def _on_cpu(board: Board, operation: Operation) -> bool:
    device: Any = board.layouts.meshes[operation.group].devices.flat[0]
    return bool(device.platform == "cpu")


def _just_in_time(operations: list[Operation], late: Sequence[Operation]) -> list[Operation]:
    """Put late operations, in their order, before the first one that takes their results."""
    waiting: dict[int, list[Operation]] = {}
    for operation in late:
        for cell in operation.outs:
            waiting.setdefault(cell, []).append(operation)
    found: list[Operation] = []
    done: set[int] = set()
    for operation in operations:
        for cell in operation.ins:
            for arriving in waiting.pop(cell, ()):
                if id(arriving) not in done:
                    done.add(id(arriving))
                    found.append(arriving)
        found.append(operation)
    return found
