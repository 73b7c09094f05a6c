"""`Memory`: what a program takes of a device, part by part, against what there is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright._tables import table
from meshwright.hardware import Chip
from meshwright.partitioning.report import LeafRow
from meshwright.partitioning.show import amount
from meshwright.rehearsal.memory.buffers import Buffer
from meshwright.rehearsal.memory.limits import GPU_FRACTION, available

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
