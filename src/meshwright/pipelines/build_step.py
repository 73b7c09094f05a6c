"""Put a step together: what comes before the tasks, the tasks, and what comes after."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding

from meshwright._compat import is_literal
from meshwright.errors import PipelineError
from meshwright.pipelines import outer_program
from meshwright.pipelines.build_tasks import Part, Sums, Tasks
from meshwright.pipelines.outer_program import EVERYWHERE, Node, Phase, size
from meshwright.pipelines.stages import StageProgram
from meshwright.pipelines.step_graph import StepBuilder, TaskFunction
from meshwright.pipelines.task_programs import Program, TaskKey
from meshwright.pipelines.tracing import Traced
from meshwright.schedules.validation import Proof


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
    """A step as operations. `results` are the slots of what it returns, by group: arrays have
    one home, single numbers are known to every group."""

    builder: StepBuilder
    results: tuple[dict[int, int], ...]


def assemble(
    traced: Traced,
    cut: StageProgram,
    programs: dict[TaskKey, Program],
    proof: Proof,
    builder: StepBuilder,
    donated: frozenset[int],
) -> Assembled:
    """Write everything onto the builder, in the order in which it runs."""
    group_of_var = _homes(traced, cut, programs, proof)
    builder.group_of_var = dict(group_of_var)
    _before(traced, builder, group_of_var)
    sums = Sums(builder, cut, traced, proof.schedule.group_of)
    sums.begin()
    tasks = Tasks(builder, cut, programs, proof, traced, sums)
    tasks.bring_batch()
    tasks.write()
    results = _after(traced, cut, tasks, sums, builder, group_of_var, donated)
    return Assembled(builder, results)


def _homes(
    traced: Traced, cut: StageProgram, programs: dict[TaskKey, Program], proof: Proof
) -> dict[Any, int]:
    """Where parameters live: in the group of the first stage that uses them."""
    made = {var for eqn in traced.prologue for var in eqn.outvars}
    arguments = set(traced.invars) | made
    operand = dict(zip(cut.invars, traced.operands, strict=True))
    split = {
        var for var, role in zip(traced.operands, cut.region.roles, strict=True) if role == "split"
    }
    group_of_var: dict[Any, int] = {}
    for key in sorted(programs, key=lambda key: (key[1], key[0])):
        for var in programs[key].ins:
            found = operand.get(var)
            if found in arguments and found not in split and size(found) > 1:
                group_of_var.setdefault(found, proof.schedule.group_of[key[1]])
    for found, role in zip(traced.operands, cut.region.roles, strict=True):
        if role == "params" and found in arguments and size(found) > 1:
            group_of_var.setdefault(found, 0)  # nothing uses it
    return group_of_var


def _before(traced: Traced, builder: StepBuilder, group_of_var: dict[Any, int]) -> None:
    """What is done to parameters before the microbatches, where they are used; else in group 0."""
    nodes = [outer_program.equation_node(eqn) for eqn in traced.prologue]
    found = dict(group_of_var)
    outer_program.assign_groups(nodes, found)
    builder.group_of_var.update((var, at) for var, at in found.items() if var in builder.arguments)
    made = {var: node for node in nodes for var in node.outs}
    later = [var for eqn in traced.epilogue for var in eqn.invars]
    wanted = {
        var: 0 if made[var].group == EVERYWHERE else made[var].group or 0
        for var in (*traced.operands, *later, *traced.outvars)
        if not is_literal(var) and var in made
    }
    group_of_var.update(
        (var, at) for var, at in found.items() if var in builder.arguments or var in wanted
    )
    for phase in outer_program.fuse_by_group_and_level(nodes, list(wanted.items())):
        _run(phase, builder, ())


def _after(
    traced: Traced,
    cut: StageProgram,
    tasks: Tasks,
    sums: Sums,
    builder: StepBuilder,
    group_of_var: dict[Any, int],
    donated: frozenset[int],
) -> tuple[dict[int, int], ...]:
    nodes = _results(traced, cut, tasks, sums, group_of_var)
    nodes += [outer_program.equation_node(eqn) for eqn in traced.epilogue]
    for node in nodes:
        if node.group is not None:
            group_of_var.update(dict.fromkeys(node.outs, node.group))
    outer_program.assign_groups(nodes, group_of_var)
    builder.group_of_var.update(
        (var, at) for var, at in group_of_var.items() if var in builder.arguments
    )
    made = {var: node for node in nodes for var in node.outs}
    everywhere: Sequence[int] = range(builder.groups)
    at = {
        var: everywhere if made[var].group == EVERYWHERE else [made[var].group or 0]
        for var in traced.outvars
        if not is_literal(var) and var in made
    }
    phases = outer_program.fuse_by_group_and_level(
        nodes, [(var, group) for var, groups in at.items() for group in groups]
    )
    last = {var: phase for phase in phases for var in phase.ins}
    _keep_layouts(builder, phases)
    kept = {var for var in traced.outvars if not is_literal(var)}
    for phase in phases:
        gone = {
            n: var
            for n, var in enumerate(phase.ins)
            if builder.arguments.get(var) in donated and last[var] is phase and var not in kept
        }
        _run(phase, builder, _usable(gone, phase))
    found = []
    for var in traced.outvars:
        groups = everywhere
        if not is_literal(var) and size(var) != 1:
            groups = at.get(var, [group_of_var.get(var, 0)])
        found.append({group: builder.slot_in_group(var, group) for group in groups})
    return tuple(found)


def _usable(gone: dict[int, Any], phase: Phase) -> tuple[int, ...]:
    """Of the arguments that may be given up, those whose memory some result can take."""
    room = collections.Counter((var.aval.shape, var.aval.dtype) for var in phase.outs)
    found = []
    for n, var in gone.items():
        kind = (var.aval.shape, var.aval.dtype)
        if room[kind]:
            room[kind] -= 1
            found.append(n)
    return tuple(found)


def _run(phase: Phase, builder: StepBuilder, donated: tuple[int, ...]) -> None:
    ins = [builder.slot_in_group(var, phase.group) for var in phase.ins]
    outs = [builder.layout(var, phase.group) for var in phase.outs]
    run = phase.rewrite_to_group_mesh(builder.layouts.groups).run
    code = TaskFunction(f"group {phase.group}: update {phase.level}", run, list(outs), donated)
    slots = builder.run(phase.group, code, ins, [var.aval for var in phase.outs])
    for var, slot in zip(phase.outs, slots, strict=True):
        builder.slot_of[var, phase.group] = slot


def _keep_layouts(builder: StepBuilder, phases: Sequence[Phase]) -> None:
    """A result lies as the nearest value of its shape that it is computed from."""
    for phase in phases:
        made = {var: node for node in phase.nodes for var in node.outs}
        for var in phase.outs:
            if size(var) > 1:
                builder.layout_of[var, phase.group] = _nearest(builder, phase.group, made, var)


def _nearest(builder: StepBuilder, group: int, made: dict[Any, Node], var: Any) -> NamedSharding:
    queue, seen = [var], {var}
    while queue:
        found = queue.pop(0)
        if found in builder.arguments or (found, group) in builder.layout_of:
            return builder.layout(found, group)
        for other in made[found].ins if found in made else ():
            if other.aval.shape == var.aval.shape and other not in seen:
                seen.add(other)
                queue.append(other)
    return builder.layouts.whole(group)


def _results(
    traced: Traced, cut: StageProgram, tasks: Tasks, sums: Sums, group_of_var: dict[Any, int]
) -> list[Node]:
    """The region's results, from sums and from values of single microbatches."""
    nodes = []
    for number, (var, how) in enumerate(
        zip(traced.results, cut.region.all_reductions, strict=True)
    ):
        if how in ("stack", "carry"):
            nodes.append(_stacked(cut, tasks, number, var, how))
            continue
        place = number - len(cut.outs)
        home = group_of_var.get(sums.operands[place]) if place >= 0 else None
        nodes.append(sums.result(number, var, home))
    return nodes


def _stacked(cut: StageProgram, tasks: Tasks, number: int, var: Any, how: str) -> Node:
    inner, count = cut.outs[number], tasks.schedule.microbatches
    groups = [tasks.group(key) for key, program in tasks.programs.items() if inner in program.outs]
    if not groups:
        raise PipelineError(
            "an auxiliary output does not depend on what the stages compute. Compute it outside "
            "of the differentiated function."
        )
    group = groups[0]
    parts = []
    for i in range(count) if how == "stack" else (count - 1,):
        part = Part(inner.aval)
        tasks.builder.slot_of[part, group] = tasks.values[inner, i, group]
        parts.append(part)

    def stack(values: dict[Any, Any]) -> list[Any]:
        items = [values[part] for part in parts]
        return [jnp.stack(items)] if how == "stack" else items

    return Node(tuple(parts), (var,), stack, group)
