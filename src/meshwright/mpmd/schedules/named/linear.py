"""One stage per group, in a line: GPipe, 1F1B, eager 1F1B, forward only."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.mpmd.schedules.schedule import Schedule
from meshwright.mpmd.schedules.tasks import Task


def forward(groups: int, microbatches: int) -> Schedule:
    """Every group runs every microbatch forward, nothing else: inference."""
    rows = [[Task("F", group, i) for i in range(microbatches)] for group in range(groups)]
    return _line("forward", microbatches, rows)


def gpipe(groups: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    rows = [alternating(group, microbatches, microbatches) for group in range(groups)]
    return _line("gpipe", microbatches, rows)


def one_f_one_b(groups: int, microbatches: int) -> Schedule:
    """As soon as a microbatch is through, its backward; each group holds few at once."""
    rows = [alternating(group, microbatches, groups - group) for group in range(groups)]
    return _line("1f1b", microbatches, rows)


def eager_1f1b(groups: int, microbatches: int) -> Schedule:
    """1F1B that runs ahead by one more microbatch per group behind: hides transfers."""
    rows = [alternating(group, microbatches, 2 * (groups - group) - 1) for group in range(groups)]
    return _line("eager-1f1b", microbatches, rows)


def alternating(stage: int, microbatches: int, ahead: int) -> list[Task]:
    """`ahead` forwards, then backward and forward in turn, then the backwards that are left."""
    ahead = min(ahead, microbatches)
    row = [Task("F", stage, i) for i in range(ahead)]
    for i in range(microbatches):
        row.append(Task("BW", stage, i))
        if ahead + i < microbatches:
            row.append(Task("F", stage, ahead + i))
    return row


def _line(name: str, microbatches: int, rows: Sequence[Sequence[Task]]) -> Schedule:
    return Schedule(name, microbatches, tuple(range(len(rows))), tuple(map(tuple, rows)))
