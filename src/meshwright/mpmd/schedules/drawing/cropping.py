"""What of a long schedule is drawn: its beginning and its end, and how much is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshwright.mpmd.schedules.timeline import Timeline


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
