"""`Schedule`: for each group, the list of its tasks. Nothing but data."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.errors import ScheduleError, short
from meshwright.mpmd.schedules.tasks import KINDS, Task


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which group runs which task, in which order.

    `tasks[g]` is what group `g` runs, one after the other; `group_of[s]` is the group of stage
    `s`. `overlapped[g]` holds positions in `tasks[g]`: the task there and the next one run as
    one, each hiding the other's communication (DualPipeV). `check` proves a schedule, `simulate`
    times it, `print` draws it.

    >>> import meshwright as mw
    >>> two = mw.Schedule("mine", microbatches=1, group_of=(0, 1),
    ...                   tasks=([("F", 0, 0), ("BW", 0, 0)], [("F", 1, 0), ("BW", 1, 0)]))
    >>> [str(task) for task in two.tasks[1]]
    ['1F0', '1BW0']
    """

    name: str
    microbatches: int
    group_of: tuple[int, ...]
    tasks: tuple[tuple[Task, ...], ...]
    overlapped: tuple[frozenset[int], ...] = ()

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str) or not name:
            raise ScheduleError(f"a schedule's name is a word, not {short(name)}.")
        count(self.microbatches, "microbatches", name)
        for what, rows in (("tasks", self.tasks), ("group_of", self.group_of)):
            if not isinstance(rows, Sequence) or isinstance(rows, str):
                raise ScheduleError(f"{name}: {what} is a list, not {short(rows)}.")
        tasks = tuple(tuple(_tasks(row, f"{name}: group {g}")) for g, row in enumerate(self.tasks))
        if not tasks:
            raise ScheduleError(f"{name}: no groups. Give one list of tasks per group.")
        pairs = tuple(map(frozenset, self.overlapped)) or (frozenset(),) * len(tasks)
        _check_groups(name, self.group_of, len(tasks))
        _check_pairs(name, pairs, tasks)
        for field, value in (
            ("tasks", tasks),
            ("overlapped", pairs),
            ("group_of", tuple(self.group_of)),
        ):
            object.__setattr__(self, field, value)

    @property
    def groups(self) -> int:
        """How many groups run it."""
        return len(self.tasks)

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.group_of)

    @functools.cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every group."""
        return tuple(
            tuple(stage for stage, at in enumerate(self.group_of) if at == group)
            for group in range(self.groups)
        )

    @functools.cached_property
    def forward_only(self) -> bool:
        """Whether there is no backward at all (inference)."""
        return all(task.kind == "F" for row in self.tasks for task in row)

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """How many tasks there are of every kind."""
        return dict(Counter(task.kind for row in self.tasks for task in row))

    def __hash__(self) -> int:
        return hash((self.name, self.microbatches, self.group_of, self.tasks))

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, groups={self.groups}, stages={self.stages}, "
            f"microbatches={self.microbatches}, tasks={sum(map(len, self.tasks))})"
        )

    def __str__(self) -> str:
        from meshwright.mpmd.schedules.timeline import simulate

        return str(simulate(self))

    def _repr_html_(self) -> str:
        from meshwright.mpmd.schedules.timeline import simulate

        return simulate(self)._repr_html_()

    def to_json(self) -> dict[str, Any]:
        """Plain data; `read_schedule` reads it back."""
        from meshwright.mpmd.schedules.files.keeping import as_json

        return as_json(self)


def count(value: Any, what: str, where: str, least: int = 1) -> int:
    """A whole number of at least `least`, or an error that says what it is for."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < least:
        raise ScheduleError(f"{where}: {what} is a whole number from {least}, not {short(value)}.")
    return int(value)


def _tasks(row: Iterable[Any], where: str) -> Iterable[Task]:
    if not isinstance(row, Iterable):
        raise ScheduleError(f"{where}: its tasks are a list, not {short(row)}.")
    for position, item in enumerate(row):
        if type(item) is Task and item.kind in KINDS:
            yield item
            continue
        if not isinstance(item, Sequence) or isinstance(item, str) or len(item) != 3:
            raise ScheduleError(
                f"{where}, position {position}: {short(item)} is not (kind, stage, microbatch)."
            )
        kind, stage, microbatch = item
        if kind not in KINDS:
            raise ScheduleError(
                f"{where}, position {position}: kind {short(kind)} is not one of {list(KINDS)}."
            )
        at = f"{where}, position {position}"
        yield Task(kind, count(stage, "stage", at, 0), count(microbatch, "microbatch", at, 0))


def _check_groups(name: str, group_of: Sequence[int], groups: int) -> None:
    if not len(group_of):
        raise ScheduleError(f"{name}: no stages. group_of names the group of every stage.")
    for stage, group in enumerate(group_of):
        if count(group, f"the group of stage {stage}", name, 0) >= groups:
            raise ScheduleError(
                f"{name}: stage {stage} is in group {group}, but there are {groups} groups, "
                f"0 to {groups - 1}."
            )
    if idle := sorted(set(range(groups)) - set(group_of)):
        raise ScheduleError(f"{name}: group {idle[0]} has no stage. Give each group at least one.")


def _check_pairs(
    name: str, pairs: Sequence[frozenset[int]], tasks: Sequence[Sequence[Task]]
) -> None:
    if len(pairs) != len(tasks):
        raise ScheduleError(
            f"{name}: overlapped has {len(pairs)} groups, tasks has {len(tasks)}. Give one each."
        )
    for group, starts in enumerate(pairs):
        for start in sorted(starts):
            if start < 0 or start + 1 >= len(tasks[group]) or start + 1 in starts:
                raise ScheduleError(
                    f"{name}: group {group}: position {start} cannot be overlapped with the next: "
                    "there is none, or it is itself the first of a pair."
                )
