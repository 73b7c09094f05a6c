"""How many rounds a loop makes.

GPU and CPU compilers write it down (`known_trip_count`). The TPU compiler does not; there the
condition tells: a counter compared with a constant, the constant it starts from, the constant
it grows by.
"""

from __future__ import annotations

import re

from meshwright.rehearsal.programs.instructions import Computation, Instruction
from meshwright.rehearsal.programs.tracing import Origin, Tracer

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_WHOLE = re.compile(r"-?\d+")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


def trip_count(loop: Instruction, tracer: Tracer) -> int | None:
    """The rounds of a `while`, or `None` where nothing tells."""
    known = _KNOWN.search(loop.rest)
    return int(known[1]) if known else _derived(loop, tracer)


def _derived(loop: Instruction, tracer: Tracer) -> int | None:
    called = dict(loop.called)
    condition = tracer.computations[called["condition"]]
    test = tracer.origin(condition.root).instruction
    if test.opcode != "compare":
        return None
    left, right = _operands(test, tracer)
    direction = test.attribute("direction") or ""
    if _constant(left) is not None:
        left, right, direction = right, left, _MIRRORED.get(direction, "")
    bound = _constant(right)
    if bound is None or len(left.path) != 1:
        return None
    given = tracer.computations[loop.computation].by_name[loop.operands[0]]
    start = _constant(tracer.origin(given, left.path))
    step = _step(tracer.computations[called["body"]], left.path, tracer)
    if start is None or step is None:
        return None
    return rounds(start, step, bound, direction)


def rounds(start: int, step: int, bound: int, direction: str) -> int | None:
    """
    >>> rounds(0, 1, 6, "LT"), rounds(5, -1, 0, "GE"), rounds(0, 2, 5, "LT"), rounds(0, 0, 5, "LT")
    (6, 6, 3, None)
    """
    last = bound + {"LE": 1, "GE": -1}.get(direction, 0)
    upwards = direction in ("LT", "LE") or (direction == "NE" and bound > start)
    if direction not in _MIRRORED or step == 0 or upwards != (step > 0):
        return None
    return max(0, -((start - last) // step))


def _operands(instruction: Instruction, tracer: Tracer) -> list[Origin]:
    where = tracer.computations[instruction.computation]
    return [tracer.origin(operand) for operand in where.operands(instruction)]


def _constant(origin: Origin) -> int | None:
    instruction = origin.instruction
    if instruction.opcode != "constant" or not _WHOLE.fullmatch(instruction.inside):
        return None
    return int(instruction.inside)


def _step(body: Computation, path: tuple[int, ...], tracer: Tracer) -> int | None:
    """What a round adds to the counter."""
    growth = tracer.origin(body.root, path).instruction
    if growth.opcode not in ("add", "subtract"):
        return None
    sign = 1 if growth.opcode == "add" else -1
    for origin in _operands(growth, tracer):
        number = _constant(origin)
        if number is not None:
            return sign * number
    return None
