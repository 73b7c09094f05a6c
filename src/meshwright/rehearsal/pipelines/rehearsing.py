"""`rehearse_pipeline(...)`: every task of a pipeline compiled, and timed as its schedule runs.

The groups' meshes say for what hardware: on `mw.mesh(..., on="v5e:4x4")` the vendor's compiler
compiles every task, in processes of its own; for live devices they are compiled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import RehearsalError, short
from meshwright.meshes import explain
from meshwright.mpmd.pipelines.explaining import explain as explain_plan
from meshwright.mpmd.pipelines.operations import Operation
from meshwright.mpmd.pipelines.planning import Plan
from meshwright.mpmd.pipelines.statics import take_apart
from meshwright.mpmd.pipelines.step import PipelineStep
from meshwright.mpmd.schedules.costs import Costs
from meshwright.mpmd.schedules.timeline import Timeline, simulate
from meshwright.placement import Placement
from meshwright.rehearsal.ledger import ledger
from meshwright.rehearsal.options import check_deadline, choose_folder
from meshwright.rehearsal.pipelines.compiling import Exhausted, TaskCompiler
from meshwright.rehearsal.pipelines.memory import bytes_on_device, group_memory
from meshwright.rehearsal.pipelines.result import (
    GroupRehearsal,
    PipelineRehearsal,
    TaskRehearsal,
)
from meshwright.rehearsal.programs import read_program
from meshwright.rehearsal.slices import stand_in
from meshwright.rehearsal.timing.steptime import step_time


def rehearse_pipeline(
    step: PipelineStep, *args: Any, deadline: float = 900.0, cache: bool | str | Path = True
) -> PipelineRehearsal:
    """Compile every task of a pipeline for its groups' hardware; `args` are arrays or shapes.

    For groups that are not here the vendor's compiler has `deadline` seconds for each task, and
    its answers are kept in `cache`, as for `rehearse`. Where it runs out of memory at a task, the
    result says which, and holds the group of that task alone.

    >>> import jax, jax.numpy as jnp, meshwright as mw
    >>> def loss(params, x):
    ...     h = mw.stage(jnp.tanh(x @ params["a"]))
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
    compiler = TaskCompiler(step.groups, check_deadline(deadline), choose_folder(cache))
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
        return step.planner.plan(take_apart(args, 1), step.mine, step.link, compiler)
    finally:
        compiler.stop()


def _group(plan: Plan, group: int) -> GroupRehearsal:
    board = plan.assembled.board
    placed = explain(board.layouts.meshes[group])
    operations = [each for each in plan.operations if each.group == group]
    memory, held = group_memory(board, plan.operations, group, placed.topology.chip)
    odd = stand_in(board.layouts.meshes[group]) if board.layouts.groups.compile_only else ""
    return GroupRehearsal(group, memory, held, _tasks(operations, placed), odd)


def _tasks(operations: Sequence[Operation], placed: Placement) -> tuple[TaskRehearsal, ...]:
    found: dict[tuple[int, str], TaskRehearsal] = {}
    for operation in operations:
        task, code = operation.task, operation.code
        if task is None or code is None or (task.stage, task.kind) in found:
            continue
        program = read_program(code.compiled.as_text())
        collectives = ledger(program, placed)
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
    board = plan.assembled.board
    chip = explain(board.layouts.meshes[0]).topology.chip
    largest = max(
        (
            sum(bytes_on_device(board, cell) for cell in operation.outs)
            for operation in plan.operations
            if operation.moves
        ),
        default=0,
    )
    return 1e3 * largest / (chip.link * 1e9)
