"""Assign the equations outside the microbatches (casts, the optimizer's update) to groups.

A part of pass 7, which calls it once for the prologue and once for the epilogue.

An optimizer needs no special operator. Equations on a parameter run in the parameter's group;
scalars that come from several groups (a global norm) meet in the first; what depends only on
scalars (a step count, a learning rate) is computed again in every group that needs it.
"""

# Input: the flat equations before or after the microbatches, and the groups of some variables
# (parameters and their gradients). Output: `Phase`s, each one program of one group, in an order in
# which they can run. Invariant: a phase reads only what is there before and results of phases of a
# lower level; every equation on arrays runs in exactly one group.
#
#     n0 = sum(g0*g0)            group 0, level 0
#     n1 = sum(g1*g1)            group 1, level 0
#     c  = 1 / sqrt(n0 + n1)     group 0, level 1    n1 crosses from group 1 to group 0
#     w1 = w1 - c*g1             group 1, level 2    c crosses back

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from meshwright._compat import Eqn, Var
from meshwright.mpmd.groups import Groups
from meshwright.pipelines.staged_program import variables
from meshwright.pipelines.task_programs import rewrite_to_group_mesh
from meshwright.pipelines.tracing import run_equation

EVERYWHERE = -1  # the "group" of scalar work that is repeated in each group that needs it

PhaseKey = tuple[int, int]  # (level, group): the order in which phases run


@dataclasses.dataclass(eq=False)
class Node:
    """Work from variables to variables: an equation, or the sum of a result's parts.

    `assign_groups` sets `group`, where it runs, and `level`: how often data crosses between groups
    on the way to it.
    """

    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    run: Callable[[dict[Var, Any]], Sequence[Any]]
    group: int | None = None
    level: int = 0
    eqn: Eqn | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """The nodes of one group and level, as one program."""

    group: int
    level: int
    nodes: tuple[Node, ...]
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]

    def rewrite_to_group_mesh(self, groups: Groups) -> Phase:
        """Rewrite the equations to the mesh of the phase's group."""
        nodes = tuple(
            node
            if node.eqn is None
            else equation_node(*rewrite_to_group_mesh([node.eqn], groups, self.group))
            for node in self.nodes
        )
        return dataclasses.replace(self, nodes=nodes)

    def run(self, *args: Any) -> list[Any]:
        values = dict(zip(self.ins, args, strict=True))
        for node in self.nodes:
            values.update(zip(node.outs, node.run(values), strict=True))
        return [values[var] for var in self.outs]


def equation_node(eqn: Eqn) -> Node:
    """Wrap an equation as a node without a group."""
    ins = tuple(dict.fromkeys(variables(eqn.invars)))
    return Node(ins, tuple(eqn.outvars), lambda values: run_equation(eqn, values), eqn=eqn)


def assign_groups(nodes: Sequence[Node], group_of_var: dict[Var, int]) -> None:
    """Set the group and the level of every node; adds to `group_of_var` what is assigned.

    Nodes are in program order. Those of one group and level can run as one program.
    """
    users: dict[Var, list[Node]] = {}
    for node in nodes:
        for var in node.ins:
            users.setdefault(var, []).append(node)
    # A fixed point, not one sweep: in Adam's `b1*mu + (1-b1)*g` the product `b1*mu` learns its
    # group from the sum after it. Each pass but the last assigns something, so this ends.
    while _propagate_groups(nodes, group_of_var, users):
        pass
    for node in nodes:
        if node.group is None:
            node.group = _group_of_scalars(node, group_of_var)
        if node.group != EVERYWHERE:
            group_of_var.update(dict.fromkeys(node.outs, node.group))
    _set_levels(nodes)


def _propagate_groups(
    nodes: Sequence[Node], group_of_var: dict[Var, int], users: dict[Var, list[Node]]
) -> bool:
    """One pass: assign each node to the group of its largest array operand, and propagate to its
    results. Returns whether anything was assigned."""
    changed = False
    for node in nodes:
        if node.group is None:
            # (size, -group): the largest array decides, of equal ones that of the first group.
            candidates = [
                (num_elements(var), -group_of_var[var])
                for var in (*node.ins, *node.outs)
                if var in group_of_var and num_elements(var) > 1
            ]
            # A node whose variables have no group yet (zeros, a random mask) goes where its
            # results are used.
            candidates = candidates or [
                (num_elements(var), -user.group)
                for var in node.outs
                if num_elements(var) > 1
                for user in users.get(var, ())
                if user.group is not None
            ]
            if not candidates:
                continue
            node.group, changed = -max(candidates)[1], True
        for var in (*node.ins, *node.outs):
            if num_elements(var) > 1 and var not in group_of_var:
                group_of_var[var] = node.group
                changed = True
    return changed


def _group_of_scalars(node: Node, group_of_var: dict[Var, int]) -> int:
    """Return the group of a node that no array with a group touches.

    Scalars of one group stay there, those of several meet in group 0; others run everywhere.
    """
    groups = {group_of_var[var] for var in node.ins if var in group_of_var}
    if groups:
        return groups.pop() if len(groups) == 1 else 0
    # Arrays are not repeated in every group, however cheap they may be: they take memory.
    return 0 if any(num_elements(var) > 1 for var in (*node.ins, *node.outs)) else EVERYWHERE


def _set_levels(nodes: Sequence[Node]) -> None:
    maker: dict[Var, Node] = {var: node for node in nodes for var in node.outs}
    for node in nodes:
        for source in (maker[var] for var in node.ins if var in maker):
            crosses = EVERYWHERE not in (source.group, node.group) and source.group != node.group
            node.level = max(node.level, source.level + crosses)


def fuse_by_group_and_level(
    nodes: Sequence[Node], results: Sequence[tuple[Var, int]]
) -> list[Phase]:
    """Fuse nodes that have groups into one program per level and group, in that order.

    `results` are the variables that must come out, each with the group that must have it.
    """
    repeated = {var: node for node in nodes if node.group == EVERYWHERE for var in node.outs}
    bodies: dict[PhaseKey, list[Node]] = {}
    for node in nodes:
        if node.group not in (EVERYWHERE, None):
            bodies.setdefault((node.level, node.group), []).append(node)
    for var, group in results:
        if var in repeated:
            # A scalar result may belong to a group that has no other work at that level.
            bodies.setdefault((repeated[var].level, group), [])
    programs = {
        key: _with_repeated(body, repeated, _repeated_results(key, results, repeated))
        for key, body in sorted(bodies.items(), key=lambda item: item[0])
    }
    ins = {key: _free_variables(body) for key, body in programs.items()}
    phases = []
    for (level, group), body in programs.items():
        needed = {var for key, used in ins.items() if key != (level, group) for var in used}
        # A repeated scalar is computed in each phase that reads it, and leaves one only as a
        # result of the step.
        needed -= set(repeated)
        needed |= {var for var, at in results if at == group or var not in repeated}
        outs = tuple(dict.fromkeys(var for node in body for var in node.outs if var in needed))
        phases.append(Phase(group, level, tuple(body), ins[level, group], outs))
    return phases


def _repeated_results(
    key: PhaseKey, results: Sequence[tuple[Var, int]], repeated: dict[Var, Node]
) -> list[Var]:
    """Return the scalar results of the step that this phase is to compute."""
    level, group = key
    return [
        var
        for var, at in results
        if var in repeated and at == group and repeated[var].level == level
    ]


def _with_repeated(
    body: Sequence[Node], repeated: dict[Var, Node], more: Sequence[Var]
) -> list[Node]:
    """Add the repeated nodes that the others (and `more`) need, each before its first user."""
    ordered: dict[int, Node] = {}

    def add(node: Node) -> None:
        if id(node) in ordered:
            return
        for var in node.ins:
            if var in repeated:
                add(repeated[var])
        ordered[id(node)] = node

    for var in more:
        add(repeated[var])
    for node in body:
        add(node)
    return list(ordered.values())


def _free_variables(body: Sequence[Node]) -> tuple[Var, ...]:
    """Return what nodes read and do not compute, once, in order."""
    computed = {var for node in body for var in node.outs}
    return tuple(dict.fromkeys(var for node in body for var in node.ins if var not in computed))


def num_elements(var: Var) -> int:
    return math.prod(var.aval.shape)
