"""A step run while threads note when the results of tasks and transfers are there."""

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

from meshwright._text import table
from meshwright.pipelines.step_graph import Operation, execute
from meshwright.pipelines.task_programs import TaskKey
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import Costs, Key, Schedule, Task, gives, needs

if TYPE_CHECKING:
    from meshwright.pipelines.plan import Plan


class RecordedDispatch(NamedTuple):
    """A task as its process handed it to the devices, in seconds."""

    task: int
    before: float  # spent on other operations since the last task
    call: float
    waited: bool  # for what another process sent


@dataclasses.dataclass(frozen=True)
class Record:
    """When operations ran, by their number in the builder, in seconds of the machine's clock."""

    tasks: dict[int, tuple[float, float]]  # start and end
    sent: dict[int, float]
    arrived: dict[int, float]
    hosts: list[list[RecordedDispatch]]  # process by process, in its order

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
            [[RecordedDispatch(*one) for one in host] for host in hosts],
        )


def merge(texts: Sequence[str]) -> str:
    """Records of several processes as one; where several run a task, from first to last."""
    found = Record({}, {}, {}, [])
    for record in map(Record.from_text, texts):
        found.hosts.extend(record.hosts)
        for number, (start, end) in record.tasks.items():
            first, last = found.tasks.get(number, (start, end))
            found.tasks[number] = (min(first, start), max(last, end))
        for local_groups, theirs in ((found.sent, record.sent), (found.arrived, record.arrived)):
            local_groups.update((n, max(at, local_groups.get(n, at))) for n, at in theirs.items())
    return found.to_text()


def record(
    operations: Sequence[Operation], slots: list[Any], tell: Callable[[Operation], None]
) -> Record:
    """Run the operations; `tell` hears of each before."""
    offset = time.time() - time.perf_counter()
    groups = range(1 + max(operation.group for operation in operations))
    tasks, transfers = [_Clock() for _ in groups], [_Clock() for _ in groups]
    ready: dict[int, Noted] = {}  # a slot, and what fills it
    sent = {}
    host = list[RecordedDispatch]()
    last, waited = time.perf_counter(), 0.0
    woken: dict[int, tuple[float, float]] = {}  # a transfer, and when this process waited for it
    clocks = [*tasks, *transfers]
    try:
        for operation in operations:
            tell(operation)
            begin = time.perf_counter()
            values = execute(operation, slots)
            end = time.perf_counter()
            if operation.task is not None:
                before = begin - last - waited
                host.append(RecordedDispatch(operation.number, before, end - begin, waited > 0))
                last, waited = end, 0.0
            elif operation.waits:
                waited += end - begin
                for clock, place in (ready[slot] for slot in operation.ins):
                    woken[clock.numbers[place]] = (begin, end)
            if operation.task is not None or operation.moves:
                clock = (transfers if operation.moves else tasks)[operation.group]
                inputs = [ready[slot] for slot in operation.ins if slot in ready]
                noted = (clock, clock.note(operation.number, begin, inputs, list(values)))
                ready.update(dict.fromkeys(operation.outs, noted))
            if operation.moves and operation.ins:
                sent[operation.number] = begin + offset
            for slot in operation.drop:
                slots[slot] = None
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


# `step.timeline()`: when the tasks of a step really ran, against what was predicted.


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
    operations = plan.assembled.builder.operations
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
    predicted = predict(schedule, costs, latency, _dispatches(operations, record))
    undelayed = simulate(plan.proof.schedule, list(costs), latency)
    return MeasuredTimeline(measured, predicted, undelayed)


def _groups(plan: Plan) -> range:
    return range(plan.proof.schedule.groups)


def _latency(operations: Sequence[Operation], record: Record) -> float:
    """From the end of a task, or from when it was sent if that was later, to the arrival.

    What a task has taken had arrived by then, even if it was noted later.
    """
    made = {slot: n for n in record.tasks for slot in operations[n].outs}
    taken: dict[int, float] = {}
    for n, (start, _) in record.tasks.items():
        taken.update((slot, min(start, taken.get(slot, start))) for slot in operations[n].ins)
    late = [
        min(at, *(taken.get(slot, at) for slot in operations[n].outs))
        - max(record.tasks[made[operations[n].ins[0]]][1], record.sent[n])
        for n, at in record.arrived.items()
        if operations[n].ins[0] in made
    ]
    return max(0.0, statistics.fmean(late)) if late else 0.0


def _dispatches(operations: Sequence[Operation], record: Record) -> list[list[Dispatch]]:
    """What every process did, with the mean times of each kind and stage, in milliseconds."""
    return [_typical([(operations[one.task].task, one) for one in host]) for host in record.hosts]


def _typical(dispatches: Sequence[tuple[Task | None, RecordedDispatch]]) -> list[Dispatch]:
    spent: dict[TaskKey, list[RecordedDispatch]] = collections.defaultdict(list)
    for task, one in dispatches:
        if task is not None:
            spent[task.kind, task.stage].append(one)
    before, call = (
        {key: 1e3 * statistics.fmean(one[at] for one in ones) for key, ones in spent.items()}
        for at in (1, 2)
    )
    return [
        Dispatch(task, before[task.kind, task.stage], call[task.kind, task.stage], one.waited)
        for task, one in dispatches
        if task is not None
    ]


def _only_run(plan: Plan, schedule: Schedule) -> Schedule:
    """The schedule without tasks that have nothing to do, as it ran."""
    tasks = [o.task for o in plan.assembled.builder.operations if o.task is not None]
    run = {(task.kind, task.stage) for task in tasks}
    rows = tuple(
        tuple(task for task in row if (task.kind, task.stage) in run) for row in schedule.tasks
    )
    return dataclasses.replace(schedule, tasks=rows, overlapped=())


def _costs(
    schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> tuple[Costs, ...]:
    """The mean time of every kind of task, stage by stage."""
    took: dict[TaskKey, list[float]] = collections.defaultdict(list)
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


# When the tasks of a step run if processes hand them to their groups one after the other.


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
    """A task starts once it is handed over by all its processes, its group is free and its inputs
    are there."""
    simulation = _Simulation(schedule, costs, latency, processes)
    hosts = [_Host(process) for process in processes]
    while any(simulation.advance(host) for host in hosts):
        pass
    first = min(simulation.starts.values())
    rows = (
        tuple(tuple(times[task] - first for task in row) for row in schedule.tasks)
        for times in (simulation.starts, simulation.ends)
    )
    return Timeline(schedule, costs, latency, *rows)


class _Host:
    """A process: what it still has to hand over, and its clock."""

    def __init__(self, dispatches: Sequence[Dispatch]):
        self.queue, self.clock = collections.deque(dispatches), 0.0


class _Simulation:
    """When tasks start and end, as far as they have been handed over."""

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
        self._missing = collections.Counter(one.task for each in processes for one in each)
        self._handed = dict.fromkeys(self._missing, 0.0)  # by the last of its processes so far

    def advance(self, host: _Host) -> bool:
        """Hand over what can be; whether there was anything."""
        before = len(host.queue)
        while host.queue and (there := self._arrivals(host.queue[0].task)) is not None:
            one = host.queue.popleft()
            begin = max([host.clock + one.before, *(there if one.waited else ())])
            host.clock = begin + one.call
            self._take(one.task, begin, there)
        return len(host.queue) < before

    def _arrivals(self, task: Task) -> list[float] | None:
        """When the inputs of a task are in its group; nothing while one is not yet timed."""
        group_of = self.schedule.group_of
        inputs = list(_inputs(task, self.schedule.stages, self._run))
        if any(key not in self._ready for key in inputs):
            return None
        far = [group_of[key[1]] != group_of[task.stage] for key in inputs]
        return [
            self._ready[key] + self.latency * away for key, away in zip(inputs, far, strict=True)
        ]

    def _take(self, task: Task, handed: float, there: Sequence[float]) -> None:
        """A process has handed a task over; the last one that does lets it start."""
        self._handed[task] = max(self._handed[task], handed)
        self._missing[task] -= 1
        if self._missing[task]:
            return
        group = self.schedule.group_of[task.stage]
        self.starts[task] = max([self._handed[task], self._free[group], *there])
        self.ends[task] = self.starts[task] + float(getattr(self.costs[task.stage], task.kind))
        self._ready[gives(task)] = self._free[group] = self.ends[task]


def _inputs(task: Key, stages: int, run: set[Key]) -> Iterator[Key]:
    """What a task waits for; a task that has nothing to do passes on what it would wait for."""
    for key in needs(task, stages):
        if key in run:
            yield key
        else:
            yield from _inputs(key, stages, run)
