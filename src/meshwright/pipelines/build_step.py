"""Pass 7: put a step together: what comes before the tasks, the tasks, and what comes after."""

# Input: the traced step, its stages and task programs, and a proved schedule. Output: all
# operations of all groups on the builder, in an order in which they can run, and the slots of the
# results. Every process writes the same list and then keeps its own part (`runtime`), which is why
# the operations can be numbered and compared. Invariant: an argument is donated only to its last
# reader, and only if a result takes its memory. For a training step:
#
#     group 0: update 0 (casts of parameters); group 0: zeros; 0F0; ...; 0BW7; group 0: update 0

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding

from meshwright._compat import Var, is_literal
from meshwright.errors import PipelineError
from meshwright.pipelines.build_tasks import Accumulators, PartialResult, TaskWriter
from meshwright.pipelines.outer_program import (
    EVERYWHERE,
    Node,
    Phase,
    assign_groups,
    equation_node,
    fuse_by_group_and_level,
    num_elements,
)
from meshwright.pipelines.stages import StageProgram
from meshwright.pipelines.step_graph import StepBuilder, TaskFunction
from meshwright.pipelines.task_programs import Program, TaskKey
from meshwright.pipelines.trace_marks import Reduction, is_total, join
from meshwright.pipelines.tracing import Traced
from meshwright.schedules.validation import Proof
from meshwright.trees.specs import make_spec


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
    """A step as operations on a builder, and its results: for each, its slot by group.

    Arrays have one group; single numbers (a loss) have a slot in every group, so that every
    process can read them.
    """

    builder: StepBuilder
    results: tuple[dict[int, int], ...]


def assemble(
    traced: Traced,
    stage_program: StageProgram,
    programs: dict[TaskKey, Program],
    proof: Proof,
    builder: StepBuilder,
    donated: frozenset[int],
) -> Assembled:
    """Write a step onto the builder, in the order in which it runs.

    `donated` are the numbers of the arguments whose memory may be reused.
    """
    group_of_var = _parameter_groups(traced, stage_program, programs, proof)
    builder.group_of_var = dict(group_of_var)
    _write_prologue(traced, builder, group_of_var)
    accumulators = Accumulators(builder, stage_program, traced, proof.schedule.group_of)
    accumulators.write_initial_values()
    tasks = TaskWriter(builder, stage_program, programs, proof, traced, accumulators)
    tasks.place_batch()
    tasks.write()
    results = _write_epilogue(traced, tasks, builder, group_of_var, donated)
    return Assembled(builder, results)


def _parameter_groups(
    traced: Traced,
    stage_program: StageProgram,
    programs: dict[TaskKey, Program],
    proof: Proof,
) -> dict[Var, int]:
    """Return the groups in which parameters live: that of the first stage that reads them."""
    roles = stage_program.region.roles
    # What is computed before the microbatches (a cast parameter) counts like an argument.
    computed = {var for eqn in traced.prologue for var in eqn.outvars}
    arguments = set(traced.invars) | computed
    operands = dict(zip(stage_program.invars, traced.operands, strict=True))
    batch = {var for var, role in zip(traced.operands, roles, strict=True) if role == "split"}
    group_of_var: dict[Var, int] = {}
    for key in sorted(programs, key=lambda key: (key[1], key[0])):
        for var in programs[key].ins:
            operand = operands.get(var)
            if operand in arguments and operand not in batch and num_elements(operand) > 1:
                group_of_var.setdefault(operand, proof.schedule.group_of[key[1]])
    for operand, role in zip(traced.operands, roles, strict=True):
        if role == "params" and operand in arguments and num_elements(operand) > 1:
            group_of_var.setdefault(operand, 0)  # no stage reads it
    return group_of_var


def _write_prologue(traced: Traced, builder: StepBuilder, group_of_var: dict[Var, int]) -> None:
    """Write what is done to parameters before the microbatches, in the groups that use them."""
    nodes = [equation_node(eqn) for eqn in traced.prologue]
    assigned = dict(group_of_var)
    assign_groups(nodes, assigned)
    builder.group_of_var.update(_of_arguments(builder, assigned))
    maker = {var: node for node in nodes for var in node.outs}
    later = [var for eqn in traced.epilogue for var in eqn.invars]
    # What is computed everywhere comes out of group 0; the builder sends it on where it is read.
    wanted = {
        var: 0 if maker[var].group == EVERYWHERE else maker[var].group or 0
        for var in (*traced.operands, *later, *traced.outvars)
        if not is_literal(var) and var in maker
    }
    # Groups of intermediate values are forgotten: nothing after the prologue reads them.
    group_of_var.update(
        (var, group) for var, group in assigned.items() if var in builder.arguments or var in wanted
    )
    for phase in fuse_by_group_and_level(nodes, list(wanted.items())):
        _write_phase(phase, builder, ())


def _write_epilogue(
    traced: Traced,
    tasks: TaskWriter,
    builder: StepBuilder,
    group_of_var: dict[Var, int],
    donated: frozenset[int],
) -> tuple[dict[int, int], ...]:
    """Write what follows the microbatches; returns the slots of the step's results by group."""
    nodes = _result_nodes(traced, tasks, group_of_var)
    nodes += [equation_node(eqn) for eqn in traced.epilogue]
    for node in nodes:
        if node.group is not None:
            group_of_var.update(dict.fromkeys(node.outs, node.group))
    assign_groups(nodes, group_of_var)
    builder.group_of_var.update(_of_arguments(builder, group_of_var))
    maker = {var: node for node in nodes for var in node.outs}
    everywhere: Sequence[int] = range(builder.groups)
    wanted = {
        var: everywhere if maker[var].group == EVERYWHERE else [maker[var].group or 0]
        for var in traced.outvars
        if not is_literal(var) and var in maker
    }
    phases = fuse_by_group_and_level(
        nodes, [(var, group) for var, groups in wanted.items() for group in groups]
    )
    _inherit_shardings(builder, phases)
    last_reader = {var: phase for phase in phases for var in phase.ins}
    returned = {var for var in traced.outvars if not is_literal(var)}
    for phase in phases:
        free = {
            n: var
            for n, var in enumerate(phase.ins)
            if builder.arguments.get(var) in donated
            and last_reader[var] is phase
            and var not in returned
        }
        _write_phase(phase, builder, _donatable(free, phase))
    results = []
    for var in traced.outvars:
        groups = everywhere
        if not is_literal(var) and num_elements(var) != 1:
            groups = wanted.get(var, [group_of_var.get(var, 0)])
        results.append({group: builder.slot_in_group(var, group) for group in groups})
    return tuple(results)


def _of_arguments(builder: StepBuilder, group_of_var: dict[Var, int]) -> dict[Var, int]:
    return {var: group for var, group in group_of_var.items() if var in builder.arguments}


def _donatable(free: dict[int, Var], phase: Phase) -> tuple[int, ...]:
    """Choose the operands to donate: those of `free` whose memory some result can take.

    JAX pairs a donated buffer with a result of the same shape and dtype, and warns of others.
    """
    room = collections.Counter((var.aval.shape, var.aval.dtype) for var in phase.outs)
    chosen = []
    for n, var in free.items():
        kind = (var.aval.shape, var.aval.dtype)
        if room[kind]:
            room[kind] -= 1
            chosen.append(n)
    return tuple(chosen)


def _write_phase(phase: Phase, builder: StepBuilder, donated: tuple[int, ...]) -> None:
    ins = [builder.slot_in_group(var, phase.group) for var in phase.ins]
    shardings = [builder.sharding(var, phase.group) for var in phase.outs]
    run = phase.rewrite_to_group_mesh(builder.shardings.groups).run
    function = TaskFunction(f"group {phase.group}: update {phase.level}", run, shardings, donated)
    slots = builder.add_call(phase.group, function, ins, [var.aval for var in phase.outs])
    for var, slot in zip(phase.outs, slots, strict=True):
        builder.slot_of[var, phase.group] = slot


def _inherit_shardings(builder: StepBuilder, phases: Sequence[Phase]) -> None:
    """Shard each result like the nearest value of its shape that it is computed from.

    A new parameter is then sharded as the old one was, and the next step takes it as it is.
    """
    for phase in phases:
        maker = {var: node for node in phase.nodes for var in node.outs}
        for var in phase.outs:
            if num_elements(var) > 1:
                sharding = _nearest_sharding(builder, phase.group, maker, var)
                builder.var_shardings[var, phase.group] = sharding


def _nearest_sharding(
    builder: StepBuilder, group: int, maker: dict[Var, Node], var: Var
) -> NamedSharding:
    """Search breadth first from `var` to what it is computed from."""
    queue, seen = [var], {var}
    while queue:
        candidate = queue.pop(0)
        if candidate in builder.arguments or (candidate, group) in builder.var_shardings:
            return builder.sharding(candidate, group)
        for operand in maker[candidate].ins if candidate in maker else ():
            if operand.aval.shape == var.aval.shape and operand not in seen:
                seen.add(operand)
                queue.append(operand)
    return builder.shardings.replicated(group)


def _result_nodes(traced: Traced, tasks: TaskWriter, group_of_var: dict[Var, int]) -> list[Node]:
    """Return the nodes that make the region's results, of totals or of single microbatches."""
    reductions = tasks.stage_program.region.all_reductions
    nodes = []
    for number, (var, how) in enumerate(zip(traced.results, reductions, strict=True)):
        # A gradient goes to its parameter, where the optimizer will need it.
        parameter = tasks.accumulators.parameter(number)
        group = None if parameter is None else group_of_var.get(parameter)
        if is_total(how):
            nodes.append(tasks.accumulators.result_node(number, var, group))
        elif parameter is None:
            nodes.append(_join_node(tasks, number, var, how))
        else:
            nodes.append(_stacked_gradient_node(tasks, number, var, group or 0))
    return nodes


def _join_node(tasks: TaskWriter, number: int, var: Var, how: Reduction) -> Node:
    """Make the node that joins the values of all microbatches, or takes the last one (carry)."""
    inner, count = tasks.stage_program.outs[number], tasks.schedule.microbatches
    groups = [tasks.group(key) for key, program in tasks.programs.items() if inner in program.outs]
    if not groups:
        raise PipelineError(
            "an auxiliary output does not depend on what the stages compute. Compute it outside "
            "of the differentiated function."
        )
    parts = [
        _partial_result(tasks, inner, microbatch, groups[0])
        for microbatch in (range(count) if how != "carry" else (count - 1,))
    ]

    def joined(values: dict[Var, Any]) -> list[Any]:
        return [join(how, [values[part] for part in parts])]

    return Node(tuple(parts), (var,), joined, groups[0])


def _stacked_gradient_node(tasks: TaskWriter, number: int, var: Var, group: int) -> Node:
    """Make the node that stacks the gradients of all microbatches, each a sum over its stages."""
    accumulators, builder = tasks.accumulators, tasks.builder
    parts = [
        [
            _partial_result(tasks, part, microbatch, tasks.schedule.group_of[stage])
            for (_, stage), part in accumulators.gradient_parts(number)
        ]
        for microbatch in range(tasks.schedule.microbatches)
    ]
    sharding = accumulators.sharding((number, 0), group)
    for part in (part for one in parts for part in one):
        builder.var_shardings[part, group] = sharding
    builder.var_shardings[var, group] = NamedSharding(
        sharding.mesh, make_spec([None, *sharding.spec])
    )
    constant = accumulators.constant_parts(number)

    def stacked(values: dict[Var, Any]) -> list[Any]:
        fixed = [accumulators.evaluate(atom, group) for atom in constant]
        return [jnp.stack([sum([values[part] for part in one] + fixed) for one in parts])]

    return Node(tuple(part for one in parts for part in one), (var,), stacked, group)


def _partial_result(tasks: TaskWriter, var: Var, microbatch: int, group: int) -> PartialResult:
    """Name the value of one microbatch, in the group that made it, for the epilogue."""
    part = PartialResult(var.aval)
    tasks.builder.slot_of[part, group] = tasks.values[var, microbatch, group]
    return part
