"""Sends and receives that together are one collective."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from meshwright.rehearsal.programs import Computation, Instruction
from meshwright.rehearsal.programs.attributes import end_of_value, whole_numbers

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
        return np.array(whole_numbers(self.target.replace("->", ",")), np.int64).reshape(-1, 2)

    @property
    def groups(self) -> tuple[np.ndarray, ...]:
        text = self.target
        spread = _EVERYWHERE.fullmatch(text)
        if spread:
            slices, inside = (_range(part) for part in spread.groups())
            return tuple(np.array([100_000 * s + device for s in slices]) for device in inside)
        return tuple(np.array(whole_numbers(g)) for g in re.findall(r"\{([\d,]+)\}", text))

    @property
    def target(self) -> str:
        if not self.between_slices:
            found = _PAIRS.search(self.send.rest)
            return found[1] if found else ""
        start = _TARGET.search(self.send.rest)
        return (
            self.send.rest[start.end() : end_of_value(self.send.rest, start.end())].strip('"')
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
            named = _TYPE.search(instruction.rest)
            kind = _KINDS.get(named[1], named[1].lower()) if named else "collective-permute"
            yield Transfer(kind, instruction, receives[_meeting(instruction)], named is not None)


def _meeting(instruction: Instruction) -> str | None:
    named = _RENDEZVOUS.search(instruction.rest)
    return named[1] if named else instruction.attribute("channel_id")
