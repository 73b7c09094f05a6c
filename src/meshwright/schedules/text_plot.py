"""A timeline drawn with letters for a terminal, and the words and numbers of every drawing.

Two or three lines per group, time running to the right, at most 100 columns wide. A schedule
repeats itself in the middle, so a long one is cropped to its beginning and its end, and the
drawing says how much it leaves out. `svg_plot` shares the cropping and the words.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from meshwright._text import plural, tidy
from meshwright.errors import listing
from meshwright.schedules.types import KIND_NAMES, Costs, Task, TaskKind

# Only for annotations: a `Timeline` draws itself with these functions.
if TYPE_CHECKING:
    from meshwright.schedules.timeline import Timeline

WIDTH, MOST_GROUPS = 100, 16
_BREAK = " ~ "
# A whole backward is one task, so it must not look like a B and a W.
_LETTERS: dict[str, str] = {
    TaskKind.FORWARD: "F",
    TaskKind.INPUT_GRADIENT: "B",
    TaskKind.WEIGHT_GRADIENT: "W",
    TaskKind.BACKWARD: "bw",
}
_WIDEST = 3  # columns of the shortest task, when there is room

Line = list[tuple[str, str]]  # pieces of text, each with the kind of its task, or ""


def draw_text(timeline: Timeline) -> str:
    """Draw a timeline at most 100 columns wide; plain letters, no colours.

    >>> from meshwright.schedules import schedule, simulate
    >>> print(draw_text(simulate(schedule("1f1b", groups=2, microbatches=4))))
    1f1b: 2 groups, 2 stages, 4 microbatches; F=1, B=1, W=1 per group
            0              5              10             15
    group 0 F  F  ......bw    F  bw    F  bw    ...bw
            0  1        0     2  1     3  2        3
    group 1    F  bw    F  bw    F  bw    F  bw
               0  0     1  1     2  2     3  3
    F forward, bw whole backward, . waits
    under each task its microbatch, by the last digits that fit
    makespan 15, bubble 3, idle 20.0 %; microbatches held by each group: 2, 1
    """
    lines = draw_lines(timeline)
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def draw_lines(timeline: Timeline) -> list[Line]:
    """Draw a timeline as lines of pieces, each with the kind of its task, for a coloured terminal.

    The headline; round times; for every group the kinds of its tasks, their stages if it has
    several, and their microbatches; what the letters mean and what is left out; the figures.
    """
    layout = _choose_layout(timeline)
    lines: list[Line] = [
        [(headline(timeline), "headline")],
        [(" " * layout.margin + _time_labels(layout), "")],
    ]
    before = -1
    for group in layout.crop.groups:
        if group > before + 1:
            lines.append([(f"... {group - before - 1} groups left out", "")])
        lines += _group_lines(layout, group)
        before = group
    return [*lines, *([(note, "")] for note in _notes(layout)), [(summary(timeline), "")]]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How times become columns: `scale` columns per unit of time, right of `margin` columns."""

    timeline: Timeline
    crop: Crop
    scale: float
    margin: int

    def column(self, time: float, window: int) -> int:
        first, _ = self.crop.windows()[window]
        skip = self.column(self.crop.head, 0) + len(_BREAK) if window else 0
        return math.floor((time - first) * self.scale + 0.5) + skip

    def columns(self, start: float, end: float) -> Iterator[tuple[int, int]]:
        """First column and one past the last, of each part of a stretch that is drawn."""
        for window, first, last in self.crop.visible(start, end):
            yield self.column(first, window), self.column(last, window)

    @property
    def width(self) -> int:
        return self.column(self.crop.end, len(self.crop.windows()) - 1)


def _choose_layout(timeline: Timeline) -> _Layout:
    """Show everything if there is room for it, else both ends at the smallest scale."""
    margin = len(f"group {timeline.schedule.groups - 1} ")
    room, end = WIDTH - margin, timeline.makespan
    smallest = _smallest_scale(timeline)
    # A multiple of it keeps tasks of equal length equally wide.
    factor = min(_WIDEST, math.floor(room / (end * smallest) + 1e-9))
    if factor >= 1:
        return _Layout(timeline, crop(timeline, end, MOST_GROUPS), smallest * factor, margin)
    half = (room - len(_BREAK)) // 2
    return _Layout(timeline, crop(timeline, 2 * half / smallest, MOST_GROUPS), smallest, margin)


def _smallest_scale(timeline: Timeline) -> float:
    """Columns per unit of time, so that each task has one and a whole backward two."""
    shortest: dict[str, float] = {}
    usual = median_duration(timeline)
    for row, starts, ends in zip(
        timeline.schedule.tasks, timeline.starts, timeline.ends, strict=True
    ):
        for task, start, end in zip(row, starts, ends, strict=True):
            if end - start > usual / 8:  # what is shorter would take all the room
                shortest[task.kind] = min(end - start, shortest.get(task.kind, math.inf))
    return max(len(kind) / time for kind, time in shortest.items()) * (1 - 1e-12)


def _time_labels(layout: _Layout) -> str:
    """Round times over their columns."""
    step = round_up(10 / layout.scale)
    text = ""
    for window, (first, last) in enumerate(layout.crop.windows()):
        for number in range(math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9) + 1):
            column, label = layout.column(number * step, window), f"{number * step:g}"
            fits = column + len(label) <= WIDTH - layout.margin
            if fits and column >= len(text) + bool(text):
                text = text.ljust(column) + label
    return text


def _group_lines(layout: _Layout, group: int) -> Iterator[Line]:
    schedule = layout.timeline.schedule
    yield _group_line(layout, group, f"group {group}", _kind)
    if any(len(own) > 1 for own in schedule.stages_of):
        yield _group_line(layout, group, "stage".rjust(layout.margin - 1), _stage)
    yield _group_line(layout, group, "", _microbatch)


def _group_line(layout: _Layout, group: int, name: str, label: Callable[[Task, int], str]) -> Line:
    """A line with a label for every task in its columns; dots where the group waits."""
    timeline = layout.timeline
    starts, ends = timeline.starts[group], timeline.ends[group]
    letters, kinds = [" "] * layout.width, [""] * layout.width
    # Painted over each other: dots, then the tasks, then the break.
    if label is _kind:
        for first, last in layout.columns(starts[0], ends[-1]):
            letters[first:last] = "." * (last - first)
    for task, start, end in zip(timeline.schedule.tasks[group], starts, ends, strict=True):
        for first, last in layout.columns(start, end):
            width = last - first
            letters[first:last] = label(task, width).ljust(width)
            kinds[first:last] = [task.kind] * width
    if layout.crop.left_out:
        at = layout.column(layout.crop.head, 0)
        letters[at : at + len(_BREAK)] = _BREAK
    runs = itertools.groupby(zip(letters, kinds, strict=True), key=lambda pair: pair[1])
    drawn = [("".join(letter for letter, _ in run), kind) for kind, run in runs]
    return [(name.ljust(layout.margin), ""), *drawn]


def _kind(task: Task, width: int) -> str:
    return _LETTERS[task.kind][:width]


def _stage(task: Task, width: int) -> str:
    return str(task.stage)[-width:] if width else ""


def _microbatch(task: Task, width: int) -> str:
    return str(task.microbatch)[-width:] if width else ""


def _notes(layout: _Layout) -> Iterator[str]:
    """What the letters mean, and what is left out."""
    timeline, crop = layout.timeline, layout.crop
    used = timeline.schedule.counts
    kinds = [f"{_LETTERS[kind]} {name}" for kind, name in KIND_NAMES.items() if kind in used]
    yield ", ".join([*kinds, ". waits"])
    yield "under each task its microbatch, by the last digits that fit"
    if crop.left_out:
        yield f"~ {crop.time_note()}"
    hidden = sum(
        not any(last > first for first, last in layout.columns(start, end))
        for group in crop.groups
        for start, end in zip(timeline.starts[group], timeline.ends[group], strict=True)
        if any(True for _ in crop.visible(start, end))
    )
    if hidden:
        yield f"{hidden:,} tasks are too short to be drawn"


# The words and numbers that go with every drawing.

GROUP_HEADING = ("group", "stages", "tasks", "busy", "bubble", "held")
GROUP_RIGHT = (True, False, True, True, True, True)
_MOST_LISTED = 16


def headline(timeline: Timeline) -> str:
    """Say what is drawn: the schedule, its sizes and its costs.

    >>> from meshwright.schedules import schedule, simulate
    >>> headline(simulate(schedule("zb-v", groups=2, microbatches=4), latency=0.5))
    'zb-v: 2 groups, 4 stages, 4 microbatches; F=1, B=1, W=1 per group, latency 0.5'
    """
    schedule = timeline.schedule
    sizes = (
        f"{plural(schedule.groups, 'group')}, {plural(schedule.stages, 'stage')}, "
        f"{plural(schedule.microbatches, 'microbatch')}"
    )
    wait = f", latency {timeline.latency:g}" if timeline.latency else ""
    return f"{schedule.name}: {sizes}; {cost_text(timeline)}{wait}"


def summary(timeline: Timeline) -> str:
    """Say how long it takes, how much of that is idle, and what the groups hold.

    >>> import meshwright as mw
    >>> summary(mw.schedules.simulate(mw.schedules.schedule("1f1b", groups=4, microbatches=8)))
    'makespan 33, bubble 9, idle 27.3 %; microbatches held by each group: 4, 3, 2, 1'
    """
    held = ", ".join(f"{most:g}" for most in timeline.memory)
    if timeline.schedule.groups > _MOST_LISTED:
        held = f"{min(timeline.memory):g} to {max(timeline.memory):g}"
    return (
        f"makespan {tidy(timeline.makespan)}, bubble {tidy(timeline.bubble)}, "
        f"idle {100 * timeline.idle:.1f} %; microbatches held by each group: {held}"
    )


def group_rows(timeline: Timeline) -> list[list[str]]:
    """Return a row of figures per group, for a table under `GROUP_HEADING`."""
    schedule = timeline.schedule
    return [
        [
            str(group),
            listing(schedule.stages_of[group]),
            f"{len(schedule.tasks[group]):,}",
            tidy(timeline.busy[group]),
            tidy(timeline.bubbles[group]),
            f"{timeline.memory[group]:g}",
        ]
        for group in range(schedule.groups)
    ]


def cost_text(timeline: Timeline) -> str:
    """Say what a microbatch costs in a group, if that is the same in all of them."""
    texts = {
        _group_costs([timeline.costs[stage] for stage in own])
        for own in timeline.schedule.stages_of
    }
    return f"{texts.pop()} per group" if len(texts) == 1 else "costs differ between groups"


def _group_costs(costs: list[Costs]) -> str:
    sums = {kind: sum(getattr(c, kind) for c in costs) for kind in ("F", "B", "W", "BW", "FB")}
    defaults = {"BW": sums["B"] + sums["W"], "FB": sums["F"] + sums["BW"]}
    return ", ".join(
        f"{kind}={value:g}"
        for kind, value in sums.items()
        if kind not in defaults or not math.isclose(value, defaults[kind])
    )


def round_up(least: float) -> float:
    """Round up to the next 1, 2 or 5 times a power of ten, for the ticks of an axis.

    >>> round_up(3.2), round_up(0.013)
    (5.0, 0.02)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= least * (1 - 1e-9))


@dataclasses.dataclass(frozen=True)
class Crop:
    """What is drawn: times from 0 to `head` and from `tail` to `end`, of the groups in `groups`."""

    head: float
    tail: float
    end: float
    groups: tuple[int, ...]

    @property
    def left_out(self) -> float:
        """The time that is not drawn."""
        return self.tail - self.head

    def windows(self) -> list[tuple[float, float]]:
        """Return the stretches of time that are drawn."""
        if not self.left_out:
            return [(0.0, self.end)]
        return [(0.0, self.head), (self.tail, self.end)]

    def visible(self, start: float, end: float) -> Iterator[tuple[int, float, float]]:
        """Yield the parts of a stretch that are drawn, each with the number of its window."""
        edge = 1e-9 * self.end  # to touch a window is not to overlap it
        for number, (first, last) in enumerate(self.windows()):
            if start < last - edge and end > first + edge:
                yield number, max(start, first), min(end, last)

    def time_note(self) -> str:
        """Say how much time is left out.

        >>> Crop(20, 70, 99, (0, 1)).time_note()
        '50 of 99 time units left out'
        """
        return f"{self.left_out:,.4g} of {self.end:,.6g} time units left out"


def crop(timeline: Timeline, most_time: float, most_groups: int) -> Crop:
    """Keep at most `most_time` and `most_groups`, half of each from either end."""
    end, groups = timeline.makespan, timeline.schedule.groups
    numbers = tuple(range(groups))
    if groups > most_groups:
        half = most_groups // 2
        numbers = numbers[:half] + numbers[-half:]
    if end <= most_time:
        return Crop(end, end, end, numbers)
    return Crop(most_time / 2, end - most_time / 2, end, numbers)


def median_duration(timeline: Timeline) -> float:
    """Return the median time of a task; of tasks that take none, the mean time between them."""
    times = sorted(
        end - start
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
    )
    return times[len(times) // 2] or timeline.makespan / len(times)
