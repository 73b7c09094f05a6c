"""`read_program` reads a compiler's HLO text into a `Program`, which counts what is in it."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from meshwright._show import short_repr
from meshwright._text import plural
from meshwright.errors import MeshwrightError
from meshwright.hlo.dataflow import Dataflow, RunCount, count_runs, runs_per_call
from meshwright.hlo.instructions import (
    Computation,
    Instruction,
    Shape,
    Source,
    SourceTable,
    integers,
    read_sources,
)
from meshwright.hlo.kernel_work import KernelWork, kernel_work
from meshwright.hlo.literals import decode_constants

# Reading a program.
# Input: `compiled.as_text()` of the CPU, GPU or TPU compiler: a header, perhaps tables of source
# lines, then computations, each a line that ends with `{`, indented instructions, and `}`.
# Output: a `Program`. Invariant: every instruction of the text becomes one, in the order of the
# text; other lines (tables, blank lines) are skipped, nothing is interpreted yet, and every operand
# is defined. An instruction may take several lines: XLA writes attributes that look like JSON, as
# the metadata of Pallas kernels do, with the newlines they have. It goes on until its brackets
# close, those in quotes not counted (kernels are bytes in quotes).
# Example: below. One pass, linear in the text, since a large model's has millions of characters.

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\(")
_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.S)
_DEVICE_COUNT = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


def read_program(text: str, tables: Mapping[str, list[Any]] | None = None) -> Program:
    """Read `compiled.as_text()` of any of the compilers.

    `tables` are constants that the text leaves out, as `literals.integer_constants` writes them.

    Raises `MeshwrightError` if the text has no ENTRY computation, or reads a value that it does not
    define.

    >>> program = read_program('''HloModule double
    ...
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %sum = f32[4]{0} add(%x, %x), metadata={op_name="jit(f)/add" stack_frame_id=1}
    ... }''')
    >>> program.entry.root.opcode, program.entry.root.operands
    ('add', ('x', 'x'))
    >>> program
    <Program double, 1 computation, 1 device>
    """
    computations: dict[str, Computation] = {}
    instructions: list[tuple[int, Instruction]] = []
    name, entry = "", ""
    for number, line in _whole_lines(text):
        if line.startswith(" "):
            instruction = read_instruction(line, name)
            if instruction is not None:
                instructions.append((number, instruction))
        elif line.startswith("}"):
            instructions = _with_elements(instructions)
            _check_operands(name, instructions)
            computations[name] = Computation(name, tuple(each for _, each in instructions))
            name, instructions = "", []
        elif line.endswith("{") and (opening := _COMPUTATION.match(line)):
            name = opening[2]
            entry = name if opening[1] else entry
    if not entry:
        raise MeshwrightError(
            "this is not the text of an HLO program: it has no ENTRY computation."
        )
    header, _, _ = text.partition("\n")
    devices = math.prod(map(int, _DEVICE_COUNT.findall(header)))
    # The header may hold braces of its own; the tables end where the first computation begins.
    sources = read_sources(text[: text.find("{\n", len(header))])
    return Program(header, computations, computations[entry], devices, sources, tables or {})


def _whole_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers, an instruction that was broken into several as one."""
    first, held, depth = 0, "", 0
    for number, line in enumerate(text.split("\n"), 1):
        if held:
            held += "\n" + line
            depth += _open_brackets(line)
        elif line.startswith(" ") and " = " in line:
            first, held, depth = number, line, _open_brackets(line)
        else:
            yield number, line
            continue
        if depth <= 0:
            yield first, held
            held = ""
    if held:
        raise MeshwrightError(
            f"line {first} of the HLO text: the brackets of {held.strip()[:80]!r} never close. "
            "Pass the whole text of compiled.as_text()."
        )


def _open_brackets(line: str) -> int:
    """Count the brackets that a line opens and does not close, outside of quotes."""
    if '"' in line:
        line = _QUOTED.sub("", line)
    opened = line.count("{") + line.count("(") + line.count("[")
    return opened - line.count("}") - line.count(")") - line.count("]")


def _with_elements(instructions: list[tuple[int, Instruction]]) -> list[tuple[int, Instruction]]:
    """Give elements of tuples an instruction where the text only has `%x#1` (libtpu 0.0.50)."""
    whole: list[tuple[int, Instruction]] = []
    by_name: dict[str, Instruction] = {}
    for number, instruction in instructions:
        if "#" in instruction.operand_text and instruction.opcode != "constant":
            for name in instruction.operands:
                outer, *indices = name.split("#")
                for index in indices:
                    inner = f"{outer}#{index}"
                    if inner not in by_name and outer in by_name:
                        by_name[inner] = _element(by_name[outer], inner, int(index))
                        whole.append((number, by_name[inner]))
                    outer = inner
        by_name[instruction.name] = instruction
        whole.append((number, instruction))
    return whole


def _element(given: Instruction, name: str, index: int) -> Instruction:
    return Instruction(
        name=name,
        opcode="get-tuple-element",
        shape=given.shape.element(index),
        operand_text=f"%{given.name}",
        attributes=f", index={index}",
        computation=given.computation,
        root=False,
    )


def _check_operands(computation: str, instructions: list[tuple[int, Instruction]]) -> None:
    """Refuse a text in which an instruction reads what its computation does not define."""
    defined = {instruction.name for _, instruction in instructions}
    for number, instruction in instructions:
        if instruction.opcode in ("constant", "parameter") or defined.issuperset(
            instruction.operands
        ):
            continue
        missing = next(name for name in instruction.operands if name not in defined)
        raise MeshwrightError(
            f"line {number} of the HLO text: %{instruction.name} reads %{missing}, which nothing "
            f"in computation {computation or '(none)'} defines. Pass the whole text of "
            "compiled.as_text(); if it is whole, this form of HLO is not known: please report it."
        )


def read_instruction(line: str, computation: str) -> Instruction | None:
    """Read one line of a computation; `None` for a line that is no instruction."""
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    start = match.end()
    end = _closing_bracket(line, start)
    return Instruction(
        name=match[2],
        opcode=match[4],
        shape=Shape(match[3]),
        operand_text=line[start:end],
        attributes=line[end + 1 :],
        computation=computation,
        root=match[1] is not None,
    )


def _closing_bracket(line: str, start: int) -> int:
    """Return where the operands end. Layouts among them have brackets: `add(f32[8]{0:T(8)} %a)`.

    Counts brackets between one closing bracket and the next, which is much quicker in Python than
    looking at every character.
    """
    end = line.find(")", start)
    opened = line.count("(", start, end)
    while opened:
        start, end = end + 1, line.find(")", end + 1)
        opened += line.count("(", start, end) - 1
    return end


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A program for one device. `devices` is how many run it together, as its header says."""

    header: str
    computations: dict[str, Computation]
    entry: Computation
    devices: int
    sources: SourceTable
    tables: Mapping[str, list[Any]]

    @functools.cached_property
    def constants(self) -> dict[str, np.ndarray]:
        """Values that the text leaves out, by instruction: tables for kernels and devices."""
        return decode_constants(self.tables)

    @functools.cached_property
    def dataflow(self) -> Dataflow:
        """Where its values come from."""
        return Dataflow(self.computations)

    @functools.cached_property
    def runs(self) -> dict[str, RunCount]:
        """`{computation: how often it runs}`, without those that are never called."""
        return count_runs(self.dataflow, self.entry.name)

    @functools.cached_property
    def started(self) -> frozenset[str]:
        """Computations that only start, and run beside others: a TPU's slices for its own chip."""
        return frozenset(
            name
            for computation in self.computations.values()
            for instruction in computation.instructions
            if instruction.opcode == "async-start"
            for _, name in instruction.called
        )

    def run_count(self, computation: str) -> RunCount:
        """Return how often a computation runs when the program runs once."""
        return self.runs.get(computation, RunCount(0))

    def source(self, instruction: Instruction) -> Source | None:
        """Return the line of the user's code that an instruction comes from, if the text says."""
        return self.sources.source(instruction)

    def stack(self, instruction: Instruction) -> tuple[Source, ...]:
        """Return every frame above an instruction, innermost first."""
        return self.sources.stack(instruction)

    @functools.cached_property
    def arguments(self) -> frozenset[str]:
        """The names of the user's arguments, as far as the text gives them."""
        return frozenset(parameter.op_name for parameter in self.entry.parameters.values())

    @functools.cached_property
    def flops(self) -> float:
        """Floating-point operations of all dots, convolutions and kernels on one device."""
        return self.flops_of_computation(self.entry.name)

    def flops_of_computation(self, computation: str) -> float:
        """Return the operations of one run of a computation and of all that it calls."""
        # Kept, because a computation may have many callers, each of which asks.
        if computation not in self._flops:
            instructions = self.computations[computation].instructions
            self._flops[computation] = sum(map(self.flops_of, instructions))
        return self._flops[computation]

    def flops_of(self, instruction: Instruction) -> float:
        """Return the operations of one instruction and of all that it calls."""
        own: float = flops(instruction, self.computations[instruction.computation])
        if (work := self.kernel_work(instruction)) is not None:
            own += work.flops
        return own + sum(
            self.flops_of_computation(name) * runs_per_call(how, instruction, self.dataflow).count
            for how, name in instruction.called
        )

    @functools.cached_property
    def _flops(self) -> dict[str, float]:
        return {}

    def kernel_work(self, instruction: Instruction) -> KernelWork | None:
        """Return the work of a custom kernel; `None` for any other instruction."""
        if instruction.opcode != "custom-call":
            return None
        if instruction not in self._kernels:
            computation = self.computations[instruction.computation]
            self._kernels[instruction] = kernel_work(
                instruction, computation, self.dataflow, self.constants
            )
        return self._kernels[instruction]

    @functools.cached_property
    def _kernels(self) -> dict[Instruction, KernelWork | None]:
        return {}

    @functools.cached_property
    def has_library_products(self) -> bool:
        """Whether a GPU's library multiplies in it: the compiler has tried out what is fastest."""
        return any(
            _LIBRARY_GEMM in instruction.attributes
            for computation in self.computations.values()
            for instruction in computation.instructions
            if instruction.opcode == "custom-call"
        )

    @functools.cached_property
    def estimated_cycles(self) -> int | None:
        """The compiler's own estimate of its fusions and copies; only TPU compilers give one."""
        estimates = [
            cycles * self.run_count(computation.name).count
            for computation in self.computations.values()
            for instruction in computation.instructions
            if (cycles := estimated_cycles(instruction)) is not None
        ]
        return sum(estimates) if estimates else None

    def __repr__(self) -> str:
        name = self.header.removeprefix("HloModule ").partition(",")[0]
        counts = (
            f"{plural(len(self.computations), 'computation')}, {plural(self.devices, 'device')}"
        )
        return short_repr(self, f"{name}, {counts}")


# Counting operations.
# Input: an instruction and the computation it is in (for the shapes of its operands).
# Output: floating-point operations of one run, those of computations it calls not included.
# Invariant: products with padding are not counted, however the compiler writes a dot.
# Example: `f32[8,4] dot(f32[8,16], f32[16,4])` has 2 * 8 * 4 * 16 = 1024.

_ESTIMATED_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_GEMM_DIMS = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_WINDOW_PART = re.compile(r"(\w+)=([\w\-]+)")
# The GPU compiler hands dots and convolutions to cuBLAS and cuDNN as custom calls.
_LIBRARY_GEMM, _LIBRARY_CONVOLUTION = '"__cublas$', '"__cudnn$conv'


def estimated_cycles(instruction: Instruction) -> int | None:
    """Return the TPU compiler's estimate for one instruction, if it has one."""
    match = _ESTIMATED_CYCLES.search(instruction.attributes)
    return int(match[1]) if match else None


def flops(instruction: Instruction, computation: Computation) -> int:
    """Count a multiplication and an addition per product; 0 for what is no dot or convolution.

    Those of custom kernels are in `Program.kernel_work`.
    """
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode == "dot":
        contracted = integers(instruction.attribute("lhs_contracting_dims"))
        return _dot(instruction, computation, contracted)
    if opcode == "convolution":
        return _convolution(instruction, computation)
    if opcode != "custom-call":
        return 0
    if _LIBRARY_GEMM in attributes:
        match = _GEMM_DIMS.search(attributes)
        return _dot(instruction, computation, integers(match[1])) if match else 0
    return _convolution(instruction, computation) if _LIBRARY_CONVOLUTION in attributes else 0


def _dot(instruction: Instruction, computation: Computation, contracted: tuple[int, ...]) -> int:
    left = computation.operands(instruction)[0].shape.leaves[0]
    products = math.prod(left.dims[dim] for dim in contracted)
    return 2 * instruction.shape.leaves[0].elements * products


def _convolution(instruction: Instruction, computation: Computation) -> int:
    """Count only products with elements that exist: padding and dilation have none.

    The TPU compiler writes batched dots as convolutions over mostly padding.
    """
    left, right = (
        operand.shape.leaves[0].dims for operand in computation.operands(instruction)[:2]
    )
    result = instruction.shape.leaves[0].dims
    # cuDNN's gradients keep the labels of the convolution itself: its input, kernel and output.
    if "convBackwardFilter" in instruction.attributes:
        right, result = result, right
    elif "convBackwardInput" in instruction.attributes:
        left, result = result, left
    labels = instruction.attribute("dim_labels") or ""
    lhs, rhs, out = re.split(r"_|->", labels)
    window = dict(_WINDOW_PART.findall(instruction.attribute("window") or ""))
    spatial = [dim for dim in lhs if dim.isdigit()]
    taps = math.prod(
        _taps(left[lhs.index(dim)], result[out.index(dim)], window, int(dim)) for dim in spatial
    )
    positions = math.prod(result[out.index(dim)] for dim in spatial)
    return 2 * math.prod(result) // positions * taps * right[rhs.index("i")]


def _taps(inputs: int, outputs: int, window: dict[str, str], dim: int) -> int:
    """Count the pairs of an output and a window position that meet an input, along one dim."""

    def number(name: str, default: int) -> int:
        entries = window.get(name)
        return int(entries.split("x")[dim].split("_")[0]) if entries else default

    return count_taps(
        inputs,
        outputs,
        size=number("size", 1),
        stride=number("stride", 1),
        pad=number("pad", 0),
        lhs_dilate=number("lhs_dilate", 1),
        rhs_dilate=number("rhs_dilate", 1),
    )


@functools.cache
def count_taps(
    inputs: int,
    outputs: int,
    *,
    size: int,
    stride: int,
    pad: int,
    lhs_dilate: int,
    rhs_dilate: int,
) -> int:
    """Count pairs of an output and a window position of `size` that meet one of the inputs."""
    # Positions in the padded, dilated input, of which every `lhs_dilate`-th is a real element.
    positions = np.add.outer(np.arange(outputs) * stride - pad, np.arange(size) * rhs_dilate)
    last = (inputs - 1) * lhs_dilate
    exists = (positions >= 0) & (positions <= last) & (positions % lhs_dilate == 0)
    return int(exists.sum())
