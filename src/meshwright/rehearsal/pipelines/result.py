"""`PipelineRehearsal`: what is known about a pipeline before it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright._tables import duration, html_table, table
from meshwright.mpmd.pipelines.explaining import Explanation
from meshwright.mpmd.schedules.timeline import Timeline
from meshwright.partitioning.show import amount
from meshwright.rehearsal.ledger import Ledger
from meshwright.rehearsal.memory.use import Memory
from meshwright.rehearsal.timing.steptime import StepTime


@dataclasses.dataclass(frozen=True)
class TaskRehearsal:
    """One kind of task of one stage: its program on its group."""

    name: str
    stage: int
    kind: str
    collectives: Ledger
    time: StepTime
    temporaries: int


@dataclasses.dataclass(frozen=True)
class GroupRehearsal:
    """One group. `held` is what lives between tasks at the peak: activations and sums.

    `stand_in` names the slice that it was compiled for where none has the group's own shape.
    """

    group: int
    memory: Memory
    held: int
    tasks: tuple[TaskRehearsal, ...]
    stand_in: str = ""

    def verdict(self) -> str:
        """One line: does it fit."""
        how = f" (compiled for {self.stand_in}: no slice has its shape)" if self.stand_in else ""
        return f"group {self.group}: {self.memory.verdict()}{how}"


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineRehearsal:
    """What the compiler made of a pipeline. Prints itself; HTML in a notebook; `to_json()`.

    `timeline` is in milliseconds, from the modelled times of the tasks. `refused` names the task
    at which the compiler ran out of memory, if it did: then only its group is known.
    """

    groups: tuple[GroupRehearsal, ...]
    timeline: Timeline | None
    explanation: Explanation | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        return all(group.memory.fits for group in self.groups)

    def __str__(self) -> str:
        lines = [group.verdict() for group in self.groups]
        if self.refused:
            return "\n".join([*lines, self._advice()])
        tasks = table(self._tasks(), [False, *[True] * 5])
        return "\n".join([*lines, "", self._memory(), "", tasks, "", str(self.timeline)])

    def _advice(self) -> str:
        return (
            f"The compiler ran out of memory at {self.refused}; the other tasks were not compiled. "
            "Use more groups, more microbatches, or cut the arrays further."
        )

    def _memory(self) -> str:
        rows = [["group", "arguments", "held", "largest task", "code", "peak"]]
        for group in self.groups:
            memory = group.memory
            working = memory.temporaries - group.held
            parts = (memory.arguments, group.held, working, memory.code, memory.peak)
            rows.append([str(group.group), *map(amount, parts)])
        return table(rows, [True] * 6)

    def _tasks(self) -> list[list[str]]:
        rows = [["task", "group", "time", "waits for others", "moved", "temporaries"]]
        for group in self.groups:
            rows += [
                [
                    task.name,
                    str(group.group),
                    duration(task.time.total),
                    duration(task.time.exposed),
                    amount(task.collectives.moved),
                    amount(task.temporaries),
                ]
                for task in group.tasks
            ]
        return rows

    def _repr_html_(self) -> str:
        verdicts = "".join(f"<p>{group.verdict()}</p>" for group in self.groups)
        if self.timeline is None:
            return f"{verdicts}<p>{self._advice()}</p>"
        return f"{verdicts}{html_table(self._tasks(), [False, *[True] * 5])}{self.timeline.svg()}"

    def to_json(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "refused": self.refused or None,
            "groups": [
                {
                    "group": group.group,
                    "memory": group.memory.to_json(),
                    "held": group.held,
                    "stand_in": group.stand_in or None,
                    "tasks": [
                        {
                            "name": task.name,
                            "time": task.time.to_json(),
                            "collectives": task.collectives.to_json(),
                            "temporaries": task.temporaries,
                        }
                        for task in group.tasks
                    ],
                }
                for group in self.groups
            ],
            "timeline": None if self.timeline is None else self.timeline.to_json(),
        }
