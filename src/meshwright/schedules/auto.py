"""`Auto`: the best schedule found for given costs, latency and memory."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator

from meshwright._checks import check_integer, check_time
from meshwright.errors import ScheduleError, short
from meshwright.schedules.named import NAMED, fits, schedule
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import AnyCosts, Costs, Schedule, Task, per_stage


@dataclasses.dataclass(frozen=True)
class Auto:
    """Finds a schedule: never slower than the best named one that fits the same memory.

    Tries every named schedule, and schedules built by running them greedily with these costs;
    the shortest makespan wins, then the least memory. `memory` is the most activations a group
    may hold at once, in microbatches of its share of the model. `split=False` keeps backwards
    whole. The same question has the same answer in every process.

    >>> import meshwright as mw
    >>> best = mw.schedules.Auto(latency=0.25, memory=4).build(groups=4, microbatches=8)
    >>> mw.schedules.simulate(best, latency=0.25).makespan, mw.schedules.check(best).live
    (28.75, (8, 8, 8, 8))
    """

    costs: AnyCosts = "F=1,B=1,W=1"
    latency: float = 0.0
    memory: float | None = None
    split: bool = True

    def __post_init__(self) -> None:
        _limit(self.memory)
        check_time(self.latency, "latency")

    def build(self, groups: int, microbatches: int, stages: int | None = None) -> Schedule:
        """The best schedule found for so many groups and microbatches."""
        groups = check_integer("auto: groups", groups, error=ScheduleError)
        microbatches = check_integer("auto: microbatches", microbatches, error=ScheduleError)
        if stages is None and isinstance(self.costs, (list, tuple)):
            stages = len(self.costs)
        if stages is not None:
            check_integer("auto: stages", stages, least=groups, error=ScheduleError)
        limit, latency = _limit(self.memory), check_time(self.latency, "latency")
        tried = list(self._named(groups, microbatches, stages, latency))
        fitting = [one for one in tried if max(one.memory) <= limit]
        for layout, group_of in _layouts(groups, stages).items():
            problem = self._problem(group_of, microbatches, latency, limit)
            least = min((one.makespan for one in fitting), default=math.inf)
            if rows := _search(problem, least, self.split):
                found = Schedule(layout, microbatches, group_of, rows)
                fitting.append(simulate(found, self.costs, latency))
        if not fitting:
            raise ScheduleError(_nothing_fits(tried, limit))
        best = min(fitting, key=lambda one: (round(one.makespan, 9), max(one.memory)))
        return dataclasses.replace(best.schedule, name=f"auto: {best.schedule.name}")

    def _named(
        self, groups: int, microbatches: int, stages: int | None, latency: float
    ) -> Iterator[Timeline]:
        for name, named in NAMED.items():
            if named.training and fits(name, groups, microbatches, stages):
                one = schedule(name, groups=groups, microbatches=microbatches, stages=stages)
                if self.split or "W" not in one.counts:
                    yield simulate(one, self.costs, latency)

    def _problem(
        self, group_of: tuple[int, ...], microbatches: int, latency: float, limit: float
    ) -> Problem:
        groups = max(group_of) + 1
        blank = Schedule("auto", microbatches, group_of, ((),) * groups)
        room = tuple(
            math.floor(min(limit, microbatches) * len(own) + 1e-9) for own in blank.stages_of
        )
        return Problem(group_of, microbatches, per_stage(self.costs, blank), latency, room)


def _search(problem: Problem, least: float, split: bool) -> Rows | None:
    """The best of all habits, if it ends before `least`; nothing is tried where none can."""
    bound, best = least_makespan(problem), None
    for habits in _habits(problem, split):
        if least <= bound + 1e-9:
            break
        found = greedy(problem, habits)
        if found is not None and found[0] < least - 1e-9:
            least, best = found
    return best


def _layouts(groups: int, stages: int | None) -> dict[str, tuple[int, ...]]:
    """Ways to put stages on groups: in a line, dealt out in a loop, down and up again."""
    down = tuple(range(groups))
    layouts = {}
    if stages in (None, groups):
        layouts["in a line"] = down
    if stages in (None, 2 * groups) and groups > 1:
        layouts["in a V"] = down + down[::-1]
    if stages != groups and groups > 1:
        layouts["in a loop"] = tuple(stage % groups for stage in range(stages or 2 * groups))
    return layouts or {"alone": (0,) * (stages or 1)}


def _habits(problem: Problem, split: bool) -> Iterator[Habits]:
    several = len(problem.group_of) > problem.groups
    for ahead, more, patience, reserve in itertools.product(
        (1.0, 1.5, 2.0, 1e6), (0, 1), (0.0, 0.5, 1.0) if split else (0.0,), (False, True)
    ):
        if (several or not reserve) and not (ahead == 1e6 and more):
            yield Habits(ahead, more, patience, reserve, split)


def _limit(memory: float | None) -> float:
    if memory is None:
        return math.inf
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not memory >= 1:
        raise ScheduleError(
            f"memory is how many microbatches a group may hold, from 1, not {short(memory)}."
        )
    return float(memory)


def _nothing_fits(tried: list[Timeline], limit: float) -> str:
    least = min(tried, key=lambda one: max(one.memory))
    return (
        f"auto: no schedule found that holds at most {limit:g} microbatches per group. The "
        f"smallest one, {least.schedule.name}, holds {max(least.memory):g}."
    )


# Build a schedule by running it: each group takes, whenever it is free, what seems best.


Rows = tuple[tuple[Task, ...], ...]

_SLACK = 1e-9  # so that sums of floating-point times compare as the numbers they stand for


@dataclasses.dataclass(frozen=True)
class Habits:
    """How a group chooses. Backwards go first; these say how far forwards may run ahead.

    A group starts no forward while `ahead * (groups behind it) + 1 + more` of its microbatches
    wait for their backward. It does a weight gradient rather than wait, unless something better
    arrives within `patience` of the weight gradient's time. With `reserve`, a microbatch enters
    a group only if all of the group's stages can hold it: slower to fill, but never stuck.
    """

    ahead: float
    more: int = 0
    patience: float = 0.0
    reserve: bool = False
    split: bool = True


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be scheduled: `room` is how many activations of its stages a group can hold."""

    group_of: tuple[int, ...]
    microbatches: int
    costs: tuple[Costs, ...]
    latency: float
    room: tuple[int, ...]

    @property
    def groups(self) -> int:
        return max(self.group_of) + 1


def greedy(problem: Problem, habits: Habits) -> tuple[float, Rows] | None:
    """When the last task ends and the tasks in the order taken, or None if the groups got stuck."""
    run = _Run(problem, habits)
    rows = run.rows()
    return None if rows is None else (max(run.free_at), tuple(map(tuple, rows)))


def least_makespan(problem: Problem) -> float:
    """No schedule ends earlier: the work of a group, after the way to it."""
    way = 0.0
    reached: dict[int, float] = {}
    for stage, group in enumerate(problem.group_of):
        far = problem.latency if stage and problem.group_of[stage - 1] != group else 0.0
        reached.setdefault(group, way + far)
        way += far + problem.costs[stage].F
    work = dict.fromkeys(reached, 0.0)
    for stage, group in enumerate(problem.group_of):
        cost = problem.costs[stage]
        work[group] += problem.microbatches * (cost.F + min(cost.BW, cost.B + cost.W))
    return max(reached[group] + work[group] for group in work)


class _Run:
    def __init__(self, problem: Problem, habits: Habits):
        self.problem, self.habits = problem, habits
        groups = problem.groups
        self.stages = len(problem.group_of)
        self.chunks = [problem.group_of.count(g) for g in range(groups)]
        self.tasks: list[list[Task]] = [[] for _ in range(groups)]
        self.free_at = [0.0] * groups
        self.held = [0] * groups  # activations, until their weight gradient is done
        self.in_flight = [0] * groups  # forwards whose backward is still to come
        # What a group can take, by kind: (time it is there, order of preference, task).
        self.forwards: list[list[tuple[float, int, Task]]] = [[] for _ in range(groups)]
        self.backwards: list[list[tuple[float, int, Task]]] = [[] for _ in range(groups)]
        self.weights: list[list[Task]] = [[] for _ in range(groups)]
        self.events: list[tuple[float, int]] = []
        self._offer(self.forwards[problem.group_of[0]], 0.0, Task("F", 0, 0))
        self.events = [(0.0, problem.group_of[0])]

    def rows(self) -> list[list[Task]] | None:
        while self.events:
            now, group = heapq.heappop(self.events)
            if now + _SLACK < self.free_at[group]:
                continue  # it is busy, and asks again when it is free
            if (task := self._choose(group, now)) is not None:
                self._run(group, task, now)
        per_stage = 3 if self.habits.split else 2
        wanted = per_stage * self.stages * self.problem.microbatches
        return self.tasks if sum(map(len, self.tasks)) == wanted else None

    def _choose(self, group: int, now: float) -> Task | None:
        if (task := _take(self.backwards[group], now)) is not None:
            return task
        owed = self.weights[group]
        if self._may_forward(group, now) and (task := _take(self.forwards[group], now)) is not None:
            return task
        if not owed:
            return None
        cost = self.problem.costs[owed[0].stage].W
        soon = now + self.habits.patience * cost
        coming = [item[0] for item in self.backwards[group]]
        if self._may_forward(group, now):
            coming += [item[0] for item in self.forwards[group]]
        if any(now + _SLACK < at < soon - _SLACK for at in coming):
            return None
        return owed.pop(0)

    def _may_forward(self, group: int, now: float) -> bool:
        ready = [item[2] for item in self.forwards[group] if item[0] <= now + _SLACK]
        if not ready:
            return True
        room = self.problem.room[group] - self.held[group]
        entering = all(task.stage < self.problem.groups for task in ready)
        if room < (self.chunks[group] if self.habits.reserve and entering else 1):
            return False
        behind = self.problem.groups - 1 - group
        most = (self.habits.ahead * behind + 1 + self.habits.more) * self.chunks[group]
        return self.in_flight[group] < most or not entering

    def _run(self, group: int, task: Task, now: float) -> None:
        kind, stage, microbatch = task
        self.tasks[group].append(task)
        end = now + float(getattr(self.problem.costs[stage], kind))
        self.free_at[group] = end
        heapq.heappush(self.events, (end, group))
        if kind == "F":
            self.held[group] += 1
            self.in_flight[group] += 1
            if stage == 0 and microbatch + 1 < self.problem.microbatches:
                self._offer(self.forwards[group], 0.0, Task("F", 0, microbatch + 1))
            if stage + 1 < self.stages:
                self._send(group, end, Task("F", stage + 1, microbatch))
            else:
                self._send(group, end, self._backward(stage, microbatch))
            return
        if kind != "B":
            self.held[group] -= 1
        if kind != "W":
            self.in_flight[group] -= 1
            if kind == "B":
                self.weights[group].append(Task("W", stage, microbatch))
            if stage:
                self._send(group, end, self._backward(stage - 1, microbatch))

    def _backward(self, stage: int, microbatch: int) -> Task:
        return Task("B" if self.habits.split else "BW", stage, microbatch)

    def _send(self, source: int, end: float, task: Task) -> None:
        """A result lets its next task begin, here or, after the latency, in another group."""
        target = self.problem.group_of[task.stage]
        at = end + (self.problem.latency if target != source else 0.0)
        self._offer((self.forwards if task.kind == "F" else self.backwards)[target], at, task)
        if target != source:
            heapq.heappush(self.events, (at, target))

    def _offer(self, offers: list[tuple[float, int, Task]], at: float, task: Task) -> None:
        """Early microbatches first; of the same one, the stage nearest to the end of its way."""
        deep = -task.stage if task.kind == "F" else task.stage
        offers.append((at, task.microbatch * self.stages + deep, task))


def _take(offers: list[tuple[float, int, Task]], now: float) -> Task | None:
    """The best offer that is there."""
    there = [item for item in offers if item[0] <= now + _SLACK]
    if not there:
        return None
    best = min(there, key=lambda item: item[1])
    offers.remove(best)
    return best[2]
