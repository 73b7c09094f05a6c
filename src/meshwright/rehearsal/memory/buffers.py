"""The largest buffers that live at once, read off a scheduled program.

A value lives from the instruction that makes it to the last one that reads it. Tuples, bitcasts,
loops and the ends of asynchronous pairs make nothing new: they hand on what they were given. A
loop writes its next state where the last one was, and a donated argument is overwritten by the
result that takes its place, so these are not counted again. The compiler packs better than that
here and there; what it reports itself is the truth, and this says what it consists of.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping

from meshwright.rehearsal.memory.origins import origin
from meshwright.rehearsal.programs.instructions import Computation, Instruction
from meshwright.rehearsal.programs.names import primitives
from meshwright.rehearsal.programs.program import Program
from meshwright.rehearsal.programs.sources import Source

_HANDED_ON = ("bitcast", "optimization-barrier", "domain")
_NOTHING = ("constant", "after-all", "partition-id", "replica-id", "iota")
_ARRAY = re.compile(r"[a-z][a-z0-9]*\[[^\]]*\](?:\{[^{}]*\})?")
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")  # a TPU's own scratch memory
_ALIASED = re.compile(r"\{(\d*)\}: \((\d+),")

Piece = tuple[str, int]  # an instruction and the number of one of its results


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
        aliased = {int(out or 0) for out, _ in _ALIASED.findall(self.program.head)}
        return self._peak(self.program.entry, owns_parameters=True, written_over=aliased)

    def called(self, name: str, loop: bool) -> _Peak:
        if name not in self.known:
            computation = self.program.computations[name]
            written_over = range(len(computation.root.shape.leaves)) if loop else ()
            self.known[name] = self._peak(
                computation, owns_parameters=False, written_over=written_over
            )
        return self.known[name]

    def _peak(
        self, computation: Computation, owns_parameters: bool, written_over: Iterable[int]
    ) -> _Peak:
        lives = _lives(computation, owns_parameters, frozenset(written_over))
        begins: dict[int, list[Piece]] = {}
        ends: dict[int, list[Piece]] = {}
        for piece, (first, last) in lives.items():
            begins.setdefault(first, []).append(piece)
            ends.setdefault(last, []).append(piece)
        sizes = {piece: _bytes(computation.by_name[piece[0]], piece[1]) for piece in lives}
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


def _lives(
    computation: Computation, owns_parameters: bool, written_over: frozenset[int]
) -> Mapping[Piece, tuple[int, int]]:
    """First and last instruction that each new piece of memory is needed at."""
    holds: dict[str, list[frozenset[Piece]]] = {}
    lives: dict[Piece, list[int]] = {}
    end = len(computation.instructions) - 1
    begun: dict[str, tuple[str, ...]] = {}  # what asynchronous work reads until it is done
    for at, instruction in enumerate(computation.instructions):
        reads = instruction.operands
        if instruction.opcode.endswith("-start"):
            begun[instruction.name] = reads
        for operand in (*reads, *(name for each in reads for name in begun.get(each, ()))):
            for pieces in holds.get(operand, ()):
                for piece in pieces:
                    lives[piece][1] = max(at, lives[piece][1])
        found = _handed_on(instruction, holds)
        if found is None:
            found = [frozenset({(instruction.name, n)}) for n in _made(computation, instruction)]
            argument = instruction.opcode == "parameter"
            if instruction.opcode in _NOTHING or (argument and not owns_parameters):
                found = [frozenset[Piece]()] * len(found)
            for pieces in found:
                for piece in pieces:
                    lives[piece] = [0, end] if argument else [at, at]
        holds[instruction.name] = found
    for number, pieces in enumerate(holds[computation.root.name]):
        for piece in pieces:
            if number in written_over and computation.by_name[piece[0]].opcode != "parameter":
                lives.pop(piece, None)
            elif piece in lives:
                lives[piece][1] = end
    return {piece: (first, last) for piece, (first, last) in lives.items()}


def _handed_on(
    instruction: Instruction, holds: Mapping[str, list[frozenset[Piece]]]
) -> list[frozenset[Piece]] | None:
    """What an instruction passes on of its operands, or `None` where it makes something."""
    opcode = instruction.opcode
    given = [holds.get(name, []) for name in instruction.operands]
    if opcode == "tuple":
        return [pieces for each in given for pieces in each]
    if opcode == "get-tuple-element":
        return [_element(instruction, given[0])]
    if opcode == "while" or opcode in _HANDED_ON or opcode.endswith(("-done", "-update")):
        return given[0] if given else []
    return None


def _element(instruction: Instruction, whole: list[frozenset[Piece]]) -> frozenset[Piece]:
    number = int(instruction.attribute("index") or 0)
    return whole[number] if number < len(whole) else frozenset()


def _made(computation: Computation, instruction: Instruction) -> Iterable[int]:
    """Which of its leaves are new. What begins asynchronous work lists what it reads as well."""
    leaves = instruction.shape.leaves
    if instruction.opcode == "copy-start":
        return (0,)
    if instruction.opcode.endswith("-start"):
        reads = tuple(
            leaf for operand in computation.operands(instruction) for leaf in operand.shape.leaves
        )
        if len(leaves) > len(reads) and leaves[: len(reads)] == reads:
            return range(len(reads), len(leaves))
    return range(max(1, len(leaves)))


def _bytes(instruction: Instruction, number: int) -> int:
    """What a piece takes of the device's main memory."""
    leaves = instruction.shape.leaves
    if number >= len(leaves) or _ON_CHIP.search(_layouts(instruction.shape.text)[number]):
        return 0
    return leaves[number].bytes


@functools.lru_cache(maxsize=4096)
def _layouts(text: str) -> list[str]:
    return _ARRAY.findall(text)
