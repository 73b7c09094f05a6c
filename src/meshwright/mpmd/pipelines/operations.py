"""A step as a list of operations on numbered cells: nothing is looked up while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import NamedSharding

from meshwright import _compat
from meshwright.mpmd.schedules.tasks import Task
from meshwright.mpmd.watching import Watch

Call = Callable[..., Sequence[Any]]


@dataclasses.dataclass(eq=False)
class Code:
    """A function to be compiled once for all operations that run it.

    A result whose sharding is None lies as the compiler sees fit.
    """

    name: str
    fn: Call
    outs: Sequence[NamedSharding | None]
    donated: tuple[int, ...] = ()
    compiled: Any = None


@dataclasses.dataclass(eq=False)
class Operation:
    """`call` the values of `ins`, put the results into `outs`, then forget `drop`.

    It has `code` to run in its group, or it brings its values there from the group `source`.
    `number` is its place in the whole step, that of all groups.
    """

    group: int
    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    code: Code | None = None
    task: Task | None = None
    source: int | None = None
    waits: bool = False
    call: Call | None = None
    drop: tuple[int, ...] = ()
    number: int = -1

    @property
    def moves(self) -> bool:
        """Whether it is a transfer, or one side of it."""
        return self.source is not None


def set_drops(operations: Sequence[Operation], kept: set[int]) -> None:
    """Every cell is forgotten after its last use, so that memory follows the schedule."""
    last: dict[int, int] = {}
    for number, operation in enumerate(operations):
        for cell in (*operation.ins, *operation.outs):
            last[cell] = number
    for cell, number in last.items():
        if cell not in kept:
            operations[number].drop += (cell,)


def run_watched(operations: Sequence[Operation], cells: list[Any], watch: Watch) -> None:
    """The same, while others may ask what this process is about."""
    for operation in operations:
        tell(watch, operation)
        run((operation,), cells)


def tell(watch: Watch, operation: Operation) -> None:
    """Say what this process is about: transfers go beside the task that it is in."""
    if operation.waits:
        watch.waiting = operation.name
    else:
        watch.doing = watch.doing if operation.moves else operation.name


def run(operations: Sequence[Operation], cells: list[Any]) -> None:
    """Dispatch every operation; the devices work on while this goes ahead."""
    for operation in operations:
        work_off(operation, cells)
        for cell in operation.drop:
            cells[cell] = None


def work_off(operation: Operation, cells: list[Any]) -> Sequence[Any]:
    """Call one operation and keep its results, which are returned too."""
    try:
        results = operation.call(*[cells[cell] for cell in operation.ins])  # type: ignore[misc]
    except _compat.no_number() as error:  # with jax_debug_nans
        raise FloatingPointError(
            f"{operation.name}: an invalid value ({error.args[-1]}) among its results."
        ) from error
    for cell, value in zip(operation.outs, results, strict=True):
        cells[cell] = value
    return results
