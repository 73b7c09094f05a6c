"""`simulate`, and the `Timeline` it returns: when every task runs, how long groups are idle.

The model of time: a group runs one task after the other; a task starts as soon as its group is
free and its inputs have arrived; an input from another group takes `latency` longer, and neither
group waits while it travels.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from meshwright._checks import check_time
from meshwright._html import tag
from meshwright._show import Table, short_repr
from meshwright.errors import ScheduleError
from meshwright.schedules.svg_plot import draw_svg
from meshwright.schedules.text_plot import (
    GROUP_HEADING,
    GROUP_RIGHT,
    draw_text,
    group_rows,
    headline,
    summary,
)
from meshwright.schedules.trace import chrome_trace
from meshwright.schedules.types import (
    AnyCosts,
    Costs,
    Key,
    Schedule,
    Task,
    costs_per_stage,
    gives,
    needs,
)
from meshwright.schedules.validation import execution_order, live_activations

MOST_ROWS = 64  # of the table in a notebook


@dataclasses.dataclass(frozen=True, repr=False)
class Timeline:
    """A schedule with times: `starts[g][i]` and `ends[g][i]` of the i-th task of group `g`.

    `costs` are those of every stage; all times are in their unit. `print` draws it, and so does
    a notebook.
    """

    schedule: Schedule
    costs: tuple[Costs, ...]
    latency: float
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @functools.cached_property
    def makespan(self) -> float:
        """The time from the first task's start to the last one's end."""
        return max(max(row, default=0.0) for row in self.ends)

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """The time each group works."""
        return tuple(
            sum(end - start for start, end in zip(*rows, strict=True))
            for rows in zip(self.starts, self.ends, strict=True)
        )

    @functools.cached_property
    def bubbles(self) -> tuple[float, ...]:
        """The time each group waits between its own first and last task.

        A group may begin the next step as soon as it has done its part of this one, so a late
        start or an early end costs nothing in the long run.
        """
        return tuple(
            max(0.0, ends[-1] - starts[0] - busy)
            for starts, ends, busy in zip(self.starts, self.ends, self.busy, strict=True)
        )

    @property
    def bubble(self) -> float:
        """The longest of the groups' bubbles: what pipelining costs in every step."""
        return max(self.bubbles)

    @property
    def idle(self) -> float:
        """The fraction of the makespan in which groups do not work, from 0 to 1."""
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
        """Convert to plain data: the figures, and every task with its group, start and end."""
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
        """Return events in Chrome's trace format, a thread per group.

        Write them as JSON, and open the file in Perfetto or chrome://tracing.
        """
        return chrome_trace(self)

    def svg(self) -> str:
        """Draw a picture, as the text of an SVG file: a lane per group, a box per task."""
        return draw_svg(self)

    def __str__(self) -> str:
        return draw_text(self)

    def __repr__(self) -> str:
        return short_repr(self, headline(self))

    # Not a `Sheet`: text draws the tasks with letters where a notebook has a picture and a table.
    def _repr_html_(self) -> str:
        rows = group_rows(self)
        left_out = len(rows) - MOST_ROWS
        more = f"... and {left_out:,} more groups" if left_out > 0 else ""
        table = Table(GROUP_HEADING, rows[:MOST_ROWS], GROUP_RIGHT, more)
        return (
            f'<div style="font-family:system-ui,sans-serif">{draw_svg(self)}'
            f"{tag('p', summary(self))}{table.html()}</div>"
        )


def simulate(schedule: Schedule, costs: AnyCosts = "F=1,B=1,W=1", latency: float = 0.0) -> Timeline:
    """Simulate a schedule: every task starts as soon as its group is free and its inputs are there.

    Args:
      schedule: which group runs which task in which order.
      costs: those of one group's share of the model, in any unit, cut evenly over the group's
        stages, so that schedules with few and many stages compare; or a list with one per stage.
      latency: the time a result takes to another group, in the same unit; both go on working
        meanwhile.

    Raises:
      ScheduleError: if the schedule cannot run.

    >>> import meshwright as mw
    >>> zb = mw.schedules.simulate(mw.schedules.schedule("zb-h1", groups=4, microbatches=16))
    >>> zb.makespan, zb.bubble, zb.memory
    (51.0, 3.0, (4.0, 4.0, 4.0, 4.0))
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"simulate takes a Schedule, not a {type(schedule).__name__}.")
    stage_costs, latency = costs_per_stage(costs, schedule), check_time(latency, "latency")
    group_of = schedule.group_of
    # `execution_order` yields a task after those it needs, so one pass knows all times.
    ends: list[list[float]] = [[] for _ in schedule.tasks]
    starts: list[list[float]] = [[] for _ in schedule.tasks]
    ready: dict[Key, float] = {}  # when each result is there, in the group that computes it
    for group, first, last in execution_order(schedule):
        unit = schedule.tasks[group][first:last]
        start = ends[group][-1] if ends[group] else 0.0
        for task in unit:
            for needed in needs(task, schedule.stages):
                travel = latency if group_of[needed[1]] != group else 0.0
                start = max(start, ready[needed] + travel)
        # Two tasks that overlap both give their results when the pair is done.
        durations = _durations(unit, stage_costs)
        end = start + sum(durations)
        for task, duration in zip(unit, durations, strict=True):
            starts[group].append(start)
            ends[group].append(start + duration)
            start += duration
            ready[gives(task)] = end
    return Timeline(
        schedule, stage_costs, latency, tuple(map(tuple, starts)), tuple(map(tuple, ends))
    )


def _durations(unit: tuple[Task, ...], costs: tuple[Costs, ...]) -> list[float]:
    """The time each task of a unit takes; both tasks of a pair shrink by what overlap saves."""
    alone = [float(getattr(costs[task.stage], task.kind)) for task in unit]
    if len(unit) == 1:
        return alone
    # The two tasks are of different stages, so the saving is the mean of the two stages' savings.
    each = [costs[task.stage] for task in unit]
    remaining = sum(cost.FB for cost in each) / sum(cost.F + cost.BW for cost in each)
    return [duration * remaining for duration in alone]
