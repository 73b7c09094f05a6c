"""`rehearse_pipeline`: compile every task of a pipeline, and time them as the schedule runs.

The groups' meshes say for what hardware: on `mw.mesh(..., on="v5e:4x4")` the vendor's compiler
compiles every task, in processes of its own; for live devices they are compiled here.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import math
import threading
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import NamedSharding

from meshwright import _compat
from meshwright._checks import check_seconds
from meshwright._html import html_table
from meshwright._show import short_repr
from meshwright._text import amount, duration, plural, table
from meshwright.errors import RehearsalError, short
from meshwright.hardware.chips import Chip
from meshwright.hlo.literals import decode_constants
from meshwright.hlo.program import read_program
from meshwright.meshes.build import explain_mesh
from meshwright.mpmd.groups import Groups
from meshwright.pipelines.explanation import Explanation
from meshwright.pipelines.explanation import explain as explain_plan
from meshwright.pipelines.plan import Plan
from meshwright.pipelines.step import PipelineStep
from meshwright.pipelines.step_graph import Operation, StepBuilder, TaskFunction
from meshwright.placement.placement import Placement
from meshwright.rehearsal.collectives.analyze import analyze
from meshwright.rehearsal.collectives.types import Collectives
from meshwright.rehearsal.compiler import PLATFORMS, Job, Outcome, Site, compile_or_load
from meshwright.rehearsal.lowering import identity_of
from meshwright.rehearsal.memory import Memory, as_refused, available
from meshwright.rehearsal.repeated_work import find_repeated_work
from meshwright.rehearsal.request import TIMEOUT, choose_folder
from meshwright.rehearsal.step_time import StepTime, step_time
from meshwright.rehearsal.tpu_slices import slice_for, stand_in_name
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import Costs, TaskKind
from meshwright.trees.split import split_arrays
from meshwright.trees.walk import bits


def rehearse_pipeline(
    step: PipelineStep, *args: Any, timeout: float = TIMEOUT, cache: bool | str | Path = True
) -> PipelineRehearsal:
    """Compile every task of a pipeline for its groups' hardware, and model its timeline.

    Args:
      step: what `pipeline(...)` returned, over live groups or groups on named hardware.
      *args: the step's arguments, as arrays or as `jax.ShapeDtypeStruct`s.
      timeout: seconds that the vendor's compiler has for each task of groups that are not here.
      cache: folder that keeps its answers, as for `rehearse`.

    Raises `RehearsalError` with the task and its group where a compiler refuses one or crashes.
    Where it runs out of memory at a task, the result says which, and holds the group of that task
    alone.

    >>> import jax, jax.numpy as jnp, meshwright as mw
    >>> def loss(params, x):
    ...     h = mw.stage_end(jnp.tanh(x @ params["a"]))
    ...     return jnp.mean((h @ params["b"]) ** 2)
    >>> w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((32, 64), "float32")
    >>> groups = mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp")
    >>> step = mw.pipeline(loss, groups, microbatches=4)
    >>> r = mw.rehearse_pipeline(step, {"a": w, "b": w}, x)
    >>> r.fits, [task.name for group in r.groups for task in group.tasks]
    (True, ['0F', '0BW', '1F', '1BW'])
    """
    if not isinstance(step, PipelineStep):
        raise RehearsalError(
            f"rehearse_pipeline: {short(step)} is not what pipeline(...) returns. Use rehearse for "
            "a plain step."
        )
    if not args:
        raise RehearsalError("rehearse_pipeline: pass the step's arguments, or their shapes.")
    compiler = TaskCompiler(
        step.groups, check_seconds("timeout", timeout, error=RehearsalError), choose_folder(cache)
    )
    try:
        if step.groups.compile_only:
            plan = _plan_without_devices(step, args, compiler)
        else:
            plan = step.plan_of(*args)
    except Exhausted as refused:
        group = GroupRehearsal(refused.group, refused.memory, 0, ())
        return PipelineRehearsal((group,), None, None, refused.task)
    groups = tuple(_group(plan, number) for number in range(step.groups.mpmd_dim))
    return PipelineRehearsal(groups, _timeline(plan, groups), explain_plan(plan))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
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
        """Whether every group fits the memory of its devices."""
        return all(group.memory.fits for group in self.groups)

    def __repr__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        return short_repr(self, f"of {plural(len(self.groups), 'group')}, {verdict}")

    def __str__(self) -> str:
        lines = [group.verdict() for group in self.groups]
        if self.refused:
            return "\n".join([*lines, self._advice()])
        tasks = table(self._task_rows(), [False, *[True] * 5])
        return "\n".join([*lines, "", self._memory_table(), "", tasks, "", str(self.timeline)])

    def _advice(self) -> str:
        return (
            f"The compiler ran out of memory at {self.refused}; the other tasks were not compiled. "
            "Use more groups, more microbatches, or cut the arrays further."
        )

    def _memory_table(self) -> str:
        rows = [["group", "arguments", "held", "largest task", "code", "peak"]]
        for group in self.groups:
            memory = group.memory
            working = memory.temporaries - group.held
            parts = (memory.arguments, group.held, working, memory.code, memory.peak)
            rows.append([str(group.group), *map(amount, parts)])
        return table(rows, [True] * 6)

    def _task_rows(self) -> list[list[str]]:
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
        return (
            f"{verdicts}{html_table(self._task_rows(), [False, *[True] * 5])}{self.timeline.svg()}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return groups, tasks and the timeline as plain data."""
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


@dataclasses.dataclass(frozen=True, repr=False)
class TaskRehearsal:
    """One kind of task of one stage, e.g. `0F`: its program on its group. Temporaries in bytes."""

    name: str
    stage: int
    kind: TaskKind
    collectives: Collectives
    time: StepTime
    temporaries: int

    def __repr__(self) -> str:
        return short_repr(self, f"{self.name}, {duration(self.time.total)}")


@dataclasses.dataclass(frozen=True, repr=False)
class GroupRehearsal:
    """One group of the pipeline: its memory over the whole step, and its tasks.

    `held` are the bytes that live between tasks at the peak: activations and sums of gradients.
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

    def __repr__(self) -> str:
        return short_repr(self, self.verdict())


def _plan_without_devices(
    step: PipelineStep, args: tuple[Any, ...], compiler: TaskCompiler
) -> Plan:
    """Plan a step whose tasks are compiled in other processes; the plan cannot run."""
    try:
        return step.planner.plan(split_arrays(args, 1), step.local_groups, step.link, compiler)
    finally:
        compiler.stop()


def _group(plan: Plan, group: int) -> GroupRehearsal:
    builder = plan.assembled.builder
    placed = explain_mesh(builder.shardings.meshes[group])
    operations = [each for each in plan.operations if each.group == group]
    memory, held = group_memory(builder, plan.operations, group, placed.topology.chip)
    other_shape = (
        stand_in_name(builder.shardings.meshes[group])
        if builder.shardings.groups.compile_only
        else ""
    )
    return GroupRehearsal(group, memory, held, _tasks(operations, placed), other_shape)


def _tasks(operations: Sequence[Operation], placed: Placement) -> tuple[TaskRehearsal, ...]:
    """One of every kind of task per stage: its microbatches all run one program."""
    tasks: dict[tuple[int, str], TaskRehearsal] = {}
    for operation in operations:
        task, code = operation.task, operation.function
        if task is None or code is None or (task.stage, task.kind) in tasks:
            continue
        compiled = code.compiled
        tables = compiled.outcome.constants if isinstance(compiled, CompiledTask) else {}
        program = read_program(compiled.as_text(), decode_constants(tables))
        collectives = analyze(program, placed)
        repeated = find_repeated_work(program, placed)
        tasks[task.stage, task.kind] = TaskRehearsal(
            f"{task.stage}{task.kind}",
            task.stage,
            TaskKind(task.kind),
            collectives,
            step_time(program, collectives, placed.topology.chip, repeated),
            compiled.memory_analysis().temp_size_in_bytes,
        )
    return tuple(tasks.values())


def _timeline(plan: Plan, groups: Sequence[GroupRehearsal]) -> Timeline:
    """Simulate the schedule with the modelled time of each task, in milliseconds."""
    schedule = plan.proof.schedule
    times = {(t.stage, t.kind): 1e3 * t.time.total for group in groups for t in group.tasks}
    costs = []
    for stage in range(schedule.stages):
        forward = times.get((stage, TaskKind.FORWARD), 0.0)
        by_input = times.get((stage, TaskKind.INPUT_GRADIENT), 0.0)
        by_weights = times.get((stage, TaskKind.WEIGHT_GRADIENT), 0.0)
        backward = times.get((stage, TaskKind.BACKWARD), by_input + by_weights)
        # `Costs` refuses a forward or a backward without a cost; a stage may have an empty one.
        costs.append(Costs(max(forward, 1e-6), by_input, by_weights, max(backward, 1e-6)))
    return simulate(schedule, costs, _latency(plan))


def _latency(plan: Plan) -> float:
    """Milliseconds for the largest value that crosses a boundary, at the speed of one link."""
    builder = plan.assembled.builder
    chip = explain_mesh(builder.shardings.meshes[0]).topology.chip
    largest = max(
        (
            sum(bytes_on_device(builder, slot) for slot in operation.outs)
            for operation in plan.operations
            if operation.is_transfer
        ),
        default=0,
    )
    return 1e3 * largest / (chip.link * 1e9)


class Exhausted(RehearsalError):
    """Raised for a task at which the compiler ran out of memory, with its group and memory."""

    def __init__(self, task: str, group: int, memory: Memory):
        super().__init__(f"{task}: the compiler ran out of memory. The group {memory.verdict()}.")
        self.task, self.group, self.memory = task, group, memory


# In: lowered programs, from the threads in which a plan compiles its tasks. Out: what the compiling
# process made of each. Invariant: one process per program, also where several threads ask for it;
# stages of a transformer are mostly one program.
class TaskCompiler:
    """Compiles the programs of groups that are not here, equal ones only once."""

    def __init__(self, groups: Groups, timeout: float, folder: Path | None):
        self.groups, self.timeout, self.folder = groups, timeout, folder
        self._outcomes: dict[str, concurrent.futures.Future[Outcome]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def __call__(self, function: TaskFunction, operation: Operation, program: Any) -> CompiledTask:
        """Compile a lowered program with the vendor's compiler."""
        job = self._job(function, operation, program)
        outcome = self._outcome(job)
        if outcome.verdict == "exhausted":
            memory = as_refused(outcome.reason, (), job.site.topology.chip)
            raise Exhausted(job.name, operation.group, memory)
        mesh = self.groups.meshes[operation.group]
        return CompiledTask(outcome, _compat.named_shardings(outcome.shardings, mesh))

    def stop(self) -> None:
        """End the compilers that are still at work."""
        self._stopped.set()

    def _job(self, function: TaskFunction, operation: Operation, program: Any) -> Job:
        module = program.compiler_ir("stablehlo").operation
        written = io.BytesIO()
        module.write_bytecode(written)
        hardware, positions = slice_for(self.groups.meshes[operation.group])
        return Job(
            _name(function, operation),
            written.getvalue(),
            Site(PLATFORMS[hardware.chip.family], hardware, positions),
            tuple(out is None for out in function.out_shardings),
            _compat.uses_shardy(),
            identity_of(module),
        )

    def _outcome(self, job: Job) -> Outcome:
        """Return the outcome of a job, or the one that another thread is already compiling."""
        with self._lock:
            first = job.key not in self._outcomes
            outcome = self._outcomes.setdefault(job.key, concurrent.futures.Future())
        if first:
            try:
                outcome.set_result(compile_or_load(job, self.folder, self.timeout, self._tick)[0])
            except BaseException as error:  # for the threads that wait for it too
                outcome.set_exception(error)
        return outcome.result()

    def _tick(self, _: float) -> None:
        if self._stopped.is_set():
            raise RehearsalError("the rehearsal of this pipeline has ended.")


def _name(function: TaskFunction, operation: Operation) -> str:
    task = operation.task
    return (
        function.name if task is None else f"group {operation.group}: task {task.stage}{task.kind}"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledTask:
    """A task compiled in another process: reads as `jax.stages.Compiled`, but cannot be called."""

    outcome: Outcome
    output_shardings: Sequence[NamedSharding]

    def as_text(self) -> str:
        return self.outcome.text

    def memory_analysis(self) -> Any:
        sizes = {f"{part}_size_in_bytes": size for part, size in self.outcome.memory.items()}
        return types.SimpleNamespace(**sizes)

    def cost_analysis(self) -> dict[str, float]:
        return self.outcome.cost


# In: the operations of all groups in the order in which they run. Out: the most that one group
# holds at once, and what of it lives between tasks then. Arguments stay unless a program is donated
# them, for the caller holds them too; results live until their last use, and each program adds its
# own temporaries. Example, 1F1B with two stages: group 0 holds the activations of two microbatches
# when its first backward begins.
def group_memory(
    builder: StepBuilder, operations: Sequence[Operation], group: int, chip: Chip
) -> tuple[Memory, int]:
    """Follow a group's memory through its operations: its peak, and what is held between tasks.

    `operations` are those of all groups: what is sent away is dropped by the group that takes it.
    """
    own = [operation for operation in operations if operation.group == group]
    given = {argument.slot for argument in builder.placed if argument.group == group}
    given |= {slot for slot in builder.constants if builder.group_of_slot[slot] == group}

    def total(slots: Iterable[int]) -> int:
        return sum(bytes_on_device(builder, slot) for slot in slots)

    arguments = total(given)
    alive = set(given)
    peak, held = arguments, 0
    for operation in operations:
        if operation.group != group:
            alive -= set(operation.drop) - given
            continue
        between = total(alive - given)
        function = operation.function
        working = total(operation.outs) if function is None else _working(function)
        if total(alive & given) + between + working > peak:
            peak, held = total(alive & given) + between + working, between
        alive |= set(operation.outs)
        alive -= set(operation.drop) - given
        alive -= set() if function is None else {operation.ins[n] for n in function.donate_argnums}
    programs = sum(
        each.compiled.memory_analysis().generated_code_size_in_bytes
        for each in {id(o.function): o.function for o in own if o.function is not None}.values()
    )
    rest = max(0, peak - arguments)
    return Memory(arguments, 0, 0, rest, programs, available(chip), chip.name, chip.family), held


def _working(function: TaskFunction) -> int:
    """Bytes that a program needs besides its arguments."""
    report = function.compiled.memory_analysis()
    new = report.output_size_in_bytes - report.alias_size_in_bytes
    return int(report.temp_size_in_bytes + new)


def bytes_on_device(builder: StepBuilder, slot: int) -> int:
    """Bytes that a device holds of the value in a slot."""
    aval, sharding = builder.avals[slot], builder.slot_shardings[slot]
    shape = aval.shape if sharding is None else sharding.shard_shape(aval.shape)
    return math.ceil(math.prod(shape) * bits(aval.dtype) / 8)
