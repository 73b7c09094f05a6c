"""`Program`: what a compiler made, with what can be counted in it."""

from __future__ import annotations

import dataclasses
import functools

from meshwright.rehearsal.programs.counting import cycles, flops
from meshwright.rehearsal.programs.instructions import Computation, Instruction
from meshwright.rehearsal.programs.running import Runs, all_runs, per_call
from meshwright.rehearsal.programs.sources import Source, SourceTable
from meshwright.rehearsal.programs.tracing import Tracer


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A program for one device. `devices` is how many run it together, as its head says."""

    head: str
    computations: dict[str, Computation]
    entry: Computation
    devices: int
    sources: SourceTable

    @functools.cached_property
    def tracer(self) -> Tracer:
        return Tracer(self.computations)

    @functools.cached_property
    def runs(self) -> dict[str, Runs]:
        return all_runs(self.tracer, self.entry.name)

    def times(self, computation: str) -> Runs:
        """How often a computation runs when the program runs once."""
        return self.runs.get(computation, Runs(0))

    def source(self, instruction: Instruction) -> Source | None:
        """Where in the user's code an instruction comes from, if the text says."""
        return self.sources.source(instruction)

    def stack(self, instruction: Instruction) -> tuple[Source, ...]:
        """Every frame above an instruction, innermost first."""
        return self.sources.stack(instruction)

    @functools.cached_property
    def arguments(self) -> frozenset[str]:
        """The names of the user's arguments, as far as the text gives them."""
        return frozenset(parameter.op_name for parameter in self.entry.parameters.values())

    @functools.cached_property
    def flops(self) -> float:
        """Floating-point operations of all dots and convolutions on one device."""
        return self.work(self.entry.name)

    def work(self, computation: str) -> float:
        """Operations of one run of a computation and of all that it calls."""
        if computation not in self._work:
            where = self.computations[computation]
            self._work[computation] = sum(map(self.work_of, where.instructions))
        return self._work[computation]

    def work_of(self, instruction: Instruction) -> float:
        """Operations of one instruction and of all that it calls."""
        own = flops(instruction, self.computations[instruction.computation])
        return own + sum(
            self.work(name) * per_call(how, instruction, self.tracer).count
            for how, name in instruction.called
        )

    @functools.cached_property
    def _work(self) -> dict[str, float]:
        return {}

    @functools.cached_property
    def estimated_cycles(self) -> int | None:
        """The compiler's own estimate of its fusions and copies; only TPU compilers give one."""
        found = [
            number * self.times(computation.name).count
            for computation in self.computations.values()
            for instruction in computation.instructions
            if (number := cycles(instruction)) is not None
        ]
        return sum(found) if found else None
