"""`check(schedule)`: proof that it runs, and what it holds at once."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

from meshwright._text import table
from meshwright.errors import ScheduleError
from meshwright.schedules.types import Key, Schedule, Task, gives, needs


@dataclasses.dataclass(frozen=True)
class Channel:
    """What one group sends to another; `in_order` when it is taken in the order it is sent."""

    source: int
    target: int
    transfers: int
    in_order: bool


@dataclasses.dataclass(frozen=True)
class Proof:
    """Every task runs once, after what it needs.

    `order` is one order of all tasks in which the schedule can run, `live` the most activations
    each group holds at once (a stage's activation lives from its F to its W or BW).
    """

    schedule: Schedule
    order: tuple[tuple[int, Task], ...] = dataclasses.field(repr=False)
    channels: tuple[Channel, ...]
    live: tuple[int, ...]

    def __str__(self) -> str:
        rows = [
            [str(group), str(len(row)), str(live), _ports(self.channels, group)]
            for group, (row, live) in enumerate(zip(self.schedule.tasks, self.live, strict=True))
        ]
        head = f"{self.schedule!r} is sound: every task runs once, after what it needs."
        heading = ["group", "tasks", "live at most", "sends"]
        return f"{head}\n{table([heading, *rows], [True, True, True, False])}"

    def to_json(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.name,
            "live": list(self.live),
            "channels": [dataclasses.asdict(channel) for channel in self.channels],
        }


def check(schedule: Schedule) -> Proof:
    """Prove that a schedule runs: every task once, in its stage's group, after what it needs.

    Raises `ScheduleError` that names the first offending task.

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
    _every_task_once(schedule)
    order = tuple(
        (group, task)
        for group, start, stop in walk(schedule)
        for task in schedule.tasks[group][start:stop]
    )
    live = tuple(max(held) for held in live_activations(schedule))
    return Proof(schedule, order, tuple(_channels(schedule, order)), live)


def live_activations(schedule: Schedule) -> list[list[int]]:
    """For each group, how many activations it holds while each of its tasks runs."""
    if schedule.forward_only:
        return [[1] * len(row) for row in schedule.tasks]
    held = []
    for row in schedule.tasks:
        now, over_time = 0, []
        for task in row:
            now += task.kind == "F"
            over_time.append(now)
            now -= task.kind in ("W", "BW")
        held.append(over_time)
    return held


def _every_task_once(schedule: Schedule) -> None:
    name, found = schedule.name, dict[Key, tuple[int, int]]()
    for group, row in enumerate(schedule.tasks):
        for position, task in enumerate(row):
            if task.stage >= schedule.stages or task.microbatch >= schedule.microbatches:
                raise ScheduleError(
                    f"{name}: {_at(group, position)}: {task} is outside of {schedule.stages} "
                    f"stages and {schedule.microbatches} microbatches."
                )
            if schedule.group_of[task.stage] != group:
                raise ScheduleError(
                    f"{name}: {_at(group, position)}: {task} belongs to group "
                    f"{schedule.group_of[task.stage]}, where stage {task.stage} is."
                )
            if task in found:
                raise ScheduleError(
                    f"{name}: {_at(group, position)}: {task} was already run at "
                    f"{_at(*found[task])}."
                )
            found[task] = group, position
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            _complete(schedule, stage, microbatch, found)


def _complete(
    schedule: Schedule, stage: int, microbatch: int, found: dict[Key, tuple[int, int]]
) -> None:
    """A forward, and a backward that is whole or in two parts; in training schedules."""
    b, w, whole = ("B", stage, microbatch), ("W", stage, microbatch), ("BW", stage, microbatch)
    missing = None
    if ("F", stage, microbatch) not in found:
        missing = ("F", stage, microbatch)
    elif schedule.forward_only:
        return
    elif whole in found:
        for part in (b, w):
            if part in found:
                raise ScheduleError(
                    f"{schedule.name}: {_at(*found[part])}: {Task(*part)} is already part of "
                    f"{Task(*whole)} at {_at(*found[whole])}. Keep one of them."
                )
    elif b not in found:
        missing = b if w in found else whole
    elif w not in found:
        missing = w
    if missing is not None:
        raise ScheduleError(
            f"{schedule.name}: group {schedule.group_of[stage]}: {Task(*missing)} is missing. Add "
            "it to the group's list."
        )


def _at(group: int, position: int) -> str:
    return f"group {group}, position {position}"


def _channels(schedule: Schedule, order: tuple[tuple[int, Task], ...]) -> Iterator[Channel]:
    """Sends in the order of their tasks, receives in the order of the tasks that need them.

    Every task runs once, so each result that is sent is taken, by name; whether also in order
    matters to those who send without names.
    """
    sent: dict[tuple[int, int], list[Key]] = {}
    taken: dict[tuple[int, int], list[Key]] = {}
    for group, task in order:
        for target in _receivers(schedule, task):
            if target != group:
                sent.setdefault((group, target), []).append(gives(task))
        for needed in needs(task, schedule.stages):
            source = schedule.group_of[needed[1]]
            if source != group:
                taken.setdefault((source, group), []).append(needed)
    for (source, target), out in sorted(sent.items()):
        yield Channel(source, target, len(out), out == taken[source, target])


def _receivers(schedule: Schedule, task: Task) -> tuple[int, ...]:
    """Groups of the tasks that wait for this one's result."""
    if task.kind == "F" and task.stage + 1 < schedule.stages:
        return (schedule.group_of[task.stage + 1],)
    if task.kind in ("B", "BW") and task.stage:
        return (schedule.group_of[task.stage - 1],)
    return ()


def _ports(channels: tuple[Channel, ...], group: int) -> str:
    ours = [channel for channel in channels if channel.source == group]
    return ", ".join(
        f"{c.transfers} to {c.target}" + ("" if c.in_order else " (not in order)") for c in ours
    )


# Walk a schedule in an order in which it can run, or say who waits for whom.


Unit = tuple[int, int, int]


def walk(schedule: Schedule) -> Iterator[Unit]:
    """`(group, first position, one past the last)` of tasks that can now run; two if overlapped.

    Groups take turns, each going on until it must wait; so the same schedule gives the same
    order everywhere.
    """
    done: set[Key] = set()
    waiting: dict[Key, list[int]] = {}
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
    for task in unit:
        for needed in needs(task, stages):
            if needed not in done:
                return needed
    return None


def _deadlock(schedule: Schedule, stuck: dict[int, int], done: set[Key]) -> str:
    """Follow who waits for whom, from the first stuck group, until it closes."""
    homes = {gives(task): group for group, row in enumerate(schedule.tasks) for task in row}
    group, seen, steps = min(stuck), set[int](), []
    while group not in seen:
        seen.add(group)
        start = stuck[group]
        stop = start + 2 if start in schedule.overlapped[group] else start + 1
        unit = schedule.tasks[group][start:stop]
        missing = _missing(unit, done, schedule.stages)
        holder = homes.get(missing) if missing is not None else None
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
