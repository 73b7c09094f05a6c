"""In: a name and sizes. Out: the schedule of that name."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from meshwright._checks import check_integer
from meshwright.errors import ScheduleError, near, short
from meshwright.schedules.types import Schedule, Task

# One stage per group, in a line: GPipe, 1F1B, eager 1F1B, forward only.


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


# Several stages per group, dealt out like cards: interleaved 1F1B, looped breadth-first.


Step = tuple[int, int]  # (which of the group's stages, microbatch)


def interleaved_1f1b(groups: int, microbatches: int, stages: int) -> Schedule:
    """1F1B in rounds of microbatches, each round through all of a group's stages in turn."""
    chunks = stages // groups
    rounds = _rounds(microbatches, groups)
    forwards = [(c, i) for batch in rounds for c in range(chunks) for i in batch]
    backwards = [(c, i) for batch in rounds for c in reversed(range(chunks)) for i in batch]
    rows = []
    for group in range(groups):
        ahead = 2 * (groups - group - 1) + (chunks - 1) * len(rounds[0]) + 1
        rows.append(_merged(group, groups, forwards, backwards, ahead))
    return _loop("interleaved-1f1b", microbatches, stages, rows)


def looped_bfs(groups: int, microbatches: int, stages: int) -> Schedule:
    """All microbatches through one of the group's stages, then through its next one."""
    chunks = range(stages // groups)
    forwards = [(c, i) for c in chunks for i in range(microbatches)]
    backwards = [(c, i) for c in reversed(chunks) for i in range(microbatches)]
    rows = [_merged(g, groups, forwards, backwards, len(forwards)) for g in range(groups)]
    return _loop("looped-bfs", microbatches, stages, rows)


def _rounds(microbatches: int, groups: int) -> list[range]:
    """Rounds of at least as many microbatches as groups, as equal as can be, larger ones first.

    >>> _rounds(9, 4), _rounds(3, 4)
    ([range(0, 5), range(5, 9)], [range(0, 3)])
    """
    count = max(1, microbatches // groups)
    sizes = [microbatches // count + (r < microbatches % count) for r in range(count)]
    ends = [sum(sizes[: r + 1]) for r in range(count)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _merged(
    group: int, groups: int, forwards: list[Step], backwards: list[Step], ahead: int
) -> list[Task]:
    """`ahead` forwards, then backward and forward in turn."""
    run = [Task("F", chunk * groups + group, i) for chunk, i in forwards]
    back = [Task("BW", chunk * groups + group, i) for chunk, i in backwards]
    row = run[:ahead]
    for number, task in enumerate(back):
        row.append(task)
        row += run[ahead + number : ahead + number + 1]
    return row


def _loop(name: str, microbatches: int, stages: int, rows: list[list[Task]]) -> Schedule:
    group_of = tuple(stage % len(rows) for stage in range(stages))
    return Schedule(name, microbatches, group_of, tuple(map(tuple, rows)))


# Two stages per group, down the line and back up, so that the first group holds the last stage.


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


# Backward in two parts, one stage per group: ZB-H1 and ZB-H2.


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


# `schedule(name, ...)`: the named schedules, and the sizes each is defined for.


@dataclasses.dataclass(frozen=True)
class Named:
    """How a named schedule is built, and for how many stages per group and microbatches."""

    build: Callable[..., Schedule]
    chunks: int | None = 1
    """Stages per group; None for any number from one."""
    default_chunks: int = 1
    least_per_group: int = 0
    """Microbatches it needs for each group."""
    training: bool = True


NAMED = {
    "gpipe": Named(gpipe),
    "1f1b": Named(one_f_one_b),
    "eager-1f1b": Named(eager_1f1b),
    "interleaved-1f1b": Named(interleaved_1f1b, None, 2),
    "looped-bfs": Named(looped_bfs, None, 2),
    "zb-h1": Named(zb_h1),
    "zb-h2": Named(zb_h2),
    "zb-v": Named(zb_v, 2, 2),
    "dualpipe-v": Named(dualpipe_v, 2, 2, least_per_group=2),
    "forward": Named(forward, training=False),
}


MOST = 10_000_000  # forwards of a schedule; more is a slip


def schedule(name: str, *, groups: int, microbatches: int, stages: int | None = None) -> Schedule:
    """A named schedule for so many groups and microbatches.

    `stages` counts those of the whole model. One per group for `gpipe`, `1f1b`, `eager-1f1b`,
    `zb-h1`, `zb-h2` and `forward` (no backward: inference); two per group for `zb-v` and
    `dualpipe-v`; any whole number per group, by default two, for `interleaved-1f1b` and
    `looped-bfs`.

    >>> import meshwright as mw
    >>> mw.schedules.schedule("interleaved-1f1b", groups=4, microbatches=8, stages=12)
    Schedule('interleaved-1f1b', groups=4, stages=12, microbatches=8, tasks=192)
    >>> mw.schedules.schedule("zbh1", groups=4, microbatches=8)
    Traceback (most recent call last):
    ...
    meshwright.errors.ScheduleError: no schedule is called 'zbh1'. Did you mean 'zb-h1'? There...
    """
    name = check_name(name)
    named = NAMED[name]
    groups, microbatches = (
        check_integer(f"{name}: groups", groups, error=ScheduleError),
        check_integer(f"{name}: microbatches", microbatches, error=ScheduleError),
    )
    stages = (
        groups * named.default_chunks
        if stages is None
        else check_integer(f"{name}: stages", stages, error=ScheduleError)
    )
    _check_stages(name, named, groups, stages)
    if stages * microbatches > MOST:
        raise ScheduleError(
            f"{name}: {stages} stages and {microbatches} microbatches make more than "
            f"{MOST:,} forwards. Take fewer."
        )
    if microbatches < named.least_per_group * groups:
        raise ScheduleError(
            f"{name} is defined from {named.least_per_group} microbatches per group: {groups} "
            f"groups need {named.least_per_group * groups}, not {microbatches}. Take more "
            "microbatches, or zb-v, which has no such limit."
        )
    if named.chunks is None:
        return named.build(groups, microbatches, stages)
    return named.build(groups, microbatches)


def check_name(name: Any) -> str:
    """The name as it is listed, or an error that lists them all."""
    plain = name.lower().strip() if isinstance(name, str) else ""
    if plain not in NAMED:
        auto = " For the best one found use Auto(...)." if plain == "auto" else ""
        raise ScheduleError(
            f"no schedule is called {short(name)}.{near(str(name).lower(), NAMED)} There are "
            f"{', '.join(NAMED)}.{auto}"
        )
    return plain


def fits(name: str, groups: int, microbatches: int, stages: int | None) -> bool:
    """Whether a named schedule is defined for these sizes."""
    named = NAMED[name]
    whole = stages is None or stages % groups == 0
    right = stages is None or named.chunks in (None, stages // groups)
    return whole and right and microbatches >= named.least_per_group * groups


def _check_stages(name: str, named: Named, groups: int, stages: int) -> None:
    if named.chunks is not None and stages != named.chunks * groups:
        others = [other for other in NAMED if fits(other, groups, 10**9, stages)]
        hint = f" For {stages} stages: {', '.join(others)}." if others else ""
        raise ScheduleError(
            f"{name} has {named.chunks} stage(s) per group: {groups} groups make "
            f"{named.chunks * groups} stages, not {stages}.{hint}"
        )
    if stages % groups:
        raise ScheduleError(
            f"{name}: {stages} stages cannot be dealt out evenly to {groups} groups. Take "
            f"{stages // groups * groups or groups} or {(stages // groups + 1) * groups} stages."
        )
