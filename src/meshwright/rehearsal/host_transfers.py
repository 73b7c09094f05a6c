"""`HostTransfers`: what a program moves between a device and the memory of its host.

Offloaded arrays (`jax.checkpoint` policies that offload, `memory_kind="pinned_host"`) cross the bus
between host and device, a link of its own with two directions. In optimised HLO host memory is the
memory space 5. How much of its time the kernels hide is in `step_time`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from meshwright._html import HIDDEN, TIME, Lane, Part
from meshwright._text import amount, duration
from meshwright.errors import listing
from meshwright.hardware.chips import Chip
from meshwright.hlo.instructions import HOST_SPACE, Computation, Instruction, Source
from meshwright.hlo.program import Program
from meshwright.rehearsal.kernel_speeds import speeds
from meshwright.rehearsal.kernels import running

Direction = Literal["to host", "to device"]

_CALLS = ("fusion", "fusion-start", "async-start", "call-start")
_COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")


@dataclasses.dataclass(frozen=True)
class HostTransfers:
    """Bytes a device sends to its host and takes from it in a step, in how many transfers.

    `seconds` is how long the bus takes for them, each way beside the other; `None` where its speed
    is not known. How much of that the step waits for is in `StepTime.host_exposed`.
    """

    to_host: int
    to_device: int
    transfers: int
    seconds: float | None

    def __str__(self) -> str:
        took = f"{duration(self.seconds)} of the bus" if self.seconds is not None else _UNKNOWN
        return (
            f"Offloaded: {amount(self.to_host)} to the host and {amount(self.to_device)} back, in "
            f"{self.transfers:,} transfers of a device, {took}."
        )

    def to_json(self) -> dict[str, Any]:
        """Return bytes, transfers and seconds as plain data."""
        return dataclasses.asdict(self)


_UNKNOWN = (
    "without their time: how fast this chip's bus to the host is, is not known here (pass "
    "on=topology(name, speeds={'bus': GB/s}))"
)


def offload_lost_line(offloads: Sequence[Source | None], chip: Chip, stand_in: bool = False) -> str:
    """Say that a program offloads nothing though these lines ask for it, why, and what helps."""
    lines = listing(str(line) for line in offloads if line is not None)
    asked = f"The step offloads to the host's memory{f' ({lines})' if lines else ''}, and"
    if chip.family == "cpu" or stand_in:
        return f"{asked} simulated CPU devices have no other memory: everything stays on them."
    return (
        f"{asked} the compiled program moves nothing there: the compiler dropped it, and the "
        "arrays stay on the device. On GPUs this happens to layers in a Python loop under "
        "jax.checkpoint(..., prevent_cse=False). Put the layers into jax.lax.scan; or leave "
        "prevent_cse=True, with which they do move."
    )


def bus_lane(exposed: float, hidden: float) -> Lane:
    """Draw the time of the bus: what the step waits for, and what runs beside its kernels."""
    parts = (
        Part("exposed host transfers", exposed, TIME["exposed host transfers"]),
        Part("hidden, not in the step", hidden, HIDDEN),
    )
    return Lane("transfers to and from the host", parts)


@dataclasses.dataclass(frozen=True)
class HostTransfer:
    """One transfer in a program: the names of the instructions that start it and end it.

    They are the same one where nothing runs beside it. `body` is the computation that a GPU's
    `fusion-start` runs for it.
    """

    direction: Direction
    bytes: int
    start: str
    end: str
    body: str = ""


def find_host_transfers(program: Program, chip: Chip) -> HostTransfers | None:
    """Add up what a program moves to and from the host; `None` if nothing."""
    moved: dict[Direction, int] = {"to host": 0, "to device": 0}
    transfers = 0
    for name, entries in transfers_of(program).items():
        times = program.run_count(name).count
        for transfer in entries:
            moved[transfer.direction] += transfer.bytes * times
            transfers += times
    if not transfers:
        return None
    speed = speeds(chip)
    seconds = speed.host(max(moved.values())) if speed.bus else None
    return HostTransfers(moved["to host"], moved["to device"], transfers, seconds)


def transfers_of(program: Program) -> dict[str, list[HostTransfer]]:
    """`{computation: its transfers to and from the host, in order}`, of those that have some."""
    entries = {each.name: list(_transfers_in(program, each)) for each in running(program)}
    bodies = {transfer.body for transfers in entries.values() for transfer in transfers}
    return {name: each for name, each in entries.items() if each and name not in bodies}


# In: a computation that runs. Out: its transfers to and from the host, in order of their starts.
# TPUs: `copy-start`, and `dynamic-slice-start` or `dynamic-update-slice-start` of a stack of layers
# in host memory. GPUs have the slices in fusions that start and end apart. Copies between HBM and a
# TPU's own scratch memory start and end apart too, and are none. Example: `%s = (bf16[8]{0:S(5)},
# bf16[8]{0}, u32[]) copy-start(%x)` moves 16 bytes to the host, until `copy-done(%s)`.
def _transfers_in(program: Program, computation: Computation) -> Iterator[HostTransfer]:
    for instruction in computation.instructions:
        inner, copy = _copy(program, computation, instruction)
        if copy is None or not copy.operands:
            continue
        end = _end(computation, instruction)
        operands = inner.operands(copy)
        source = operands[1] if copy.opcode.startswith("dynamic-update-slice") else operands[0]
        to_host, from_host = _on_host(end), _on_host(source)
        if to_host == from_host:
            continue
        moved = source if to_host else end
        direction: Direction = "to host" if to_host else "to device"
        body = "" if inner is computation else inner.name
        yield HostTransfer(direction, moved.shape.bytes, instruction.name, end.name, body)


def _copy(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[Computation, Instruction | None]:
    """Return the copy that an instruction is, starts or runs, and the computation that has it."""
    if instruction.opcode.removesuffix("-start") in _COPIES:
        return computation, instruction
    if instruction.opcode not in _CALLS or not instruction.called:
        return computation, None
    inner = program.computations[instruction.called[0][1]]
    copied = None
    root = inner.root
    while root.opcode in ("bitcast", "tuple", "copy", "reshape") and root.operands:
        copied = root if root.opcode == "copy" else copied
        root = inner.operands(root)[0]
    return inner, root if root.opcode in _COPIES else copied


def _end(computation: Computation, instruction: Instruction) -> Instruction:
    """Return the instruction that has the result: the `-done` of a start, or itself."""
    end = instruction
    while end.opcode.endswith(("-start", "-update")):
        users = [
            user
            for user in computation.users.get(end.name, ())
            if user.opcode.endswith(("-update", "-done"))
        ]
        if not users:
            break
        end = users[0]
    return end


def _on_host(instruction: Instruction) -> bool:
    return HOST_SPACE in instruction.shape.spaces
