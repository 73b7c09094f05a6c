"""Loops that hand a value from device to device, and add nothing to it.

So a compiler gathers an array piece by piece while it works on the pieces that have come.
"""

from __future__ import annotations

from meshwright.rehearsal.programs import Instruction, Program
from meshwright.rehearsal.programs.tracing import Origin


def first_origin(program: Program, value: Instruction) -> Origin:
    """Where a value comes from, also through loops that hand it round."""
    origin = program.tracer.origin(value)
    while (loop := _loop(program, origin)) is not None and _goes_round(
        program, loop, origin.path[0]
    ):
        (given,) = program.computations[loop.computation].operands(loop)
        origin = program.tracer.origin(given, origin.path)
    return origin


def handed_round(program: Program, moving: Instruction) -> bool:
    """Whether what an instruction moves is handed round by a loop."""
    where = program.computations[moving.computation]
    origin = program.tracer.origin(where.operands(moving)[0])
    loop = _loop(program, origin)
    return loop is not None and _goes_round(program, loop, origin.path[0])


def _loop(program: Program, origin: Origin) -> Instruction | None:
    """The loop whose state a value is, within the loop or after it."""
    instruction = origin.instruction
    if not origin.path:
        return None
    if instruction.opcode == "parameter":
        callers = program.tracer.callers.get(instruction.computation, [])
        instruction = callers[0] if len(callers) == 1 else instruction
    return instruction if instruction.opcode == "while" else None


def _goes_round(program: Program, loop: Instruction, index: int) -> bool:
    """Whether every round of a loop hands an element of its state on, changing nothing."""
    body = program.computations[dict(loop.called)["body"]]
    before = program.tracer.origin(body.root, (index,))
    return before == Origin(body.parameters[0], (index,))
