"""`Schedule`, its `Task`s and their `Costs`: a pipeline schedule as plain data.

A model is cut into stages, a batch into microbatches. A task is one kind of work on one
microbatch at one stage; a schedule gives each group of devices the list of its tasks. Nothing
here runs or times anything: `validation` proves a schedule, `timeline` simulates it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright._checks import check_integer, check_time
from meshwright.errors import ScheduleError, near, short

if TYPE_CHECKING:
    from meshwright.schedules.timeline import Timeline


class TaskKind(enum.StrEnum):
    """What a task does. Each member equals its letters, so a task may be written with either.

    The letters are those of the zero-bubble papers: splitting the backward pass of a stage into
    `B`, which the stage before waits for, and `W`, which nothing waits for but the optimizer,
    lets `W` fill the time a group would otherwise be idle.
    """

    FORWARD = "F"
    INPUT_GRADIENT = "B"  # the gradient of the stage's input
    WEIGHT_GRADIENT = "W"  # the gradient of the stage's weights
    BACKWARD = "BW"  # both gradients in one task


# The tasks of a schedule hold plain letters, and loops over all tasks compare with letters: a
# member would cost a lookup in its class each time, and schedules have up to 30 million tasks.
KINDS = tuple(str(kind) for kind in TaskKind)

KIND_NAMES: dict[str, str] = {
    TaskKind.FORWARD: "forward",
    TaskKind.INPUT_GRADIENT: "gradient of the input",
    TaskKind.WEIGHT_GRADIENT: "gradient of the weights",
    TaskKind.BACKWARD: "whole backward",
}


class Task(NamedTuple):
    """One kind of work on one microbatch at one stage.

    Prints as stage, kind and microbatch: `2F5` is the forward of microbatch 5 at stage 2.

    >>> Task("BW", 2, 5), str(Task("BW", 2, 5))
    (Task(kind='BW', stage=2, microbatch=5), '2BW5')
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


# A task as the plain tuple it equals: quicker to make than a `Task`, for loops over all tasks.
Key = tuple[str, int, int]


def needs(task: Key, stages: int) -> tuple[Key, ...]:
    """List the tasks whose results a task takes as inputs.

    A `B` in the answer stands for whichever task computes that gradient, `B` or `BW`; compare
    it with `gives`.

    >>> needs(Task("BW", 1, 0), stages=4)
    (('F', 1, 0), ('B', 2, 0))
    """
    kind, stage, microbatch = task
    if kind == "F":
        return (("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (("B", stage, microbatch),)
    own = ("F", stage, microbatch)
    return (own, ("B", stage + 1, microbatch)) if stage + 1 < stages else (own,)


def gives(task: Key) -> Key:
    """Name a task's result as `needs` does: a `BW` gives what a `B` gives.

    >>> gives(Task("BW", 2, 0)) in needs(Task("BW", 1, 0), stages=4)
    True
    """
    return ("B", task[1], task[2]) if task[0] == "BW" else task


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which group runs which task, in which order.

    `tasks[g]` is what group `g` runs, one after the other; `group_of[s]` is the group of stage
    `s`. `overlapped[g]` holds positions in `tasks[g]`: the task there and the next one run as
    one, each hiding the other's communication (DualPipeV). Making a schedule checks types and
    sizes only; `check` proves that it runs, `simulate` times it, `print` draws it.

    >>> import meshwright as mw
    >>> two = mw.schedules.Schedule("mine", microbatches=1, group_of=(0, 1),
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
        check_integer(f"{name}: microbatches", self.microbatches, error=ScheduleError)
        for what, rows in (("tasks", self.tasks), ("group_of", self.group_of)):
            if not isinstance(rows, Sequence) or isinstance(rows, str):
                raise ScheduleError(f"{name}: {what} is a list, not {short(rows)}.")
        tasks = tuple(
            tuple(_checked_tasks(row, f"{name}: group {group}"))
            for group, row in enumerate(self.tasks)
        )
        if not tasks:
            raise ScheduleError(f"{name}: no groups. Give one list of tasks per group.")
        overlapped = tuple(map(frozenset, self.overlapped)) or (frozenset(),) * len(tasks)
        _check_groups(name, self.group_of, len(tasks))
        _check_overlapped(name, overlapped, tasks)
        # Lists and plain tuples are accepted; what is kept can be hashed and cannot be changed.
        for field, value in (
            ("tasks", tasks),
            ("overlapped", overlapped),
            ("group_of", tuple(self.group_of)),
        ):
            object.__setattr__(self, field, value)

    @property
    def groups(self) -> int:
        """The number of groups that run it."""
        return len(self.tasks)

    @property
    def stages(self) -> int:
        """The number of stages the model is cut into."""
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
        """The number of tasks of each kind that occurs."""
        return dict(Counter(task.kind for row in self.tasks for task in row))

    def __hash__(self) -> int:
        return hash((self.name, self.microbatches, self.group_of, self.tasks))

    def __repr__(self) -> str:
        return (
            f"Schedule({short(self.name)}, groups={self.groups}, stages={self.stages}, "
            f"microbatches={self.microbatches}, tasks={sum(map(len, self.tasks))})"
        )

    def __str__(self) -> str:
        return str(self._simulated())

    def _repr_html_(self) -> str:
        return self._simulated()._repr_html_()

    def _simulated(self) -> Timeline:
        # A drawing needs times, so a schedule is drawn as a timeline at unit costs; imported here
        # because `timeline` is built on this file.
        from meshwright.schedules.timeline import simulate

        return simulate(self)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data, tasks as text; `read_schedule` reads it back from a file.

        >>> Schedule("mine", 1, (0,), [[("F", 0, 0), ("BW", 0, 0)]]).to_json()["tasks"]
        [['0F0', '0BW0']]
        """
        return {
            "name": self.name,
            "microbatches": self.microbatches,
            "group_of": list(self.group_of),
            "tasks": [[str(task) for task in row] for row in self.tasks],
            "overlapped": [sorted(starts) for starts in self.overlapped],
        }


def _checked_tasks(row: Iterable[Any], where: str) -> Iterable[Task]:
    """Turn the items of a group's list into `Task`s; name the first that is none."""
    if not isinstance(row, Iterable):
        raise ScheduleError(f"{where}: its tasks are a list, not {short(row)}.")
    for position, item in enumerate(row):
        # The builders make millions of `Task`s: those of sound numbers are taken as they are.
        if type(item) is Task and item[0] in KINDS and _is_index(item[1]) and _is_index(item[2]):
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
        yield Task(
            kind,
            check_integer(f"{at}: stage", stage, least=0, error=ScheduleError),
            check_integer(f"{at}: microbatch", microbatch, least=0, error=ScheduleError),
        )


def _is_index(number: Any) -> bool:
    return type(number) is int and number >= 0


def _check_groups(name: str, group_of: Sequence[int], groups: int) -> None:
    if not len(group_of):
        raise ScheduleError(f"{name}: no stages. group_of names the group of every stage.")
    for stage, group in enumerate(group_of):
        what = f"{name}: the group of stage {stage}"
        if check_integer(what, group, least=0, error=ScheduleError) >= groups:
            raise ScheduleError(
                f"{name}: stage {stage} is in group {group}, but there are {groups} groups, "
                f"0 to {groups - 1}."
            )
    if idle := sorted(set(range(groups)) - set(group_of)):
        raise ScheduleError(f"{name}: group {idle[0]} has no stage. Give each group at least one.")


def _check_overlapped(
    name: str, overlapped: Sequence[frozenset[int]], tasks: Sequence[Sequence[Task]]
) -> None:
    if len(overlapped) != len(tasks):
        raise ScheduleError(
            f"{name}: overlapped has {len(overlapped)} groups, tasks has {len(tasks)}. "
            "Give one each."
        )
    for group, starts in enumerate(overlapped):
        for start in sorted(starts):
            if start < 0 or start + 1 >= len(tasks[group]) or start + 1 in starts:
                raise ScheduleError(
                    f"{name}: group {group}: position {start} cannot be overlapped with the next: "
                    "there is none, or it is itself the first of a pair."
                )


@dataclasses.dataclass(frozen=True)
class Costs:
    """Time of one microbatch through one group's share of the model, in any unit.

    `F` is the forward, `B` the gradient of the input, `W` the gradient of the weights. Unless
    given, the whole backward (`BW`) costs `B + W`, and a forward overlapped with a whole backward
    (`FB`) costs `F + BW`: nothing is hidden.

    >>> Costs.parse("F=1, B=1.5, W=0.5").BW
    2.0
    """

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    BW: float = None  # type: ignore[assignment]  # filled in below
    FB: float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for field in ("F", "B", "W", "BW", "FB"):
            if getattr(self, field) is None:
                default = self.B + self.W if field == "BW" else self.F + self.BW
                object.__setattr__(self, field, default)
            object.__setattr__(self, field, check_time(getattr(self, field), f"cost {field}"))
        if self.F <= 0 or self.BW <= 0:
            raise ScheduleError(
                f"cost F={self.F:g}, BW={self.BW:g}: a forward and a whole backward take time."
            )

    @classmethod
    def parse(cls, costs: Any) -> Costs:
        """Read `"F=1,B=1,W=1"` or a mapping; `F`, `B` and `W` cost 1 where they are left out."""
        if isinstance(costs, Costs):
            return costs
        if isinstance(costs, str):
            pairs = [_parse_cost(part) for part in costs.split(",") if part.strip()]
            if twice := [kind for kind, n in Counter(k for k, _ in pairs).items() if n > 1]:
                raise ScheduleError(
                    f"costs: {twice[0]} is given twice in {short(costs)}.", option="costs"
                )
            costs = dict(pairs)
        if not isinstance(costs, Mapping):
            raise ScheduleError(
                f"costs are 'F=1,B=1,W=1', a mapping or Costs, not {short(costs)}.", option="costs"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for kind in costs:
            if kind not in known:
                raise ScheduleError(
                    f"costs: {short(kind)} is not one of {known}.{near(str(kind), known)}",
                    option="costs",
                )
        return cls(**costs)

    def divided(self, parts: int) -> Costs:
        """Return the costs of one of `parts` equal parts."""
        return Costs(*(getattr(self, f.name) / parts for f in dataclasses.fields(self)))


# For all stages alike, or a list with one entry per stage.
AnyCosts = Costs | str | Mapping[str, float] | Sequence[Costs | str | Mapping[str, float]]


def check_costs(costs: Any) -> None:
    """Refuse what can be the costs of no schedule, before one is chosen."""
    alike = isinstance(costs, (Costs, str, Mapping))
    if not alike and not isinstance(costs, Sequence):
        raise ScheduleError(
            f"costs are Costs, or a list with one per stage, not {short(costs)}.", option="costs"
        )
    for each in (costs,) if alike else costs:
        Costs.parse(each)


def costs_per_stage(costs: AnyCosts, schedule: Schedule) -> tuple[Costs, ...]:
    """Return the costs of every stage: as given, or a group's costs cut evenly over its stages."""
    check_costs(costs)
    if isinstance(costs, (Costs, str, Mapping)):
        group_costs = Costs.parse(costs)
        return tuple(group_costs.divided(len(schedule.stages_of[g])) for g in schedule.group_of)
    if len(costs) != schedule.stages:
        raise ScheduleError(
            f"{schedule.name}: {len(costs)} costs for {schedule.stages} stages. Give one per "
            "stage, or one for all.",
            option="costs",
        )
    return tuple(map(Costs.parse, costs))


def _parse_cost(part: str) -> tuple[str, float]:
    name, _, value = part.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise ScheduleError(
            f"costs: {short(part.strip())} is not kind=time. Write e.g. 'F=1,B=1,W=1'.",
            option="costs",
        ) from None
