"""What a step does around its microbatches: every equation finds the group that has its data.

An optimizer needs no special operator: equations on a parameter run in the parameter's group,
sums over all groups (a global norm) meet in the first one, and what depends on nothing but
scalars (a step count, a learning rate) is computed wherever it is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from meshwright._compat import is_literal
from meshwright.mpmd.groups import Groups
from meshwright.pipelines.mesh_rewrite import rewrite_to_group_mesh
from meshwright.pipelines.tracing import run_equation

EVERYWHERE = -1


@dataclasses.dataclass(eq=False)
class Node:
    """A piece of work between variables; `group` is where it runs, once that is known."""

    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    run: Callable[[dict[Any, Any]], Sequence[Any]]
    group: int | None = None
    level: int = 0
    eqn: Any = None


def equation_node(eqn: Any) -> Node:
    ins = tuple(dict.fromkeys(v for v in eqn.invars if not is_literal(v)))
    return Node(ins, tuple(eqn.outvars), lambda values: run_equation(eqn, values), eqn=eqn)


def assign_groups(nodes: Sequence[Node], group_of_var: dict[Any, int]) -> None:
    """Give every node a group and a level; `group_of_var` grows by the variables that find theirs.

    Levels count how often data has crossed between groups: all nodes of one group and level run
    as one program.
    """
    users: dict[Any, list[Node]] = {}
    for node in nodes:
        for var in node.ins:
            users.setdefault(var, []).append(node)
    while _spread(nodes, group_of_var, users):
        pass
    for node in nodes:
        if node.group is None:
            node.group = _group_of_scalars(node, group_of_var)
        if node.group != EVERYWHERE:
            group_of_var.update(dict.fromkeys(node.outs, node.group))
    _set_levels(nodes, group_of_var)


def _spread(
    nodes: Sequence[Node], group_of_var: dict[Any, int], users: dict[Any, list[Node]]
) -> bool:
    """One pass: arrays draw the nodes they meet into their group, and those other arrays."""
    changed = False
    for node in nodes:
        if node.group is None:
            known = (*node.ins, *node.outs)
            near = [(size(v), -group_of_var[v]) for v in known if v in group_of_var and size(v) > 1]
            near = near or [
                (size(v), -user.group)
                for v in node.outs
                if size(v) > 1
                for user in users.get(v, ())
                if user.group is not None
            ]
            if not near:
                continue
            node.group, changed = -max(near)[1], True
        for var in (*node.ins, *node.outs):
            if size(var) > 1 and var not in group_of_var:
                group_of_var[var] = node.group
                changed = True
    return changed


def _group_of_scalars(node: Node, group_of_var: dict[Any, int]) -> int:
    """Scalars of one group stay there, those of several meet in the first; others are free."""
    groups = {group_of_var[var] for var in node.ins if var in group_of_var}
    if groups:
        return groups.pop() if len(groups) == 1 else 0
    return 0 if any(size(var) > 1 for var in (*node.ins, *node.outs)) else EVERYWHERE


def _set_levels(nodes: Sequence[Node], group_of_var: dict[Any, int]) -> None:
    made: dict[Any, Node] = {var: node for node in nodes for var in node.outs}
    for node in nodes:
        for var in node.ins:
            maker = made.get(var)
            if maker is not None:
                far = EVERYWHERE not in (maker.group, node.group) and maker.group != node.group
                node.level = max(node.level, maker.level + far)


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """The nodes of one group and level, as one program."""

    group: int
    level: int
    nodes: tuple[Node, ...]
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]

    def rewrite_to_group_mesh(self, groups: Groups) -> Phase:
        """The same with its equations on the mesh of its group."""
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


def fuse_by_group_and_level(
    nodes: Sequence[Node], results: Sequence[tuple[Any, int]]
) -> list[Phase]:
    """Settled nodes as programs, in the order of their levels. `results` must be given, where."""
    free = {var: node for node in nodes if node.group == EVERYWHERE for var in node.outs}
    bodies: dict[tuple[int, int], list[Node]] = {}
    for node in nodes:
        if node.group not in (EVERYWHERE, None):
            bodies.setdefault((node.level, node.group), []).append(node)
    for var, group in results:
        if var in free:
            # What is free and a result of the step is made with the rest of that group's level.
            bodies.setdefault((free[var].level, group), [])
    keyed = sorted(bodies.items(), key=lambda item: item[0])
    whole = {key: _with_free(body, free, _wanted_free(key, results, free)) for key, body in keyed}
    ins = {key: _ins(body) for key, body in whole.items()}
    found = []
    for (level, group), body in whole.items():
        made = {var for node in body for var in node.outs}
        needed = {var for key, used in ins.items() if key != (level, group) for var in used}
        needed -= set(free)
        needed |= {var for var, at in results if at == group or var not in free}
        outs = tuple(dict.fromkeys(v for node in body for v in node.outs if v in made & needed))
        found.append(Phase(group, level, tuple(body), ins[level, group], outs))
    return found


def _wanted_free(
    key: tuple[int, int], results: Sequence[tuple[Any, int]], free: dict[Any, Node]
) -> list[Any]:
    level, group = key
    return [var for var, at in results if var in free and at == group and free[var].level == level]


def _with_free(body: Sequence[Node], free: dict[Any, Node], more: Sequence[Any]) -> list[Node]:
    """The nodes with the free ones they need, each once, before its first user."""
    found: dict[int, Node] = {}

    def add(node: Node) -> None:
        if id(node) in found:
            return
        for var in node.ins:
            if var in free:
                add(free[var])
        found[id(node)] = node

    for var in more:
        add(free[var])
    for node in body:
        add(node)
    return list(found.values())


def _ins(body: Sequence[Node]) -> tuple[Any, ...]:
    made = {var for node in body for var in node.outs}
    return tuple(dict.fromkeys(v for node in body for v in node.ins if v not in made))


def size(var: Any) -> int:
    return math.prod(var.aval.shape)
