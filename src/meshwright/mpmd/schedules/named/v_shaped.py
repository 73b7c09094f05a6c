"""Two stages per group, down the line and back up, so that the first group holds the last stage."""

from __future__ import annotations

from collections import Counter, deque

from meshwright.mpmd.schedules.schedule import Schedule
from meshwright.mpmd.schedules.tasks import Task


class _Row:
    """A group's tasks as they are written down: microbatches count up by themselves."""

    def __init__(self, group: int, groups: int, microbatches: int):
        self.down, self.up = group, 2 * groups - 1 - group
        self.tasks: list[Task] = []
        self.pairs: set[int] = set()
        self.owed: deque[Task] = deque()
        self._next: Counter[tuple[str, int]] = Counter()
        self._microbatches = microbatches

    def f(self, stage: int) -> None:
        self._add("F", stage)

    def b(self, stage: int) -> None:
        """The gradient of the input; that of the weights is owed."""
        if self._add("B", stage):
            self.owed.append(Task("W", *self.tasks[-1][1:]))

    def bw(self, stage: int) -> None:
        self._next["B", stage] += 1
        self.tasks.append(Task("BW", stage, self._next["B", stage] - 1))

    def w(self) -> None:
        """The weight gradient that is owed longest."""
        if self.owed:
            self.tasks.append(self.owed.popleft())

    def f_with_bw(self, forward: int, backward: int) -> None:
        """A forward and a backward that hide each other's communication."""
        self.pairs.add(len(self.tasks))
        self.f(forward)
        self.bw(backward)

    def left(self, kind: str, stage: int) -> int:
        return self._microbatches - self._next[kind, stage]

    def _add(self, kind: str, stage: int) -> bool:
        if not self.left(kind, stage):
            return False
        self.tasks.append(Task(kind, stage, self._next[kind, stage]))
        self._next[kind, stage] += 1
        return True


def zb_v(groups: int, microbatches: int) -> Schedule:
    """Zero bubble in 1F1B's memory, when F, B and W take the same time."""
    rows = [_zb_v_row(_Row(group, groups, microbatches), groups) for group in range(groups)]
    return _v("zb-v", microbatches, rows)


def _zb_v_row(row: _Row, groups: int) -> _Row:
    group, down, up = row.down, row.down, row.up
    for _ in range(2 * (groups - group) - 1):
        row.f(down)
    for _ in range(group):
        row.f(up)
        row.f(down)
    for _ in range(groups - group):
        _f_b_w(row, up)
    while row.left("F", up):
        _f_b_w(row, down)
        _f_b_w(row, up)
    for _ in range(group):
        row.b(down)
        row.b(up)
    while row.left("B", down):
        row.b(down)
        row.w()
    while row.left("B", up):
        row.b(up)
    while row.owed:
        row.w()
    return row


def _f_b_w(row: _Row, stage: int) -> None:
    row.f(stage)
    row.b(stage)
    row.w()


def dualpipe_v(groups: int, microbatches: int) -> Schedule:
    """Forwards of one direction run with backwards of the other; from 2 microbatches per group."""
    rows = [
        _dualpipe_v_row(_Row(group, groups, microbatches), groups, microbatches)
        for group in range(groups)
    ]
    return _v("dualpipe-v", microbatches, rows)


def _dualpipe_v_row(row: _Row, groups: int, microbatches: int) -> _Row:
    group, down, up = row.down, row.down, row.up
    behind = groups - 1 - group
    for _ in range(2 * behind):
        row.f(down)
    for _ in range(group + 1):
        row.f(down)
        row.f(up)
    for _ in range(behind):
        row.b(up)
        row.w()
        row.f(up)
    for _ in range(microbatches - 2 * groups + group + 1):
        row.f_with_bw(down, up)
        row.f_with_bw(up, down)
    for _ in range(behind):
        row.bw(up)
        row.f_with_bw(up, down)
    # The last backwards are whole at first, then in two parts, to end with weight gradients.
    for number in range(2 * (group + 1)):
        stage = down if number % 2 else up
        if number <= group:
            row.bw(stage)
        else:
            row.b(stage)
    for _ in range(behind):
        row.w()
        row.b(down)
    while row.owed:
        row.w()
    return row


def _v(name: str, microbatches: int, rows: list[_Row]) -> Schedule:
    down = tuple(range(len(rows)))
    return Schedule(
        name,
        microbatches,
        down + down[::-1],
        tuple(tuple(row.tasks) for row in rows),
        tuple(frozenset(row.pairs) for row in rows),
    )
