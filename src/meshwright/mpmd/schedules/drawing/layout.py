"""Where things stand in a picture of a timeline, in pixels."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from meshwright.mpmd.schedules.drawing.cropping import Crop, crop, typical
from meshwright.mpmd.schedules.timeline import Timeline

MOST_BOXES, MOST_LANES = 1500, 16
LANE, GAP, BREAK = 26, 7, 34
LEFT, TOP = 76, 64
_WIDEST, _NARROWEST = 1200.0, 360.0  # of the lanes
_BOX, _SMALLEST_BOX = 26.0, 7.0  # a typical task's width, when there is room and when there is not


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where things are: pixels per unit of time, and what is left out."""

    timeline: Timeline
    crop: Crop
    scale: float

    def x(self, time: float, window: int) -> float:
        """The place of a time inside the first or the second drawn window."""
        if not window:
            return LEFT + time * self.scale
        return LEFT + (self.crop.head + time - self.crop.tail) * self.scale + BREAK

    def y(self, row: int) -> float:
        """The top of a lane; lanes that are left out leave a gap."""
        groups = self.crop.groups
        jump = row > 0 and any(b > a + 1 for a, b in itertools.pairwise(groups))
        return TOP + row * (LANE + GAP) + (LANE if jump else 0)

    @property
    def right(self) -> float:
        return self.x(self.crop.end, len(self.crop.windows()) - 1)

    @property
    def bottom(self) -> float:
        return self.y(len(self.crop.groups) - 1) + LANE

    def pieces(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """The drawn parts of a stretch of time: x and width."""
        for window, first, last in self.crop.seen(start, end):
            x = self.x(first, window)
            yield x, self.x(last, window) - x


def lay_out(timeline: Timeline) -> Layout:
    """All of it if tasks get wide enough to tell apart, else both ends."""
    task, whole = typical(timeline), timeline.makespan
    wanted = max(_BOX / task, _NARROWEST / whole)
    scale = min(wanted, max(_WIDEST / whole, _SMALLEST_BOX / task))
    most_time = _WIDEST / scale * (1 + 1e-9)
    chosen = crop(timeline, most_time, MOST_LANES)
    while _boxes(timeline, chosen) > MOST_BOXES:
        most_time *= 0.9
        chosen = crop(timeline, most_time, MOST_LANES)
    drawn = sum(last - first for first, last in chosen.windows())
    return Layout(timeline, chosen, min(wanted, _WIDEST / drawn))


def _boxes(timeline: Timeline, chosen: Crop) -> int:
    return sum(
        end > first and start < last
        for group in chosen.groups
        for start, end in zip(timeline.starts[group], timeline.ends[group], strict=True)
        for first, last in chosen.windows()
    )
