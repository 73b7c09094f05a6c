"""The tasks of the schedule as operations, with the transfers between them."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding

from meshwright.errors import PipelineError
from meshwright.mpmd.pipelines.board import Board
from meshwright.mpmd.pipelines.cutting import Cut
from meshwright.mpmd.pipelines.inlining import program_of
from meshwright.mpmd.pipelines.localizing import localized
from meshwright.mpmd.pipelines.microbatches import Microbatches
from meshwright.mpmd.pipelines.operations import Code
from meshwright.mpmd.pipelines.programs import Key, Program
from meshwright.mpmd.pipelines.reading import Traced
from meshwright.mpmd.pipelines.sums import Sums
from meshwright.mpmd.schedules.proving import Proof


class Tasks:
    """Writes the tasks onto the board, in the order in which the schedule was proved."""

    def __init__(
        self,
        board: Board,
        cut: Cut,
        programs: dict[Key, Program],
        proof: Proof,
        traced: Traced,
        sums: Sums,
    ):
        self.board, self.cut, self.programs, self.proof = board, cut, programs, proof
        self.traced, self.sums = traced, sums
        self.schedule = proof.schedule
        self.values: dict[tuple[Any, int, int], int] = {}  # (variable, microbatch, group)
        self.operand = dict(zip(cut.invars, traced.operands, strict=True))
        roles = zip(cut.invars, cut.region.roles, strict=True)
        split = {var: self.operand[var] for var, role in roles if role == "split"}
        self.batch = Microbatches(board, split, self.schedule.microbatches)
        self.carried = self._carried()
        self.readers: dict[Any, set[int]] = {}  # a variable, and the groups whose tasks take it
        for key, program in programs.items():
            for var in program.ins:
                self.readers.setdefault(var, set()).add(self.group(key))

    def group(self, key: Key) -> int:
        return self.schedule.group_of[key[1]]

    def bring_batch(self) -> None:
        """To each group what its tasks need."""
        for group in range(self.schedule.groups):
            used = [var for var in self.batch.split if group in self.readers.get(var, ())]
            self.batch.bring(group, used)

    def write(self) -> None:
        codes = {key: self._code(key) for key in self.programs}
        for group, task in self.proof.order:
            program = self.programs[task.kind, task.stage]
            if not program.eqns and not program.sums:
                continue
            i = task.microbatch
            adding = [self.sums.cells[number] for number in program.sums]
            own = [var for var in program.ins if var not in self.batch.split]
            ins = [self._input(var, i, group) for var in own]
            ins += self.batch.inputs(program.ins, i, group)
            avals = [var.aval for var in (*program.outs, *program.sums.values())]
            code = codes[task.kind, task.stage]
            outs = self.board.run(group, code, [*adding, *ins], avals, task)
            given = len(program.outs)
            for var, cell in zip(program.outs, outs[:given], strict=True):
                self.values[var, i, group] = cell
            self.sums.cells.update(zip(program.sums, outs[given:], strict=True))
            self._hand_over(program, i, group)

    def _hand_over(self, program: Program, microbatch: int, group: int) -> None:
        """Send what other groups need, together for each of them."""
        for target in range(self.schedule.groups):
            used = [v for v in program.outs if target in self.readers.get(v, ())]
            if target != group and used:
                layouts = [self.board.layouts.rows(target, var.aval.shape) for var in used]
                cells = [self.values[var, microbatch, group] for var in used]
                for var, cell in zip(used, self.board.send(cells, target, layouts), strict=True):
                    self.values[var, microbatch, target] = cell

    def _input(self, var: Any, microbatch: int, group: int) -> int:
        if (var, microbatch, group) in self.values:
            return self.values[var, microbatch, group]
        if var in self.cut.consts:
            if (var, group) not in self.board.cell_of:
                self.board.cell_of[var, group] = self.board.fix(self.cut.consts[var], group)
            return self.board.cell_of[var, group]
        if var in self.carried and microbatch:
            before = (self.carried[var], microbatch - 1, group)
            if before not in self.values:
                raise PipelineError(
                    "a carried value is made in a later stage than it is used in, or in another "
                    "group, so that every microbatch would wait for the one before it. Keep what "
                    "is carried within one stage."
                )
            return self.values[before]
        return self.board.fetch(self.operand[var], group)

    def _carried(self) -> dict[Any, Any]:
        """A carried operand, and the variable that holds it after a microbatch."""
        region = self.cut.region
        into = [v for v, role in zip(self.cut.invars, region.roles, strict=True) if role == "carry"]
        out = [v for v, how in zip(self.cut.outs, region.reductions, strict=True) if how == "carry"]
        return dict(zip(into, out, strict=True))

    def _code(self, key: Key) -> Code:
        """The program of a task, with what it adds up: sums come first, and are given up."""
        program, group = self.programs[key], self.group(key)
        eqns = localized(program.eqns, self.board.layouts.groups, group)
        run = program_of(program.ins, [*program.outs, *program.sums.values()], eqns)
        run = self.batch.picking(run, program.ins)
        adds = [self.sums.add(number) for number in program.sums]
        count, given = len(adds), len(program.outs)

        def task(*values: Any) -> list[Any]:
            results = run(*values[count:])
            return [
                *results[:given],
                *(
                    add(total, more)
                    for add, total, more in zip(adds, values[:count], results[given:], strict=True)
                ),
            ]

        task.__name__ = task.__qualname__ = program.name
        outs = [self._layout(var, key) for var in program.outs]
        outs += [self.sums.layout(number, group) for number in program.sums]
        return Code(program.name, task, outs, tuple(range(count)))

    def _layout(self, var: Any, key: Key) -> NamedSharding | None:
        """Rows cut over data axes where a value leaves its stage; else as the compiler likes.

        What is carried lies as it came, since it takes that place.
        """
        for before, after in self.carried.items():
            if after is var:
                return self.board.layout(self.operand[before], self.group(key))
        leaves = any(var in other.ins for at, other in self.programs.items() if at[1] != key[1])
        group = self.group(key)
        single = len(self.board.layouts.meshes[group].devices.flat) == 1
        if not leaves and not single:
            return None
        return self.board.layouts.rows(group, var.aval.shape)
