"""`Auto`: search for the fastest schedule for given costs, latency and memory.

Two sources of candidates: every named schedule that is defined for the sizes, and schedules built
greedily. The greedy builder simulates the groups; whenever one is free it takes the task that a
policy prefers, and the order in which tasks were taken is the schedule. A few dozen policies are
tried for each way to lay stages out on groups, until one reaches a lower bound of the makespan.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from meshwright._checks import check_integer, check_time
from meshwright.errors import ScheduleError, short
from meshwright.schedules.named import NAMED, fits, schedule
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import (
    AnyCosts,
    Costs,
    Schedule,
    Task,
    TaskKind,
    check_costs,
    costs_per_stage,
)

Rows = tuple[tuple[Task, ...], ...]
Offer = tuple[float, int, Task]  # the time its inputs are there, its rank, the task

_SLACK = 1e-9  # so that sums of floating-point times compare as the numbers they stand for
_NO_LIMIT = 1e6


@dataclasses.dataclass(frozen=True, repr=False)
class Auto:
    """A search for a schedule that is never slower than the best named one in the same memory.

    `build` tries every named schedule, and schedules built greedily with these costs; the
    shortest makespan wins, then the least memory. `costs` and `latency` are those of `simulate`.
    `memory` is the most activations a group may hold at once, in microbatches of its share of the
    model; None for no limit. `split=False` keeps backwards whole. The search is deterministic:
    every process gets the same schedule.

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
        _memory_limit(self.memory)
        check_time(self.latency, "latency")
        check_costs(self.costs)
        if not isinstance(self.split, bool):
            raise ScheduleError(f"split: {short(self.split)} is not True or False.", option="split")

    def __repr__(self) -> str:
        return (
            f"Auto(costs={short(self.costs)}, latency={self.latency!r}, memory={self.memory!r}, "
            f"split={self.split!r})"
        )

    def build(self, groups: int, microbatches: int, stages: int | None = None) -> Schedule:
        """Return the best schedule found for a number of groups and microbatches.

        `stages` are those of the whole model: by default one per cost if `costs` is a list, else
        one or two per group, whichever is faster.
        """
        groups = check_integer("auto: groups", groups, error=ScheduleError)
        microbatches = check_integer("auto: microbatches", microbatches, error=ScheduleError)
        if stages is None and isinstance(self.costs, (list, tuple)):
            stages = len(self.costs)
        if stages is not None:
            check_integer("auto: stages", stages, least=groups, error=ScheduleError)
        limit, latency = _memory_limit(self.memory), check_time(self.latency, "latency")
        tried = list(self._named(groups, microbatches, stages, latency))
        fitting = [timeline for timeline in tried if max(timeline.memory) <= limit]
        fitting += self._greedy(groups, microbatches, stages, latency, limit, fitting)
        if not fitting:
            # All policies got stuck with groups full of forwards. One microbatch at a time cannot.
            fitting += self._greedy(groups, microbatches, stages, latency, 1.0, fitting)
        if not fitting:
            raise ScheduleError(_nothing_fits(tried, limit), option="memory")
        # Sums of the same times in another order differ in their last bits; rounded, such
        # makespans tie and memory decides.
        best = min(
            fitting, key=lambda timeline: (round(timeline.makespan, 9), max(timeline.memory))
        )
        return dataclasses.replace(best.schedule, name=f"auto: {best.schedule.name}")

    def _named(
        self, groups: int, microbatches: int, stages: int | None, latency: float
    ) -> Iterator[Timeline]:
        for name, named in NAMED.items():
            if named.training and fits(name, groups, microbatches, stages):
                built = schedule(name, groups=groups, microbatches=microbatches, stages=stages)
                if self.split or TaskKind.WEIGHT_GRADIENT not in built.counts:
                    yield simulate(built, self.costs, latency)

    def _greedy(
        self,
        groups: int,
        microbatches: int,
        stages: int | None,
        latency: float,
        limit: float,
        fitting: Sequence[Timeline],
    ) -> list[Timeline]:
        """Build a schedule for each layout of stages that is faster than all that fit so far."""
        built: list[Timeline] = []
        for layout, group_of in _layouts(groups, stages).items():
            problem = self._problem(group_of, microbatches, latency, limit)
            known = [timeline.makespan for timeline in (*fitting, *built)]
            if rows := _search(problem, min(known, default=math.inf), self.split):
                greedy_schedule = Schedule(layout, microbatches, group_of, rows)
                built.append(simulate(greedy_schedule, self.costs, latency))
        return built

    def _problem(
        self, group_of: tuple[int, ...], microbatches: int, latency: float, limit: float
    ) -> _Problem:
        groups = max(group_of) + 1
        blank = Schedule("auto", microbatches, group_of, ((),) * groups)
        capacity = tuple(
            math.floor(min(limit, microbatches) * len(own) + 1e-9) for own in blank.stages_of
        )
        costs = costs_per_stage(self.costs, blank)
        return _Problem(group_of, microbatches, costs, latency, capacity)


def _search(problem: _Problem, least: float, split: bool) -> Rows | None:
    """The best greedy schedule that ends before `least`; stops where none can end earlier."""
    bound, best = _makespan_bound(problem), None
    for policy in _policies(problem, split):
        if least <= bound + _SLACK:
            break
        run = _GreedyRun(problem, policy)
        rows = run.rows()
        if rows is not None and (end := max(run.free_at)) < least - _SLACK:
            least, best = end, tuple(map(tuple, rows))
    return best


def _layouts(groups: int, stages: int | None) -> dict[str, tuple[int, ...]]:
    """The group of every stage, for each way to lay stages out, by the name the result gets."""
    down = tuple(range(groups))
    layouts = {}
    if stages in (None, groups):
        layouts["in a line"] = down
    if stages in (None, 2 * groups) and groups > 1:
        layouts["in a V"] = down + down[::-1]
    if stages != groups and groups > 1:
        layouts["in a loop"] = tuple(stage % groups for stage in range(stages or 2 * groups))
    return layouts or {"alone": (0,) * (stages or 1)}


def _policies(problem: _Problem, split: bool) -> Iterator[_Policy]:
    """Policies that differ for this problem.

    With one stage per group a microbatch takes one place, so `reserve` changes nothing; and where
    forwards may run ahead without limit, `extra` does not.
    """
    several = len(problem.group_of) > problem.groups
    for ahead, extra, patience, reserve in itertools.product(
        (1.0, 1.5, 2.0, _NO_LIMIT), (0, 1), (0.0, 0.5, 1.0) if split else (0.0,), (False, True)
    ):
        if (several or not reserve) and not (ahead == _NO_LIMIT and extra):
            yield _Policy(ahead, extra, patience, reserve, split)


def _memory_limit(memory: float | None) -> float:
    if memory is None:
        return math.inf
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not memory >= 1:
        raise ScheduleError(
            f"memory is how many microbatches a group may hold, from 1, not {short(memory)}.",
            option="memory",
        )
    return float(memory)


def _nothing_fits(tried: list[Timeline], limit: float) -> str:
    if not tried:
        return (
            f"auto: no schedule found that holds at most {limit:g} microbatches per group, and no "
            "named schedule is defined for these sizes. Raise memory=, or take another number of "
            "stages."
        )
    least = min(tried, key=lambda timeline: max(timeline.memory))
    return (
        f"auto: no schedule found that holds at most {limit:g} microbatches per group. The "
        f"smallest one, {least.schedule.name}, holds {max(least.memory):g}."
    )


@dataclasses.dataclass(frozen=True)
class _Policy:
    """How a group chooses its next task. Backwards go first, then forwards, then weight gradients.

    A group starts no forward while `ahead * (groups behind it) + 1 + extra` of its microbatches
    wait for their backward. It runs a weight gradient rather than wait, unless a better task
    arrives within `patience` times the weight gradient's cost. With `reserve`, a microbatch enters
    a group only if all of the group's stages can hold it: slower to fill, but it cannot get stuck.
    With `split`, backwards are in two parts.
    """

    ahead: float
    extra: int
    patience: float
    reserve: bool
    split: bool


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What is to be scheduled; `capacity[g]` is the most activations group `g` can hold."""

    group_of: tuple[int, ...]
    microbatches: int
    costs: tuple[Costs, ...]
    latency: float
    capacity: tuple[int, ...]

    @property
    def groups(self) -> int:
        return max(self.group_of) + 1


def _makespan_bound(problem: _Problem) -> float:
    """A lower bound: the first microbatch reaches a group, which then does all its work."""
    time = 0.0
    reached: dict[int, float] = {}
    for stage, group in enumerate(problem.group_of):
        travel = problem.latency if stage and problem.group_of[stage - 1] != group else 0.0
        reached.setdefault(group, time + travel)
        time += travel + problem.costs[stage].F
    work = dict.fromkeys(reached, 0.0)
    for stage, group in enumerate(problem.group_of):
        cost = problem.costs[stage]
        work[group] += problem.microbatches * (cost.F + min(cost.BW, cost.B + cost.W))
    return max(reached[group] + work[group] for group in work)


class _GreedyRun:
    """A simulation in which every group chooses its tasks by a policy.

    An event is a time at which a group may have something to start: it has become free, or an
    input has arrived. Events at the same time are taken by group, so the result is determined.
    """

    def __init__(self, problem: _Problem, policy: _Policy):
        self.problem, self.policy = problem, policy
        groups = problem.groups
        self.stages = len(problem.group_of)
        self.chunks = [problem.group_of.count(g) for g in range(groups)]
        self.tasks: list[list[Task]] = [[] for _ in range(groups)]
        self.free_at = [0.0] * groups
        self.held = [0] * groups  # activations, until their weight gradient is done
        self.in_flight = [0] * groups  # forwards whose backward is still to come
        # What each group can take, by kind.
        self.forwards: list[list[Offer]] = [[] for _ in range(groups)]
        self.backwards: list[list[Offer]] = [[] for _ in range(groups)]
        self.weights: list[list[Task]] = [[] for _ in range(groups)]
        self.events: list[tuple[float, int]] = []
        self._offer(self.forwards[problem.group_of[0]], 0.0, Task("F", 0, 0))
        self.events = [(0.0, problem.group_of[0])]

    def rows(self) -> list[list[Task]] | None:
        """Run to the end: the tasks of each group as they were taken, or None if it got stuck."""
        while self.events:
            now, group = heapq.heappop(self.events)
            if now + _SLACK < self.free_at[group]:
                continue  # busy: there is an event for when it becomes free
            if (task := self._choose(group, now)) is not None:
                self._run(group, task, now)
        # Groups that are full of activations and have no backward to run start nothing more.
        tasks_per_stage = 3 if self.policy.split else 2
        total = tasks_per_stage * self.stages * self.problem.microbatches
        return self.tasks if sum(map(len, self.tasks)) == total else None

    def _choose(self, group: int, now: float) -> Task | None:
        if (task := _take(self.backwards[group], now)) is not None:
            return task
        delayed = self.weights[group]
        if self._may_forward(group, now) and (task := _take(self.forwards[group], now)) is not None:
            return task
        if not delayed:
            return None
        cost = self.problem.costs[delayed[0].stage].W
        soon = now + self.policy.patience * cost
        arrivals = [at for at, _, _ in self.backwards[group]]
        if self._may_forward(group, now):
            arrivals += [at for at, _, _ in self.forwards[group]]
        if any(now + _SLACK < at < soon - _SLACK for at in arrivals):
            return None
        return delayed.pop(0)

    def _may_forward(self, group: int, now: float) -> bool:
        """Whether memory and the policy allow one of the forwards that are there."""
        ready = [task for at, _, task in self.forwards[group] if at <= now + _SLACK]
        if not ready:
            return True
        room = self.problem.capacity[group] - self.held[group]
        # The groups' first stages are those below `groups`. Later ones continue microbatches that
        # the group holds already, and to keep those back could stop everything.
        entering = all(task.stage < self.problem.groups for task in ready)
        if room < (self.chunks[group] if self.policy.reserve and entering else 1):
            return False
        behind = self.problem.groups - 1 - group
        most = (self.policy.ahead * behind + 1 + self.policy.extra) * self.chunks[group]
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
        return Task("B" if self.policy.split else "BW", stage, microbatch)

    def _send(self, source: int, end: float, task: Task) -> None:
        """Offer the task that a result allows, here or, after the latency, in another group."""
        target = self.problem.group_of[task.stage]
        at = end + (self.problem.latency if target != source else 0.0)
        self._offer((self.forwards if task.kind == "F" else self.backwards)[target], at, task)
        if target != source:
            heapq.heappush(self.events, (at, target))

    def _offer(self, offers: list[Offer], at: float, task: Task) -> None:
        """Rank early microbatches first; of the same one, the stage nearest to its end."""
        depth = -task.stage if task.kind == "F" else task.stage
        offers.append((at, task.microbatch * self.stages + depth, task))


def _take(offers: list[Offer], now: float) -> Task | None:
    """Remove and return the best task whose inputs are there."""
    there = [offer for offer in offers if offer[0] <= now + _SLACK]
    if not there:
        return None
    best = min(there, key=lambda offer: offer[1])
    offers.remove(best)
    return best[2]
