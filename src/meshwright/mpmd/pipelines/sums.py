"""What is added up over microbatches, and how results come of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshwright import _compat
from meshwright.errors import PipelineError
from meshwright.mpmd.pipelines.board import Board
from meshwright.mpmd.pipelines.cutting import FREE, Cut
from meshwright.mpmd.pipelines.inlining import program_of
from meshwright.mpmd.pipelines.localizing import localized
from meshwright.mpmd.pipelines.operations import Code
from meshwright.mpmd.pipelines.outer import Node
from meshwright.mpmd.pipelines.programs import Sum, all_sums, clones
from meshwright.mpmd.pipelines.reading import Traced


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A value between the microbatches and a result: a part of a sum, or one item of a stack."""

    aval: Any


class Sums:
    """The accumulators of a step: each is a cell that moves on with every task that adds to it."""

    def __init__(self, board: Board, cut: Cut, traced: Traced, group_of: Sequence[int]):
        self.board, self.cut = board, cut
        self.operands = [
            operand
            for operand, role in zip(traced.operands, cut.region.roles, strict=True)
            if role == "params"
        ]
        self.vars = {number: var for number, (_, var) in all_sums(cut).items()}
        self.group = {number: group_of[home[1]] for number, (home, _) in all_sums(cut).items()}
        self.cells: dict[Sum, int] = {}

    def begin(self) -> None:
        """Zeros, or the least number where the largest is sought; one program per group."""
        for group in sorted(set(self.group.values())):
            numbers = [number for number, at in self.group.items() if at == group]
            wanted = [(self.how(number), self.vars[number].aval) for number in numbers]
            code = Code(
                f"group {group}: zeros",
                functools.partial(_beginnings, wanted),
                [self.layout(number, group) for number in numbers],
            )
            cells = self.board.run(group, code, (), [aval for _, aval in wanted])
            self.cells.update(zip(numbers, cells, strict=True))

    def how(self, number: Sum) -> str:
        return self.cut.region.all_reductions[number[0]]

    def layout(self, number: Sum, group: int) -> NamedSharding:
        """A gradient lies as its parameter does; other sums lie whole."""
        place = number[0] - len(self.cut.outs)
        if place < 0 or self.operands[place] not in self.board.arguments:
            return self.board.layouts.whole(group)
        return self.board.layout(self.operands[place], group)

    def add(self, number: Sum) -> Callable[[Any, Any], Any]:
        return jnp.maximum if self.how(number) == "max" else jnp.add

    def result(self, number: int, var: Any, home: int | None) -> Node:
        """From the parts of a sum to the result, in the group where it belongs."""
        numbers = [key for key in self.vars if key[0] == number]
        how, times = self.cut.region.all_reductions[number], self.cut.region.microbatches
        groups = [self.group[key] for key in numbers]
        home = min(groups, default=0) if home is None else home
        parts = [Part(self.vars[key].aval) for key in numbers]
        for key, part, group in zip(numbers, parts, groups, strict=True):
            self.board.cell_of[part, group] = self.cells[key]
            self.board.layout_of[part, home] = self.layout(key, home)
        fixed = self._fixed(number)

        def finish(values: dict[Any, Any]) -> list[Any]:
            found = [values[part] for part in parts]
            same = [self._constant(var, home) for var in fixed]
            found += [x if how == "max" else x * times for x in same]
            total = functools.reduce(self.add((number, 0)), found)
            return [(total / times).astype(var.aval.dtype) if how == "mean" else total]

        return Node(tuple(parts), (var,), finish, home)

    def _fixed(self, number: int) -> list[Any]:
        """The parts of a result that are the same for every microbatch."""
        place = number - len(self.cut.outs)
        if place >= 0:
            return [var for home, var in self.cut.grads[place] if home == FREE]
        return [] if (number, 0) in self.vars else [self.cut.outs[number]]

    def _constant(self, var: Any, group: int) -> Any:
        jc = _compat.jaxprs()
        if isinstance(var, jc.Literal):
            return jnp.full(var.aval.shape, var.val, var.aval.dtype)
        eqns = clones(self.cut, [var])
        made = {v for eqn in eqns for v in eqn.outvars}
        used = {v for e in eqns for v in e.invars if not isinstance(v, jc.Literal)}
        if var not in made or used - made:
            raise PipelineError(
                "a result depends on parameters, constants or keys alone, not on the batch. "
                "Compute it outside of the differentiated function."
            )
        return program_of((), (var,), localized(eqns, self.board.layouts.groups, group))()[0]


def _beginnings(wanted: Sequence[tuple[str, Any]]) -> list[Any]:
    return [
        jnp.full(aval.shape, _least(aval.dtype), aval.dtype)
        if how == "max"
        else jnp.zeros(aval.shape, aval.dtype)
        for how, aval in wanted
    ]


def _least(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf
    return False if dtype == jnp.bool_ else np.iinfo(dtype).min
