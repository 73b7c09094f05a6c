"""Which operation a collective serves, and where the user wrote it.

Compilers lose the name of a collective now and then, and of most of them in programs for several
slices, or call it by the argument it moves. The next best witness is a neighbour: for a gather
what reads it, for anything else what made it, fusions looked into.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from meshwright.rehearsal.ledger.finding import Found
from meshwright.rehearsal.programs import Instruction, Program, Source

_STEPS = 4
# What stands between a collective and the operation it serves, with the name of something else.
_SAYS_NOTHING = frozenset("parameter constant while tuple get-tuple-element conditional".split())


def named(program: Program, found: Found) -> tuple[str, Source | None]:
    """Its operation and source; an empty name and `None` where nothing around it has any."""
    made, read = _makers(program, found.first), _readers(program, found.last)
    around = (read, made) if found.kind == "all-gather" else (made, read)
    for witness in itertools.chain((found.instruction, found.last, found.first), *around):
        name = witness.op_name
        if name and name not in program.arguments and witness.opcode not in _SAYS_NOTHING:
            return name, program.source(witness)
    return "", None


def _makers(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """Instructions whose results it uses, nearest first."""
    where = program.computations[instruction.computation]
    front = list(where.operands(instruction))
    for _ in range(_STEPS):
        for maker in front:
            yield from _with_inside(program, maker)
        front = [earlier for maker in front for earlier in where.operands(maker)]


def _readers(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """Instructions that use its result, nearest first."""
    where = program.computations[instruction.computation]
    front = where.users.get(instruction.name, [])
    for _ in range(_STEPS):
        for reader in front:
            yield from _with_inside(program, reader)
        front = [later for reader in front for later in where.users.get(reader.name, [])]


def _with_inside(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    yield instruction
    if instruction.opcode == "fusion":
        for _, name in instruction.called:
            yield from reversed(program.computations[name].instructions)
