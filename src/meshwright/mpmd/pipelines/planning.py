"""`Plan`: everything that is worked out and compiled before a step runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.errors import PipelineError, ScheduleError
from meshwright.mpmd.pipelines.assembling import Assembled, assemble
from meshwright.mpmd.pipelines.board import Board
from meshwright.mpmd.pipelines.compiling import Compile, compile_all, compile_here
from meshwright.mpmd.pipelines.cutting import Cut, cut
from meshwright.mpmd.pipelines.layouts import Layouts
from meshwright.mpmd.pipelines.operations import Operation, set_drops
from meshwright.mpmd.pipelines.placing import settle_constants
from meshwright.mpmd.pipelines.programs import Key, Program, programs
from meshwright.mpmd.pipelines.reading import Traced, read
from meshwright.mpmd.pipelines.sharing import share
from meshwright.mpmd.pipelines.statics import Split
from meshwright.mpmd.schedules.auto import Auto
from meshwright.mpmd.schedules.named.catalogue import schedule as named_schedule
from meshwright.mpmd.schedules.proving import Proof, check
from meshwright.mpmd.schedules.schedule import Schedule
from meshwright.mpmd.transfers import Link


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A step for arguments of one kind: traced, proved, put together and compiled."""

    traced: Traced
    cut: Cut
    programs: dict[Key, Program]
    proof: Proof
    assembled: Assembled
    operations: Sequence[Operation]
    names: Sequence[str]
    paths: Sequence[str]
    donated: frozenset[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Planner:
    """What a step was asked to be; makes its plans, one for each kind of arguments."""

    fn: Callable[..., Any]
    layouts: Layouts
    schedule: str | Schedule | Auto
    microbatches: int
    donated: tuple[int, ...]
    options: dict[str, Any]

    def plan(
        self,
        parts: Split,
        mine: frozenset[int],
        link: Link | None,
        compile_one: Compile = compile_here,
    ) -> Plan:
        """Trace, cut, prove, put together and compile what these groups run."""
        traced = read(self.fn, parts, self.microbatches, self._is_forward(), self.options)
        if self._is_forward() == bool(traced.region.gradient):
            have = "has no backward" if self._is_forward() else "has one"
            raise PipelineError(
                f"the step {'takes gradients' if traced.region.gradient else 'takes none'}, and "
                f"the schedule {have}. Use 'forward' for steps without gradients only."
            )
        stages = cut(traced.region)
        proof = check(self._schedule(stages.stages))
        tasks = {(task.kind, task.stage) for row in proof.schedule.tasks for task in row}
        numbers = [int(path.partition("/")[0]) for path in parts.paths]
        names = [path.partition("/")[2] or path for path in parts.paths]
        self.layouts.check_rules(names)
        board = Board(
            self.layouts,
            {var: n for n, var in enumerate(traced.invars)},
            traced.consts,
            parts.arrays,
            names,
        )
        donated = frozenset(n for n, number in enumerate(numbers) if number in self.donated)
        pieces = programs(stages, tasks)
        assembled = assemble(traced, stages, pieces, proof, board, donated)
        if not self.layouts.groups.compile_only:
            settle_constants(board, mine)
        operations = share(board, mine, link)
        kept = {cell for by_group in assembled.results for cell in by_group.values()}
        set_drops(operations, kept | set(board.fixed))
        compile_all(board, operations, compile_one)
        return Plan(
            traced, stages, pieces, proof, assembled, operations, names, parts.paths, donated
        )

    def _is_forward(self) -> bool:
        if isinstance(self.schedule, Schedule):
            return self.schedule.forward_only
        return isinstance(self.schedule, str) and self.schedule.strip().lower() == "forward"

    def _schedule(self, stages: int) -> Schedule:
        groups = self.layouts.groups.mpmd_dim
        if isinstance(self.schedule, Schedule):
            found = self.schedule
        elif isinstance(self.schedule, Auto):
            found = self.schedule.build(groups, self.microbatches, stages)
        else:
            try:
                found = named_schedule(
                    self.schedule, groups=groups, microbatches=self.microbatches, stages=stages
                )
            except ScheduleError as error:
                if stages == groups:
                    raise
                raise PipelineError(
                    f"{error} Marks in the function: {stages - 1}; one stage per group takes "
                    f"{groups - 1}."
                ) from error
        if (found.groups, found.microbatches, found.stages) != (groups, self.microbatches, stages):
            raise PipelineError(
                f"schedule {found.name} has {found.groups} groups, {found.microbatches} "
                f"microbatches and {found.stages} stages; the pipeline has {groups}, "
                f"{self.microbatches} and {stages} (one more than marks)."
            )
        return found
