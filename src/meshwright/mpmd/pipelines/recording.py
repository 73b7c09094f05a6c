"""A step run while threads note when the results of tasks and transfers are there."""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from meshwright.mpmd.pipelines.operations import Operation, work_off


class Dispatch(NamedTuple):
    """A task as its process handed it to the devices, in seconds."""

    task: int
    before: float  # spent on other operations since the last task
    call: float
    waited: bool  # for what another process sent


@dataclasses.dataclass(frozen=True)
class Record:
    """When operations ran, by their number on the board, in seconds of the machine's clock."""

    tasks: dict[int, tuple[float, float]]  # start and end
    sent: dict[int, float]
    arrived: dict[int, float]
    hosts: list[list[Dispatch]]  # process by process, in its order

    def to_text(self) -> str:
        times = (self.tasks, self.sent, self.arrived)
        return json.dumps([[list(part.items()) for part in times], self.hosts])

    @staticmethod
    def from_text(text: str) -> Record:
        (tasks, sent, arrived), hosts = json.loads(text)
        return Record(
            {n: (start, end) for n, (start, end) in tasks},
            dict(sent),
            dict(arrived),
            [[Dispatch(*one) for one in host] for host in hosts],
        )


def merge(texts: Sequence[str]) -> str:
    """Records of several processes as one; where several run a task, from first to last."""
    found = Record({}, {}, {}, [])
    for record in map(Record.from_text, texts):
        found.hosts.extend(record.hosts)
        for number, (start, end) in record.tasks.items():
            first, last = found.tasks.get(number, (start, end))
            found.tasks[number] = (min(first, start), max(last, end))
        for mine, theirs in ((found.sent, record.sent), (found.arrived, record.arrived)):
            mine.update((n, max(at, mine.get(n, at))) for n, at in theirs.items())
    return found.to_text()


def record(
    operations: Sequence[Operation], cells: list[Any], tell: Callable[[Operation], None]
) -> Record:
    """Run the operations; `tell` hears of each before."""
    offset = time.time() - time.perf_counter()
    groups = range(1 + max(operation.group for operation in operations))
    tasks, transfers = [_Clock() for _ in groups], [_Clock() for _ in groups]
    ready: dict[int, Noted] = {}  # a cell, and what fills it
    sent = {}
    host = list[Dispatch]()
    last, waited = time.perf_counter(), 0.0
    woken: dict[int, tuple[float, float]] = {}  # a transfer, and when this process waited for it
    clocks = [*tasks, *transfers]
    try:
        for operation in operations:
            tell(operation)
            begin = time.perf_counter()
            values = work_off(operation, cells)
            end = time.perf_counter()
            if operation.task is not None:
                before = begin - last - waited
                host.append(Dispatch(operation.number, before, end - begin, waited > 0))
                last, waited = end, 0.0
            elif operation.waits:
                waited += end - begin
                for clock, place in (ready[cell] for cell in operation.ins):
                    woken[clock.numbers[place]] = (begin, end)
            if operation.task is not None or operation.moves:
                clock = (transfers if operation.moves else tasks)[operation.group]
                inputs = [ready[cell] for cell in operation.ins if cell in ready]
                noted = (clock, clock.note(operation.number, begin, inputs, list(values)))
                ready.update(dict.fromkeys(operation.outs, noted))
            if operation.moves and operation.ins:
                sent[operation.number] = begin + offset
            for cell in operation.drop:
                cells[cell] = None
    finally:
        for clock in clocks:
            clock.stop()
    for error in [clock.error for clock in clocks if clock.error is not None]:
        raise error
    return Record(
        {
            number: (start + offset, end + offset)
            for clock in tasks
            for number, start, end in zip(clock.numbers, clock.starts(), clock.ends, strict=True)
        },
        sent,
        {
            number: _arrival(end, woken.get(number)) + offset
            for clock in transfers
            for number, end, there in zip(clock.numbers, clock.ends, clock.filled, strict=True)
            if there
        },
        [host],
    )


def _arrival(ready: float, waited: tuple[float, float] | None) -> float:
    """When what came is of use: if the process slept until then, once it is awake."""
    return ready if waited is None or ready <= waited[0] else max(ready, waited[1])


class _Clock:
    """Waits for a group's operations one after the other, and notes when each was done."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.filled: list[bool] = []
        self.dispatched: list[float] = []
        self.inputs: list[Sequence[Noted]] = []
        self.ends: list[float] = []
        self.error: Exception | None = None
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def note(self, number: int, at: float, inputs: Sequence[Noted], values: Sequence[Any]) -> int:
        self.numbers.append(number)
        self.filled.append(bool(values))
        self.dispatched.append(at)
        self.inputs.append(inputs)
        self._waiting.put(values)
        return len(self.dispatched) - 1

    def _wait(self) -> None:
        try:
            while (values := self._waiting.get()) is not None:
                for value in values:
                    wait_for(value)
                self.ends.append(time.perf_counter())
        except Exception as error:
            self.error = error

    def starts(self) -> list[float]:
        """When each could begin at the earliest: free, dispatched, and with its inputs there."""
        found, free = [], 0.0
        for at, inputs, end in zip(self.dispatched, self.inputs, self.ends, strict=True):
            there = [clock.ends[n] for clock, n in inputs]
            found.append(min(end, max(free, at, *(t for t in there if t <= end))))
            free = end
        return found

    def stop(self) -> None:
        self._waiting.put(None)
        self._thread.join()


def wait_for(value: Any) -> None:
    """Wait until an array is there, or until it was given up to the next task: a sum.

    While it is being given up `is_deleted()` is still false, but waiting for it fails already.
    """
    try:
        if not value.is_deleted():
            value.block_until_ready()
    except RuntimeError as error:
        if not value.is_deleted() and "deleted or donated" not in str(error):
            raise


Noted = tuple["_Clock", int]
