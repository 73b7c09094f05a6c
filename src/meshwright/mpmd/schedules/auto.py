"""`Auto`: the best schedule found for given costs, latency and memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from meshwright.errors import ScheduleError, short
from meshwright.mpmd.schedules.costs import AnyCosts, per_stage, time
from meshwright.mpmd.schedules.greedy import Habits, Problem, Rows, greedy, least_makespan
from meshwright.mpmd.schedules.named.catalogue import NAMED, fits, schedule
from meshwright.mpmd.schedules.schedule import Schedule, count
from meshwright.mpmd.schedules.timeline import Timeline, simulate


@dataclasses.dataclass(frozen=True)
class Auto:
    """Finds a schedule: never slower than the best named one that fits the same memory.

    Tries every named schedule, and schedules built by running them greedily with these costs;
    the shortest makespan wins, then the least memory. `memory` is the most activations a group
    may hold at once, in microbatches of its share of the model. `split=False` keeps backwards
    whole. The same question has the same answer in every process.

    >>> import meshwright as mw
    >>> best = mw.Auto(latency=0.25, memory=4).build(groups=4, microbatches=8)
    >>> mw.simulate(best, latency=0.25).makespan, mw.check(best).live
    (28.75, (8, 8, 8, 8))
    """

    costs: AnyCosts = "F=1,B=1,W=1"
    latency: float = 0.0
    memory: float | None = None
    split: bool = True

    def __post_init__(self) -> None:
        _limit(self.memory)
        time(self.latency, "latency")

    def build(self, groups: int, microbatches: int, stages: int | None = None) -> Schedule:
        """The best schedule found for so many groups and microbatches."""
        groups = count(groups, "groups", "auto")
        microbatches = count(microbatches, "microbatches", "auto")
        if stages is None and isinstance(self.costs, (list, tuple)):
            stages = len(self.costs)
        if stages is not None:
            count(stages, "stages", "auto", groups)
        limit, latency = _limit(self.memory), time(self.latency, "latency")
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
