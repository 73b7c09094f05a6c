"""`rehearse_pipeline`: compile every task of a pipeline, and time them as the schedule runs.

The groups' meshes say for what hardware: on `mw.mesh(..., on="v5e:4x4")` the vendor's compiler
compiles every task, in processes of its own; for live devices they are compiled here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright._checks import check_flag, check_seconds
from meshwright._html import Html, block, tag
from meshwright._progress import showing
from meshwright._show import Table, short_repr
from meshwright._text import amount, duration, plural, table
from meshwright.errors import RehearsalError, short
from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.chips import CHIPS
from meshwright.hlo.instructions import Source
from meshwright.meshes.build import explain_mesh
from meshwright.pipelines.explanation import Explanation
from meshwright.pipelines.explanation import explain as explain_plan
from meshwright.pipelines.plan import Plan
from meshwright.pipelines.step import PipelineStep
from meshwright.pipelines.step_graph import Operation
from meshwright.placement.cost_model import INSIDE
from meshwright.placement.placement import Placement
from meshwright.rehearsal.callbacks import Callback, callbacks_line
from meshwright.rehearsal.collectives.analyze import analyze
from meshwright.rehearsal.collectives.types import Collectives
from meshwright.rehearsal.host_memory import HostMemory, host_share
from meshwright.rehearsal.host_transfers import (
    HostTransfers,
    find_host_transfers,
    offload_lost_line,
)
from meshwright.rehearsal.lowering import cudnn_of_chip
from meshwright.rehearsal.memory import Memory
from meshwright.rehearsal.repeated_work import find_repeated_work
from meshwright.rehearsal.request import TIMEOUT, choose_folder
from meshwright.rehearsal.step_arguments import array_types
from meshwright.rehearsal.step_time import StepTime, step_time
from meshwright.rehearsal.task_compiler import (
    Exhausted,
    TaskCompiler,
    bytes_on_device,
    group_host_memory,
    group_memory,
    task_program,
    task_temporaries,
)
from meshwright.rehearsal.tpu_slices import stand_in_name
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import Costs, TaskKind
from meshwright.trees.split import split_arrays


def rehearse_pipeline(
    step: PipelineStep,
    *args: Any,
    timeout: float = TIMEOUT,
    cache: bool | str | Path = True,
    progress: bool = True,
    speeds: str | os.PathLike[str] | Calibration | None = None,
) -> PipelineRehearsal:
    """Compile every task of a pipeline for its groups' hardware, and model its timeline.

    Args:
      step: what `pipeline(...)` returned, over live groups or groups on named hardware.
      *args: the step's arguments, as arrays or as `jax.ShapeDtypeStruct`s.
      timeout: seconds that the vendor's compiler has for each task of groups that are not here.
      cache: folder for its answers, as for `rehearse`.
      progress: False to show none, as for `rehearse`.
      speeds: a file of `meshwright calibrate`, or what `calibrate` returned, as for `rehearse`.

    Raises `RehearsalError` with the task and its group where a compiler refuses one or crashes, and
    `CalibrationError` for speeds of another kind of chip. Where a compiler runs out of memory at a
    task, the result says which, and holds the group of that task alone.

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
    check_flag("progress", progress, error=RehearsalError)
    # Read once, and refused before anything is compiled.
    hardware = explain_mesh(step.groups.meshes[0], speeds=speeds).topology
    speeds = hardware.chip.measured
    about: dict[str, Any] = {
        "name": str(getattr(step.fn, "__name__", "step")),
        "on": f"{len(step.groups.meshes)} x {hardware.name}",
        "group_sizes": tuple(mesh.size for mesh in step.groups.meshes),
        "array_types": array_types(args),
    }
    try:
        with showing(progress):
            if step.groups.compile_only:
                plan = _plan_without_devices(step, args, compiler)
            else:
                plan = step.plan_of(*args)
    except Exhausted as refused:
        group = GroupRehearsal(refused.group, refused.memory, 0, ())
        callbacks = tuple(compiler.callbacks)
        return PipelineRehearsal((group,), None, None, refused.task, callbacks, **about)
    groups = tuple(_group(plan, number, speeds) for number in range(step.groups.mpmd_dim))
    times = {(t.stage, str(t.kind)): 1e3 * t.time.total for group in groups for t in group.tasks}
    return PipelineRehearsal(
        groups,
        modelled_timeline(plan, times, speeds),
        explain_plan(plan),
        callbacks=tuple(compiler.callbacks),
        offloads=tuple(compiler.offloads),
        **about,
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PipelineRehearsal:
    """What the compiler made of a pipeline. Prints itself; HTML in a notebook; `to_json()`.

    `timeline` is in milliseconds, from the modelled times of the tasks. `refused` names the task
    at which the compiler ran out of memory, if it did: then only its group is known. `callbacks`
    were left out of the tasks of groups that are not here; `offloads` are the lines of those that
    move arrays to the host. `on` is the hardware of the groups, `group_sizes` are their numbers
    of devices, `array_types` the shapes and dtypes of the arrays that the step takes.
    """

    groups: tuple[GroupRehearsal, ...]
    timeline: Timeline | None
    explanation: Explanation | None
    refused: str = ""
    callbacks: tuple[Callback, ...] = ()
    offloads: tuple[Source | None, ...] = ()
    name: str = ""
    on: str = ""
    group_sizes: tuple[int, ...] = ()
    array_types: tuple[str, ...] = ()

    @property
    def offload_lost(self) -> bool:
        """Whether tasks offload arrays, and the compiled programs keep them on the device."""
        tasks = [task for group in self.groups for task in group.tasks]
        return bool(self.offloads and tasks) and all(t.host_transfers is None for t in tasks)

    @property
    def speeds(self) -> str:
        """Whose speeds the times of its tasks go by; empty where none was compiled."""
        return next((task.time.speeds for group in self.groups for task in group.tasks), "")

    @property
    def fits(self) -> bool:
        """Whether every group fits the memory of its devices."""
        return all(group.memory.fits for group in self.groups)

    def compare(self, measured: Any) -> Any:
        """Show these promises beside what `step.measure` returned: it, with one column more."""
        if not hasattr(measured, "makespan"):  # of a room below this one
            raise RehearsalError(f"compare: {short(measured)} is not what step.measure returns.")
        return measured.compare(self)

    def __repr__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        return short_repr(self, f"of {plural(len(self.groups), 'group')}, {verdict}")

    def __str__(self) -> str:
        lines = [*(group.verdict() for group in self.groups), *self._notes()]
        if self.refused:
            return "\n".join([*lines, self._advice()])
        tasks = table(self._task_rows(), [False, *[True] * 5])
        return "\n".join([*lines, "", self._memory_table(), "", tasks, "", str(self.timeline)])

    def _notes(self) -> list[str]:
        """What was left out of the programs, and what they move to and from the host."""
        notes = [callbacks_line(self.callbacks)] if self.callbacks else []
        if self.offload_lost:
            chip = CHIPS[self.groups[0].memory.chip]
            notes.append(offload_lost_line(self.offloads, chip))
        moved = [task.host_transfers for group in self.groups for task in group.tasks]
        if any(moved) and not any(each.to_device for each in moved if each is not None):
            notes.append(
                "What tasks leave on the host is taken to come back in no time: JAX has no memory "
                "of the host for GPUs that are not here."
            )
        notes += [
            f"task {task.name}: {task.host_transfers}"
            for group in self.groups
            for task in group.tasks
            if task.host_transfers is not None
        ]
        notes += [
            f"group {group.group}: {group.host_memory.verdict()}"
            for group in self.groups
            if group.host_memory is not None
        ]
        return notes + ([f"modelled times: by {self.speeds}"] if self.speeds else [])

    def _advice(self) -> str:
        return (
            f"The compiler ran out of memory at {self.refused}; the other tasks were not compiled. "
            "Use more groups, more microbatches, or shard the arrays further."
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
        lines = [*(group.verdict() for group in self.groups), *self._notes()]
        verdicts = [tag("p", line) for line in lines]
        if self.timeline is None:
            return block(*verdicts, tag("p", self._advice()))
        heading, *rows = self._task_rows()
        tasks = Table(heading, rows, [False, *[True] * 5]).html()
        return block(*verdicts, tasks, Html(self.timeline.svg()))

    def to_json(self) -> dict[str, Any]:
        """Return groups, tasks and the timeline as plain data."""
        return {
            "fits": self.fits,
            "refused": self.refused or None,
            "callbacks": [callback.to_json() for callback in self.callbacks],
            "offload_lost": self.offload_lost,
            "speeds": self.speeds,
            "groups": [
                {
                    "group": group.group,
                    "memory": group.memory.to_json(),
                    "held": group.held,
                    "host_memory": group.host_memory and group.host_memory.to_json(),
                    "stand_in": group.stand_in or None,
                    "tasks": [
                        {
                            "name": task.name,
                            "time": task.time.to_json(),
                            "collectives": task.collectives.to_json(),
                            "temporaries": task.temporaries,
                            "host_transfers": task.host_transfers and task.host_transfers.to_json(),
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
    host_transfers: HostTransfers | None = None

    def __repr__(self) -> str:
        return short_repr(self, f"{self.name}, {duration(self.time.total)}")


@dataclasses.dataclass(frozen=True, repr=False)
class GroupRehearsal:
    """One group of the pipeline: its memory over the whole step, and its tasks.

    `held` are the bytes that live between tasks at the peak: activations and sums of gradients.
    `stand_in` names the slice that it was compiled for where none has the group's own shape.
    `host_memory` is what its tasks leave on their hosts at once, against its devices' share of
    their memory; `None` if nothing.
    """

    group: int
    memory: Memory
    held: int
    tasks: tuple[TaskRehearsal, ...]
    stand_in: str = ""
    host_memory: HostMemory | None = None

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
    chip = explain_mesh(step.groups.meshes[0]).topology.chip
    parts = split_arrays(args, 1)
    try:
        with cudnn_of_chip(chip):
            return step.planner.plan(parts, step.local_groups, step.link, compiler, compiler.lower)
    finally:
        compiler.stop()


def _group(plan: Plan, group: int, speeds: Calibration | None) -> GroupRehearsal:
    builder = plan.assembled.builder
    placed = explain_mesh(builder.shardings.meshes[group], speeds=speeds)
    operations = [each for each in plan.operations if each.group == group]
    memory, held = group_memory(builder, plan.operations, group, placed.topology.chip)
    other_shape = (
        stand_in_name(builder.shardings.meshes[group])
        if builder.shardings.groups.compile_only
        else ""
    )
    given, peak = group_host_memory(builder, plan.operations, group)
    host = host_share(given, peak, placed.topology) if peak else None
    return GroupRehearsal(group, memory, held, _tasks(operations, placed), other_shape, host)


def _tasks(operations: Sequence[Operation], placed: Placement) -> tuple[TaskRehearsal, ...]:
    """One of every kind of task per stage: its microbatches all run one program."""
    tasks: dict[tuple[int, str], TaskRehearsal] = {}
    for operation in operations:
        task, code = operation.task, operation.function
        if task is None or code is None or (task.stage, task.kind) in tasks:
            continue
        compiled = code.compiled
        program = task_program(compiled)
        collectives = analyze(program, placed)
        repeated = find_repeated_work(program, placed)
        tasks[task.stage, task.kind] = TaskRehearsal(
            f"{task.stage}{task.kind}",
            task.stage,
            TaskKind(task.kind),
            collectives,
            step_time(program, collectives, placed.topology.chip, repeated),
            task_temporaries(compiled, program, placed.topology.chip),
            find_host_transfers(program, placed.topology.chip),
        )
    return tuple(tasks.values())


def modelled_timeline(
    plan: Plan, times: Mapping[tuple[int, str], float], speeds: Calibration | None = None
) -> Timeline:
    """Simulate the schedule with the modelled time of tasks by stage and kind, in milliseconds."""
    schedule = plan.proof.schedule
    costs = []
    for stage in range(schedule.stages):
        forward = times.get((stage, TaskKind.FORWARD), 0.0)
        by_input = times.get((stage, TaskKind.INPUT_GRADIENT), 0.0)
        by_weights = times.get((stage, TaskKind.WEIGHT_GRADIENT), 0.0)
        backward = times.get((stage, TaskKind.BACKWARD), by_input + by_weights)
        # `Costs` refuses a forward or a backward without a cost; a stage may have an empty one.
        costs.append(Costs(max(forward, 1e-6), by_input, by_weights, max(backward, 1e-6)))
    return simulate(schedule, costs, _latency(plan, speeds))


def _latency(plan: Plan, speeds: Calibration | None) -> float:
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
    line = speeds and speeds.collective("collective-permute", INSIDE[chip.family], 2)
    if line and largest:
        return 1e3 * (line[0] + largest / line[1])
    return 1e3 * largest / (chip.link * 1e9)
