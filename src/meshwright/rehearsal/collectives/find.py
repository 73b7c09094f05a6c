"""`find_collectives`: the collectives of a program, each once, however they are written.

- `all-gather-start` and `all-gather-done` are one, and so are `async-start`, the computation it
  calls and `async-done`; where the compiler notes `is_sync` nothing runs beside them;
- the TPU compiler spreads a collective over fusions that work beside it: one that starts it, some
  that carry it on, one that ends it, all with the same channel;
- its fusions named `all-reduce-scatter` hold an all-reduce and a slice: a reduce-scatter;
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
_ASYNC_FUSION = '"async_collective_fusion_config"'  # in the backend_config of TPU programs


@dataclasses.dataclass(frozen=True, eq=False)
class HloCollective:
    """A collective in the program's text.

    `instruction` says who takes part, `parts` are the names of all instructions that make it up.
    `first` takes its operands and `last` gives its result, as seen by the instructions around
    them: a fusion that holds it, a start and its end. `meanwhile` are the floating-point
    operations that the schedule puts between the two.
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


# In: a scheduled program. Out: its collectives, computation by computation, in program order.
# Invariant: no instruction is a part of two of them, and what never runs (a loop without rounds, a
# computation that nothing calls) is left out. Example: `%s = all-gather-start(%x)`,
# a dot and `%d = all-gather-done(%s)` are one asynchronous all-gather, parts ("s", "d"), with the
# dot's operations in `meanwhile`.
def find_collectives(program: Program) -> Iterator[HloCollective]:
    """Find the collectives of a program."""
    fusions = _AsyncFusions(program)
    for computation in program.computations.values():
        if not program.run_count(computation.name).count:
            continue
        for instruction in computation.instructions:
            if instruction.opcode in _STARTS:
                yield _start_and_done(program, instruction, computation)
            elif instruction.opcode in KINDS and _ASYNC_FUSION in instruction.attributes:
                yield from fusions.started_by(instruction, computation)
            elif instruction.opcode in KINDS:
                yield _plain(program, instruction, computation)
        for transfer in find_transfers(computation):
            yield _send_and_recv(program, transfer, computation)


def _plain(program: Program, instruction: Instruction, computation: Computation) -> HloCollective:
    """One instruction, by itself or inside of a fusion or an `async-start`."""
    callers = tuple(program.dataflow.callers.get(computation.name, ()))
    results, kind = instruction.shape, instruction.opcode
    if computation.name.startswith("all-reduce-scatter"):
        results, kind = computation.root.shape, "reduce-scatter"
    holders = [caller for caller in callers if caller.opcode in ("fusion", "async-start")]
    outside = holders[0] if holders else instruction
    starts = [caller for caller in callers if caller.opcode == "async-start"]
    return HloCollective(
        kind,
        instruction,
        _operand_shapes(instruction, computation),
        results,
        (instruction.name,),
        bool(starts),
        sum(_work_meanwhile(program, start) for start in starts[:1]),
        outside,
        outside,
    )


def _start_and_done(
    program: Program, instruction: Instruction, computation: Computation
) -> HloCollective:
    done = _done(instruction, computation)
    beside = '"is_sync":true' not in instruction.attributes
    return HloCollective(
        _STARTS[instruction.opcode],
        instruction,
        _operand_shapes(instruction, computation),
        done.shape,
        (instruction.name, done.name),
        beside,
        _work_meanwhile(program, instruction) if beside else 0.0,
        instruction,
        done,
    )


def _send_and_recv(program: Program, transfer: Transfer, computation: Computation) -> HloCollective:
    send, recv = transfer.send, transfer.recv
    ends = [_done(instruction, computation) for instruction in (send, recv)]
    first = min(send, recv, key=computation.instructions.index)
    return HloCollective(
        transfer.kind,
        send,
        _operand_shapes(send, computation)[:1],  # the second is a token
        Shape(str(recv.shape.leaves[0])),
        (send.name, recv.name, *(end.name for end in ends)),
        True,
        _work_between(program, computation, first, ends[1]),
        send,
        ends[1],
        transfer,
    )


class _AsyncFusions:
    """Collectives that TPU fusions carry on, piece by piece (async collective fusion)."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.pieces: dict[str | None, list[Instruction]] = {}  # by channel
        for computation in program.computations.values():
            for instruction in computation.instructions:
                if instruction.opcode in KINDS and _ASYNC_FUSION in instruction.attributes:
                    channel = instruction.attribute("channel_id")
                    self.pieces.setdefault(channel, []).append(instruction)

    def started_by(
        self, instruction: Instruction, computation: Computation
    ) -> Iterator[HloCollective]:
        """The collective that a piece starts; nothing for pieces that carry one on or end it."""
        if not _is_start(computation):
            return
        pieces = self.pieces[instruction.attribute("channel_id")]
        starts = [p for p in pieces if _is_start(self.program.computations[p.computation])]
        # Several starts on one channel share the pieces that follow; they are listed once.
        parts = pieces if instruction is starts[0] else [instruction]
        runs = self.program.run_count(computation.name).count
        work = sum(
            self.program.flops_of_computation(piece.computation)
            * self.program.run_count(piece.computation).count
            for piece in pieces
        )
        ends = [piece for piece in pieces if self._is_end(piece)] or [instruction]
        yield HloCollective(
            instruction.opcode,
            instruction,
            _operand_shapes(instruction, computation),
            instruction.shape,
            tuple(part.name for part in parts),
            True,
            work / (runs * len(starts)),
            self._fusion_of(instruction),
            self._fusion_of(ends[-1]),
        )

    def _is_end(self, piece: Instruction) -> bool:
        root = self.program.computations[piece.computation].root
        return '"AsyncCollectiveDone"' in root.attributes

    def _fusion_of(self, piece: Instruction) -> Instruction:
        return self.program.dataflow.callers[piece.computation][0]


def _is_start(computation: Computation) -> bool:
    return '"AsyncCollectiveStart"' in computation.root.attributes


def _operand_shapes(instruction: Instruction, computation: Computation) -> tuple[Shape, ...]:
    return tuple(operand.shape for operand in computation.operands(instruction))


def _done(start: Instruction, computation: Computation) -> Instruction:
    """The end of something started, behind any `-update`s; the start itself if there is none."""
    for user in computation.users.get(start.name, ()):
        if user.opcode.endswith("-update"):
            return _done(user, computation)
        if user.opcode.endswith("-done"):
            return user
    return start


def _work_meanwhile(program: Program, start: Instruction) -> float:
    computation = program.computations[start.computation]
    return _work_between(program, computation, start, _done(start, computation))


def _work_between(
    program: Program, computation: Computation, start: Instruction, end: Instruction
) -> float:
    """Operations that the schedule puts between two instructions."""
    first = computation.instructions.index(start)
    last = computation.instructions.index(end)
    return sum(map(program.flops_of, computation.instructions[first + 1 : last]))


# Sends and receives that together are one collective. Between slices libtpu names the collective
# they stand for (`_xla_megascale_transfer_type`) and its devices; on GPUs they are permutations.

_MEGASCALE_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_MEGASCALE_TYPE = re.compile(r'_xla_megascale_transfer_type="([^"]*)"')
_MEGASCALE_TARGET = re.compile(r"_xla_megascale_target=")
_PAIRS = re.compile(r"_xla_send_recv_source_target_pairs=\"?(\{(?:\{[^}]*\},?)*\})")
_SLICES_TIMES_DEVICES = re.compile(r"\{([\d,:]*)\}x\{([\d,:]*)\}")
IDS_PER_SLICE = 100_000  # libtpu numbers the devices of a slice from a multiple of this


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """A send and the receive it meets.

    `between_slices`: devices go by the TPU's own numbers, `IDS_PER_SLICE` for every slice from 1
    on plus the number within it. Else they go by partition.
    """

    kind: str
    send: Instruction
    recv: Instruction
    between_slices: bool

    @property
    def pairs(self) -> np.ndarray:
        """Senders and receivers of a permutation, a pair a row: `{{100000->200000}}`."""
        return np.array(integers(self.target.replace("->", ",")), np.int64).reshape(-1, 2)

    @property
    def groups(self) -> tuple[np.ndarray, ...]:
        """The devices of each group: `{1:2}x{0:3}` are four groups, of one device in each slice."""
        text = self.target
        product = _SLICES_TIMES_DEVICES.fullmatch(text)
        if product:
            slices, inside = (_range(part) for part in product.groups())
            return tuple(
                np.array([IDS_PER_SLICE * number + device for number in slices])
                for device in inside
            )
        return tuple(np.array(integers(g)) for g in re.findall(r"\{([\d,]+)\}", text))

    @property
    def target(self) -> str:
        """Who sends to whom, as it is written."""
        rest = self.send.attributes
        if not self.between_slices:
            pairs = _PAIRS.search(rest)
            return pairs[1] if pairs else ""
        start = _MEGASCALE_TARGET.search(rest)
        return rest[start.end() : end_of_value(rest, start.end())].strip('"') if start else ""


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


# In: a computation. Out: each `send` with the `recv` that has its rendezvous or its channel.
# Invariant: a send that meets no receive here is left out. Example: between slices `send(...),
# _xla_megascale_transfer_type="ALL_GATHER"` and its `recv` are one all-gather.
def find_transfers(computation: Computation) -> Iterator[Transfer]:
    """Find every send with the receive that meets it, by rendezvous or by channel."""
    receives = {
        _meeting(instruction): instruction
        for instruction in computation.instructions
        if instruction.opcode == "recv"
    }
    for instruction in computation.instructions:
        if instruction.opcode == "send" and _meeting(instruction) in receives:
            kind, megascale = "collective-permute", _MEGASCALE_TYPE.search(instruction.attributes)
            if megascale:
                kind = _MEGASCALE_KINDS.get(megascale[1], megascale[1].lower())
            recv = receives[_meeting(instruction)]
            yield Transfer(kind, instruction, recv, megascale is not None)


def _meeting(instruction: Instruction) -> str | None:
    rendezvous = _RENDEZVOUS.search(instruction.attributes)
    return rendezvous[1] if rendezvous else instruction.attribute("channel_id")
