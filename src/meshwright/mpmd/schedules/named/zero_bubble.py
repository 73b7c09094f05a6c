"""Backward in two parts, one stage per group: ZB-H1 and ZB-H2."""

from __future__ import annotations

from meshwright.mpmd.schedules.schedule import Schedule
from meshwright.mpmd.schedules.tasks import Task


def zb_h1(groups: int, microbatches: int) -> Schedule:
    """1F1B whose later groups put off weight gradients, to fill their waits with them.

    No group holds more microbatches than the first one of 1F1B does.
    """
    return _delayed("zb-h1", groups, microbatches, more=0)


def zb_h2(groups: int, microbatches: int) -> Schedule:
    """ZB-H1 with up to twice the microbatches in flight: no group waits once it has begun."""
    more = max(0, min(groups - 1, microbatches - groups))
    return _delayed("zb-h2", groups, microbatches, more)


def _delayed(name: str, groups: int, microbatches: int, more: int) -> Schedule:
    rows = []
    for group in range(groups):
        ahead = groups - group + min(more, groups - 1 - group)
        rows.append(_row(group, microbatches, ahead, late=group + min(more, group)))
    return Schedule(name, microbatches, tuple(range(groups)), tuple(map(tuple, rows)))


def _row(stage: int, microbatches: int, ahead: int, late: int) -> list[Task]:
    """`ahead` forwards; then B, W and F in turn, every W `late` microbatches after its B."""
    row = [Task("F", stage, i) for i in range(min(ahead, microbatches))]
    for i in range(microbatches):
        row.append(Task("B", stage, i))
        if i >= late:
            row.append(Task("W", stage, i - late))
        if ahead + i < microbatches:
            row.append(Task("F", stage, ahead + i))
    row += [Task("W", stage, i) for i in range(max(0, microbatches - late), microbatches)]
    return row
