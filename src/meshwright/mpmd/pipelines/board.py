"""Where a step's values are: cells, the groups they lie in, and the operations that fill them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright import _compat
from meshwright.errors import PipelineError
from meshwright.mpmd.pipelines.layouts import Layouts
from meshwright.mpmd.pipelines.operations import Code, Operation


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of the step that a group needs: which one, how it lies there, in which cell."""

    number: int
    group: int
    sharding: NamedSharding
    cell: int


class Board:
    """The step while it is put together.

    Variables of the step (`jaxpr` variables, or parts of results) have one cell per group that
    needs them: `fetch` finds it, or brings the value there.
    """

    def __init__(
        self,
        layouts: Layouts,
        arguments: dict[Any, int],
        consts: dict[Any, Any],
        given: Sequence[Any],
        names: Sequence[str],
    ):
        self.layouts, self.consts = layouts, consts
        self.homes: dict[Any, int] = {}
        self.arguments, self.given, self.names = arguments, given, names
        self.groups = len(layouts.meshes)
        self.avals: list[Any] = []
        self.lies: list[NamedSharding | None] = []
        self.group_of: list[int] = []
        self.operations: list[Operation] = []
        self.placed: list[Argument] = []
        self.fixed: dict[int, Any] = {}
        self.cell_of: dict[tuple[Any, int], int] = {}
        self.made_by: dict[int, str] = {}
        self.layout_of: dict[tuple[Any, int], NamedSharding] = {}

    def new(self, aval: Any, sharding: NamedSharding | None, group: int) -> int:
        """A cell for a value of this shape that lies so in a group."""
        self.avals.append(aval)
        self.lies.append(sharding)
        self.group_of.append(group)
        return len(self.avals) - 1

    def run(
        self, group: int, code: Code, ins: Sequence[int], avals: Sequence[Any], task: Any = None
    ) -> list[int]:
        """An operation; returns the cells of its results."""
        outs = [self.new(aval, to, group) for aval, to in zip(avals, code.outs, strict=True)]
        name = code.name if task is None else str(task)
        self.operations.append(Operation(group, name, tuple(ins), tuple(outs), code, task))
        self.made_by.update(dict.fromkeys(outs, name))
        return outs

    def send(self, cells: Sequence[int], group: int, layouts: Sequence[NamedSharding]) -> list[int]:
        """Values to another group, all in one transfer; returns their cells there."""
        outs = [self.new(self.avals[c], to, group) for c, to in zip(cells, layouts, strict=True)]
        source = self.group_of[cells[0]]
        name = f"{self.made_by.get(cells[0], 'an argument')} of group {source}"
        moved = Operation(group, name, tuple(cells), tuple(outs), source=source)
        self.operations.append(moved)
        return outs

    def layout(self, var: Any, group: int) -> NamedSharding:
        """How a variable lies in a group: as it came if it came placed there, else as decided."""
        if (var, group) not in self.layout_of:
            self.layout_of[var, group] = self._decide(var, group)
        return self.layout_of[var, group]

    def _decide(self, var: Any, group: int) -> NamedSharding:
        number = self.arguments.get(var)
        if number is None:
            return self.layouts.whole(group)
        given = getattr(self.given[number], "sharding", None)
        if isinstance(given, NamedSharding) and given.mesh == self.layouts.meshes[group]:
            return given
        return self.layouts.parameter(group, self.names[number], var.aval.shape, var.aval.dtype)

    def fetch(self, var: Any, group: int) -> int:
        """The cell of a variable in a group; it is brought there once."""
        if isinstance(var, _compat.jaxprs().Literal):
            return self.fix(jax.numpy.asarray(var.val), group)
        if (var, group) not in self.cell_of:
            self.cell_of[var, group] = self._bring(var, group)
        return self.cell_of[var, group]

    def _bring(self, var: Any, group: int) -> int:
        if var in self.consts:
            return self.fix(jax.numpy.asarray(self.consts[var]), group)
        layout = self.layout(var, group)
        if var in self.arguments and self.homes.get(var, group) == group:
            cell = self.new(var.aval, layout, group)
            self.placed.append(Argument(self.arguments[var], group, layout, cell))
            return cell
        # An argument that several groups need comes to its home, and goes on from there.
        if var in self.arguments:
            self.fetch(var, self.homes[var])
        held = [self.cell_of[var, at] for at in range(self.groups) if (var, at) in self.cell_of]
        if not held:
            raise PipelineError(
                f"group {group} needs a value of type {var.aval.str_short()} that no group has "
                "made. This is a defect of meshwright: please report it with the step."
            )
        (cell,) = self.send(held[:1], group, [layout])
        return cell

    def fix(self, value: Any, group: int) -> int:
        """A cell with a constant."""
        cell = self.new(jax.typeof(value), self.layouts.whole(group), group)
        self.fixed[cell] = value
        return cell
