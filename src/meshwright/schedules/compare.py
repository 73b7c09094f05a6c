"""`compare_schedules(groups, microbatches)`: every schedule side by side."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright._checks import check_integer, check_time
from meshwright._html import html_table
from meshwright._text import plural, table, tidy
from meshwright.errors import ScheduleError, short
from meshwright.schedules.auto import Auto
from meshwright.schedules.named import NAMED, schedule
from meshwright.schedules.text_plot import cost_text
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import AnyCosts, Costs, Schedule

HEADING = ("schedule", "stages", "makespan", "bubble", "idle", "held", "")
RIGHT = (False, True, True, True, True, True, False)


@dataclasses.dataclass(frozen=True)
class Row:
    """One schedule: its timeline, unless it is not defined here, and why it is not to be taken."""

    name: str
    timeline: Timeline | None
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether it is defined for these sizes and keeps to the memory limit."""
        return not self.reason

    @property
    def memory(self) -> float | None:
        """Most activations any group holds, in microbatches of its share of the model."""
        return None if self.timeline is None else max(self.timeline.memory)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Schedules for the same sizes, fastest first; those that do not fit last, with the reason."""

    groups: int
    microbatches: int
    latency: float
    memory: float | None
    rows: tuple[Row, ...]

    @property
    def best(self) -> Timeline | None:
        """The fastest one that fits."""
        return self.rows[0].timeline if self.rows[0].fits else None

    def __str__(self) -> str:
        return f"{headline(self)}\n{table([HEADING, *map(_cells, self.rows)], RIGHT)}"

    def _repr_html_(self) -> str:
        rows = html_table([HEADING, *map(_cells, self.rows)], RIGHT)
        return (
            '<div style="font-family:system-ui,sans-serif">'
            f'<b>{html.escape(headline(self))}</b><div style="overflow-x:auto">{rows}</div></div>'
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "groups": self.groups,
            "microbatches": self.microbatches,
            "latency": self.latency,
            "memory": self.memory,
            "schedules": [_row_json(row) for row in self.rows],
        }


def compare_schedules(
    groups: int,
    microbatches: int,
    *,
    costs: AnyCosts = "F=1,B=1,W=1",
    latency: float = 0.0,
    memory: float | None = None,
    stages: int | None = None,
    also: Iterable[Schedule] = (),
) -> Comparison:
    """All training schedules and `Auto` for the same sizes and costs, fastest first.

    `memory` is the most activations a group may hold at once, in microbatches of its share of
    the model. What is not defined for these sizes or does not fit is listed with the reason.
    `also` are schedules of your own to put beside them.

    >>> import meshwright as mw
    >>> found = mw.schedules.compare_schedules(4, 16, memory=4)
    >>> [row.name for row in found.rows if not row.fits]
    ['dualpipe-v', 'zb-h2', 'interleaved-1f1b', 'looped-bfs', 'eager-1f1b', 'gpipe']
    """
    groups = check_integer("compare_schedules: groups", groups, error=ScheduleError)
    microbatches = check_integer(
        "compare_schedules: microbatches", microbatches, error=ScheduleError
    )
    latency, memory = check_time(latency, "latency"), memory_limit(memory)
    if isinstance(costs, (Costs, str, Mapping)):
        costs = Costs.parse(costs)
    elif not isinstance(costs, Sequence):
        raise ScheduleError(f"costs are Costs, or a list with one per stage, not {short(costs)}.")
    elif stages is None:
        stages = len(costs)
    rows = [
        _row(name, groups, microbatches, costs, latency, memory, stages)
        for name in ["auto", *(name for name, named in NAMED.items() if named.training)]
    ]
    rows += [_own_row(one, groups, microbatches, costs, latency, memory) for one in also]
    rows.sort(key=_rank)
    return Comparison(groups, microbatches, latency, memory, tuple(rows))


def memory_limit(memory: Any) -> float | None:
    """A limit in microbatches, or None for none."""
    if memory is not None and (
        isinstance(memory, bool) or not isinstance(memory, (int, float)) or not memory > 0
    ):
        raise ScheduleError(
            "memory is the most microbatches a group may hold at once, a number above 0, not "
            f"{short(memory)}."
        )
    return None if memory is None else float(memory)


def over(timeline: Timeline, memory: float | None) -> str:
    """By how much a schedule holds more than a limit, and where; nothing if it does not."""
    most = max(timeline.memory)
    if memory is None or most <= memory:
        return ""
    return (
        f"group {timeline.memory.index(most)} holds {most:g} microbatches, "
        f"{most - memory:g} over the limit of {memory:g}"
    )


def headline(found: Comparison) -> str:
    timed = [row.timeline for row in found.rows if row.timeline is not None]
    costs = f"; {cost_text(timed[0])}" if timed else ""
    wait = f", latency {found.latency:g}" if found.latency else ""
    limit = "" if found.memory is None else f"; at most {plural(found.memory, 'microbatch')} held"
    sizes = f"{plural(found.groups, 'group')}, {plural(found.microbatches, 'microbatch')}"
    return f"{sizes}{costs}{wait}{limit}"


def _row(
    name: str,
    groups: int,
    microbatches: int,
    costs: AnyCosts,
    latency: float,
    memory: float | None,
    stages: int | None,
) -> Row:
    try:
        if name == "auto":
            built: Schedule = Auto(costs, latency, memory).build(groups, microbatches, stages)
        else:
            built = schedule(name, groups=groups, microbatches=microbatches, stages=stages)
    except ScheduleError as error:
        return Row(name, None, str(error).split(". ")[0].removesuffix("."))
    timeline = simulate(built, costs, latency)
    return Row(name, timeline, over(timeline, memory))


def _own_row(
    own: Schedule,
    groups: int,
    microbatches: int,
    costs: AnyCosts,
    latency: float,
    memory: float | None,
) -> Row:
    if (own.groups, own.microbatches) != (groups, microbatches):
        return Row(own.name, None, f"is for {own.groups} groups, {own.microbatches} microbatches")
    timeline = simulate(own, costs, latency)
    return Row(own.name, timeline, over(timeline, memory))


def _rank(row: Row) -> tuple[bool, bool, float, float]:
    """What fits, then what is defined; fastest first, and of those the smallest."""
    if row.timeline is None:
        return True, True, 0.0, 0.0
    # Sums of the same times in another order differ in their last bits.
    return not row.fits, False, round(row.timeline.makespan, 9), max(row.timeline.memory)


def _cells(row: Row) -> list[str]:
    note = row.reason
    if row.timeline is None:
        return [row.name, *["-"] * 5, note]
    timeline = row.timeline
    if not note and timeline.schedule.name != row.name:
        note = timeline.schedule.name.removeprefix("auto: ")
    return [
        row.name,
        str(timeline.schedule.stages),
        tidy(timeline.makespan),
        tidy(timeline.bubble),
        f"{100 * timeline.idle:.1f} %",
        f"{max(timeline.memory):g}",
        note,
    ]


def _row_json(row: Row) -> dict[str, Any]:
    figures: dict[str, Any] = dict.fromkeys(("stages", "makespan", "bubble", "idle", "memory"))
    if row.timeline is not None:
        figures = {
            "stages": row.timeline.schedule.stages,
            "makespan": row.timeline.makespan,
            "bubble": row.timeline.bubble,
            "idle": row.timeline.idle,
            "memory": list(row.timeline.memory),
        }
    return {"name": row.name, "fits": row.fits, "reason": row.reason or None, **figures}
