"""Where a value comes from: back through copies, casts, cuts, tuples, fusions and loops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from meshwright.rehearsal.programs.attributes import whole_numbers
from meshwright.rehearsal.programs.instructions import Computation, Instruction

# What hands on the elements of its first operand, some of them or all.
_PASSES_ON = frozenset(
    "bitcast bitcast-convert collective-permute collective-permute-done collective-permute-start "
    "convert copy copy-done copy-start dynamic-slice optimization-barrier reduce-precision reshape "
    "slice slice-done slice-start transpose all-gather all-gather-start all-gather-done "
    "fusion-done async-done async-update call-done".split()
)
_ENTERS = frozenset("fusion fusion-start call call-start async-start".split())
_MOST_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Origin:
    """An instruction and, where it makes a tuple, the element meant."""

    instruction: Instruction
    path: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Tracer:
    """Follows values through the computations of one program."""

    computations: Mapping[str, Computation]

    @functools.cached_property
    def callers(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                if "%" in instruction.rest:
                    for _, name in instruction.called:
                        found.setdefault(name, []).append(instruction)
        return found

    def origin(self, instruction: Instruction, path: tuple[int, ...] = ()) -> Origin:
        """The first instruction on the way back that does more than hand its operand on."""
        here = Origin(instruction, path)
        for _ in range(_MOST_STEPS):
            before = self._before(here.instruction, here.path)
            if before is None:
                return here
            here = before
        return here

    def _before(self, instruction: Instruction, path: tuple[int, ...]) -> Origin | None:
        opcode = instruction.opcode
        if opcode in _PASSES_ON:
            return Origin(self._operand(instruction, 0), path)
        if opcode == "get-tuple-element":
            index = whole_numbers(instruction.attribute("index"))
            return Origin(self._operand(instruction, 0), (*index, *path))
        if opcode == "tuple":
            return Origin(self._operand(instruction, path[0]), path[1:]) if path else None
        if opcode == "while":
            return self._through_loop(instruction, path)
        if opcode == "parameter":
            return self._from_caller(instruction, path)
        if opcode in _ENTERS and instruction.called:
            return Origin(self.computations[instruction.called[0][1]].root, path)
        if opcode == "custom-call" and '"ConcatBitcast"' in instruction.rest:
            return Origin(self._operand(instruction, 0), path)
        return None

    def _operand(self, instruction: Instruction, number: int) -> Instruction:
        where = self.computations[instruction.computation]
        return where.by_name[instruction.operands[number]]

    def _from_caller(self, parameter: Instruction, path: tuple[int, ...]) -> Origin | None:
        callers = self.callers.get(parameter.computation, [])
        if len(callers) != 1:
            return None
        caller = callers[0]
        if caller.opcode == "while":
            return self._through_loop(caller, path)
        if caller.opcode in _ENTERS:
            return Origin(self._operand(caller, int(parameter.inside)), path)
        return None

    def _through_loop(self, loop: Instruction, path: tuple[int, ...]) -> Origin | None:
        """A carried value that no round changes is what the loop was given."""
        if path and self._carried_unchanged(dict(loop.called)["body"], path[0]):
            return Origin(self._operand(loop, 0), path)
        return None

    def _carried_unchanged(self, body: str, index: int) -> bool:
        root = self.computations[body].root
        if root.opcode != "tuple":
            return False
        value = self._operand(root, index)
        while value.opcode in ("copy", "copy-done", "copy-start", "bitcast"):
            value = self._operand(value, 0)
        return (
            value.opcode == "get-tuple-element"
            and whole_numbers(value.attribute("index")) == (index,)
            and self._operand(value, 0).opcode == "parameter"
        )
