"""Which of its results an instruction says it writes over its operands.

Fusions and custom calls may have to: `output_to_operand_aliasing`. A TPU's compiler says of each
instruction what it came to share: `aliasing_operands` numbers operands and then results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.rehearsal.programs.instructions import Computation, Instruction

_MUST = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}")
_SHARED = re.compile(r'"aliasing_operands":\{"lists":\[((?:\{"indices":\[[^\]]*\]\},?)*)\]')
_GROUP = re.compile(r"\[([^\]]*)\]")

Place = tuple[int, int]  # the number of an operand and of one of its arrays


def says_all(instruction: Instruction) -> bool:
    """Whether the text tells of everything that the instruction writes over."""
    return _SHARED.search(instruction.rest) is not None


def written_over(computation: Computation, instruction: Instruction) -> dict[int, Place]:
    """Per result that is an operand's memory, which; only where both have the same size."""
    results = instruction.shape.leaves
    operands = [operand.shape.leaves for operand in computation.operands(instruction)]
    found: dict[int, Place] = {}
    for result, (operand, leaf) in (*_must(instruction), *_shared(instruction)):
        if result < len(results) and operand < len(operands) and leaf < len(operands[operand]):
            if results[result].bytes == operands[operand][leaf].bytes:
                found.setdefault(result, (operand, leaf))
    return found


def _must(instruction: Instruction) -> Iterator[tuple[int, Place]]:
    """Results and operands in tuples within tuples are left out."""
    text = instruction.attribute("output_to_operand_aliasing") or ""
    for result, operand, leaf in _MUST.findall(text):
        yield int(result or 0), (int(operand), int(leaf or 0))


def _shared(instruction: Instruction) -> Iterator[tuple[int, Place]]:
    said = _SHARED.search(instruction.rest)
    count = len(instruction.operands)
    for group in _GROUP.findall(said[1]) if said else ():
        numbers = sorted(int(number) for number in re.findall(r"\d+", group))
        for number in numbers:
            if numbers[0] < count <= number:
                yield number - count, (numbers[0], 0)
