"""Walk a schedule in an order in which it can run, or say who waits for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from meshwright.errors import ScheduleError
from meshwright.mpmd.schedules.schedule import Schedule
from meshwright.mpmd.schedules.tasks import Key, Task, gives, needs

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
