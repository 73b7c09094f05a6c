"""`Plan`: everything that is worked out and compiled before a step runs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from meshwright._progress import Bar
from meshwright.errors import PipelineError, ScheduleError
from meshwright.pipelines.build_step import Assembled, assemble
from meshwright.pipelines.runtime import local_operations, place_constants
from meshwright.pipelines.stages import StageProgram, split_into_stages
from meshwright.pipelines.step_graph import (
    Layouts,
    Operation,
    StepBuilder,
    TaskFunction,
    free_after_last_use,
)
from meshwright.pipelines.task_programs import Program, TaskKey, programs
from meshwright.pipelines.tracing import Traced, trace_step
from meshwright.schedules.auto import Auto
from meshwright.schedules.named import schedule as named_schedule
from meshwright.schedules.types import Schedule
from meshwright.schedules.validation import Proof, check
from meshwright.transfers.links import Link
from meshwright.trees.split import Split

# Compile a step's programs ahead of time, several at once.


# From a lowered program to one that answers as `jax.stages.Compiled` does.
Compile = Callable[[TaskFunction, Operation, Any], Any]

_TICK = 0.2  # seconds between two looks at a program that is being compiled


def compile_here(_: TaskFunction, __: Operation, program: Any) -> Any:
    """In this process, for devices of its own."""
    return program.compile()


def compile_all(
    builder: StepBuilder, operations: Sequence[Operation], compile_one: Compile = compile_here
) -> None:
    """Compile what the operations run, each program once, in waves.

    How some values lie is known only when the program that makes them is compiled: programs
    that take them wait for the next wave.
    """
    waiting: dict[int, tuple[TaskFunction, Operation]] = {}
    for operation in operations:
        if operation.code is not None and operation.code.compiled is None:
            waiting.setdefault(id(operation.code), (operation.code, operation))
    total = len(waiting)
    threads = min(total or 1, os.cpu_count() or 1)
    with Bar("pipeline") as bar, _threads(threads) as pool:
        while waiting:
            ready = [
                (code, operation, _lower(builder, code, operation))
                for code, operation in waiting.values()
                if all(builder.slot_shardings[slot] is not None for slot in operation.ins)
            ]
            made = [(each[0], pool.submit(compile_one, *each)) for each in ready]
            for code, future in made:
                while not concurrent.futures.wait([future], _TICK).done:
                    bar.now(f"compiling {code.name}", total - len(waiting), total)
                code.compiled = future.result()
                del waiting[id(code)]
            _learn(builder, operations)
    for operation in operations:
        if operation.code is not None:
            operation.call = operation.code.compiled


@contextlib.contextmanager
def _threads(count: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads that nobody waits for where one has failed, or the user interrupts."""
    pool = concurrent.futures.ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _lower(builder: StepBuilder, code: TaskFunction, operation: Operation) -> Any:
    shapes = [
        jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            builder.avals[slot].shape,
            builder.avals[slot].dtype,
            sharding=builder.slot_shardings[slot],
        )
        for slot in operation.ins
    ]
    jitted = jax.jit(code.fn, out_shardings=code.outs, donate_argnums=code.donated)
    # A mesh that the caller has set would be taken for the program's own.
    with jax.set_mesh(builder.layouts.meshes[operation.group]):
        return jitted.lower(*shapes)


def _learn(builder: StepBuilder, operations: Sequence[Operation]) -> None:
    """How results lie that the compiler was free to place."""
    for operation in operations:
        code = operation.code
        if code is None or code.compiled is None or None not in code.outs:
            continue
        for slot, sharding in zip(operation.outs, code.compiled.output_shardings, strict=True):
            if builder.slot_shardings[slot] is None:
                builder.slot_shardings[slot] = sharding


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A step for arguments of one kind: traced, proved, put together and compiled."""

    traced: Traced
    cut: StageProgram
    programs: dict[TaskKey, Program]
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
        local_groups: frozenset[int],
        link: Link | None,
        compile_one: Compile = compile_here,
    ) -> Plan:
        """Trace, cut, prove, put together and compile what these groups run."""
        traced = trace_step(self.fn, parts, self.microbatches, self._is_forward(), self.options)
        if self._is_forward() == bool(traced.region.gradient):
            have = "has no backward" if self._is_forward() else "has one"
            raise PipelineError(
                f"the step {'takes gradients' if traced.region.gradient else 'takes none'}, and "
                f"the schedule {have}. Use 'forward' for steps without gradients only."
            )
        stages = split_into_stages(traced.region)
        proof = check(self._schedule(stages.stages))
        tasks = {(task.kind, task.stage) for row in proof.schedule.tasks for task in row}
        numbers = [int(path.partition("/")[0]) for path in parts.paths]
        names = [path.partition("/")[2] or path for path in parts.paths]
        self.layouts.check_rules(names)
        builder = StepBuilder(
            self.layouts,
            {var: n for n, var in enumerate(traced.invars)},
            traced.consts,
            parts.arrays,
            names,
        )
        donated = frozenset(n for n, number in enumerate(numbers) if number in self.donated)
        pieces = programs(stages, tasks)
        assembled = assemble(traced, stages, pieces, proof, builder, donated)
        if not self.layouts.groups.compile_only:
            place_constants(builder, local_groups)
        operations = local_operations(builder, local_groups, link)
        kept = {slot for by_group in assembled.results for slot in by_group.values()}
        free_after_last_use(operations, kept | set(builder.constants))
        compile_all(builder, operations, compile_one)
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
