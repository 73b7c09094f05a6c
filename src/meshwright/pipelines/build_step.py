"""Put a step together: what comes before the tasks, the tasks, and what comes after."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding

from meshwright.errors import PipelineError
from meshwright.pipelines import outer_program
from meshwright.pipelines.build_tasks import Part, Sums, Tasks
from meshwright.pipelines.outer_program import EVERYWHERE, Node, Phase, is_literal, size
from meshwright.pipelines.stages import Cut
from meshwright.pipelines.step_graph import Board, Code
from meshwright.pipelines.task_programs import Program, TaskKey
from meshwright.pipelines.tracing import Traced
from meshwright.schedules.validation import Proof


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
    """A step as operations. `results` are the cells of what it returns, by group: arrays have
    one home, single numbers are known to every group."""

    board: Board
    results: tuple[dict[int, int], ...]


def assemble(
    traced: Traced,
    cut: Cut,
    programs: dict[TaskKey, Program],
    proof: Proof,
    board: Board,
    donated: frozenset[int],
) -> Assembled:
    """Write everything onto the board, in the order in which it runs."""
    homes = _homes(traced, cut, programs, proof)
    board.homes = dict(homes)
    _before(traced, board, homes)
    sums = Sums(board, cut, traced, proof.schedule.group_of)
    sums.begin()
    tasks = Tasks(board, cut, programs, proof, traced, sums)
    tasks.bring_batch()
    tasks.write()
    results = _after(traced, cut, tasks, sums, board, homes, donated)
    return Assembled(board, results)


def _homes(
    traced: Traced, cut: Cut, programs: dict[TaskKey, Program], proof: Proof
) -> dict[Any, int]:
    """Where parameters live: in the group of the first stage that uses them."""
    made = {var for eqn in traced.before for var in eqn.outvars}
    arguments = set(traced.invars) | made
    operand = dict(zip(cut.invars, traced.operands, strict=True))
    split = {
        var for var, role in zip(traced.operands, cut.region.roles, strict=True) if role == "split"
    }
    homes: dict[Any, int] = {}
    for key in sorted(programs, key=lambda key: (key[1], key[0])):
        for var in programs[key].ins:
            found = operand.get(var)
            if found in arguments and found not in split and size(found) > 1:
                homes.setdefault(found, proof.schedule.group_of[key[1]])
    for found, role in zip(traced.operands, cut.region.roles, strict=True):
        if role == "params" and found in arguments and size(found) > 1:
            homes.setdefault(found, 0)  # nothing uses it
    return homes


def _before(traced: Traced, board: Board, homes: dict[Any, int]) -> None:
    """What is done to parameters before the microbatches, where they are used; else in group 0."""
    nodes = [outer_program.equation_node(eqn) for eqn in traced.before]
    found = dict(homes)
    outer_program.settle(nodes, found)
    board.homes.update((var, at) for var, at in found.items() if var in board.arguments)
    made = {var: node for node in nodes for var in node.outs}
    later = [var for eqn in traced.after for var in eqn.invars]
    wanted = {
        var: 0 if made[var].group == EVERYWHERE else made[var].group or 0
        for var in (*traced.operands, *later, *traced.outvars)
        if not is_literal(var) and var in made
    }
    homes.update((var, at) for var, at in found.items() if var in board.arguments or var in wanted)
    for phase in outer_program.phases(nodes, list(wanted.items())):
        _run(phase, board, ())


def _after(
    traced: Traced,
    cut: Cut,
    tasks: Tasks,
    sums: Sums,
    board: Board,
    homes: dict[Any, int],
    donated: frozenset[int],
) -> tuple[dict[int, int], ...]:
    nodes = _results(traced, cut, tasks, sums, homes)
    nodes += [outer_program.equation_node(eqn) for eqn in traced.after]
    for node in nodes:
        if node.group is not None:
            homes.update(dict.fromkeys(node.outs, node.group))
    outer_program.settle(nodes, homes)
    board.homes.update((var, at) for var, at in homes.items() if var in board.arguments)
    made = {var: node for node in nodes for var in node.outs}
    everywhere: Sequence[int] = range(board.groups)
    at = {
        var: everywhere if made[var].group == EVERYWHERE else [made[var].group or 0]
        for var in traced.outvars
        if not is_literal(var) and var in made
    }
    phases = outer_program.phases(
        nodes, [(var, group) for var, groups in at.items() for group in groups]
    )
    last = {var: phase for phase in phases for var in phase.ins}
    _keep_layouts(board, phases)
    kept = {var for var in traced.outvars if not is_literal(var)}
    for phase in phases:
        gone = {
            n: var
            for n, var in enumerate(phase.ins)
            if board.arguments.get(var) in donated and last[var] is phase and var not in kept
        }
        _run(phase, board, _usable(gone, phase))
    found = []
    for var in traced.outvars:
        groups = everywhere
        if not is_literal(var) and size(var) != 1:
            groups = at.get(var, [homes.get(var, 0)])
        found.append({group: board.fetch(var, group) for group in groups})
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


def _run(phase: Phase, board: Board, donated: tuple[int, ...]) -> None:
    ins = [board.fetch(var, phase.group) for var in phase.ins]
    outs = [board.layout(var, phase.group) for var in phase.outs]
    run = phase.localized(board.layouts.groups).run
    code = Code(f"group {phase.group}: update {phase.level}", run, list(outs), donated)
    cells = board.run(phase.group, code, ins, [var.aval for var in phase.outs])
    for var, cell in zip(phase.outs, cells, strict=True):
        board.cell_of[var, phase.group] = cell


def _keep_layouts(board: Board, phases: Sequence[Phase]) -> None:
    """A result lies as the nearest value of its shape that it is computed from."""
    for phase in phases:
        made = {var: node for node in phase.nodes for var in node.outs}
        for var in phase.outs:
            if size(var) > 1:
                board.layout_of[var, phase.group] = _nearest(board, phase.group, made, var)


def _nearest(board: Board, group: int, made: dict[Any, Node], var: Any) -> NamedSharding:
    queue, seen = [var], {var}
    while queue:
        found = queue.pop(0)
        if found in board.arguments or (found, group) in board.layout_of:
            return board.layout(found, group)
        for other in made[found].ins if found in made else ():
            if other.aval.shape == var.aval.shape and other not in seen:
                seen.add(other)
                queue.append(other)
    return board.layouts.whole(group)


def _results(
    traced: Traced, cut: Cut, tasks: Tasks, sums: Sums, homes: dict[Any, int]
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
        home = homes.get(sums.operands[place]) if place >= 0 else None
        nodes.append(sums.result(number, var, home))
    return nodes


def _stacked(cut: Cut, tasks: Tasks, number: int, var: Any, how: str) -> Node:
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
        tasks.board.cell_of[part, group] = tasks.values[inner, i, group]
        parts.append(part)

    def stack(values: dict[Any, Any]) -> list[Any]:
        items = [values[part] for part in parts]
        return [jnp.stack(items)] if how == "stack" else items

    return Node(tuple(parts), (var,), stack, group)
