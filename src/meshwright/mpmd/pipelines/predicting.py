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
    board = _Board(schedule, costs, latency, processes)
    hosts = [_Host(process) for process in processes]
    while any(board.advance(host) for host in hosts):
        pass
    first = min(board.starts.values())
    rows = (
        tuple(tuple(times[task] - first for task in row) for row in schedule.tasks)
        for times in (board.starts, board.ends)
    )
    return Timeline(schedule, costs, latency, *rows)


class _Host:
    """A process: what it still has to hand over, and its clock."""

    def __init__(self, handings: Sequence[Handing]):
        self.queue, self.clock = collections.deque(handings), 0.0


class _Board:
    """When tasks start and end, as far as they have been handed over."""

    def __init__(
        self,
        schedule: Schedule,
        costs: tuple[Costs, ...],
        latency: float,
        processes: Sequence[Sequence[Handing]],
    ):
        self.schedule, self.costs, self.latency = schedule, costs, latency
        self.starts, self.ends = dict[Task, float](), dict[Task, float]()
        self._run = {gives(task) for row in schedule.tasks for task in row}
        self._ready, self._free = dict[Key, float](), [0.0] * schedule.groups
        self._missing = collections.Counter(one.task for each in processes for one in each)
        self._handed = dict.fromkeys(self._missing, 0.0)  # by the last of its processes so far

    def advance(self, host: _Host) -> bool:
        """Hand over what can be; whether there was anything."""
        before = len(host.queue)
        while host.queue and (there := self._arrivals(host.queue[0].task)) is not None:
            one = host.queue.popleft()
            begin = max([host.clock + one.before, *(there if one.waited else ())])
            host.clock = begin + one.call
            self._take(one.task, begin, there)
        return len(host.queue) < before

    def _arrivals(self, task: Task) -> list[float] | None:
        """When the inputs of a task are in its group; nothing while one is not yet timed."""
        group_of = self.schedule.group_of
        inputs = list(_inputs(task, self.schedule.stages, self._run))
        if any(key not in self._ready for key in inputs):
            return None
        far = [group_of[key[1]] != group_of[task.stage] for key in inputs]
        return [
            self._ready[key] + self.latency * away for key, away in zip(inputs, far, strict=True)
        ]

    def _take(self, task: Task, handed: float, there: Sequence[float]) -> None:
        """A process has handed a task over; the last one that does lets it start."""
        self._handed[task] = max(self._handed[task], handed)
        self._missing[task] -= 1
        if self._missing[task]:
            return
        group = self.schedule.group_of[task.stage]
        self.starts[task] = max([self._handed[task], self._free[group], *there])
        self.ends[task] = self.starts[task] + float(getattr(self.costs[task.stage], task.kind))
        self._ready[gives(task)] = self._free[group] = self.ends[task]


def _inputs(task: Key, stages: int, run: set[Key]) -> Iterator[Key]:
    """What a task waits for; a task that has nothing to do passes on what it would wait for."""
    for key in needs(task, stages):
        if key in run:
            yield key
        else:
            yield from _inputs(key, stages, run)
