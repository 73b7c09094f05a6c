"""`schedule(name, ...)`: the named pipeline schedules, and the sizes each is defined for.

Every builder returns the tasks of each group in order, and nothing else: no times enter. GPipe
runs all forwards first and so holds every microbatch; 1F1B runs a backward as soon as it can, and
a group holds as many microbatches as there are groups from itself on; interleaving shortens the
bubble with several stages per group; the zero-bubble schedules (ZB-H1, ZB-H2, ZB-V) fill it with
weight gradients; DualPipeV also overlaps forwards with backwards.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from meshwright._checks import check_integer
from meshwright._text import plural
from meshwright.errors import ScheduleError, near, short
from meshwright.schedules.types import Schedule, Task

MOST_FORWARDS = 10_000_000  # of a schedule; more is surely a mistake in the sizes


def schedule(name: str, *, groups: int, microbatches: int, stages: int | None = None) -> Schedule:
    """Build a named schedule for a number of groups and microbatches.

    Args:
      name: `gpipe`, `1f1b`, `eager-1f1b`, `interleaved-1f1b`, `looped-bfs`, `zb-h1`, `zb-h2`,
        `zb-v`, `dualpipe-v`, or `forward` (no backward: inference).
      groups: how many groups run it.
      microbatches: how many parts the batch has.
      stages: those of the whole model: one per group, but two for `zb-v` and `dualpipe-v`, and any
        number, by default two, for `interleaved-1f1b` and `looped-bfs`.

    Raises:
      ScheduleError: for an unknown name, and for sizes the schedule is not defined for.

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
    groups = check_integer(f"{name}: groups", groups, error=ScheduleError)
    microbatches = check_integer(f"{name}: microbatches", microbatches, error=ScheduleError)
    if stages is None:
        stages = groups * named.default_chunks
    stages = check_integer(f"{name}: stages", stages, error=ScheduleError)
    _check_stages(name, named, groups, stages)
    if stages * microbatches > MOST_FORWARDS:
        raise ScheduleError(
            f"{name}: {stages} stages and {microbatches} microbatches make more than "
            f"{MOST_FORWARDS:,} forwards. Take fewer."
        )
    if microbatches < named.least_per_group * groups:
        raise ScheduleError(
            f"{name} is defined from {named.least_per_group} microbatches per group: {groups} "
            f"groups need {named.least_per_group * groups}, not {microbatches}. Take more "
            "microbatches, or zb-v, which has no such limit.",
            option="microbatches",
        )
    if named.chunks is None:
        return named.build(groups, microbatches, stages)
    return named.build(groups, microbatches)


def check_name(name: Any) -> str:
    """Return the name as it is listed, in lower case, or raise an error that lists them all."""
    listed = name.lower().strip() if isinstance(name, str) else ""
    if listed not in NAMED:
        auto = " For the best one found use Auto(...)." if listed == "auto" else ""
        raise ScheduleError(
            f"no schedule is called {short(name)}.{near(str(name).lower(), NAMED)} There are "
            f"{', '.join(NAMED)}.{auto}"
        )
    return listed


def fits(name: str, groups: int, microbatches: int, stages: int | None) -> bool:
    """Tell whether a named schedule is defined for these sizes."""
    named = NAMED[name]
    even = stages is None or stages % groups == 0
    right = stages is None or named.chunks in (None, stages // groups)
    return even and right and microbatches >= named.least_per_group * groups


def _check_stages(name: str, named: Named, groups: int, stages: int) -> None:
    if named.chunks is not None and stages != named.chunks * groups:
        others = [listed for listed in NAMED if fits(listed, groups, 10**9, stages)]
        hint = f" For {stages} stages: {', '.join(others)}." if others else ""
        raise ScheduleError(
            f"{name} has {plural(named.chunks, 'stage')} per group: {groups} groups make "
            f"{named.chunks * groups} stages, not {stages}.{hint}",
            option="stages",
        )
    if stages % groups:
        raise ScheduleError(
            f"{name}: {stages} stages cannot be dealt out evenly to {groups} groups. Take "
            f"{stages // groups * groups or groups} or {(stages // groups + 1) * groups} stages.",
            option="stages",
        )


# One stage per group: GPipe, 1F1B, eager 1F1B, forward only. Group `g` runs stage `g`.


def forward(groups: int, microbatches: int) -> Schedule:
    """Run every microbatch forward in every group, and nothing else: inference."""
    rows = [[Task("F", group, i) for i in range(microbatches)] for group in range(groups)]
    return _one_stage_per_group("forward", microbatches, rows)


def gpipe(groups: int, microbatches: int) -> Schedule:
    """Run all forwards, then all backwards; every microbatch is held meanwhile."""
    rows = [_alternating(group, microbatches, microbatches) for group in range(groups)]
    return _one_stage_per_group("gpipe", microbatches, rows)


def one_f_one_b(groups: int, microbatches: int) -> Schedule:
    """Run the backward of a microbatch as soon as it can.

    Group `g` runs `groups - g` forwards before its first backward: as many microbatches as are
    on their way to the last stage and back, so it never holds more than those.
    """
    rows = [_alternating(group, microbatches, groups - group) for group in range(groups)]
    return _one_stage_per_group("1f1b", microbatches, rows)


def eager_1f1b(groups: int, microbatches: int) -> Schedule:
    """Run 1F1B with one more microbatch ahead per group behind.

    The next forward's input has then arrived while a backward runs: transfers are hidden, at
    almost twice the activations.
    """
    rows = [_alternating(group, microbatches, 2 * (groups - group) - 1) for group in range(groups)]
    return _one_stage_per_group("eager-1f1b", microbatches, rows)


def _alternating(stage: int, microbatches: int, ahead: int) -> list[Task]:
    """`ahead` forwards, then backward and forward in turn, then the backwards that are left."""
    ahead = min(ahead, microbatches)
    row = [Task("F", stage, i) for i in range(ahead)]
    for i in range(microbatches):
        row.append(Task("BW", stage, i))
        if ahead + i < microbatches:
            row.append(Task("F", stage, ahead + i))
    return row


def _one_stage_per_group(name: str, microbatches: int, rows: Sequence[Sequence[Task]]) -> Schedule:
    return Schedule(name, microbatches, tuple(range(len(rows))), tuple(map(tuple, rows)))


# Several stages per group: interleaved 1F1B, looped breadth-first. Stages go round the groups,
# stage `s` to group `s % groups`; a group's own stages are its chunks.

Step = tuple[int, int]  # (chunk, microbatch)


def interleaved_1f1b(groups: int, microbatches: int, stages: int) -> Schedule:
    """Run 1F1B in rounds of microbatches, each round through all chunks of a group in turn.

    The bubble shrinks by the number of chunks, since a microbatch reaches the last group after
    one chunk of each group instead of all of it; more activations and transfers are the price.
    """
    chunks = stages // groups
    rounds = _rounds(microbatches, groups)
    forwards = [(c, i) for batch in rounds for c in range(chunks) for i in batch]
    backwards = [(c, i) for batch in rounds for c in reversed(range(chunks)) for i in batch]
    rows = []
    for group in range(groups):
        # Forwards of all chunks but the last in the first round, and, of the last one, those
        # that are on their way to the last stage and back.
        ahead = 2 * (groups - group - 1) + (chunks - 1) * len(rounds[0]) + 1
        rows.append(_alternating_chunks(group, groups, forwards, backwards, ahead))
    return _round_the_groups("interleaved-1f1b", microbatches, stages, rows)


def looped_bfs(groups: int, microbatches: int, stages: int) -> Schedule:
    """Run all microbatches through one chunk of a group, then through its next one."""
    chunks = range(stages // groups)
    forwards = [(c, i) for c in chunks for i in range(microbatches)]
    backwards = [(c, i) for c in reversed(chunks) for i in range(microbatches)]
    rows = [
        _alternating_chunks(g, groups, forwards, backwards, len(forwards)) for g in range(groups)
    ]
    return _round_the_groups("looped-bfs", microbatches, stages, rows)


def _rounds(microbatches: int, groups: int) -> list[range]:
    """Cut microbatches into rounds of at least `groups`, as equal as can be, larger ones first.

    A round with fewer microbatches than groups would leave groups idle between its chunks.

    >>> _rounds(9, 4), _rounds(3, 4)
    ([range(0, 5), range(5, 9)], [range(0, 3)])
    """
    count = max(1, microbatches // groups)
    sizes = [microbatches // count + (r < microbatches % count) for r in range(count)]
    ends = itertools.accumulate(sizes)
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _alternating_chunks(
    group: int, groups: int, forwards: list[Step], backwards: list[Step], ahead: int
) -> list[Task]:
    """`ahead` forwards, then backward and forward in turn."""
    forward_tasks = [Task("F", chunk * groups + group, i) for chunk, i in forwards]
    row = forward_tasks[:ahead]
    for number, (chunk, i) in enumerate(backwards):
        row.append(Task("BW", chunk * groups + group, i))
        row += forward_tasks[ahead + number : ahead + number + 1]
    return row


def _round_the_groups(
    name: str, microbatches: int, stages: int, rows: list[list[Task]]
) -> Schedule:
    group_of = tuple(stage % len(rows) for stage in range(stages))
    return Schedule(name, microbatches, group_of, tuple(map(tuple, rows)))


# Two stages per group in a V: stages go down the groups and back up, so that the first group
# holds the first and the last stage, and a microbatch turns round in a group without a transfer.


class _Row:
    """The list of a group's tasks as it is written; microbatches count up by themselves."""

    def __init__(self, group: int, groups: int, microbatches: int):
        self.down, self.up = group, 2 * groups - 1 - group
        self.tasks: list[Task] = []
        self.pairs: set[int] = set()
        self.delayed: deque[Task] = deque()  # weight gradients still to be written
        self._next: Counter[tuple[str, int]] = Counter()
        self._microbatches = microbatches

    def f(self, stage: int) -> None:
        self._add("F", stage)

    def b(self, stage: int) -> None:
        """Add the gradient of the input; that of the weights is delayed until `w`."""
        if self._add("B", stage):
            self.delayed.append(Task("W", *self.tasks[-1][1:]))

    def bw(self, stage: int) -> None:
        self._next["B", stage] += 1
        self.tasks.append(Task("BW", stage, self._next["B", stage] - 1))

    def w(self) -> None:
        """Add the weight gradient that has been delayed longest."""
        if self.delayed:
            self.tasks.append(self.delayed.popleft())

    def f_with_bw(self, forward: int, backward: int) -> None:
        """Add a forward and a backward that hide each other's communication."""
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
    """Run without a bubble in 1F1B's memory, if F, B and W take the same time (ZB-V)."""
    rows = [_zb_v_row(_Row(group, groups, microbatches), groups) for group in range(groups)]
    return _in_a_v("zb-v", microbatches, rows)


def _zb_v_row(row: _Row, groups: int) -> _Row:
    group, down, up = row.down, row.down, row.up
    # Fill: forwards only, until the first microbatch is back at this group's second stage.
    for _ in range(2 * (groups - group) - 1):
        row.f(down)
    for _ in range(group):
        row.f(up)
        row.f(down)
    for _ in range(groups - group):
        _f_b_w(row, up)
    # Steady state: every task of both stages in turn, nothing waits.
    while row.left("F", up):
        _f_b_w(row, down)
        _f_b_w(row, up)
    # Drain: gradients that others wait for first, delayed weight gradients where there is time.
    for _ in range(group):
        row.b(down)
        row.b(up)
    while row.left("B", down):
        row.b(down)
        row.w()
    while row.left("B", up):
        row.b(up)
    while row.delayed:
        row.w()
    return row


def _f_b_w(row: _Row, stage: int) -> None:
    row.f(stage)
    row.b(stage)
    row.w()


def dualpipe_v(groups: int, microbatches: int) -> Schedule:
    """Overlap forwards of one direction with backwards of the other (DualPipeV).

    Defined from 2 microbatches per group.
    """
    rows = [
        _dualpipe_v_row(_Row(group, groups, microbatches), groups, microbatches)
        for group in range(groups)
    ]
    return _in_a_v("dualpipe-v", microbatches, rows)


def _dualpipe_v_row(row: _Row, groups: int, microbatches: int) -> _Row:
    # The eight steps of DeepSeek's DualPipeV (github.com/deepseek-ai/DualPipe, dualpipev.py); its
    # phases 0 and 1 are the stages on the way down and on the way up.
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
    # Whole backwards at first, then in two parts, so that weight gradients are left for the end.
    for number in range(2 * (group + 1)):
        stage = down if number % 2 else up
        if number <= group:
            row.bw(stage)
        else:
            row.b(stage)
    for _ in range(behind):
        row.w()
        row.b(down)
    while row.delayed:
        row.w()
    return row


def _in_a_v(name: str, microbatches: int, rows: list[_Row]) -> Schedule:
    down = tuple(range(len(rows)))
    return Schedule(
        name,
        microbatches,
        down + down[::-1],
        tuple(tuple(row.tasks) for row in rows),
        tuple(frozenset(row.pairs) for row in rows),
    )


# One stage per group, backward in two parts: ZB-H1 and ZB-H2.


def zb_h1(groups: int, microbatches: int) -> Schedule:
    """Run 1F1B whose later groups delay weight gradients and fill their waits with them.

    No group holds more microbatches than the first one of 1F1B does.
    """
    return _zb_h("zb-h1", groups, microbatches, extra=0)


def zb_h2(groups: int, microbatches: int) -> Schedule:
    """Run ZB-H1 with up to twice the microbatches in flight: no group waits once it has begun."""
    extra = max(0, min(groups - 1, microbatches - groups))
    return _zb_h("zb-h2", groups, microbatches, extra)


def _zb_h(name: str, groups: int, microbatches: int, extra: int) -> Schedule:
    # A microbatch ahead and a delayed weight gradient each hold one activation: what a later group
    # does not run ahead, it may delay in the same memory.
    rows = []
    for group in range(groups):
        ahead = groups - group + min(extra, groups - 1 - group)
        rows.append(_zb_h_row(group, microbatches, ahead, delay=group + min(extra, group)))
    return _one_stage_per_group(name, microbatches, rows)


def _zb_h_row(stage: int, microbatches: int, ahead: int, delay: int) -> list[Task]:
    """`ahead` forwards; then B, W and F in turn, every W `delay` microbatches after its B."""
    row = [Task("F", stage, i) for i in range(min(ahead, microbatches))]
    for i in range(microbatches):
        row.append(Task("B", stage, i))
        if i >= delay:
            row.append(Task("W", stage, i - delay))
        if ahead + i < microbatches:
            row.append(Task("F", stage, ahead + i))
    row += [Task("W", stage, i) for i in range(max(0, microbatches - delay), microbatches)]
    return row


@dataclasses.dataclass(frozen=True)
class Named:
    """The builder of a named schedule, and the sizes it is defined for."""

    build: Callable[..., Schedule]
    chunks: int | None = 1
    """Stages per group; None for any number from one."""
    default_chunks: int = 1
    least_per_group: int = 0
    """The microbatches it needs for each group."""
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
