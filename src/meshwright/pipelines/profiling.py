"""`MeasuredTimeline`: when the tasks of a step really ran, and what their mean times predict.

Three parts: `record` runs a step while threads note when results are ready; `measured_timeline`
makes timelines of what was recorded; `predict` simulates a schedule whose tasks are dispatched by
processes, one after the other.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright._html import Html, block, tag
from meshwright._show import Table, short_repr
from meshwright.pipelines.step_graph import Operation, execute
from meshwright.pipelines.task_programs import TaskKey
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import Costs, Key, Schedule, Task, TaskKind, gives, needs

if TYPE_CHECKING:
    from meshwright.pipelines.plan import Plan

_LEAST_COST = 1e-6  # milliseconds: `Costs` must be positive, also for tasks that did not run


@dataclasses.dataclass(frozen=True, repr=False)
class MeasuredTimeline:
    """A step as it ran and as predicted, in milliseconds.

    `predicted` is made of the mean times of tasks, of transfers, and of dispatching tasks to the
    groups; `undelayed` is what the schedule would take if dispatching cost nothing.
    """

    measured: Timeline
    predicted: Timeline
    undelayed: Timeline

    @property
    def ratio(self) -> float:
        """The predicted makespan divided by the measured one."""
        return self.predicted.makespan / self.measured.makespan

    def __repr__(self) -> str:
        return short_repr(
            self,
            f"{self.measured.schedule.name}: {self.measured.makespan:.2f} ms, "
            f"predicted {self.predicted.makespan:.2f} ms",
        )

    def __str__(self) -> str:
        rows = [
            [name, f"{t.makespan:.2f} ms", f"{t.bubble:.2f} ms", f"{100 * t.idle:.0f} %"]
            for name, t in (
                ("measured", self.measured),
                ("predicted", self.predicted),
                ("if dispatching tasks were free", self.undelayed),
            )
        ]
        figures = Table(["", "makespan", "bubble", "idle"], rows, [False, True, True, True])
        return f"{figures.text()}\npredicted / measured: {self.ratio:.2f}\n\n{self.measured}"

    def _repr_html_(self) -> str:
        drawn = (Html(each.svg()) for each in (self.measured, self.predicted))
        return block(tag("h3", "measured"), next(drawn), tag("h3", "predicted"), next(drawn))

    def svg(self) -> str:
        """Draw what was measured."""
        return self.measured.svg()

    def trace(self) -> dict[str, Any]:
        """Make a Chrome trace of what was measured; it opens in Perfetto."""
        return self.measured.trace()

    def to_json(self) -> dict[str, Any]:
        """Return plain data for scripts; times in milliseconds."""
        return {
            "ratio": self.ratio,
            "measured": self.measured.to_json(),
            "predicted": self.predicted.to_json(),
            "undelayed": self.undelayed.to_json(),
        }


# Run a step and note when the results of tasks and transfers are ready.


class RecordedDispatch(NamedTuple):
    """A task as its process dispatched it, in seconds."""

    task: int  # the number of its operation
    before: float  # spent on other operations since the last task
    call: float
    waited: bool  # for what another process sent


@dataclasses.dataclass(frozen=True)
class Record:
    """When operations ran, by their number in the step, in seconds since the epoch.

    Wall-clock times, since records of several processes are merged.
    """

    tasks: dict[int, tuple[float, float]]  # start and end
    sent: dict[int, float]
    arrived: dict[int, float]
    dispatches: list[list[RecordedDispatch]]  # by process, in its order

    def to_text(self) -> str:
        times = (self.tasks, self.sent, self.arrived)
        return json.dumps([[list(part.items()) for part in times], self.dispatches])

    @staticmethod
    def from_text(text: str) -> Record:
        # Pairs, not objects: JSON would turn the numbers of operations into strings.
        (tasks, sent, arrived), dispatches = json.loads(text)
        return Record(
            {number: (start, end) for number, (start, end) in tasks},
            dict(sent),
            dict(arrived),
            [[RecordedDispatch(*fields) for fields in process] for process in dispatches],
        )


def merge(texts: Sequence[str]) -> str:
    """Merge the records of several processes.

    A task of several processes runs from its first start to its last end.
    """
    merged = Record({}, {}, {}, [])
    for record in map(Record.from_text, texts):
        merged.dispatches.extend(record.dispatches)
        for number, (start, end) in record.tasks.items():
            first, last = merged.tasks.get(number, (start, end))
            merged.tasks[number] = (min(first, start), max(last, end))
        for latest, times in ((merged.sent, record.sent), (merged.arrived, record.arrived)):
            latest.update((number, max(at, latest.get(number, at))) for number, at in times.items())
    return merged.to_text()


def record(
    operations: Sequence[Operation], slots: list[Any], on_start: Callable[[Operation], None]
) -> Record:
    """Run the operations; `on_start(op)` is called before each one."""
    offset = time.time() - time.perf_counter()
    groups = range(1 + max(operation.group for operation in operations))
    # A group's transfers have a thread of their own: they run beside its tasks.
    tasks, transfers = [_Completions() for _ in groups], [_Completions() for _ in groups]
    filled_by: dict[int, Pending] = {}  # by slot
    sent: dict[int, float] = {}
    waits: dict[int, tuple[float, float]] = {}  # a transfer, and when this process waited for it
    dispatches: list[RecordedDispatch] = []
    last, waited = time.perf_counter(), 0.0
    try:
        for operation in operations:
            on_start(operation)
            begin = time.perf_counter()
            values = execute(operation, slots)
            end = time.perf_counter()
            if operation.task is not None:
                times = (begin - last - waited, end - begin)
                dispatches.append(RecordedDispatch(operation.number, *times, waited > 0))
                last, waited = end, 0.0
            elif operation.waits:
                waited += end - begin
                for completions, index in (filled_by[slot] for slot in operation.ins):
                    waits[completions.numbers[index]] = (begin, end)
            if operation.task is not None or operation.is_transfer:
                completions = (transfers if operation.is_transfer else tasks)[operation.group]
                inputs = [filled_by[slot] for slot in operation.ins if slot in filled_by]
                index = completions.add(operation.number, begin, inputs, list(values))
                filled_by.update(dict.fromkeys(operation.outs, (completions, index)))
            if operation.is_transfer and operation.ins:
                sent[operation.number] = begin + offset
            for slot in operation.drop:
                slots[slot] = None
    finally:
        for completions in (*tasks, *transfers):
            completions.stop()
    for completions in (*tasks, *transfers):
        if completions.error is not None:
            raise completions.error
    return Record(
        {
            number: (start + offset, end + offset)
            for group in tasks
            for number, start, end in zip(group.numbers, group.starts(), group.ends, strict=True)
        },
        sent,
        {
            number: _arrival(end, waits.get(number)) + offset
            for group in transfers
            for number, end, values in zip(group.numbers, group.ends, group.filled, strict=True)
            if values  # the sending side of a transfer has none
        },
        [dispatches],
    )


def _arrival(ready: float, waited: tuple[float, float] | None) -> float:
    """Return when a transferred value can be used: after the wait, if the process waited for it."""
    return ready if waited is None or ready <= waited[0] else max(ready, waited[1])


class _Completions:
    """A thread that waits for a group's operations in order, and notes when each was done.

    JAX tells only that a value is ready, not when it became so: waiting is the one way to learn
    it on every backend.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.filled: list[bool] = []  # whether it has values at all
        self.dispatched: list[float] = []
        self.inputs: list[Sequence[Pending]] = []
        self.ends: list[float] = []
        self.error: Exception | None = None
        self._values: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def add(self, number: int, at: float, inputs: Sequence[Pending], values: Sequence[Any]) -> int:
        """Wait for the values of an operation dispatched at `at`; returns its index here."""
        self.numbers.append(number)
        self.filled.append(bool(values))
        self.dispatched.append(at)
        self.inputs.append(inputs)
        self._values.put(values)
        return len(self.dispatched) - 1

    def _wait(self) -> None:
        try:
            while (values := self._values.get()) is not None:
                for value in values:
                    wait_for(value)
                self.ends.append(time.perf_counter())
        except Exception as error:
            self.error = error

    def starts(self) -> list[float]:
        """Return when each could begin: dispatched, inputs ready, the one before it done."""
        starts, free = [], 0.0
        for at, inputs, end in zip(self.dispatched, self.inputs, self.ends, strict=True):
            ready = [completions.ends[index] for completions, index in inputs]
            # Another thread may have noted an input late, even after this task was done.
            starts.append(min(end, max(free, at, *(t for t in ready if t <= end))))
            free = end
        return starts

    def stop(self) -> None:
        self._values.put(None)
        self._thread.join()


Pending = tuple[_Completions, int]  # an operation that was dispatched: its thread and index


def wait_for(value: Any) -> None:
    """Wait until an array is ready, or was donated to the next task (a total).

    While it is being donated `is_deleted()` is still false, but waiting for it fails already.
    """
    try:
        if not value.is_deleted():
            value.block_until_ready()
    except RuntimeError as error:
        if not value.is_deleted() and "deleted or donated" not in str(error):
            raise


# Timelines of what was recorded.


def measured_timeline(plan: Plan, record: Record) -> MeasuredTimeline:
    """Make timelines of what was recorded and of what its mean times predict."""
    operations = plan.assembled.builder.operations
    groups = range(plan.proof.schedule.groups)
    # Operations of a group are numbered in the order of its schedule.
    numbers = [
        sorted(number for number in record.tasks if operations[number].group == group)
        for group in groups
    ]
    first = min(start for start, _ in record.tasks.values())
    starts, ends = (
        tuple(tuple(1e3 * (record.tasks[n][at] - first) for n in row) for row in numbers)
        for at in (0, 1)
    )
    schedule = _without_empty_tasks(plan, plan.proof.schedule)
    costs = _mean_costs(schedule, starts, ends)
    latency = 1e3 * _mean_latency(operations, record)
    measured = Timeline(schedule, costs, latency, starts, ends)
    dispatches = [_mean_dispatches(operations, process) for process in record.dispatches]
    predicted = predict(schedule, costs, latency, dispatches)
    undelayed = simulate(plan.proof.schedule, list(costs), latency)
    return MeasuredTimeline(measured, predicted, undelayed)


def _without_empty_tasks(plan: Plan, schedule: Schedule) -> Schedule:
    """Return the schedule without the tasks that have nothing to do, as it ran."""
    tasks = [operation.task for operation in plan.assembled.builder.operations]
    kinds = {(task.kind, task.stage) for task in tasks if task is not None}
    rows = tuple(
        tuple(task for task in row if (task.kind, task.stage) in kinds) for row in schedule.tasks
    )
    return dataclasses.replace(schedule, tasks=rows, overlapped=())


def _mean_latency(operations: Sequence[Operation], record: Record) -> float:
    """Return seconds from the end of a task, or from a later send, to the arrival."""
    maker = {slot: n for n in record.tasks for slot in operations[n].outs}
    # What a task has read had arrived when it started, even if that was noted later.
    first_read: dict[int, float] = {}
    for n, (start, _) in record.tasks.items():
        for slot in operations[n].ins:
            first_read[slot] = min(start, first_read.get(slot, start))
    latencies = [
        min(at, *(first_read.get(slot, at) for slot in operations[n].outs))
        - max(record.tasks[maker[operations[n].ins[0]]][1], record.sent[n])
        for n, at in record.arrived.items()
        if operations[n].ins[0] in maker
    ]
    return max(0.0, statistics.fmean(latencies)) if latencies else 0.0


def _mean_costs(
    schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> tuple[Costs, ...]:
    """Return the mean time of every kind of task, stage by stage."""
    times: dict[TaskKey, list[float]] = collections.defaultdict(list)
    for row, row_starts, row_ends in zip(schedule.tasks, starts, ends, strict=True):
        for task, start, end in zip(row, row_starts, row_ends, strict=True):
            times[task.kind, task.stage].append(end - start)
    means = {key: statistics.fmean(durations) for key, durations in times.items()}
    costs = []
    for stage in range(schedule.stages):
        f, b, w, bw = (means.get((kind, stage), 0.0) for kind in TaskKind)
        costs.append(Costs(max(f, _LEAST_COST), b, w, max(bw or b + w, _LEAST_COST)))
    return tuple(costs)


def _mean_dispatches(
    operations: Sequence[Operation], process: Sequence[RecordedDispatch]
) -> list[Dispatch]:
    """Return what a process dispatched, with mean times by kind and stage, in milliseconds."""
    recorded = [(task, d) for d in process if (task := operations[d.task].task) is not None]
    by_kind: dict[TaskKey, list[RecordedDispatch]] = collections.defaultdict(list)
    for task, dispatch in recorded:
        by_kind[task.kind, task.stage].append(dispatch)
    before = {key: 1e3 * statistics.fmean(d.before for d in ds) for key, ds in by_kind.items()}
    call = {key: 1e3 * statistics.fmean(d.call for d in ds) for key, ds in by_kind.items()}
    return [
        Dispatch(task, before[task.kind, task.stage], call[task.kind, task.stage], dispatch.waited)
        for task, dispatch in recorded
    ]


# Predict when the tasks of a step run if processes dispatch them to their groups one by one.


class Dispatch(NamedTuple):
    """Host time spent before and in dispatching one task."""

    task: Task
    before: float
    call: float
    waited: bool  # until the task's inputs are there


def predict(
    schedule: Schedule,
    costs: tuple[Costs, ...],
    latency: float,
    processes: Sequence[Sequence[Dispatch]],
) -> Timeline:
    """Simulate a schedule whose tasks processes dispatch, each in its order.

    A task starts once all its processes have dispatched it, its group is free and its inputs have
    arrived. All times are in the unit of `costs`.
    """
    simulation = _Simulation(schedule, costs, latency, processes)
    hosts = [_Host(process) for process in processes]
    # A host stops at a task whose inputs are not timed yet, until another has dispatched what
    # makes them.
    while any(simulation.advance(host) for host in hosts):
        pass
    first = min(simulation.starts.values())
    rows = (
        tuple(tuple(times[task] - first for task in row) for row in schedule.tasks)
        for times in (simulation.starts, simulation.ends)
    )
    return Timeline(schedule, costs, latency, *rows)


class _Host:
    """A process: what it has yet to dispatch, and its clock."""

    def __init__(self, dispatches: Sequence[Dispatch]):
        self.queue, self.clock = collections.deque(dispatches), 0.0


class _Simulation:
    """When tasks start and end, as far as they have been dispatched."""

    def __init__(
        self,
        schedule: Schedule,
        costs: tuple[Costs, ...],
        latency: float,
        processes: Sequence[Sequence[Dispatch]],
    ):
        self.schedule, self.costs, self.latency = schedule, costs, latency
        self.starts, self.ends = dict[Task, float](), dict[Task, float]()
        self._run = {gives(task) for row in schedule.tasks for task in row}
        self._ready, self._free = dict[Key, float](), [0.0] * schedule.groups
        # How many processes have yet to dispatch a task, and when the last one so far did.
        self._missing = collections.Counter(d.task for process in processes for d in process)
        self._dispatched = dict.fromkeys(self._missing, 0.0)

    def advance(self, host: _Host) -> bool:
        """Dispatch what can be; returns whether there was anything."""
        before = len(host.queue)
        while host.queue and (arrivals := self._arrivals(host.queue[0].task)) is not None:
            dispatch = host.queue.popleft()
            begin = max([host.clock + dispatch.before, *(arrivals if dispatch.waited else ())])
            host.clock = begin + dispatch.call
            self._take(dispatch.task, begin, arrivals)
        return len(host.queue) < before

    def _arrivals(self, task: Task) -> list[float] | None:
        """Return when the inputs of a task are in its group; None while one is not yet timed."""
        group_of = self.schedule.group_of
        inputs = list(_inputs(task, self.schedule.stages, self._run))
        if any(key not in self._ready for key in inputs):
            return None
        crosses = [group_of[key[1]] != group_of[task.stage] for key in inputs]
        return [
            self._ready[key] + self.latency * far for key, far in zip(inputs, crosses, strict=True)
        ]

    def _take(self, task: Task, dispatched: float, arrivals: Sequence[float]) -> None:
        """Note that a process has dispatched a task; the last one that does lets it start."""
        self._dispatched[task] = max(self._dispatched[task], dispatched)
        self._missing[task] -= 1
        if self._missing[task]:
            return
        group = self.schedule.group_of[task.stage]
        self.starts[task] = max([self._dispatched[task], self._free[group], *arrivals])
        self.ends[task] = self.starts[task] + float(getattr(self.costs[task.stage], task.kind))
        self._ready[gives(task)] = self._free[group] = self.ends[task]


def _inputs(task: Key, stages: int, run: set[Key]) -> Iterator[Key]:
    """Yield what a task waits for; in place of an empty task, what that would wait for."""
    for key in needs(task, stages):
        if key in run:
            yield key
        else:
            yield from _inputs(key, stages, run)
