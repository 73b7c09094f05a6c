"""`check`, and the `Proof` it returns: that a schedule runs, in which order, and what it holds.

A schedule is sound if every task of every stage and microbatch is there once, in the group of its
stage, and if no group waits for ever: taking, again and again, any task whose inputs are there
reaches the end. The order of choices does not matter, since running a task only adds results, so
one pass decides.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright.errors import ScheduleError
from meshwright.schedules.types import Key, Schedule, Task, gives, needs


@dataclasses.dataclass(frozen=True)
class Channel:
    """What one group sends to another; `in_order` if it is needed in the order it is sent."""

    source: int
    target: int
    transfers: int
    in_order: bool


@dataclasses.dataclass(frozen=True, repr=False)
class Proof(Shown):
    """Evidence that every task of a schedule runs once, after what it needs.

    `order` is one order of all tasks, with their groups, in which the schedule can run. `live` is
    the most activations each group holds at once; a stage's activation lives from its F to its W
    or BW. `channels` say what each group sends to each other one.
    """

    schedule: Schedule
    order: tuple[tuple[int, Task], ...]
    channels: tuple[Channel, ...]
    live: tuple[int, ...]

    def _sheet(self) -> Sheet:
        rows = [
            [str(group), str(len(row)), str(live), _sends(self.channels, group)]
            for group, (row, live) in enumerate(zip(self.schedule.tasks, self.live, strict=True))
        ]
        heading = ["group", "tasks", "live at most", "sends"]
        return Sheet(self._headline(), [Table(heading, rows, [True, True, True, False])])

    # Without the table, whose rows take time in proportion to groups times channels.
    def __repr__(self) -> str:
        return short_repr(self, self._headline())

    def _headline(self) -> str:
        return f"{self.schedule!r} is sound: every task runs once, after what it needs."

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data, without the order."""
        return {
            "schedule": self.schedule.name,
            "live": list(self.live),
            "channels": [dataclasses.asdict(channel) for channel in self.channels],
        }


def check(schedule: Schedule) -> Proof:
    """Prove that a schedule runs: every task once, in its stage's group, after what it needs.

    Raises `ScheduleError` that names the first offending task, or who waits for whom.

    >>> import meshwright as mw
    >>> mw.schedules.check(mw.schedules.schedule("1f1b", groups=4, microbatches=8)).live
    (4, 3, 2, 1)
    >>> mw.schedules.check(mw.schedules.Schedule("bad", 1, (0,), [[("BW", 0, 0), ("F", 0, 0)]]))
    Traceback (most recent call last):
    ...
    meshwright.errors.ScheduleError: bad: group 0 waits at 0BW0 (position 0) for 0F0, which it...
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"check takes a Schedule, not a {type(schedule).__name__}.")
    _check_tasks(schedule)
    order = tuple(
        (group, task)
        for group, start, stop in execution_order(schedule)
        for task in schedule.tasks[group][start:stop]
    )
    live = tuple(max(held) for held in live_activations(schedule))
    return Proof(schedule, order, tuple(_channels(schedule, order)), live)


def live_activations(schedule: Schedule) -> list[list[int]]:
    """Count, for each group, the activations it holds while each of its tasks runs."""
    # Without a backward nothing is kept: a group holds what it works on.
    if schedule.forward_only:
        return [[1] * len(row) for row in schedule.tasks]
    held = []
    for row in schedule.tasks:
        now, over_time = 0, []
        for task in row:
            now += task.kind == "F"
            over_time.append(now)  # a backward reads its activation, so it counts until the end
            now -= task.kind in ("W", "BW")
        held.append(over_time)
    return held


def _check_tasks(schedule: Schedule) -> None:
    """Refuse tasks that are out of range, in another stage's group, there twice or missing."""
    name = schedule.name
    positions: dict[Key, tuple[int, int]] = {}  # the group of each task, and where in its list
    for group, row in enumerate(schedule.tasks):
        for position, task in enumerate(row):
            if task.stage >= schedule.stages or task.microbatch >= schedule.microbatches:
                raise ScheduleError(
                    f"{name}: {_where(group, position)}: {task} is outside of {schedule.stages} "
                    f"stages and {schedule.microbatches} microbatches."
                )
            if schedule.group_of[task.stage] != group:
                raise ScheduleError(
                    f"{name}: {_where(group, position)}: {task} belongs to group "
                    f"{schedule.group_of[task.stage]}, where stage {task.stage} is."
                )
            if task in positions:
                raise ScheduleError(
                    f"{name}: {_where(group, position)}: {task} was already run at "
                    f"{_where(*positions[task])}."
                )
            positions[task] = group, position
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            _check_complete(schedule, stage, microbatch, positions)


def _check_complete(
    schedule: Schedule, stage: int, microbatch: int, positions: dict[Key, tuple[int, int]]
) -> None:
    """Require a forward and, in training, a backward: whole or in two parts, not both."""
    b, w, whole = ("B", stage, microbatch), ("W", stage, microbatch), ("BW", stage, microbatch)
    missing = None
    if ("F", stage, microbatch) not in positions:
        missing = ("F", stage, microbatch)
    elif schedule.forward_only:
        return
    elif whole in positions:
        for part in (b, w):
            if part in positions:
                raise ScheduleError(
                    f"{schedule.name}: {_where(*positions[part])}: {Task(*part)} is already part "
                    f"of {Task(*whole)} at {_where(*positions[whole])}. Keep one of them."
                )
    elif b not in positions:
        missing = b if w in positions else whole
    elif w not in positions:
        missing = w
    if missing is not None:
        raise ScheduleError(
            f"{schedule.name}: group {schedule.group_of[stage]}: {Task(*missing)} is missing. Add "
            "it to the group's list."
        )


def _where(group: int, position: int) -> str:
    return f"group {group}, position {position}"


def _channels(schedule: Schedule, order: tuple[tuple[int, Task], ...]) -> Iterator[Channel]:
    """Compare the results each group sends another with those the other needs, in their orders.

    Every task runs once, so each result that is sent is also needed. Transfers that carry the
    name of their result work either way; those that are matched by order need `in_order`.
    """
    sent: dict[tuple[int, int], list[Key]] = {}  # by (source, target), as the tasks give them
    needed_by: dict[tuple[int, int], list[Key]] = {}  # by (source, target), as they are needed
    for group, task in order:
        for target in _receivers(schedule, task):
            if target != group:
                sent.setdefault((group, target), []).append(gives(task))
        for needed in needs(task, schedule.stages):
            source = schedule.group_of[needed[1]]
            if source != group:
                needed_by.setdefault((source, group), []).append(needed)
    for (source, target), results in sorted(sent.items()):
        in_order = results == needed_by[source, target]
        yield Channel(source, target, len(results), in_order)


def _receivers(schedule: Schedule, task: Task) -> tuple[int, ...]:
    """Return the groups of the tasks that need this one's result."""
    if task.kind == "F" and task.stage + 1 < schedule.stages:
        return (schedule.group_of[task.stage + 1],)
    if task.kind in ("B", "BW") and task.stage:
        return (schedule.group_of[task.stage - 1],)
    return ()


def _sends(channels: tuple[Channel, ...], group: int) -> str:
    return ", ".join(
        f"{channel.transfers} to {channel.target}{'' if channel.in_order else ' (not in order)'}"
        for channel in channels
        if channel.source == group
    )


def execution_order(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """Yield tasks in an order in which they can run, or raise: who waits for whom.

    A unit of work is `(group, first position, one past the last)`: one task, or two that overlap.
    Groups take turns, each going on until it must wait, so a schedule has the same order in every
    process. Linear in the number of tasks: a group that waits is looked at again only when the
    result it waits for is there.
    """
    done: set[Key] = set()
    waiting: dict[Key, list[int]] = {}  # the groups that wait for a result
    at = [0] * schedule.groups
    turns = deque(range(schedule.groups))
    while turns:
        group = turns.popleft()
        row, pairs = schedule.tasks[group], schedule.overlapped[group]
        while at[group] < len(row):
            start = at[group]
            stop = start + 2 if start in pairs else start + 1
            missing = _missing(row[start:stop], done, schedule.stages)
            if missing is not None:
                waiting.setdefault(missing, []).append(group)
                break
            yield group, start, stop
            at[group] = stop
            for task in row[start:stop]:
                given = gives(task)
                done.add(given)
                turns.extend(waiting.pop(given, ()))
    if stuck := {g: at[g] for g in range(schedule.groups) if at[g] < len(schedule.tasks[g])}:
        raise ScheduleError(_deadlock(schedule, stuck, done))


def _missing(unit: tuple[Task, ...], done: set[Key], stages: int) -> Key | None:
    """The first input that is not there; the two tasks of a pair start together, so of both."""
    for task in unit:
        for needed in needs(task, stages):
            if needed not in done:
                return needed
    return None


def _deadlock(schedule: Schedule, stuck: dict[int, int], done: set[Key]) -> str:
    """Say who waits for whom, from the first stuck group to one that was named already."""
    group_of = {gives(task): group for group, row in enumerate(schedule.tasks) for task in row}
    group, seen, steps = min(stuck), set[int](), []
    while group not in seen:
        seen.add(group)
        start = stuck[group]
        stop = start + 2 if start in schedule.overlapped[group] else start + 1
        unit = schedule.tasks[group][start:stop]
        missing = _missing(unit, done, schedule.stages)
        holder = group_of.get(missing) if missing is not None else None
        named = "+".join(map(str, unit))
        steps.append(
            f"group {group} waits at {named} (position {start}) for {missing and Task(*missing)}"
        )
        if holder is None:
            return f"{schedule.name}: {steps[-1]}, which no group runs."
        if holder == group:
            return f"{schedule.name}: {steps[-1]}, which it would run itself, later."
        group = holder
    chain = "; ".join(steps[:6]) + ("; ..." if len(steps) > 6 else "")
    return f"{schedule.name}: deadlock. {chain}. Move the first of these tasks back in its group."
