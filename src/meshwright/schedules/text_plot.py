"""In: a timeline. Out: a picture of it for the terminal, a page, or a trace viewer."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from meshwright._text import plural, tidy
from meshwright.errors import listing
from meshwright.schedules.timeline import Timeline
from meshwright.schedules.types import NAMES, Costs, Task

# A timeline in letters: two or three lines per group, time running to the right.


WIDTH, MOST_GROUPS = 100, 16
_BREAK = " ~ "
# A whole backward is one task, so it must not look like a B and a W.
_LETTERS = {"F": "F", "B": "B", "W": "W", "BW": "bw"}
_WIDEST = 3  # columns of the shortest task, when there is room

Line = list[tuple[str, str]]  # pieces of text, each with the kind of its task, or ""


@dataclasses.dataclass(frozen=True)
class _Page:
    """How times become columns."""

    timeline: Timeline
    crop: Crop
    scale: float
    margin: int

    def column(self, time: float, window: int) -> int:
        first, _ = self.crop.windows()[window]
        skip = self.column(self.crop.head, 0) + len(_BREAK) if window else 0
        return math.floor((time - first) * self.scale + 0.5) + skip

    def columns(self, start: float, end: float) -> Iterator[tuple[int, int]]:
        """First column and one past the last, of every part that is drawn."""
        for window, first, last in self.crop.seen(start, end):
            yield self.column(first, window), self.column(last, window)

    @property
    def width(self) -> int:
        return self.column(self.crop.end, len(self.crop.windows()) - 1)


def draw_lines(timeline: Timeline) -> list[Line]:
    """Times, then for every group its kinds of task, their stages if it has several, and their
    microbatches; then what the letters mean and what is left out."""
    page = _page(timeline)
    lines: list[Line] = [[(" " * page.margin + _times(page), "")]]
    before = -1
    for group in page.crop.groups:
        if group > before + 1:
            lines.append([(f"... {group - before - 1} groups left out", "")])
        lines += _group(page, group)
        before = group
    return [*lines, *([(note, "")] for note in _notes(page))]


def _page(timeline: Timeline) -> _Page:
    margin = len(f"group {timeline.schedule.groups - 1} ")
    room, end = WIDTH - margin, timeline.makespan
    least = _least_scale(timeline)
    times = min(_WIDEST, math.floor(room / (end * least) + 1e-9))
    if times >= 1:
        return _Page(timeline, crop(timeline, end, MOST_GROUPS), least * times, margin)
    half = (room - len(_BREAK)) // 2
    return _Page(timeline, crop(timeline, 2 * half / least, MOST_GROUPS), least, margin)


def _least_scale(timeline: Timeline) -> float:
    """Columns per unit of time, so that each task has one and a whole backward two."""
    shortest: dict[str, float] = {}
    usual = typical(timeline)
    for row, starts, ends in zip(
        timeline.schedule.tasks, timeline.starts, timeline.ends, strict=True
    ):
        for task, start, end in zip(row, starts, ends, strict=True):
            if end - start > usual / 8:  # what is shorter would take all the room
                shortest[task.kind] = min(end - start, shortest.get(task.kind, math.inf))
    return max(len(kind) / time for kind, time in shortest.items()) * (1 - 1e-12)


def _times(page: _Page) -> str:
    """Round times over their columns."""
    step = round_up(10 / page.scale)
    text = ""
    for window, (first, last) in enumerate(page.crop.windows()):
        for number in range(math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9) + 1):
            column, label = page.column(number * step, window), f"{number * step:g}"
            fits = column + len(label) <= WIDTH - page.margin
            if fits and column >= len(text) + bool(text):
                text = text.ljust(column) + label
    return text


def _group(page: _Page, group: int) -> Iterator[Line]:
    schedule = page.timeline.schedule
    yield _line(page, group, f"group {group}", _kind)
    if any(len(own) > 1 for own in schedule.stages_of):
        yield _line(page, group, "stage".rjust(page.margin - 1), _stage)
    yield _line(page, group, "", _microbatch)


def _line(page: _Page, group: int, name: str, label: Callable[[Task, int], str]) -> Line:
    """What `label` says of every task, in its columns; dots where the group waits."""
    timeline = page.timeline
    starts, ends = timeline.starts[group], timeline.ends[group]
    letters, kinds = [" "] * page.width, [""] * page.width
    if label is _kind:
        for first, last in page.columns(starts[0], ends[-1]):
            letters[first:last] = "." * (last - first)
    for task, start, end in zip(timeline.schedule.tasks[group], starts, ends, strict=True):
        for first, last in page.columns(start, end):
            width = last - first
            letters[first:last] = label(task, width).ljust(width)
            kinds[first:last] = [task.kind] * width
    if page.crop.left_out:
        at = page.column(page.crop.head, 0)
        letters[at : at + len(_BREAK)] = _BREAK
    runs = itertools.groupby(zip(letters, kinds, strict=True), key=lambda pair: pair[1])
    drawn = [("".join(letter for letter, _ in run), kind) for kind, run in runs]
    return [(name.ljust(page.margin), ""), *drawn]


def _kind(task: Task, width: int) -> str:
    return _LETTERS[task.kind][:width]


def _stage(task: Task, width: int) -> str:
    return str(task.stage)[-width:] if width else ""


def _microbatch(task: Task, width: int) -> str:
    return str(task.microbatch)[-width:] if width else ""


def _notes(page: _Page) -> Iterator[str]:
    """What the letters mean, and what is left out."""
    timeline, crop = page.timeline, page.crop
    used = timeline.schedule.counts
    kinds = [f"{_LETTERS[kind]} {name}" for kind, name in NAMES.items() if kind in used]
    yield ", ".join([*kinds, ". waits"])
    yield "under each task its microbatch, by the last digits that fit"
    if crop.left_out:
        yield f"~ {crop.time_note()}"
    hidden = sum(
        not any(last > first for first, last in page.columns(start, end))
        for group in crop.groups
        for start, end in zip(timeline.starts[group], timeline.ends[group], strict=True)
        if any(True for _ in crop.seen(start, end))
    )
    if hidden:
        yield f"{hidden:,} tasks are too short to be drawn"


# The words and numbers that go with every drawing.


HEADING = ("group", "stages", "tasks", "busy", "bubble", "held")
RIGHT = (True, False, True, True, True, True)
_MOST_LISTED = 16


def headline(timeline: Timeline) -> str:
    """What is drawn.

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
    """
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


def rows(timeline: Timeline) -> list[list[str]]:
    """A line per group, under `HEADING`."""
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
    """What a microbatch costs in a group, if that is the same in all of them."""
    found = {
        _group_costs([timeline.costs[stage] for stage in own])
        for own in timeline.schedule.stages_of
    }
    return f"{found.pop()} per group" if len(found) == 1 else "costs differ between groups"


def _group_costs(costs: list[Costs]) -> str:
    sums = {kind: sum(getattr(c, kind) for c in costs) for kind in ("F", "B", "W", "BW", "FB")}
    told = {"BW": sums["B"] + sums["W"], "FB": sums["F"] + sums["BW"]}
    return ", ".join(
        f"{kind}={value:g}"
        for kind, value in sums.items()
        if kind not in told or not math.isclose(value, told[kind])
    )


def round_up(least: float) -> float:
    """The next 1, 2 or 5 times a power of ten.

    >>> round_up(3.2), round_up(0.013)
    (5.0, 0.02)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= least * (1 - 1e-9))


# What of a long schedule is drawn: its beginning and its end, and how much is left out.


@dataclasses.dataclass(frozen=True)
class Crop:
    """Times from 0 to `head` and from `tail` to `end` are drawn, of the groups in `groups`.

    A schedule repeats itself in the middle, so its ends show what there is to see.
    """

    head: float
    tail: float
    end: float
    groups: tuple[int, ...]

    @property
    def left_out(self) -> float:
        """Time that is not drawn."""
        return self.tail - self.head

    def windows(self) -> list[tuple[float, float]]:
        """The stretches of time that are drawn."""
        if not self.left_out:
            return [(0.0, self.end)]
        return [(0.0, self.head), (self.tail, self.end)]

    def seen(self, start: float, end: float) -> Iterator[tuple[int, float, float]]:
        """The parts of a stretch that are drawn, each with the number of its window."""
        edge = 1e-9 * self.end  # a touch is no overlap
        for number, (first, last) in enumerate(self.windows()):
            if start < last - edge and end > first + edge:
                yield number, max(start, first), min(end, last)

    def time_note(self) -> str:
        """
        >>> Crop(20, 70, 99, (0, 1)).time_note()
        '50 of 99 time units left out'
        """
        return f"{self.left_out:,.4g} of {self.end:,.6g} time units left out"


def crop(timeline: Timeline, most_time: float, most_groups: int) -> Crop:
    """The first and last half of `most_time`, and of `most_groups`."""
    end, groups = timeline.makespan, timeline.schedule.groups
    numbers = tuple(range(groups))
    if groups > most_groups:
        half = most_groups // 2
        numbers = numbers[:half] + numbers[-half:]
    if end <= most_time:
        return Crop(end, end, end, numbers)
    return Crop(most_time / 2, end - most_time / 2, end, numbers)


def typical(timeline: Timeline) -> float:
    """The median time of a task."""
    times = sorted(
        end - start
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
    )
    return times[len(times) // 2] or timeline.makespan / len(times)
