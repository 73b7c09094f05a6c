"""When the tasks of a step run if processes hand them to their groups one after the other."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.mpmd.schedules.costs import Costs
from meshwright.mpmd.schedules.schedule import Schedule
from meshwright.mpmd.schedules.tasks import Key, Task, gives, needs
from meshwright.mpmd.schedules.timeline import Timeline


class Handing(NamedTuple):
    """A process hands a task over: what it does before, how long that takes, and the call."""

    task: Task
    before: float
    call: float
    waited: bool  # until the task's inputs are there


def predict(
    schedule: Schedule,
    costs: tuple[Costs, ...],
    latency: float,
    processes: Sequence[Sequence[Handing]],
) -> Timeline:
    """A task starts once it is handed over by all its processes, its group is free and its inputs
    are there."""
    run = {gives(task) for row in schedule.tasks for task in row}
    handed = collections.Counter(one.task for process in processes for one in process)
    queues = [collections.deque(process) for process in processes]
    clocks = [0.0] * len(queues)
    at = dict.fromkeys(handed, 0.0)  # when a task was handed over by the last of its processes
    starts, ends = dict[Task, float](), dict[Task, float]()
    ready, free = dict[Key, float](), [0.0] * schedule.groups
    moved = True
    while moved:
        moved = False
        for number, queue in enumerate(queues):
            while queue:
                task, before, call, waited = queue[0]
                group = schedule.group_of[task.stage]
                inputs = list(_inputs(task, schedule.stages, run))
                if any(key not in ready for key in inputs):
                    break
                moved = bool(queue.popleft())
                there = [
                    ready[key] + (latency if schedule.group_of[key[1]] != group else 0.0)
                    for key in inputs
                ]
                begin = max([clocks[number] + before, *(there if waited else ())])
                clocks[number] = begin + call
                at[task] = max(at[task], begin)
                handed[task] -= 1
                if not handed[task]:
                    starts[task] = max([at[task], free[group], *there])
                    ends[task] = starts[task] + float(getattr(costs[task.stage], task.kind))
                    ready[gives(task)] = free[group] = ends[task]
    first = min(starts.values())
    rows = (
        tuple(tuple(times[task] - first for task in row) for row in schedule.tasks)
        for times in (starts, ends)
    )
    return Timeline(schedule, costs, latency, *rows)


def _inputs(task: Key, stages: int, run: set[Key]) -> Iterator[Key]:
    """What a task waits for; a task that has nothing to do passes on what it would wait for."""
    for key in needs(task, stages):
        if key in run:
            yield key
        else:
            yield from _inputs(key, stages, run)
