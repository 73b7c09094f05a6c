"""`Program`: what a compiler made, with what can be counted in it."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.hlo.dataflow import Runs, Tracer, all_runs, per_call
from meshwright.hlo.instructions import (
    Computation,
    Instruction,
    Shape,
    Source,
    SourceTable,
    read_sources,
    whole_numbers,
)


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


# `read_program(text)`: a compiler's text taken apart, line by line.


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


# Work: operations of dots and convolutions, and the TPU compiler's estimated cycles.


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_GEMM_DIMS = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_WINDOW_PART = re.compile(r"(\w+)=([\w\-]+)")
_LIBRARY_GEMM, _LIBRARY_CONVOLUTION = '"__cublas$', '"__cudnn$conv'


def cycles(instruction: Instruction) -> int | None:
    found = _CYCLES.search(instruction.rest)
    return int(found[1]) if found else None


def flops(instruction: Instruction, computation: Computation) -> int:
    """A multiplication and an addition for every product; 0 for what is no dot or convolution.

    Attention kernels and other custom calls are opaque and count nothing.
    """
    opcode, rest = instruction.opcode, instruction.rest
    if opcode == "dot":
        contracted = whole_numbers(instruction.attribute("lhs_contracting_dims"))
        return _dot(instruction, computation, contracted)
    if opcode == "convolution":
        return _convolution(instruction, computation)
    if opcode != "custom-call":
        return 0
    if _LIBRARY_GEMM in rest:
        found = _GEMM_DIMS.search(rest)
        return _dot(instruction, computation, whole_numbers(found[1] if found else ""))
    return _convolution(instruction, computation) if _LIBRARY_CONVOLUTION in rest else 0


def _dot(instruction: Instruction, computation: Computation, contracted: tuple[int, ...]) -> int:
    left = computation.operands(instruction)[0].shape.leaves[0]
    products = math.prod(left.dims[dim] for dim in contracted)
    return 2 * instruction.shape.leaves[0].elements * products


def _convolution(instruction: Instruction, computation: Computation) -> int:
    """Only products with elements that exist: padding and dilation hold none.

    The TPU compiler writes batched dots as convolutions over mostly padding.
    """
    left, right = (
        operand.shape.leaves[0].dims for operand in computation.operands(instruction)[:2]
    )
    result = instruction.shape.leaves[0]
    labels = instruction.attribute("dim_labels") or ""
    lhs, rhs, out = re.split(r"_|->", labels)
    window = dict(_WINDOW_PART.findall(instruction.attribute("window") or ""))
    spatial = [dim for dim in lhs if dim.isdigit()]
    taps = math.prod(
        _taps(left[lhs.index(dim)], result.dims[out.index(dim)], window, int(dim))
        for dim in spatial
    )
    positions = math.prod(result.dims[out.index(dim)] for dim in spatial)
    return 2 * result.elements // positions * taps * right[rhs.index("i")]


def _taps(inputs: int, outputs: int, window: dict[str, str], dim: int) -> int:
    """Pairs of an output position and a place of the window that meet an input."""

    def number(name: str, default: int) -> int:
        entries = window.get(name)
        return int(entries.split("x")[dim].split("_")[0]) if entries else default

    return _meetings(
        inputs,
        outputs,
        number("size", 1),
        number("stride", 1),
        number("pad", 0),
        number("lhs_dilate", 1),
        number("rhs_dilate", 1),
    )


@functools.cache
def _meetings(
    inputs: int, outputs: int, size: int, stride: int, pad: int, apart: int, spread: int
) -> int:
    places = np.add.outer(np.arange(outputs) * stride - pad, np.arange(size) * spread)
    exists = (places >= 0) & (places <= (inputs - 1) * apart) & (places % apart == 0)
    return int(exists.sum())
