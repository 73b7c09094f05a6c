"""`compare_schedules`, and the `Comparison` it returns: every schedule for the same sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from meshwright._checks import check_integer, check_time
from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import plural, tidy
from meshwright.errors import ScheduleError, short
from meshwright.schedules.auto import Auto
from meshwright.schedules.named import NAMED, schedule
from meshwright.schedules.text_plot import cost_text
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import AnyCosts, Costs, Schedule, check_costs

HEADING = ("schedule", "stages", "makespan", "bubble", "idle", "held", "")
RIGHT = (False, True, True, True, True, True, False)


@dataclasses.dataclass(frozen=True, repr=False)
class Row:
    """One schedule of a comparison.

    `timeline` is None if the schedule is not defined for the sizes; `reason` says why it is not,
    or why it does not fit, and is empty if it does.
    """

    name: str
    timeline: Timeline | None
    reason: str = ""

    def __repr__(self) -> str:
        return short_repr(self, f"{self.name}: {self.reason or 'fits'}")

    @property
    def fits(self) -> bool:
        """Whether it is defined for these sizes and keeps to the memory limit."""
        return not self.reason

    @property
    def memory(self) -> float | None:
        """The most activations any group holds, in microbatches of its share of the model."""
        return None if self.timeline is None else max(self.timeline.memory)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Schedules for the same sizes, fastest first; those that do not fit last, with the reason."""

    groups: int
    microbatches: int
    latency: float
    memory: float | None
    rows: tuple[Row, ...]

    @property
    def best(self) -> Timeline | None:
        """The fastest one that fits, if any does."""
        return self.rows[0].timeline if self.rows[0].fits else None  # rows are sorted by `_rank`

    def _sheet(self) -> Sheet:
        return Sheet(_headline(self), [Table(HEADING, [_cells(row) for row in self.rows], RIGHT)])

    # Without the rows, whose figures are computed when they are asked for.
    def __repr__(self) -> str:
        return short_repr(self, _headline(self))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data: the request, and the figures of every schedule."""
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
    """Compare all training schedules and `Auto` for the same sizes and costs, fastest first.

    `costs` and `latency` are those of `simulate`. `memory` is the most activations a group may
    hold at once, in microbatches of its share of the model. A schedule that is not defined for
    these sizes or does not fit is listed with the reason. `also` are schedules of your own to put
    beside them.

    >>> import meshwright as mw
    >>> comparison = mw.schedules.compare_schedules(4, 16, memory=4)
    >>> [row.name for row in comparison.rows if not row.fits]
    ['dualpipe-v', 'zb-h2', 'interleaved-1f1b', 'looped-bfs', 'eager-1f1b', 'gpipe']
    """
    groups = check_integer("compare_schedules: groups", groups, error=ScheduleError)
    microbatches = check_integer(
        "compare_schedules: microbatches", microbatches, error=ScheduleError
    )
    latency, memory = check_time(latency, "latency"), memory_limit(memory)
    mine = _own_schedules(also)
    check_costs(costs)
    if isinstance(costs, (Costs, str, Mapping)):
        costs = Costs.parse(costs)
    elif stages is None:
        stages = len(costs)
    rows = [
        _row(name, groups, microbatches, costs, latency, memory, stages)
        for name in ["auto", *(name for name, named in NAMED.items() if named.training)]
    ]
    rows += [_own_row(own, groups, microbatches, costs, latency, memory) for own in mine]
    rows.sort(key=_rank)
    return Comparison(groups, microbatches, latency, memory, tuple(rows))


def _own_schedules(also: Any) -> list[Schedule]:
    """Return `also` as a list; refuse what holds anything but schedules."""
    items = list(also) if isinstance(also, Iterable) else None
    if items is None or not all(isinstance(item, Schedule) for item in items):
        raise ScheduleError(
            f"also: {short(also)} is not a list of Schedules. Pass [schedule(...)], or what "
            "read_schedule returned, in a list.",
            option="also",
        )
    return items


def memory_limit(memory: Any) -> float | None:
    """Check a limit in microbatches; None for no limit."""
    if memory is not None and (
        isinstance(memory, bool) or not isinstance(memory, (int, float)) or not memory > 0
    ):
        raise ScheduleError(
            "memory is the most microbatches a group may hold at once, a number above 0, not "
            f"{short(memory)}.",
            option="memory",
        )
    return None if memory is None else float(memory)


def memory_excess(timeline: Timeline, memory: float | None) -> str:
    """Say by how much a schedule holds more than a limit, and where; nothing if it does not."""
    most = max(timeline.memory)
    if memory is None or most <= memory:
        return ""
    return (
        f"group {timeline.memory.index(most)} holds {most:g} microbatches, "
        f"{most - memory:g} over the limit of {memory:g}"
    )


def _headline(comparison: Comparison) -> str:
    timelines = [row.timeline for row in comparison.rows if row.timeline is not None]
    costs = f"; {cost_text(timelines[0])}" if timelines else ""
    wait = f", latency {comparison.latency:g}" if comparison.latency else ""
    limit = ""
    if comparison.memory is not None:
        limit = f"; at most {plural(comparison.memory, 'microbatch')} held"
    groups = plural(comparison.groups, "group")
    microbatches = plural(comparison.microbatches, "microbatch")
    return f"{groups}, {microbatches}{costs}{wait}{limit}"


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
            built = Auto(costs, latency, memory).build(groups, microbatches, stages)
        else:
            built = schedule(name, groups=groups, microbatches=microbatches, stages=stages)
    except ScheduleError as error:
        # The first sentence says what is wrong; the rest advises someone who asked for this one.
        return Row(name, None, str(error).split(". ")[0].removesuffix("."))
    timeline = simulate(built, costs, latency)
    return Row(name, timeline, memory_excess(timeline, memory))


def _own_row(
    own: Schedule,
    groups: int,
    microbatches: int,
    costs: AnyCosts,
    latency: float,
    memory: float | None,
) -> Row:
    if (own.groups, own.microbatches) != (groups, microbatches):
        sizes = f"{plural(own.groups, 'group')}, {plural(own.microbatches, 'microbatch')}"
        return Row(own.name, None, f"is for {sizes}")
    timeline = simulate(own, costs, latency)
    return Row(own.name, timeline, memory_excess(timeline, memory))


def _rank(row: Row) -> tuple[bool, bool, float, float]:
    """Those that fit, then those that are defined; fastest first, and of equals the smallest."""
    if row.timeline is None:
        return True, True, 0.0, 0.0
    # Sums of the same times in another order differ in their last bits.
    return not row.fits, False, round(row.timeline.makespan, 9), max(row.timeline.memory)


def _cells(row: Row) -> list[str]:
    note = row.reason
    if row.timeline is None:
        return [row.name, *["-"] * 5, note]
    timeline = row.timeline
    # The row of `auto` says how its schedule was made.
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
