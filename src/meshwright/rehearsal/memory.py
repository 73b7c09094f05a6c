"""`Memory`: what a program takes of a device, part by part, against what there is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright._text import amount, table
from meshwright.hardware.chips import Chip
from meshwright.hlo.instructions import Computation, Instruction, Source, primitives
from meshwright.hlo.program import Program
from meshwright.partitioning.report import LeafRow
from meshwright.rehearsal.live_ranges import Lease, Lives, Piece, main_memory

_REFUSED = re.compile(r"([\d.]+)([KMGT])?i?B?\) exceeds available HBM \(([\d.]+)([KMGT])?")
_USED = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 1}
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on every device. `peak` is all that is allocated at once: arguments, outputs that
    do not overwrite an argument, temporaries and code. `refused`: the compiler gave up, and
    `temporaries` is what it said it needs beyond the arguments.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    limit: int
    chip: str
    family: str
    refused: bool = False
    buffers: tuple[Buffer, ...] = ()

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def margin(self) -> int:
        """What is left of the limit; negative when it does not fit."""
        return self.limit - self.peak

    @property
    def fits(self) -> bool:
        return not self.refused and self.margin >= 0

    @property
    def note(self) -> str:
        """What to mind, if anything."""
        if self.refused:
            return "the compiler refused: temporaries are what it said it needs beside arguments"
        if self.family == "cpu" and not self.fits:
            return f"{amount(self.limit)} is what a simulated device is taken to have"
        if self.family == "gpu" and self.fits and self.peak > GPU_FRACTION * self.limit:
            return (
                f"more than the {GPU_FRACTION:.0%} of a GPU that JAX takes by default: set "
                "XLA_PYTHON_CLIENT_MEM_FRACTION=.95"
            )
        return ""

    def parts(self) -> dict[str, int]:
        """The parts of the peak."""
        return {
            "arguments": self.arguments,
            "outputs": self.outputs,
            "aliased": -self.aliased,
            "temporaries": self.temporaries,
            "code": self.code,
        }

    def verdict(self) -> str:
        """One line: does it fit, with what margin."""
        share = self.peak / self.limit
        if self.fits:
            return (
                f"fits: {amount(self.peak)} of {amount(self.limit)} on each {self.chip} "
                f"({share:.0%}), {amount(self.margin)} to spare"
            )
        return (
            f"does NOT fit: {amount(self.peak)} on each {self.chip}, which has "
            f"{amount(self.limit)}: {amount(-self.margin)} too much ({share:.1f} times)"
        )

    def __str__(self) -> str:
        rows = [["memory on a device", "bytes"]]
        rows += [[name, amount(size)] for name, size in self.parts().items() if size]
        rows += [["peak", amount(self.peak)], ["limit", amount(self.limit)]]
        lines = [self.verdict(), table(rows, [False, True])]
        if self.note:
            lines.append(f"note: {self.note}")
        if self.buffers:
            found = [["largest at the peak", "bytes", "from"]]
            found += [
                [buffer.shape, amount(buffer.bytes), _origin(buffer)]
                for buffer in self.buffers[:_SHOWN]
            ]
            lines.append(table(found, [False, True, False]))
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "peak": self.peak,
            "limit": self.limit,
            "margin": self.margin,
            "refused": self.refused,
            "parts": self.parts(),
            "note": self.note,
            "buffers": [
                {
                    "shape": buffer.shape,
                    "bytes": buffer.bytes,
                    "op": buffer.op_name,
                    "source": None if buffer.source is None else str(buffer.source),
                }
                for buffer in self.buffers
            ],
        }


def _origin(buffer: Buffer) -> str:
    made_by = buffer.made_by
    return f"{made_by[:40]} {buffer.source}" if buffer.source else made_by[:60]


def as_compiled(sizes: Mapping[str, int], chip: Chip, buffers: tuple[Buffer, ...]) -> Memory:
    """The compiler's own report."""
    return Memory(
        sizes["argument"],
        sizes["output"],
        sizes["alias"],
        sizes["temp"],
        sizes["generated_code"],
        available(chip),
        chip.name,
        chip.family,
        buffers=buffers,
    )


def as_refused(reason: str, rows: Sequence[LeafRow], chip: Chip) -> Memory:
    """The verdict of a compiler that ran out of memory, in the same form.

    It names what it needs and what there is, not what for; of the buffers the arguments are known.
    """
    needed, limit = _read(reason)
    arguments = sum(row.device_bytes for row in rows)
    buffers = [
        Buffer(f"argument {row.path}", _local(row), row.device_bytes, "", None) for row in rows
    ]
    return Memory(
        arguments,
        0,
        0,
        max(0, (needed or arguments) - arguments),
        0,
        limit or available(chip),
        chip.name,
        chip.family,
        refused=True,
        buffers=tuple(sorted(buffers, key=lambda buffer: (-buffer.bytes, buffer.name))),
    )


def _local(row: LeafRow) -> str:
    """What a device holds of an argument, such as `f32[512,128]`."""
    return f"{row.text.partition('[')[0]}[{','.join(map(str, row.local))}]"


def _read(reason: str) -> tuple[int | None, int | None]:
    """What it needs and what there is, in bytes, as far as the compiler says."""
    found = _REFUSED.search(reason) or _USED.search(reason)
    if found is None:
        return None, None
    needed, unit, limit, other = found.groups(default="")
    return int(float(needed) * _UNITS[unit]), int(float(limit) * _UNITS[other])


# How much memory a program may take on a device.


_GIB = 2**30

# GiB a device, as the TPU compiler itself says when it refuses ("available HBM"; libtpu 0.0.42).
_AVAILABLE = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}

# What JAX takes of a GPU unless told otherwise (XLA_PYTHON_CLIENT_MEM_FRACTION).
GPU_FRACTION = 0.75


def available(chip: Chip) -> int:
    """Bytes a program may take: what the compiler lets it, or the memory a device has."""
    if chip.name in _AVAILABLE:
        return int(_AVAILABLE[chip.name] * _GIB)
    return int(chip.memory_gb * 1e9) // chip.cores


# The largest buffers that live at once, read off a scheduled program.
#
# The compiler packs a little differently here and there; what it reports itself is the truth, and
# this says what it consists of.


_ALIASED = re.compile(r"\{(\d*)\}: \((\d+),")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One piece of memory at the moment of the peak."""

    name: str
    shape: str
    bytes: int
    op_name: str
    source: Source | None

    @property
    def made_by(self) -> str:
        """The operation in a word, or the compiler's own name where it has none."""
        return ", ".join(primitives(self.op_name)) or self.name


@dataclasses.dataclass(frozen=True)
class _Peak:
    bytes: int
    pieces: tuple[tuple[str, Piece], ...]  # with the computation that holds them


def live_buffers(program: Program) -> tuple[Buffer, ...]:
    """What lives at the peak, largest first; arguments too."""
    found = []
    for computation, (name, number) in _Walk(program).entry().pieces:
        made = program.computations[computation].by_name[name]
        leaf = made.shape.leaves[number]
        named = origin(program, made) or made
        found.append(Buffer(name, str(leaf), leaf.bytes, named.op_name, program.source(named)))
    return tuple(sorted(found, key=lambda buffer: (-buffer.bytes, buffer.name)))


class _Walk:
    """The peaks of a program's computations, each worked out once."""

    def __init__(self, program: Program):
        self.program = program
        self.known: dict[str, _Peak] = {}

    def entry(self) -> _Peak:
        donated = _ALIASED.findall(self.program.header)
        lease = Lease(
            counted=True,
            results=frozenset(int(result or 0) for result, _ in donated),
            parameters=frozenset(int(parameter) for _, parameter in donated),
        )
        return self._peak(self.program.entry, lease)

    def called(self, name: str, loop: bool) -> _Peak:
        if name not in self.known:
            computation = self.program.computations[name]
            state = frozenset(range(len(computation.root.shape.leaves)))
            lease = Lease(results=state, parameters=frozenset({0} if loop else ()))
            self.known[name] = self._peak(computation, lease)
        return self.known[name]

    def _peak(self, computation: Computation, lease: Lease) -> _Peak:
        lives = Lives(self.program, computation, lease).found()
        begins: dict[int, list[Piece]] = {}
        ends: dict[int, list[Piece]] = {}
        for piece, (first, last) in lives.items():
            begins.setdefault(first, []).append(piece)
            ends.setdefault(last, []).append(piece)
        sizes = {piece: main_memory(computation.by_name[piece[0]], piece[1]) for piece in lives}
        total, best, when = 0, -1, 0
        for at, instruction in enumerate(computation.instructions):
            total += sum(sizes[piece] for piece in begins.get(at, ()))
            inner = self._inner(instruction)
            if total + inner.bytes > best:
                best, when = total + inner.bytes, at
            total -= sum(sizes[piece] for piece in ends.get(at, ()))
        alive = [
            (computation.name, piece)
            for piece, (first, last) in lives.items()
            if first <= when <= last and sizes[piece]
        ]
        inner = self._inner(computation.instructions[when])
        return _Peak(best, (*alive, *inner.pieces))

    def _inner(self, instruction: Instruction) -> _Peak:
        if not instruction.only_calls:
            return _Peak(0, ())
        loop = instruction.opcode == "while"
        peaks = [self.called(name, loop) for how, name in instruction.called if how != "to_apply"]
        return max(peaks, key=lambda peak: peak.bytes, default=_Peak(0, ()))


# Whose operation a buffer belongs to, where the instruction that makes it does not say.
#
# Compilers copy, widen and set aside memory on behalf of others: a copy belongs to what it copies,
# and memory that is set aside to whoever fills it, which may be the body of a loop.


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
