"""Finding the collectives of a program, each once, however it is written.

- `all-gather-start` and `all-gather-done` are one, and so are `async-start`, the computation it
  calls and `async-done`; where the compiler notes `is_sync` nothing runs beside them;
- the TPU compiler spreads a collective over fusions that work beside it: one that starts it, some
  that carry it on, one that ends it, all with the same channel;
- its fusions named `all-reduce-scatter` hold an all-reduce and a cut: a reduce-scatter;
- between slices it uses `send` and `recv` that meet at a rendezvous, and says what they make up;
- GPU compilers take a permutation apart into `send` and `recv` on one channel.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from meshwright.hlo.instructions import Computation, Instruction, Shape, end_of_value, integers
from meshwright.hlo.program import Program

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "collective-permute",
)
_STARTS = {f"{kind}-start": kind for kind in KINDS}
_SPREAD = '"async_collective_fusion_config"'


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A collective in the text.

    `first` takes its operands and `last` gives its result, as seen by the instructions around
    them: a fusion that holds it, a start and its end.
    """

    kind: str
    instruction: Instruction
    operands: tuple[Shape, ...]
    results: Shape
    parts: tuple[str, ...]
    asynchronous: bool
    meanwhile: float
    first: Instruction
    last: Instruction
    transfer: Transfer | None = None


def find(program: Program) -> Iterator[Found]:
    spread = _Spread(program)
    for computation in program.computations.values():
        if not program.run_count(computation.name).count:
            continue
        for instruction in computation.instructions:
            opcode = instruction.opcode
            if opcode in KINDS:
                if _SPREAD in instruction.attributes:
                    yield from spread.found(instruction, computation)
                else:
                    yield _plain(program, instruction, computation)
            elif opcode in _STARTS:
                yield _started(program, instruction, computation)
        for transfer in transfers(computation):
            yield _transferred(program, transfer, computation)


def _plain(program: Program, instruction: Instruction, computation: Computation) -> Found:
    callers = tuple(program.dataflow.callers.get(computation.name, ()))
    shape, kind = instruction.shape, instruction.opcode
    if computation.name.startswith("all-reduce-scatter"):
        shape, kind = computation.root.shape, "reduce-scatter"
    holders = [caller for caller in callers if caller.opcode in ("fusion", "async-start")]
    outside = holders[0] if holders else instruction
    starts = [caller for caller in callers if caller.opcode == "async-start"]
    return Found(
        kind,
        instruction,
        _shapes(instruction, computation),
        shape,
        (instruction.name,),
        bool(starts),
        sum(_meanwhile(program, start) for start in starts[:1]),
        outside,
        outside,
    )


def _started(program: Program, instruction: Instruction, computation: Computation) -> Found:
    done = _done(instruction, computation)
    beside = '"is_sync":true' not in instruction.attributes
    return Found(
        _STARTS[instruction.opcode],
        instruction,
        _shapes(instruction, computation),
        done.shape,
        (instruction.name, done.name),
        beside,
        _meanwhile(program, instruction) if beside else 0.0,
        instruction,
        done,
    )


def _transferred(program: Program, transfer: Transfer, computation: Computation) -> Found:
    send, recv = transfer.send, transfer.recv
    ends = [_done(instruction, computation) for instruction in (send, recv)]
    first = min(send, recv, key=computation.instructions.index)
    return Found(
        transfer.kind,
        send,
        _shapes(send, computation)[:1],
        Shape(str(recv.shape.leaves[0])),
        (send.name, recv.name, *(end.name for end in ends)),
        True,
        _between(program, computation, first, ends[1]),
        send,
        ends[1],
        transfer,
    )


class _Spread:
    """Collectives that TPU fusions carry on, piece by piece."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.pieces: dict[str | None, list[Instruction]] = {}
        for computation in program.computations.values():
            for instruction in computation.instructions:
                if instruction.opcode in KINDS and _SPREAD in instruction.attributes:
                    channel = instruction.attribute("channel_id")
                    self.pieces.setdefault(channel, []).append(instruction)

    def found(self, instruction: Instruction, computation: Computation) -> Iterator[Found]:
        if not _starts_spread(computation):
            return
        pieces = self.pieces[instruction.attribute("channel_id")]
        starts = [p for p in pieces if _starts_spread(self.program.computations[p.computation])]
        # Several starts on one channel share the pieces that follow; they are listed once.
        parts = pieces if instruction is starts[0] else [instruction]
        runs = self.program.run_count(computation.name).count
        work = sum(
            self.program.flops_of_computation(piece.computation)
            * self.program.run_count(piece.computation).count
            for piece in pieces
        )
        ends = [piece for piece in pieces if self._is_end(piece)] or [instruction]
        yield Found(
            instruction.opcode,
            instruction,
            _shapes(instruction, computation),
            instruction.shape,
            tuple(part.name for part in parts),
            True,
            work / (runs * len(starts)),
            self._outside(instruction),
            self._outside(ends[-1]),
        )

    def _is_end(self, piece: Instruction) -> bool:
        root = self.program.computations[piece.computation].root
        return '"AsyncCollectiveDone"' in root.attributes

    def _outside(self, piece: Instruction) -> Instruction:
        return self.program.dataflow.callers[piece.computation][0]


def _starts_spread(computation: Computation) -> bool:
    return '"AsyncCollectiveStart"' in computation.root.attributes


def _shapes(instruction: Instruction, computation: Computation) -> tuple[Shape, ...]:
    return tuple(operand.shape for operand in computation.operands(instruction))


def _done(start: Instruction, computation: Computation) -> Instruction:
    """The end of something started; updates in between are passed."""
    for user in computation.users.get(start.name, ()):
        if user.opcode.endswith("-update"):
            return _done(user, computation)
        if user.opcode.endswith("-done"):
            return user
    return start


def _meanwhile(program: Program, start: Instruction) -> float:
    computation = program.computations[start.computation]
    return _between(program, computation, start, _done(start, computation))


def _between(
    program: Program, computation: Computation, start: Instruction, end: Instruction
) -> float:
    """Operations that the schedule puts between two instructions."""
    first = computation.instructions.index(start)
    last = computation.instructions.index(end)
    return sum(map(program.flops_of, computation.instructions[first + 1 : last]))


# Sends and receives that together are one collective.


_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_TYPE = re.compile(r'_xla_megascale_transfer_type="([^"]*)"')
_PAIRS = re.compile(r"_xla_send_recv_source_target_pairs=\"?(\{(?:\{[^}]*\},?)*\})")
_TARGET = re.compile(r"_xla_megascale_target=")
_EVERYWHERE = re.compile(r"\{([\d,:]*)\}x\{([\d,:]*)\}")


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """A send and the receive it meets. `between_slices`: devices go by the TPU's own numbers,
    100,000 for every slice from 1 on plus the number within it."""

    kind: str
    send: Instruction
    recv: Instruction
    between_slices: bool

    @property
    def pairs(self) -> np.ndarray:
        """Senders and receivers of a permutation."""
        return np.array(integers(self.target.replace("->", ",")), np.int64).reshape(-1, 2)

    @property
    def groups(self) -> tuple[np.ndarray, ...]:
        text = self.target
        spread = _EVERYWHERE.fullmatch(text)
        if spread:
            slices, inside = (_range(part) for part in spread.groups())
            return tuple(np.array([100_000 * s + device for s in slices]) for device in inside)
        return tuple(np.array(integers(g)) for g in re.findall(r"\{([\d,]+)\}", text))

    @property
    def target(self) -> str:
        if not self.between_slices:
            found = _PAIRS.search(self.send.attributes)
            return found[1] if found else ""
        start = _TARGET.search(self.send.attributes)
        return (
            self.send.attributes[
                start.end() : end_of_value(self.send.attributes, start.end())
            ].strip('"')
            if start
            else ""
        )


def _range(text: str) -> list[int]:
    """
    >>> _range("0:3"), _range("1,2"), _range("0:1,4")
    ([0, 1, 2, 3], [1, 2], [0, 1, 4])
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def transfers(computation: Computation) -> Iterator[Transfer]:
    """Every send with the receive that meets it."""
    receives = {
        _meeting(instruction): instruction
        for instruction in computation.instructions
        if instruction.opcode == "recv"
    }
    for instruction in computation.instructions:
        if instruction.opcode == "send" and _meeting(instruction) in receives:
            named = _TYPE.search(instruction.attributes)
            kind = _KINDS.get(named[1], named[1].lower()) if named else "collective-permute"
            yield Transfer(kind, instruction, receives[_meeting(instruction)], named is not None)


def _meeting(instruction: Instruction) -> str | None:
    named = _RENDEZVOUS.search(instruction.attributes)
    return named[1] if named else instruction.attribute("channel_id")
