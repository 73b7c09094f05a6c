"""`HostTransfers`: what a program moves between a device and the memory of its host.

Offloaded arrays (`jax.checkpoint` policies that offload, `memory_kind="pinned_host"`) cross the bus
between host and device, a wire of its own. In optimised HLO host memory is the memory space 5.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from meshwright._text import amount, duration
from meshwright.hardware.chips import Chip
from meshwright.hlo.instructions import Computation, Instruction
from meshwright.hlo.program import Program

Direction = Literal["to host", "to device"]

# GB/s of a device each way. TPUs: the scaling book ("16GB/s each way" for v4, "1.6e10 per chip" for
# newer ones, twice that for v6e); TPU7x is not published. GPUs: PCIe 4 and 5 with 16 lanes; GB200:
# NVLink-C2C, which two GPUs share.
_BUS = {
    "v4": 16.0,
    "v5e": 16.0,
    "v5p": 16.0,
    "v6e": 32.0,
    "a100": 31.5,
    "h100": 63.0,
    "h200": 63.0,
    "b200": 63.0,
    "gb200": 225.0,
}
_REACHED = 0.84  # of the bus, by 1 GiB to and from pinned memory on an H200 (52.7 and 53.2 GB/s)

_HOST = re.compile(r"\{[^{}]*S\(5\)[^{}]*\}")
_ARRAY = re.compile(r"[a-z]\w*\[[^\]]*\](?:\{[^{}]*\})?")
_PASSES = ("bitcast", "tuple", "copy", "reshape")


@dataclasses.dataclass(frozen=True)
class HostTransfers:
    """Bytes a device sends to its host and takes from it in a step, in how many transfers.

    `seconds` is how long the bus takes for them, each way beside the other; `None` where its speed
    is not known. It is not in the modelled step: transfers run beside kernels where they can.
    """

    to_host: int
    to_device: int
    transfers: int
    seconds: float | None

    def __str__(self) -> str:
        took = "" if self.seconds is None else f", {duration(self.seconds)} of the bus at least"
        return (
            f"Offloaded: {amount(self.to_host)} to the host and {amount(self.to_device)} back, in "
            f"{self.transfers:,} transfers of a device{took}; not in the modelled step."
        )

    def to_json(self) -> dict[str, Any]:
        """Return bytes, transfers and seconds as plain data."""
        return dataclasses.asdict(self)


def find_host_transfers(program: Program, chip: Chip) -> HostTransfers | None:
    """Add up what a program moves to and from the host; `None` if nothing."""
    moved: dict[Direction, int] = {"to host": 0, "to device": 0}
    transfers = 0
    for computation in program.computations.values():
        times = program.run_count(computation.name).count
        if not times:
            continue
        for instruction in computation.instructions:
            transfer = _transfer(program, computation, instruction)
            if transfer is not None:
                direction, size = transfer
                moved[direction] += size * times
                transfers += times
    if not transfers:
        return None
    speed = _BUS.get(chip.name)
    longest = max(moved.values())
    seconds = None if speed is None else longest / (speed * 1e9 * _REACHED)
    return HostTransfers(moved["to host"], moved["to device"], transfers, seconds)


# In: an instruction. Out: which way it moves how many bytes, or `None`. TPUs: `copy-start`, and
# `dynamic-slice-start` or `dynamic-update-slice-start` of a stack of layers in host memory. GPUs
# have the slices in fusions that start and end apart. Example: `%s = (bf16[8]{0:S(5)}, bf16[8]{0},
# u32[]) copy-start(%x)` moves 16 bytes to the host.
def _transfer(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[Direction, int] | None:
    kind = _kind(program, instruction)
    operands = computation.operands(instruction) if kind else []
    if not operands:
        return None
    if kind == "copy-start":
        target = bool(_HOST.search(_ARRAY.findall(instruction.shape.text)[0]))
        if target == _on_host(operands[0]):
            return None
        return ("to host" if target else "to device"), instruction.shape.leaves[0].bytes
    if not _on_host(operands[0]):
        return None
    if kind == "dynamic-update-slice-start":
        return None if _on_host(operands[1]) else ("to host", operands[1].shape.bytes)
    ends = [user for user in computation.users.get(instruction.name, ()) if not _on_host(user)]
    return ("to device", ends[0].shape.bytes) if ends else None


_KINDS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")


def _kind(program: Program, instruction: Instruction) -> str:
    """Return what an instruction starts, that inside of a fusion too; empty if no transfer."""
    kind = instruction.opcode
    if kind in ("fusion-start", "async-start", "call-start") and instruction.called:
        inner = program.computations[instruction.called[0][1]]
        root = inner.root
        while root.opcode in _PASSES and root.operands:
            root = inner.operands(root)[0]
        kind = f"{root.opcode}-start"
    return kind if kind in _KINDS else ""


def _on_host(instruction: Instruction) -> bool:
    return bool(_HOST.search(instruction.shape.text))
