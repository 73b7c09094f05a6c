"""The batch in each group that needs it; every task picks the rows of its own microbatch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.mpmd.pipelines.board import Board
from meshwright.mpmd.pipelines.operations import Code

Run = Callable[..., list[Any]]


class Microbatches:
    """`split` are the variables of one microbatch, each with the step's variable for the batch."""

    def __init__(self, board: Board, split: Mapping[Any, Any], count: int):
        self.board, self.split, self.count = board, split, count
        self._cells: dict[tuple[Any, int], int] = {}
        self._numbers: dict[tuple[int, int], int] = {}

    def bring(self, group: int, used: Sequence[Any]) -> None:
        """What the tasks of a group need; each of several devices holds a part of every row."""
        layouts = self.board.layouts
        batches = [self.split[var] for var in used]
        for batch in batches:
            self.board.layout_of[batch, group] = layouts.rows(group, batch.aval.shape)
        cells = [self.board.fetch(batch, group) for batch in batches]
        if used and layouts.meshes[group].size > 1:
            avals = [var.aval.update(shape=(self.count, *var.aval.shape)) for var in used]
            outs = [layouts.rows(group, aval.shape, 1) for aval in avals]
            rows = functools.partial(_rows, [aval.shape for aval in avals])
            code = Code(f"group {group}: microbatches", rows, outs)
            cells = self.board.run(group, code, cells, avals)
        self._cells.update(((var, group), cell) for var, cell in zip(used, cells, strict=True))

    def inputs(self, variables: Sequence[Any], microbatch: int, group: int) -> list[int]:
        """Cells of the batch for a task with these inputs, then that of its microbatch's number."""
        found = [self._cells[var, group] for var in variables if var in self.split]
        return [*found, self._number(microbatch, group)] if found else []

    def picking(self, run: Run, variables: Sequence[Any]) -> Run:
        """The program with what `inputs` gives at its end, in the place of the microbatch."""
        places = [n for n, var in enumerate(variables) if var in self.split]
        shapes = [(self.count, *variables[n].aval.shape) for n in places]

        def picked(*values: Any) -> list[Any]:
            whole = list(values[: len(variables) - len(places)])
            *batches, number = values[len(whole) :]
            for place, rows in zip(places, _rows(shapes, *batches), strict=True):
                whole.insert(place, jax.lax.dynamic_index_in_dim(rows, number, keepdims=False))
            return run(*whole)

        return picked if places else run

    def _number(self, microbatch: int, group: int) -> int:
        if (microbatch, group) not in self._numbers:
            self._numbers[microbatch, group] = self.board.fix(jnp.int32(microbatch), group)
        return self._numbers[microbatch, group]


def _rows(shapes: Sequence[tuple[int, ...]], *batches: Any) -> list[Any]:
    return [batch.reshape(shape) for batch, shape in zip(batches, shapes, strict=True)]
