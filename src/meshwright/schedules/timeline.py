"""`simulate(schedule, costs, latency)`: when every task runs, and how long groups stand idle."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from meshwright._checks import check_time
from meshwright.errors import ScheduleError
from meshwright.schedules.types import AnyCosts, Costs, Key, Schedule, Task, gives, needs, per_stage
from meshwright.schedules.validation import live_activations, walk


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A schedule with times: `starts[g][i]` and `ends[g][i]` of the i-th task of group g."""

    schedule: Schedule
    costs: tuple[Costs, ...]
    latency: float
    starts: tuple[tuple[float, ...], ...] = dataclasses.field(repr=False)
    ends: tuple[tuple[float, ...], ...] = dataclasses.field(repr=False)

    @functools.cached_property
    def makespan(self) -> float:
        """From the first task's start to the last one's end."""
        return max(max(row, default=0.0) for row in self.ends)

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each group works."""
        return tuple(
            sum(end - start for start, end in zip(*rows, strict=True))
            for rows in zip(self.starts, self.ends, strict=True)
        )

    @functools.cached_property
    def bubbles(self) -> tuple[float, ...]:
        """How long each group waits between its own first and last task.

        A group may begin the next step as soon as it has done its part of this one, so its late
        start or early end is no loss in the long run.
        """
        return tuple(
            max(0.0, ends[-1] - starts[0] - busy)
            for starts, ends, busy in zip(self.starts, self.ends, self.busy, strict=True)
        )

    @property
    def bubble(self) -> float:
        """The longest of the groups' bubbles: what pipelining costs, step after step."""
        return max(self.bubbles)

    @property
    def idle(self) -> float:
        """The part of the makespan that the groups do not work, from 0 to 1."""
        return 1 - sum(self.busy) / (self.makespan * self.schedule.groups)

    @functools.cached_property
    def memory(self) -> tuple[float, ...]:
        """Most activations each group holds at once, in microbatches of its share of the model."""
        return tuple(
            max(held) / len(stages)
            for held, stages in zip(
                live_activations(self.schedule), self.schedule.stages_of, strict=True
            )
        )

    def to_json(self) -> dict[str, Any]:
        """The figures, and every task with its group, start and end."""
        return {
            "schedule": self.schedule.name,
            "groups": self.schedule.groups,
            "stages": self.schedule.stages,
            "microbatches": self.schedule.microbatches,
            "latency": self.latency,
            "makespan": self.makespan,
            "bubble": self.bubble,
            "idle": self.idle,
            "bubbles": list(self.bubbles),
            "memory": list(self.memory),
            "tasks": [
                {"group": group, "task": str(task), "start": start, "end": end}
                for group, rows in enumerate(
                    zip(self.schedule.tasks, self.starts, self.ends, strict=True)
                )
                for task, start, end in zip(*rows, strict=True)
            ],
        }

    def trace(self) -> dict[str, Any]:
        """Chrome's trace format, one line per group; write it as JSON and open it in Perfetto."""
        from meshwright.schedules.trace import chrome_trace

        return chrome_trace(self)

    def svg(self) -> str:
        """The picture: a lane per group, a box per task."""
        from meshwright.schedules.svg_plot import draw_svg

        return draw_svg(self)

    def _repr_html_(self) -> str:
        from meshwright.schedules.svg_plot import as_html

        return as_html(self)

    def __str__(self) -> str:
        from meshwright.schedules.svg_plot import as_text

        return as_text(self)


def simulate(schedule: Schedule, costs: AnyCosts = "F=1,B=1,W=1", latency: float = 0.0) -> Timeline:
    """Run a schedule on paper: every task starts as soon as its group and its inputs are there.

    `costs` are those of one group's share of the model, cut evenly over the group's stages, so
    that schedules with few and many stages compare; or a list with one `Costs` per stage.
    `latency` is how long a result takes to another group, during which both go on working.

    >>> import meshwright as mw
    >>> zb = mw.schedules.simulate(mw.schedules.schedule("zb-h1", groups=4, microbatches=16))
    >>> zb.makespan, zb.bubble, zb.memory
    (51.0, 3.0, (4.0, 4.0, 4.0, 4.0))
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"simulate takes a Schedule, not a {type(schedule).__name__}.")
    stages, latency = per_stage(costs, schedule), check_time(latency, "latency")
    group_of = schedule.group_of
    ends: list[list[float]] = [[] for _ in schedule.tasks]
    starts: list[list[float]] = [[] for _ in schedule.tasks]
    ready: dict[Key, float] = {}
    for group, first, last in walk(schedule):
        unit = schedule.tasks[group][first:last]
        start = ends[group][-1] if ends[group] else 0.0
        for task in unit:
            for needed in needs(task, schedule.stages):
                far = latency if group_of[needed[1]] != group else 0.0
                start = max(start, ready[needed] + far)
        # Two tasks that overlap both give their results when the pair is done.
        shares = _shares(unit, stages)
        end = start + sum(shares)
        for task, share in zip(unit, shares, strict=True):
            starts[group].append(start)
            ends[group].append(start + share)
            start += share
            ready[gives(task)] = end
    return Timeline(schedule, stages, latency, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _shares(unit: tuple[Task, ...], costs: tuple[Costs, ...]) -> list[float]:
    """How long each task of a unit takes; a pair shares what overlap saves."""
    alone = [float(getattr(costs[task.stage], task.kind)) for task in unit]
    if len(unit) == 1:
        return alone
    each = [costs[task.stage] for task in unit]
    hidden = sum(cost.FB for cost in each) / sum(cost.F + cost.BW for cost in each)
    return [one * hidden for one in alone]
