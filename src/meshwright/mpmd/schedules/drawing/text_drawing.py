"""A timeline in letters: two or three lines per group, time running to the right."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from meshwright.mpmd.schedules.drawing.colours import NAMES
from meshwright.mpmd.schedules.drawing.cropping import Crop, crop, typical
from meshwright.mpmd.schedules.drawing.figures import round_up
from meshwright.mpmd.schedules.tasks import Task
from meshwright.mpmd.schedules.timeline import Timeline

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
