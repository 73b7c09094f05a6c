"""`rehearse_pipeline(...)`: every task of a pipeline compiled, and timed as its schedule runs.

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
from meshwright._html import html_table
from meshwright._text import amount, duration, table
from meshwright.errors import RehearsalError, short
from meshwright.hardware.chips import Chip
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
from meshwright.rehearsal.compiler import PLATFORMS, Job, Outcome, Site, answer
from meshwright.rehearsal.lowering import identity_of
from meshwright.rehearsal.memory import Memory, as_refused, available
from meshwright.rehearsal.request import check_timeout, choose_folder
from meshwright.rehearsal.step_time import StepTime, step_time
from meshwright.rehearsal.tpu_slices import hardware_of, stand_in
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import Costs
from meshwright.trees.split import split_arrays
from meshwright.trees.walk import bits


def rehearse_pipeline(
    step: PipelineStep, *args: Any, timeout: float = 900.0, cache: bool | str | Path = True
) -> PipelineRehearsal:
    """Compile every task of a pipeline for its groups' hardware; `args` are arrays or shapes.

    For groups that are not here the vendor's compiler has `timeout` seconds for each task, and
    its answers are kept in `cache`, as for `rehearse`. Where it runs out of memory at a task, the
    result says which, and holds the group of that task alone.

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
    compiler = TaskCompiler(step.groups, check_timeout(timeout), choose_folder(cache))
    try:
        plan = _elsewhere(step, args, compiler) if step.groups.compile_only else step.plan_of(*args)
    except Exhausted as refused:
        group = GroupRehearsal(refused.group, refused.memory, 0, ())
        return PipelineRehearsal((group,), None, None, refused.task)
    groups = tuple(_group(plan, number) for number in range(step.groups.mpmd_dim))
    return PipelineRehearsal(groups, _timeline(plan, groups), explain_plan(plan, plan.names))


def _elsewhere(step: PipelineStep, args: tuple[Any, ...], compiler: TaskCompiler) -> Plan:
    """The plan of a step whose tasks are compiled in other processes; it cannot run."""
    try:
        return step.planner.plan(split_arrays(args, 1), step.local_groups, step.link, compiler)
    finally:
        compiler.stop()


def _group(plan: Plan, group: int) -> GroupRehearsal:
    builder = plan.assembled.builder
    placed = explain_mesh(builder.layouts.meshes[group])
    operations = [each for each in plan.operations if each.group == group]
    memory, held = group_memory(builder, plan.operations, group, placed.topology.chip)
    odd = stand_in(builder.layouts.meshes[group]) if builder.layouts.groups.compile_only else ""
    return GroupRehearsal(group, memory, held, _tasks(operations, placed), odd)


def _tasks(operations: Sequence[Operation], placed: Placement) -> tuple[TaskRehearsal, ...]:
    found: dict[tuple[int, str], TaskRehearsal] = {}
    for operation in operations:
        task, code = operation.task, operation.code
        if task is None or code is None or (task.stage, task.kind) in found:
            continue
        program = read_program(code.compiled.as_text())
        collectives = analyze(program, placed)
        found[task.stage, task.kind] = TaskRehearsal(
            f"{task.stage}{task.kind}",
            task.stage,
            task.kind,
            collectives,
            step_time(program, collectives, placed.topology.chip),
            code.compiled.memory_analysis().temp_size_in_bytes,
        )
    return tuple(found.values())


def _timeline(plan: Plan, groups: Sequence[GroupRehearsal]) -> Timeline:
    schedule = plan.proof.schedule
    times = {(t.stage, t.kind): 1e3 * t.time.total for group in groups for t in group.tasks}
    costs = []
    for stage in range(schedule.stages):
        f, b, w = (times.get((stage, kind), 0.0) for kind in ("F", "B", "W"))
        whole = times.get((stage, "BW"), b + w)
        costs.append(Costs(max(f, 1e-6), b, w, max(whole, 1e-6)))
    return simulate(schedule, costs, _latency(plan))


def _latency(plan: Plan) -> float:
    """Milliseconds for the largest value that crosses a boundary, at the speed of one link."""
    builder = plan.assembled.builder
    chip = explain_mesh(builder.layouts.meshes[0]).topology.chip
    largest = max(
        (
            sum(bytes_on_device(builder, cell) for cell in operation.outs)
            for operation in plan.operations
            if operation.moves
        ),
        default=0,
    )
    return 1e3 * largest / (chip.link * 1e9)


# A pipeline's tasks, compiled in processes of their own.


class Exhausted(RehearsalError):
    """A task for which the compiler ran out of memory: of which group, and its verdict."""

    def __init__(self, task: str, group: int, memory: Memory):
        super().__init__(f"{task}: the compiler ran out of memory. The group {memory.verdict()}.")
        self.task, self.group, self.memory = task, group, memory


class TaskCompiler:
    """Compiles the programs of groups that are not here; the same program only once."""

    def __init__(self, groups: Groups, timeout: float, folder: Path | None):
        self.groups, self.timeout, self.folder = groups, timeout, folder
        self._asked: dict[str, concurrent.futures.Future[Outcome]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def __call__(self, code: TaskFunction, operation: Operation, program: Any) -> CompiledTask:
        """What the vendor's compiler makes of a lowered program."""
        job = self._job(code, operation, program)
        outcome = self._outcome(job)
        if outcome.verdict == "exhausted":
            memory = as_refused(outcome.reason, (), job.site.topology.chip)
            raise Exhausted(job.name, operation.group, memory)
        mesh = self.groups.meshes[operation.group]
        return CompiledTask(outcome, _compat.named_shardings(outcome.shardings, mesh))

    def stop(self) -> None:
        """End the compilers that are still at work."""
        self._stopped.set()

    def _job(self, code: TaskFunction, operation: Operation, program: Any) -> Job:
        module = program.compiler_ir("stablehlo").operation
        written = io.BytesIO()
        module.write_bytecode(written)
        hardware, positions = hardware_of(self.groups.meshes[operation.group])
        return Job(
            _name(code, operation),
            written.getvalue(),
            Site(PLATFORMS[hardware.chip.family], hardware, positions),
            tuple(out is None for out in code.outs),
            _compat.uses_shardy(),
            identity_of(module),
        )

    def _outcome(self, job: Job) -> Outcome:
        """Waits for another thread that has asked the same."""
        with self._lock:
            first = job.key not in self._asked
            found = self._asked.setdefault(job.key, concurrent.futures.Future())
        if first:
            try:
                found.set_result(answer(job, self.folder, self.timeout, self._look)[0])
            except BaseException as error:  # those who wait are to hear of it too
                found.set_exception(error)
        return found.result()

    def _look(self, _: float) -> None:
        if self._stopped.is_set():
            raise RehearsalError("the rehearsal of this pipeline has ended.")


def _name(code: TaskFunction, operation: Operation) -> str:
    task = operation.task
    return code.name if task is None else f"group {operation.group}: task {task.stage}{task.kind}"


# `CompiledTask`: what a compiler in another process made of a task, read as one made here is.


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledTask:
    """Answers what `jax.stages.Compiled` does, and cannot be called."""

    outcome: Outcome
    output_shardings: Sequence[NamedSharding]

    def as_text(self) -> str:
        return self.outcome.text

    def memory_analysis(self) -> Any:
        sizes = {f"{part}_size_in_bytes": size for part, size in self.outcome.memory.items()}
        return types.SimpleNamespace(**sizes)

    def cost_analysis(self) -> dict[str, float]:
        return self.outcome.cost


# A group's memory, followed through its operations.
#
# Arguments stay unless a program is donated them, for the caller holds them too; results live until
# their last use, and each program adds its own temporaries.


def group_memory(
    builder: StepBuilder, operations: Sequence[Operation], group: int, chip: Chip
) -> tuple[Memory, int]:
    """The peak of a group as its operations run, and what of it lives between them.

    `operations` are those of all groups: what is sent away is forgotten by the group that takes it.
    """
    own = [operation for operation in operations if operation.group == group]
    given = {argument.slot for argument in builder.placed if argument.group == group}
    given |= {cell for cell in builder.constants if builder.group_of[cell] == group}

    def total(cells: Iterable[int]) -> int:
        return sum(bytes_on_device(builder, cell) for cell in cells)

    arguments = total(given)
    alive = set(given)
    peak, held = arguments, 0
    for operation in operations:
        if operation.group != group:
            alive -= set(operation.drop) - given
            continue
        between = total(alive - given)
        code = operation.code
        working = total(operation.outs) if code is None else _working(code)
        if total(alive & given) + between + working > peak:
            peak, held = total(alive & given) + between + working, between
        alive |= set(operation.outs)
        alive -= set(operation.drop) - given
        alive -= set() if code is None else {operation.ins[n] for n in code.donated}
    programs = sum(
        each.compiled.memory_analysis().generated_code_size_in_bytes
        for each in {id(o.code): o.code for o in own if o.code is not None}.values()
    )
    rest = max(0, peak - arguments)
    return Memory(arguments, 0, 0, rest, programs, available(chip), chip.name, chip.family), held


def _working(code: TaskFunction) -> int:
    """What a program needs besides what it is given."""
    report = code.compiled.memory_analysis()
    new = report.output_size_in_bytes - report.alias_size_in_bytes
    return int(report.temp_size_in_bytes + new)


def bytes_on_device(builder: StepBuilder, cell: int) -> int:
    """What a device holds of a value."""
    aval, lies = builder.avals[cell], builder.slot_shardings[cell]
    shape = aval.shape if lies is None else lies.shard_shape(aval.shape)
    return math.ceil(math.prod(shape) * bits(aval.dtype) / 8)


# `PipelineRehearsal`: what is known about a pipeline before it runs.


@dataclasses.dataclass(frozen=True)
class TaskRehearsal:
    """One kind of task of one stage: its program on its group."""

    name: str
    stage: int
    kind: str
    collectives: Collectives
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
