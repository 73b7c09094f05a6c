"""`Memory`: what a program takes of a device, part by part, against what there is.

Sizes are the compiler's own. What lives at the peak (`Buffer`) is worked out here from the live
ranges of the scheduled program.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import amount
from meshwright.hardware.chips import Chip
from meshwright.hlo.instructions import Computation, Instruction, Source, primitives
from meshwright.hlo.program import Program
from meshwright.partitioning.report import LeafRow
from meshwright.rehearsal.live_ranges import BufferId, CallerBuffers, LiveRanges, bytes_in

_SHOWN = 8  # buffers that are printed


@dataclasses.dataclass(frozen=True, repr=False)
class Memory(Shown):
    """Bytes on every device. Prints itself; `to_json()`.

    `peak` is all that is allocated at once: arguments, outputs that do not overwrite an argument
    (`aliased` are those that do), temporaries and code. `limit` is what a program may have.
    `refused`: the compiler gave up, and `temporaries` is what it said it needs beyond the
    arguments. `buffers` are the values alive at the peak, largest first.
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
        """Bytes that are allocated at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def margin(self) -> int:
        """Bytes that are left of the limit; negative when it does not fit."""
        return self.limit - self.peak

    @property
    def fits(self) -> bool:
        """Whether the compiler accepted the program and its peak is within the limit."""
        return not self.refused and self.margin >= 0

    @property
    def note(self) -> str:
        """A caveat about the verdict, or an empty string."""
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
        """Return the parts of the peak."""
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

    def _sheet(self) -> Sheet:
        sizes = [[name, amount(size)] for name, size in self.parts().items() if size]
        sizes += [["peak", amount(self.peak)], ["limit", amount(self.limit)]]
        parts: list[str | Table] = [Table(["memory on a device", "bytes"], sizes, [False, True])]
        if self.note:
            parts.append(f"note: {self.note}")
        if self.buffers:
            heading = ["largest at the peak", "bytes", "from"]
            rows = [
                [buffer.shape, amount(buffer.bytes), buffer.origin]
                for buffer in self.buffers[:_SHOWN]
            ]
            parts.append(Table(heading, rows, [False, True, False]))
        return Sheet(self.verdict(), parts)

    def to_json(self) -> dict[str, Any]:
        """Return the sizes in bytes, and the buffers at the peak, as plain data."""
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


@dataclasses.dataclass(frozen=True, repr=False)
class Buffer:
    """A value in memory at the moment of the peak, and whose operation it is."""

    name: str
    shape: str
    bytes: int
    op_name: str
    source: Source | None

    @property
    def made_by(self) -> str:
        """The operation in a word, or the compiler's own name where it has none."""
        return ", ".join(primitives(self.op_name)) or self.name

    @property
    def origin(self) -> str:
        """Operation and source line, short enough for a table."""
        return f"{self.made_by[:40]} {self.source}" if self.source else self.made_by[:60]

    def __repr__(self) -> str:
        return short_repr(self, f"{self.shape}, {amount(self.bytes)}: {self.origin}")


def as_compiled(
    sizes: Mapping[str, int], chip: Chip, buffers: tuple[Buffer, ...], workspace: int = 0
) -> Memory:
    """`Memory` from the compiler's own report of sizes, and `workspace` bytes it cannot know."""
    return Memory(
        sizes["argument"],
        sizes["output"],
        sizes["alias"],
        _temporaries(sizes, chip) + workspace,
        sizes["generated_code"],
        available(chip),
        chip.name,
        chip.family,
        buffers=buffers,
    )


# libtpu (0.0.42) reports more temporaries than it allocates: MaxText-32B on 64 v5p, 93.5 GiB where
# its own buffer assignment has 81.5 GiB in main memory, of 95.7 GiB that the chip grants; it counts
# the right size when it decides whether a program fits. What it counts as alive at once, arguments
# included, is within 0.8 % of that assignment (0.6 GiB there are lost between buffers).
def _temporaries(sizes: Mapping[str, int], chip: Chip) -> int:
    """Bytes of temporaries: as reported, or on a TPU what is alive at once beside the arguments."""
    live = sizes.get("live", 0)
    if chip.family != "tpu" or not live:
        return sizes["temp"]
    beside = live - (sizes["argument"] + sizes["output"] - sizes["alias"])
    return min(sizes["temp"], max(0, beside))


def as_refused(reason: str, rows: Sequence[LeafRow], chip: Chip) -> Memory:
    """`Memory` from the message of a compiler that ran out of memory.

    It names what it needs and what there is, not what for; of the buffers the arguments are known.
    """
    needed, limit = _read_refusal(reason)
    arguments = sum(row.device_bytes for row in rows)
    buffers = [
        Buffer(f"argument {row.path}", _local_shape(row), row.device_bytes, "", None)
        for row in rows
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


def _local_shape(row: LeafRow) -> str:
    """What a device holds of an argument, such as `f32[512,128]`."""
    return f"{row.text.partition('[')[0]}[{','.join(map(str, row.local))}]"


# The two forms in which libtpu says that a program is too large.
_EXCEEDS = re.compile(r"([\d.]+)([KMGT])?i?B?\) exceeds available HBM \(([\d.]+)([KMGT])?")
_USED = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 1}


def _read_refusal(reason: str) -> tuple[int | None, int | None]:
    """Read what a program needs and what there is, in bytes, as far as the compiler says.

    >>> [size // 2**20 for size in _read_refusal("Used 20.00G of 15.75G hbm")]
    [20480, 16128]
    """
    sizes = _EXCEEDS.search(reason) or _USED.search(reason)
    if sizes is None:
        return None, None
    needed, needed_unit, limit, limit_unit = sizes.groups(default="")
    return int(float(needed) * _UNITS[needed_unit]), int(float(limit) * _UNITS[limit_unit])


_GIB = 2**30

# GiB a device, as the TPU compiler itself says when it refuses ("available HBM"; libtpu 0.0.42).
_AVAILABLE = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}

# What JAX takes of a GPU unless told otherwise (XLA_PYTHON_CLIENT_MEM_FRACTION).
GPU_FRACTION = 0.75


def available(chip: Chip) -> int:
    """Bytes a program may take of a device: what its compiler grants, or the memory it has."""
    if chip.name in _AVAILABLE:
        return int(_AVAILABLE[chip.name] * _GIB)
    return int(chip.memory_gb * 1e9) // chip.cores


_ALIASED = re.compile(r"\{(\d*)\}: \((\d+),")  # of input_output_alias={ {0}: (1, {}, may-alias) }


@dataclasses.dataclass(frozen=True)
class _Peak:
    """The most that a computation and all it calls hold at once."""

    bytes: int
    buffers: tuple[tuple[str, BufferId], ...]  # with the computation that holds them


# In: a scheduled program. Out: the buffers that live at the moment when they take the most bytes,
# those of called computations included, largest first. Invariant: their sizes add up to what is
# alive at once; the compiler packs a little differently here and there, what it reports itself is
# the truth, and this says what it consists of. Example: entry (p) -> big = broadcast; small =
# reduce(big) peaks at `small`, with p, big and small alive.
def live_buffers(program: Program, space: int = 0) -> tuple[Buffer, ...]:
    """List what lives at the peak of a memory space, arguments too, largest first."""
    buffers = []
    for computation, (name, number) in _Peaks(program, space=space).entry().buffers:
        maker = program.computations[computation].by_name[name]
        leaf = maker.shape.leaves[number]
        named = origin(program, maker) or maker
        size, shape = leaf.bytes, str(leaf)
        if not size:
            size = cudnn_workspace(program, maker)
            shape = f"u8[{size}]"
        buffers.append(Buffer(name, shape, size, named.op_name, program.source(named)))
    return tuple(sorted(buffers, key=lambda buffer: (-buffer.bytes, buffer.name)))


def workspace_at_peak(program: Program) -> int:
    """Bytes by which the workspaces of cuDNN's attention raise the peak of a program."""
    calls = (each for inner in program.computations.values() for each in inner.instructions)
    if not any(cudnn_workspace(program, call) for call in calls):
        return 0
    return _Peaks(program).entry().bytes - _Peaks(program, workspaces=False).entry().bytes


_FMHA = re.compile(r'custom_call_target="__cudnn\$fmha(\w+)"')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^]]*"dimensions":\s*\[([^]]*)\]')


# cuDNN says how much memory a call needs beside its results, and it is not asked where it is not
# installed: the compiler leaves the last result at `u8[0]`. These are the sizes measured on an H200
# with nine shapes, exactly: forward 256 bytes, backward a float32 copy of the query's gradient with
# a sum for each row, and one of the keys' for each head where several share them.
def cudnn_workspace(program: Program, call: Instruction) -> int:
    """Bytes a call of cuDNN's attention needs for itself; 0 of others and where they are known."""
    if call.opcode != "custom-call" or call.shape.leaves[-1].bytes:
        return 0
    target, scores = _FMHA.search(call.attributes), _SCORES.search(call.attributes)
    if target is None or scores is None or "F8" in target[1]:  # of which nothing was measured
        return 0
    if "Backward" not in target[1]:
        return 256
    batch, heads, rows, columns = (int(size.strip(' "')) for size in scores[1].split(","))
    query, keys = program.computations[call.computation].operands(call)[:2]
    width = query.shape.leaves[0].dims[-1]
    all_heads = batch * heads * columns * width
    shared = 4 * all_heads if keys.shape.leaves[0].elements < all_heads else 0
    return 256 + 4 * batch * rows * heads * (width + 1) + shared


class _Peaks:
    """The peaks of a program's computations, each worked out once."""

    def __init__(self, program: Program, workspaces: bool = True, space: int = 0):
        self.program, self.space = program, space
        self.workspaces = workspaces and space == 0
        self.known: dict[str, _Peak] = {}

    def entry(self) -> _Peak:
        donated = _ALIASED.findall(self.program.header)
        caller = CallerBuffers(
            counted=True,
            results=frozenset(int(result or 0) for result, _ in donated),
            parameters=frozenset(int(parameter) for _, parameter in donated),
        )
        return self._peak(self.program.entry, caller)

    def called(self, name: str, loop: bool) -> _Peak:
        if name not in self.known:
            computation = self.program.computations[name]
            # The caller has set the results aside, and a loop's body writes over its old state.
            results = frozenset(range(len(computation.root.shape.leaves)))
            caller = CallerBuffers(results=results, parameters=frozenset({0} if loop else ()))
            self.known[name] = self._peak(computation, caller)
        return self.known[name]

    def _peak(self, computation: Computation, caller: CallerBuffers) -> _Peak:
        ranges = LiveRanges(self.program, computation, caller).compute()
        begins: dict[int, list[BufferId]] = {}
        ends: dict[int, list[BufferId]] = {}
        for buffer, (first, last) in ranges.items():
            begins.setdefault(first, []).append(buffer)
            ends.setdefault(last, []).append(buffer)
        sizes = {
            buffer: bytes_in(computation.by_name[buffer[0]], buffer[1], self.space)
            for buffer in ranges
        }
        # One pass over the schedule: add what begins, look, drop what ends.
        total, most, when = 0, -1, 0
        for at, instruction in enumerate(computation.instructions):
            total += sum(sizes[buffer] for buffer in begins.get(at, ()))
            inner = self._inner(instruction)
            if total + inner.bytes > most:
                most, when = total + inner.bytes, at
            total -= sum(sizes[buffer] for buffer in ends.get(at, ()))
        alive = [
            (computation.name, buffer)
            for buffer, (first, last) in ranges.items()
            if first <= when <= last and sizes[buffer]
        ]
        inner = self._inner(computation.instructions[when])
        return _Peak(most, (*alive, *inner.buffers))

    def _inner(self, instruction: Instruction) -> _Peak:
        """The largest peak among the computations that an instruction runs, one at a time."""
        if not instruction.only_calls:
            size = cudnn_workspace(self.program, instruction) if self.workspaces else 0
            last = (instruction.name, len(instruction.shape.leaves) - 1)
            return _Peak(size, ((instruction.computation, last),) if size else ())
        loop = instruction.opcode == "while"
        peaks = [self.called(name, loop) for how, name in instruction.called if how != "to_apply"]
        return max(peaks, key=lambda peak: peak.bytes, default=_Peak(0, ()))


_COPIES = ("copy", "copy-start", "copy-done", "transpose", "reshape", "convert", "bitcast")
_STEPS = 6  # away from the instruction itself


# In: the instruction that makes a buffer. Out: one that carries the name of a user's operation, or
# `None`. Compilers copy, widen and set aside memory on behalf of others: a copy belongs to what it
# copies, and memory that is set aside to what fills it, which may be the body of a loop.
# Example: a nameless broadcast that starts a scan's stacked results is named by the
# dynamic-update-slice in the loop's body.
def origin(program: Program, instruction: Instruction, steps: int = _STEPS) -> Instruction | None:
    """Find the instruction that names a user's operation for this one; itself, if it does."""
    if is_named(program, instruction):
        return instruction
    if not steps:
        return None
    for neighbour in _neighbours(program, instruction):
        named = origin(program, neighbour, steps - 1)
        if named is not None:
            return named
    return None


def is_named(program: Program, instruction: Instruction) -> bool:
    """Whether it has the name of an argument, or the path of an operation."""
    if instruction.opcode == "parameter":
        return instruction.op_name in program.arguments - {""}
    return "/" in instruction.op_name or program.source(instruction) is not None


def _neighbours(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """Yield instructions that may have a name instead: the source of a copy, readers, writers."""
    where = program.computations[instruction.computation]
    if instruction.opcode in _COPIES:
        yield from where.operands(instruction)[:1]
    for user in where.users.get(instruction.name, ()):
        if user.opcode != "tuple":
            yield user
            continue
        number = user.operands.index(instruction.name)
        for loop in where.users.get(user.name, ()):
            yield from _left_by_body(program, loop, number)


def _left_by_body(program: Program, loop: Instruction, number: int) -> Iterator[Instruction]:
    """Yield what the body of a loop leaves at a place of its state; nothing if it is no loop."""
    for how, name in loop.called:
        body = program.computations[name]
        if loop.opcode == "while" and how == "body" and number < len(body.root.operands):
            yield body.by_name[body.root.operands[number]]
