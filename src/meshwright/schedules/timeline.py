"""`simulate`, and the `Timeline` it returns: when every task runs, how long groups are idle.

The model of time: a group runs one task after the other; a task starts as soon as its group is
free and its inputs have arrived; an input from another group takes `latency` longer, and neither
group waits while it travels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from meshwright._checks import check_time
from meshwright._html import Html, block, tag
from meshwright._show import Table, short_repr
from meshwright.errors import ScheduleError, short
from meshwright.schedules.svg_plot import draw_svg
from meshwright.schedules.text_plot import (
    GROUP_HEADING,
    GROUP_RIGHT,
    draw_text,
    group_rows,
    headline,
    summary,
)
from meshwright.schedules.types import (
    KIND_NAMES,
    AnyCosts,
    Costs,
    Key,
    Schedule,
    Task,
    TaskKind,
    costs_per_stage,
    gives,
    needs,
)
from meshwright.schedules.validation import execution_order, live_activations

T = TypeVar("T")
MOST_ROWS = 64  # of the table in a notebook


class Gap(NamedTuple):
    """The time in which a group does nothing before one of its tasks.

    `waited` is the part of it until `awaited`, the task of another group that it needs, has ended;
    `starting` the rest: the result is on its way, or the task was not dispatched yet.
    """

    group: int
    task: Task
    waited: float
    awaited: Task | None
    starting: float


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

    @functools.cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Who waits for whom: the time without work before each task, group by group.

        Of a group, the time that it works, its gaps and what is left after its last task add up to
        the makespan.

        >>> import meshwright as mw
        >>> two = mw.schedules.simulate(mw.schedules.schedule("gpipe", groups=2, microbatches=2))
        >>> [(gap.group, str(gap.task), gap.waited, str(gap.awaited)) for gap in two.gaps]
        [(0, '0BW0', 3.0, '1BW0'), (1, '1F0', 1.0, '0F0')]
        """
        return tuple(_gaps(self))

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
        return block(Html(draw_svg(self)), tag("p", summary(self)), table.html())


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


def _gaps(timeline: Timeline) -> Iterator[Gap]:
    schedule = timeline.schedule
    ended: dict[Key, tuple[Task, float]] = {}
    for row, ends in zip(schedule.tasks, timeline.ends, strict=True):
        ended |= {gives(task): (task, end) for task, end in zip(row, ends, strict=True)}
    for group, row in enumerate(schedule.tasks):
        free = 0.0
        for task, start, end in zip(row, timeline.starts[group], timeline.ends[group], strict=True):
            inputs = [
                each
                for each in _awaited(task, schedule.stages, ended)
                if schedule.group_of[each[0].stage] != group
            ]
            awaited, ready = max(inputs, key=lambda each: each[1], default=(None, 0.0))
            waited = max(0.0, min(start, ready) - free)
            if start > free:
                yield Gap(group, task, waited, awaited if waited else None, start - free - waited)
            free = max(free, end)


# A timeline as events in Chrome's trace format, for Perfetto and chrome://tracing.

Event = dict[str, Any]


def chrome_trace(timeline: Timeline, *, microseconds: float = 1000.0) -> dict[str, Any]:
    """Make events for a trace viewer: a thread per group, arrows for transfers, activations held.

    `microseconds` is the length of a unit of cost: by default a millisecond; 1e6 for costs in
    seconds.

    >>> from meshwright.schedules import schedule, simulate
    >>> trace = simulate(schedule("gpipe", groups=2, microbatches=2)).trace()
    >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    ['0F0', '0F1', '0BW0', '0BW1', '1F0', '1F1', '1BW0', '1BW1']
    """
    if isinstance(microseconds, bool) or not isinstance(microseconds, (int, float)):
        raise ScheduleError(
            f"microseconds is how long a unit is, not {short(microseconds)}.", option="microseconds"
        )
    if not 0 < microseconds < float("inf"):
        raise ScheduleError(
            f"microseconds is a number above 0, not {short(microseconds)}.", option="microseconds"
        )
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": timeline.schedule.name}},
        *_threads(timeline),
        *_tasks(timeline, microseconds),
        *_transfers(timeline, microseconds),
        *_held(timeline, microseconds),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"schedule": headline(timeline), "microseconds per unit": microseconds},
    }


# Phases of the format: "M" is metadata, "X" a slice with a duration, "s" and "f" the two ends of
# an arrow, "C" a counter. Times are in microseconds.


def _threads(timeline: Timeline) -> Iterator[Event]:
    for group in range(timeline.schedule.groups):
        where = {"ph": "M", "pid": 0, "tid": group}
        yield {**where, "name": "thread_name", "args": {"name": f"group {group}"}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": group}}


def _tasks(timeline: Timeline, unit: float) -> Iterator[Event]:
    schedule = timeline.schedule
    for group, row in enumerate(schedule.tasks):
        starts, ends = timeline.starts[group], timeline.ends[group]
        for at, task in enumerate(row):
            more = {}
            if at in schedule.overlapped[group]:
                more["overlaps"] = str(row[at + 1])
            elif at - 1 in schedule.overlapped[group]:
                more["overlaps"] = str(row[at - 1])
            yield {
                "ph": "X",
                "name": str(task),
                "cat": KIND_NAMES[task.kind],
                "pid": 0,
                "tid": group,
                "ts": starts[at] * unit,
                "dur": (ends[at] - starts[at]) * unit,
                "args": {
                    "kind": task.kind,
                    "stage": task.stage,
                    "microbatch": task.microbatch,
                    **more,
                },
            }


def _transfers(timeline: Timeline, unit: float) -> Iterator[Event]:
    """An arrow from each task that gives a result to the one in another group that needs it."""
    schedule = timeline.schedule
    sent: dict[Key, tuple[int, float]] = {}
    for group, row in enumerate(schedule.tasks):
        times = zip(row, timeline.starts[group], timeline.ends[group], strict=True)
        for task, start, end in times:
            # Inside the task, since a viewer ties an arrow to the slice around its end.
            sent[gives(task)] = group, start + 0.99 * (end - start)
    number = 0
    for group, row in enumerate(schedule.tasks):
        for task, start in zip(row, timeline.starts[group], strict=True):
            for source, at in _awaited(task, schedule.stages, sent):
                if source != group:
                    arrow = {"name": "transfer", "cat": "transfer", "id": number, "pid": 0}
                    # "bp": "e" binds the end to the slice around it, not to the next one.
                    yield {**arrow, "ph": "s", "tid": source, "ts": at * unit}
                    yield {**arrow, "ph": "f", "bp": "e", "tid": group, "ts": start * unit}
                    number += 1


def _awaited(task: Task, stages: int, sent: dict[Key, T]) -> Iterator[T]:
    """Yield what is known of each of a task's inputs, such as its group and time.

    A measured timeline leaves out tasks that are empty in the compiled step; what such a task
    would have passed on comes from the tasks before it.
    """
    for needed in needs(task, stages):
        if needed in sent:
            yield sent[needed]
        else:
            yield from _awaited(Task(*needed), stages, sent)


def _held(timeline: Timeline, unit: float) -> Iterator[Event]:
    """How many activations each group holds, as it changes."""
    for group, held in enumerate(live_activations(timeline.schedule)):
        name = f"activations of group {group}"
        row = timeline.schedule.tasks[group]
        for at, (task, now) in enumerate(zip(row, held, strict=True)):
            if task.kind == TaskKind.FORWARD:
                time, value = timeline.starts[group][at], now
            elif task.kind != TaskKind.INPUT_GRADIENT:
                time, value = timeline.ends[group][at], now - 1
            else:
                continue
            yield {"ph": "C", "name": name, "pid": 0, "ts": time * unit, "args": {"held": value}}
