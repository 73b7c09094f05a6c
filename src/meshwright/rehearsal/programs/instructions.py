"""Instructions and computations, as the text has them."""

from __future__ import annotations

import dataclasses
import functools
import re

from meshwright.rehearsal.programs.attributes import attribute
from meshwright.rehearsal.programs.shapes import Shape

_OPERAND = re.compile(r"%([\w.-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r", (calls|to_apply|body|condition|branch_computations|called_computations"
    r"|true_computation|false_computation)=(%[\w.-]+|\{[^}]*\})"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a program.

    `inside` is the text between the brackets (operands, a parameter's number, a constant's
    value), `rest` all that follows.
    """

    name: str
    opcode: str
    shape: Shape
    inside: str
    rest: str
    computation: str
    root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_OPERAND.findall(self.inside))

    @functools.cached_property
    def op_name(self) -> str:
        """The user's operation: `jit(step)/jvp()/dot_general`; empty where the text is silent."""
        found = _OP_NAME.search(self.rest)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @functools.cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """Every computation it calls and the attribute that says so: `("body", "region_0.1")`."""
        return tuple(
            (how, name)
            for how, names in _CALLED.findall(self.rest)
            for name in _OPERAND.findall(names)
        )

    @property
    def only_calls(self) -> bool:
        """Whether it does nothing but run other computations; `fusion-start` begins one."""
        return self.opcode in ("while", "call", "conditional") or (
            self.opcode.endswith("-start") and ", calls=" in self.rest
        )

    def attribute(self, name: str) -> str | None:
        return attribute(self.rest, name)


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in the order in which they run, where the program is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {
            int(instruction.inside): instruction
            for instruction in self.instructions
            if instruction.opcode == "parameter"
        }

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Per instruction, those that read it."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in instruction.operands:
                found.setdefault(operand, []).append(instruction)
        return found

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        return tuple(self.by_name[name] for name in instruction.operands)
