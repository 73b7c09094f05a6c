"""`read_program(text)`: a compiler's text taken apart, line by line."""

from __future__ import annotations

import re

from meshwright.errors import MeshwrightError
from meshwright.rehearsal.programs.instructions import Computation, Instruction
from meshwright.rehearsal.programs.program import Program
from meshwright.rehearsal.programs.shapes import Shape
from meshwright.rehearsal.programs.sources import read_sources

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\(")
_NUMBER = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


def read_program(text: str) -> Program:
    """Read `compiled.as_text()` of any of the compilers.

    >>> program = read_program('''HloModule double
    ...
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %sum = f32[4]{0} add(%x, %x), metadata={op_name="jit(f)/add" stack_frame_id=1}
    ... }''')
    >>> program.entry.root.opcode, program.entry.root.operands
    ('add', ('x', 'x'))
    """
    computations: dict[str, Computation] = {}
    lines: list[Instruction] = []
    name, entry = "", ""
    for line in text.splitlines():
        if line.startswith(" "):
            instruction = read_instruction(line, name)
            if instruction is not None:
                lines.append(instruction)
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(lines))
            name, lines = "", []
        elif line.endswith("{") and (started := _COMPUTATION.match(line)):
            name = started[2]
            entry = name if started[1] else entry
    if not entry:
        raise MeshwrightError("this is no program text: it has no ENTRY computation.")
    head, _, _ = text.partition("\n")
    devices = 1
    for number in _NUMBER.findall(head):
        devices *= int(number)
    tables = text[: text.find("{\n", len(head))]
    return Program(head, computations, computations[entry], devices, read_sources(tables))


def read_instruction(line: str, computation: str) -> Instruction | None:
    """One line of a computation; `None` for a line that is no instruction."""
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    start = found.end()
    end = _closing(line, start)
    return Instruction(
        found[2],
        found[4],
        Shape(found[3]),
        line[start:end],
        line[end + 1 :],
        computation,
        found[1] is not None,
    )


def _closing(line: str, start: int) -> int:
    """The bracket that closes the operands."""
    end = line.find(")", start)
    opened = line.count("(", start, end)
    while opened:
        start, end = end + 1, line.find(")", end + 1)
        opened += line.count("(", start, end) - 1
    return end
