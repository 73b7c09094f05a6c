"""The largest buffers that live at once, read off a scheduled program.

The compiler packs a little differently here and there; what it reports itself is the truth, and
this says what it consists of.
"""

from __future__ import annotations

import dataclasses
import re

from meshwright.rehearsal.memory.lives import Lease, Lives, Piece, main_memory
from meshwright.rehearsal.memory.origins import origin
from meshwright.rehearsal.programs.instructions import Computation, Instruction
from meshwright.rehearsal.programs.names import primitives
from meshwright.rehearsal.programs.program import Program
from meshwright.rehearsal.programs.sources import Source

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
        donated = _ALIASED.findall(self.program.head)
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
