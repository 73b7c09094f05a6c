"""Several stages per group, dealt out like cards: interleaved 1F1B, looped breadth-first."""

from __future__ import annotations

from meshwright.mpmd.schedules.schedule import Schedule
from meshwright.mpmd.schedules.tasks import Task

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
