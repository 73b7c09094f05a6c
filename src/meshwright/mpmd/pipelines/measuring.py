"""`step.timeline()`: when the tasks of a step really ran, against what was predicted."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright._tables import table
from meshwright.mpmd.pipelines.operations import Operation
from meshwright.mpmd.pipelines.predicting import Handing, predict
from meshwright.mpmd.pipelines.programs import Key
from meshwright.mpmd.pipelines.recording import Dispatch, Record
from meshwright.mpmd.schedules.costs import Costs
from meshwright.mpmd.schedules.schedule import Schedule
from meshwright.mpmd.schedules.tasks import Task
from meshwright.mpmd.schedules.timeline import Timeline, simulate

if TYPE_CHECKING:
    from meshwright.mpmd.pipelines.planning import Plan


@dataclasses.dataclass(frozen=True)
class MeasuredTimeline:
    """A step as it ran and as predicted, in milliseconds.

    `predicted` is made of the mean times of tasks, of transfers, and of handing tasks to the
    groups; `undelayed` is what the schedule would take if that cost nothing.
    """

    measured: Timeline
    predicted: Timeline
    undelayed: Timeline

    @property
    def ratio(self) -> float:
        """The predicted makespan by the measured one."""
        return self.predicted.makespan / self.measured.makespan

    def __str__(self) -> str:
        heading = ["", "makespan", "bubble", "idle"]
        rows = [
            [name, f"{t.makespan:.2f} ms", f"{t.bubble:.2f} ms", f"{100 * t.idle:.0f} %"]
            for name, t in (
                ("measured", self.measured),
                ("predicted", self.predicted),
                ("if handing over tasks were free", self.undelayed),
            )
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
            "undelayed": self.undelayed.to_json(),
        }


def timelines(plan: Plan, record: Record) -> MeasuredTimeline:
    """What was recorded, and what the mean times of its parts predict."""
    operations = plan.assembled.board.operations
    ran = [[n for n in record.tasks if operations[n].group == group] for group in _groups(plan)]
    first = min(start for start, _ in record.tasks.values())
    starts, ends = (
        tuple(tuple(1e3 * (record.tasks[n][at] - first) for n in sorted(row)) for row in ran)
        for at in (0, 1)
    )
    schedule = _only_run(plan, plan.proof.schedule)
    costs = _costs(schedule, starts, ends)
    latency = 1e3 * _latency(operations, record)
    measured = Timeline(schedule, costs, latency, starts, ends)
    predicted = predict(schedule, costs, latency, _handings(operations, record))
    undelayed = simulate(plan.proof.schedule, list(costs), latency)
    return MeasuredTimeline(measured, predicted, undelayed)


def _groups(plan: Plan) -> range:
    return range(plan.proof.schedule.groups)


def _latency(operations: Sequence[Operation], record: Record) -> float:
    """From the end of a task, or from when it was sent if that was later, to the arrival.

    What a task has taken had arrived by then, even if it was noted later.
    """
    made = {cell: n for n in record.tasks for cell in operations[n].outs}
    taken: dict[int, float] = {}
    for n, (start, _) in record.tasks.items():
        taken.update((cell, min(start, taken.get(cell, start))) for cell in operations[n].ins)
    late = [
        min(at, *(taken.get(cell, at) for cell in operations[n].outs))
        - max(record.tasks[made[operations[n].ins[0]]][1], record.sent[n])
        for n, at in record.arrived.items()
        if operations[n].ins[0] in made
    ]
    return max(0.0, statistics.fmean(late)) if late else 0.0


def _handings(operations: Sequence[Operation], record: Record) -> list[list[Handing]]:
    """What every process did, with the mean times of each kind and stage, in milliseconds."""
    return [_typical([(operations[one.task].task, one) for one in host]) for host in record.hosts]


def _typical(dispatches: Sequence[tuple[Task | None, Dispatch]]) -> list[Handing]:
    spent: dict[Key, list[Dispatch]] = collections.defaultdict(list)
    for task, one in dispatches:
        if task is not None:
            spent[task.kind, task.stage].append(one)
    before, call = (
        {key: 1e3 * statistics.fmean(one[at] for one in ones) for key, ones in spent.items()}
        for at in (1, 2)
    )
    return [
        Handing(task, before[task.kind, task.stage], call[task.kind, task.stage], one.waited)
        for task, one in dispatches
        if task is not None
    ]


def _only_run(plan: Plan, schedule: Schedule) -> Schedule:
    """The schedule without tasks that have nothing to do, as it ran."""
    tasks = [o.task for o in plan.assembled.board.operations if o.task is not None]
    run = {(task.kind, task.stage) for task in tasks}
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
