"""`Plan`: everything that is worked out and compiled before a step runs, made by a `Planner`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from meshwright._progress import Pulse, showing
from meshwright._show import short_repr
from meshwright._text import plural
from meshwright.errors import PipelineError, ScheduleError
from meshwright.pipelines.arguments import CheckedOptions
from meshwright.pipelines.build_step import Assembled, assemble
from meshwright.pipelines.outer_program import num_elements
from meshwright.pipelines.runtime import local_operations, place_constants
from meshwright.pipelines.staged_program import variables
from meshwright.pipelines.stages import StageProgram, split_into_stages
from meshwright.pipelines.step_graph import (
    GroupShardings,
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
from meshwright.trees.split import Split, changed_numbers, split_arrays

# From a jitted function and shapes to a lowered program, and from that to one with the methods of
# `jax.stages.Compiled`.
Lower = Callable[[TaskFunction, Operation, Any, Sequence[Any]], Any]
Compile = Callable[[TaskFunction, Operation, Any], Any]

_TICK = 0.2  # seconds between two updates of the progress bar


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A step for arguments of one kind: traced, cut, proved, put together and compiled.

    `operations` are those of this process; `assembled` has those of all groups. `paths` are the
    paths of the argument arrays ("0/w"), `names` the same inside their argument ("w"); `donated`
    are their indices, `unused_donations` those of more than one number whose memory no program
    takes over: a step deletes them itself. `numbers` are the positions, among all leaves, of Python
    numbers that the step returns changed and that were taken for data.
    """

    traced: Traced
    stage_program: StageProgram
    programs: dict[TaskKey, Program]
    proof: Proof
    assembled: Assembled
    operations: Sequence[Operation]
    names: Sequence[str]
    paths: Sequence[str]
    donated: frozenset[int]
    unused_donations: frozenset[int] = frozenset()
    numbers: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        schedule = self.proof.schedule
        return short_repr(
            self,
            f"{schedule.name}: {plural(schedule.groups, 'group')}, "
            f"{plural(schedule.stages, 'stage')}, "
            f"{plural(schedule.microbatches, 'microbatch')}, "
            f"{plural(len(self.operations), 'operation')}",
        )


def lower_here(_: TaskFunction, __: Operation, jitted: Any, shapes: Sequence[Any]) -> Any:
    """Lower for devices of this process."""
    return jitted.lower(*shapes)


def compile_here(_: TaskFunction, __: Operation, lowered: Any) -> Any:
    """Compile in this process, for devices of its own."""
    return lowered.compile()


@dataclasses.dataclass(frozen=True, eq=False)
class Planner:
    """The checked options of a pipeline; `plan` makes a `Plan` for arguments of one kind."""

    fn: Callable[..., Any]
    shardings: GroupShardings
    schedule: str | Schedule | Auto
    microbatches: int
    donated: tuple[int, ...]
    options: CheckedOptions
    progress: bool = True

    def plan(
        self,
        parts: Split,
        local_groups: frozenset[int],
        link: Link | None,
        compile_one: Compile = compile_here,
        lower_one: Lower = lower_here,
    ) -> Plan:
        """Trace, cut, prove, put together, and compile what these groups run.

        `parts` are the arguments, arrays or shapes. `link` transfers between processes; None in a
        single one.
        """
        parts, traced, changed = self._trace(parts)
        self._check_gradients(traced)
        stage_program = split_into_stages(traced.region)
        proof = check(self._schedule(stage_program.stages))
        kinds = {(task.kind, task.stage) for row in proof.schedule.tasks for task in row}
        # A path is "argument number/path inside of it"; rules match the latter.
        numbers = [int(path.partition("/")[0]) for path in parts.paths]
        names = [path.partition("/")[2] or path for path in parts.paths]
        self.shardings.check_rules(names)
        builder = StepBuilder(
            self.shardings,
            {var: n for n, var in enumerate(traced.invars)},
            traced.consts,
            parts.arrays,
            names,
        )
        donated = frozenset(n for n, number in enumerate(numbers) if number in self.donated)
        task_programs = programs(stage_program, kinds)
        assembled = assemble(traced, stage_program, task_programs, proof, builder, donated)
        if not self.shardings.groups.compile_only:
            place_constants(builder, local_groups)
        operations = local_operations(builder, local_groups, link)
        kept = {slot for by_group in assembled.results for slot in by_group.values()}
        # Constants are kept as well: they are the same arrays in every step.
        free_after_last_use(operations, kept | set(builder.constants))
        with showing(self.progress):
            compile_all(builder, operations, compile_one, lower_one)
        taken = _taken_over(builder, traced)
        return Plan(
            traced,
            stage_program,
            task_programs,
            proof,
            assembled,
            operations,
            names,
            parts.paths,
            donated,
            frozenset(n for n in donated - taken if num_elements(traced.invars[n]) > 1),
            changed,
        )

    def _trace(self, parts: Split) -> tuple[Split, Traced, frozenset[int]]:
        """Trace the step, Python numbers that it returns changed being data (`TrainState.step`)."""
        options = (self.microbatches, self.options)
        traced = trace_step(self.fn, parts, *options)
        numbers = changed_numbers(parts, traced.out)
        if not numbers:
            return parts, traced, numbers
        data = split_arrays(parts.rebuild(parts.arrays), 1, numbers.union(parts.positions))
        try:
            return data, trace_step(self.fn, data, *options), numbers
        except Exception:
            # The step asks for the value, `if state.step % 100 == 0`: it must stay a setting, and
            # the step is compiled for each. `PlanCache` warns of that.
            return parts, traced, frozenset()

    def _check_gradients(self, traced: Traced) -> None:
        """Refuse a step with gradients on a schedule without a backward, and the reverse."""
        forward_only = not self.options.gradient
        if forward_only == bool(traced.region.gradient):
            have = "has no backward" if forward_only else "has one"
            raise PipelineError(
                f"the step {'takes gradients' if traced.region.gradient else 'takes none'}, and "
                f"the schedule {have}. Use 'forward' for steps without gradients only.",
                option="schedule",
            )

    def _schedule(self, stages: int) -> Schedule:
        """Return the schedule for as many stages as the function turned out to have."""
        groups = self.shardings.groups.mpmd_dim
        if isinstance(self.schedule, Schedule):
            schedule = self.schedule
        elif isinstance(self.schedule, Auto):
            schedule = self.schedule.build(groups, self.microbatches, stages)
        else:
            try:
                schedule = named_schedule(
                    self.schedule, groups=groups, microbatches=self.microbatches, stages=stages
                )
            except ScheduleError as error:
                if stages == groups:
                    raise
                raise PipelineError(
                    f"{error} Stage ends in the function: {stages - 1}; one stage per group takes "
                    f"{groups - 1}.",
                    option="schedule",
                ) from error
        sizes = (schedule.groups, schedule.microbatches, schedule.stages)
        if sizes != (groups, self.microbatches, stages):
            raise PipelineError(
                f"schedule {schedule.name} has {schedule.groups} groups, {schedule.microbatches} "
                f"microbatches and {schedule.stages} stages; the pipeline has {groups}, "
                f"{self.microbatches} and {stages} (one more than stage ends).",
                option="schedule",
            )
        return schedule


def _taken_over(builder: StepBuilder, traced: Traced) -> frozenset[int]:
    """Return the arguments that live on: in the memory of a result, or returned as they are."""
    taken = {
        operation.ins[n]
        for operation in builder.operations
        if operation.function is not None
        for n in operation.function.donate_argnums
    }
    returned = {builder.arguments[v] for v in variables(traced.outvars) if v in builder.arguments}
    return frozenset(p.number for p in builder.placed if p.slot in taken) | returned


def compile_all(
    builder: StepBuilder,
    operations: Sequence[Operation],
    compile_one: Compile = compile_here,
    lower_one: Lower = lower_here,
) -> None:
    """Compile what the operations run, each function once, several at a time, in waves.

    Some shardings are known only when the program that makes the value is compiled (the compiler
    chose them): programs that read such values wait for the next wave.
    """
    waiting: dict[int, tuple[TaskFunction, Operation]] = {}
    for operation in operations:
        if operation.function is not None and operation.function.compiled is None:
            waiting.setdefault(id(operation.function), (operation.function, operation))
    total = len(waiting)
    threads = min(total or 1, os.cpu_count() or 1)
    # Of several processes, which compile alike, one says so.
    speaks = builder.shardings.groups.compile_only or jax.process_index() == 0
    with showing(speaks), Pulse("pipeline") as pulse, _thread_pool(threads) as pool:
        while waiting:
            # Lowering traces Python, under the interpreter lock: threads would not help there.
            ready = [
                (function, operation, lower_function(builder, function, operation, lower_one))
                for function, operation in waiting.values()
                if all(builder.slot_shardings[slot] is not None for slot in operation.ins)
            ]
            futures = [(job[0], pool.submit(compile_one, *job)) for job in ready]
            for function, future in futures:
                done = total - len(waiting)
                pulse.now(f"compiling {function.name} ({done + 1} of {total})")
                while not concurrent.futures.wait([future], _TICK).done:
                    pass  # in short waits, which Ctrl-C can end
                function.compiled = future.result()
                del waiting[id(function)]
            _read_output_shardings(builder, operations)
    for operation in operations:
        if operation.function is not None:
            operation.call = operation.function.compiled


@contextlib.contextmanager
def _thread_pool(count: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads that are not waited for when one has failed or the user interrupts.

    `with ThreadPoolExecutor()` would wait for all running compiles, which may take minutes.
    """
    pool = concurrent.futures.ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def lower_function(
    builder: StepBuilder,
    function: TaskFunction,
    operation: Operation,
    lower_one: Lower = lower_here,
) -> Any:
    """Lower a function for the shardings of the slots that an operation calls it with."""

    def named(*values: Any) -> Any:
        return function.fn(*values)

    # The name of the program in profiles and in the compiler's dumps: `F0`, `group_0_update_0`.
    named.__name__ = named.__qualname__ = re.sub(r"\W+", "_", function.name)
    jitted = jax.jit(
        named,
        out_shardings=function.out_shardings,
        donate_argnums=function.donate_argnums,
    )
    # A mesh that the caller has set would be taken for the program's own.
    with jax.set_mesh(builder.shardings.meshes[operation.group]):
        return lower_one(function, operation, jitted, [*map(builder.shape, operation.ins)])


def _read_output_shardings(builder: StepBuilder, operations: Sequence[Operation]) -> None:
    """Note the shardings of the results for which the compiler chose one."""
    for operation in operations:
        function = operation.function
        if function is None or function.compiled is None or None not in function.out_shardings:
            continue
        for slot, sharding in zip(operation.outs, function.compiled.output_shardings, strict=True):
            if builder.slot_shardings[slot] is None:
                builder.slot_shardings[slot] = sharding
