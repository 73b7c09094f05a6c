"""Which operations of a step this process runs, and how its transfers are done."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from meshwright.errors import listing
from meshwright.mpmd.groups import Groups
from meshwright.mpmd.pipelines.board import Board
from meshwright.mpmd.pipelines.operations import Operation
from meshwright.mpmd.pipelines.placing import put
from meshwright.mpmd.transfers import Link, Route, route


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
