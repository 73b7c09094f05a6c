"""`step.timeline()`: when the tasks of a step really ran, against what was predicted."""

from __future__ import annotations

import collections
import dataclasses
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from meshwright._tables import table
from meshwright.mpmd.pipelines.programs import Key
from meshwright.mpmd.schedules.costs import Costs
from meshwright.mpmd.schedules.schedule import Schedule
from meshwright.mpmd.schedules.timeline import Timeline, simulate

if TYPE_CHECKING:
    from meshwright.mpmd.pipelines.step import Plan


@dataclasses.dataclass(frozen=True)
class MeasuredTimeline:
    """A step as it ran and as predicted from the measured times of its tasks, in milliseconds."""

    measured: Timeline
    predicted: Timeline

    @property
    def ratio(self) -> float:
        """The predicted makespan by the measured one."""
        return self.predicted.makespan / self.measured.makespan

    def __str__(self) -> str:
        heading = ["", "makespan", "bubble", "idle"]
        rows = [
            [name, f"{t.makespan:.2f} ms", f"{t.bubble:.2f} ms", f"{100 * t.idle:.0f} %"]
            for name, t in (("measured", self.measured), ("predicted", self.predicted))
        ]
        figures = table([heading, *rows], [False, True, True, True])
        return f"{figures}\npredicted / measured: {self.ratio:.2f}\n\n{self.measured}"

    def _repr_html_(self) -> str:
        return f"<h4>measured</h4>{self.measured.svg()}<h4>predicted</h4>{self.predicted.svg()}"

    def svg(self) -> str:
        """The picture of what was measured."""
        return self.measured.svg()

    def trace(self) -> dict[str, Any]:
        """Chrome's trace of what was measured; opens in Perfetto."""
        return self.measured.trace()

    def to_json(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "measured": self.measured.to_json(),
            "predicted": self.predicted.to_json(),
        }


def measure(plan: Plan, cells: list[Any]) -> MeasuredTimeline:
    """Run a step while threads note when the results of tasks and transfers are there."""
    schedule = plan.proof.schedule
    tasks = [_Clock() for _ in range(schedule.groups)]
    transfers = [_Clock() for _ in range(schedule.groups)]
    ready: dict[int, Noted] = {}  # a cell, and what fills it
    for operation in plan.operations:
        before = time.perf_counter()
        values = operation.call(*[cells[cell] for cell in operation.ins])  # type: ignore[misc]
        for cell, value in zip(operation.outs, values, strict=True):
            cells[cell] = value
        clock = tasks[operation.group] if operation.task is not None else None
        if operation.source is not None and operation.ins[0] in ready:
            clock = transfers[operation.source]
        if clock is not None:
            inputs = [ready[cell] for cell in operation.ins if cell in ready]
            noted = (clock, clock.note(before, inputs, list(values)))
            ready.update(dict.fromkeys(operation.outs, noted))
        for cell in operation.drop:
            cells[cell] = None
    for clock in (*tasks, *transfers):
        clock.stop()
    return _timelines(plan, tasks, transfers)


class _Clock:
    """Waits for a group's tasks one after the other, and notes when each was done."""

    def __init__(self) -> None:
        self.dispatched: list[float] = []
        self.inputs: list[Sequence[Noted]] = []
        self.ends: list[float] = []
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def note(self, at: float, inputs: Sequence[Noted], values: Any) -> int:
        self.dispatched.append(at)
        self.inputs.append(inputs)
        self._tasks.put(values)
        return len(self.dispatched) - 1

    def _wait(self) -> None:
        while (values := self._tasks.get()) is not None:
            for value in values:
                # A sum is given up to the next task, perhaps before we look.
                if not value.is_deleted():
                    _wait_for(value)
            self.ends.append(time.perf_counter())

    def starts(self) -> list[float]:
        """When each could begin at the earliest: free, dispatched, and with its inputs there."""
        found, free = [], 0.0
        for at, inputs, end in zip(self.dispatched, self.inputs, self.ends, strict=True):
            there = [clock.ends[n] for clock, n in inputs]
            found.append(min(end, max(free, at, *(t for t in there if t <= end))))
            free = end
        return found

    def stop(self) -> None:
        self._tasks.put(None)
        self._thread.join()


def _wait_for(value: Any) -> None:
    try:
        jax.block_until_ready(value)  # type: ignore[no-untyped-call]
    except RuntimeError:
        if not value.is_deleted():
            raise


Noted = tuple["_Clock", int]


def _timelines(
    plan: Plan, tasks: Sequence[_Clock], transfers: Sequence[_Clock]
) -> MeasuredTimeline:
    first = min(clock.dispatched[0] for clock in tasks if clock.dispatched)
    starts, ends = [], []
    for clock in tasks:
        began = clock.starts()
        starts.append(tuple(1e3 * (start - first) for start in began))
        ends.append(tuple(1e3 * (end - first) for end in clock.ends))
    schedule = _only_run(plan, plan.proof.schedule)
    costs = _costs(schedule, starts, ends)
    late = [
        end - max(at, *(c.ends[n] for c, n in inputs))
        for clock in transfers
        for at, inputs, end in zip(clock.dispatched, clock.inputs, clock.ends, strict=True)
    ]
    latency = max(0.0, 1e3 * statistics.fmean(late)) if late else 0.0
    measured = Timeline(schedule, costs, latency, tuple(starts), tuple(ends))
    return MeasuredTimeline(measured, simulate(plan.proof.schedule, list(costs), latency))


def _only_run(plan: Plan, schedule: Schedule) -> Schedule:
    """The schedule without tasks that have nothing to do, as it ran."""
    run = {(o.task.kind, o.task.stage) for o in plan.operations if o.task is not None}
    rows = tuple(
        tuple(task for task in row if (task.kind, task.stage) in run) for row in schedule.tasks
    )
    return dataclasses.replace(schedule, tasks=rows, overlapped=())


def _costs(
    schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> tuple[Costs, ...]:
    """The mean time of every kind of task, stage by stage."""
    took: dict[Key, list[float]] = collections.defaultdict(list)
    for row, begins, stops in zip(schedule.tasks, starts, ends, strict=True):
        for task, start, end in zip(row, begins, stops, strict=True):
            took[task.kind, task.stage].append(end - start)
    typical = {key: statistics.fmean(times) for key, times in took.items()}
    found = []
    for stage in range(schedule.stages):
        times = {kind: typical.get((kind, stage), 0.0) for kind in ("F", "B", "W", "BW")}
        whole = times["BW"] or times["B"] + times["W"]
        found.append(Costs(max(times["F"], 1e-6), times["B"], times["W"], max(whole, 1e-6)))
    return tuple(found)
