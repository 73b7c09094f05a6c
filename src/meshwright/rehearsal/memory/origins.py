"""Whose operation a buffer belongs to, where the instruction that makes it does not say.

Compilers copy, widen and set aside memory on behalf of others: a copy belongs to what it copies,
and memory that is set aside to whoever fills it, which may be the body of a loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.rehearsal.programs.instructions import Instruction
from meshwright.rehearsal.programs.program import Program

_COPIES = ("copy", "copy-start", "copy-done", "transpose", "reshape", "convert", "bitcast")
_STEPS = 6  # away from the instruction itself


def origin(program: Program, instruction: Instruction, steps: int = _STEPS) -> Instruction | None:
    """The instruction that names an operation of the user for this one; itself, if it does."""
    if is_named(program, instruction):
        return instruction
    if not steps:
        return None
    for other in _others(program, instruction):
        found = origin(program, other, steps - 1)
        if found is not None:
            return found
    return None


def is_named(program: Program, instruction: Instruction) -> bool:
    """Whether it has the name of an argument, or the path of an operation."""
    if instruction.opcode == "parameter":
        return instruction.op_name in program.arguments - {""}
    return "/" in instruction.op_name or program.source(instruction) is not None


def _others(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """Who to ask instead: what is copied, then who reads or fills it."""
    where = program.computations[instruction.computation]
    if instruction.opcode in _COPIES:
        yield from where.operands(instruction)[:1]
    for user in where.users.get(instruction.name, ()):
        if user.opcode != "tuple":
            yield user
            continue
        number = user.operands.index(instruction.name)
        for loop in where.users.get(user.name, ()):
            yield from _written(program, loop, number)


def _written(program: Program, loop: Instruction, number: int) -> Iterator[Instruction]:
    """What the body of a loop leaves at a place of its state."""
    for how, name in loop.called:
        body = program.computations[name]
        if loop.opcode == "while" and how == "body" and number < len(body.root.operands):
            yield body.by_name[body.root.operands[number]]
