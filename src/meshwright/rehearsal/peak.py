"""What is in memory when a program needs the most of it: `live_buffers`, each with the operation
that made it, and what the libraries of a GPU need beside (`workspace_at_peak`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping

from meshwright.hardware.chips import Chip
from meshwright.hlo.instructions import HOST_SPACE, Computation, Instruction
from meshwright.hlo.program import Program
from meshwright.rehearsal import gpu_scratch
from meshwright.rehearsal.kernels import running
from meshwright.rehearsal.live_ranges import BufferId, CallerBuffers, LiveRanges, bytes_in
from meshwright.rehearsal.memory import Buffer

_ALIASED = re.compile(r"\{(\d*)\}: \((\d+),")  # of input_output_alias={ {0}: (1, {}, may-alias) }


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most that a computation and all it calls hold at once.

    `scratch` is what an instruction needs for itself: in which computation, its name, bytes.
    """

    bytes: int
    buffers: tuple[tuple[str, BufferId], ...]  # with the computation that holds them
    scratch: tuple[tuple[str, str, int], ...] = ()


# In: a scheduled program. Out: the buffers that live at the moment when they take the most bytes,
# those of called computations included, largest first. Invariant: their sizes add up to what is
# alive at once; the compiler packs a little differently here and there, what it reports itself is
# the truth, and this says what it consists of. Example: entry (p) -> big = broadcast; small =
# reduce(big) peaks at `small`, with p, big and small alive.
def live_buffers(program: Program, chip: Chip | None = None, space: int = 0) -> tuple[Buffer, ...]:
    """List what lives at the peak of a memory space, arguments and a GPU's scratch too, largest
    first."""
    peak = Peaks(program, chip, space).entry()
    held = []
    for computation, (name, number) in peak.buffers:
        maker = program.computations[computation].by_name[name]
        held.append((maker, str(maker.shape.leaves[number]), maker.shape.stored[number]))
    for computation, name, size in peak.scratch:
        held.append((program.computations[computation].by_name[name], f"u8[{size}]", size))
    buffers = []
    for maker, shape, size in held:
        named = origin(program, maker) or maker
        # Variables of NNX hold their array in an attribute, `kernel.value`, which is no layer.
        name = named.op_name.removesuffix(".value")
        buffers.append(Buffer(maker.name, shape, size, name, program.source(named)))
    return tuple(sorted(buffers, key=lambda buffer: (-buffer.bytes, buffer.name)))


# In: a program and the peak that its compiler reports. Out: bytes to add to that. Invariant: both
# peaks are found by one walk, with and without the libraries' buffers, so that a walk that packs
# other than the compiler is off by the same in both. Example: a product that needs 32 MiB adds
# nothing where 40 MiB more are alive at another moment.
def workspace_at_peak(program: Program, chip: Chip, allocated: int) -> int:
    """Bytes by which what a GPU's libraries need raises the `allocated` peak of a program."""
    if chip.family != "gpu":
        return 0
    peak = Peaks(program, chip).entry()
    more = peak.bytes - Peaks(program).entry().bytes
    for computation, name, _ in peak.scratch:
        # Where CUB sorts, the compiler packed the memory of another program.
        maker = program.computations[computation].by_name[name]
        if gpu_scratch.library_sort(program, maker, chip) is not None:
            more = max(more, peak.bytes - allocated)
    return max(0, more) + gpu_scratch.taken_at_run(program, running(program))


# In: a scheduled program whose header says which results write over which parameters. Out: the
# sizes by the compiler's own names. Invariant: arguments + results - aliased + temporaries are what
# it set aside. Example: a step f32[1024] -> f32[1024], donated, with 12 KiB assigned: argument and
# output 4,096 each, alias 4,096, temp 8,192.
def scheduled_sizes(program: Program, assigned: Mapping[str, int]) -> dict[str, int]:
    """Sizes as a compiler reports them in the end, of a program that it only scheduled.

    `assigned` is what it set aside of the device's memory, and of the host's.
    """
    sizes = {"generated_code": 0}
    aliased = {int(number or 0) for number, _ in _ALIASED.findall(program.header)}
    root = program.entry.root
    for prefix, space in (("", 0), ("host_", HOST_SPACE)):
        results = [bytes_in(root, number, space) for number in range(len(root.shape.leaves))]
        arguments = sum(
            bytes_in(each, number, space)
            for each in program.entry.parameters.values()
            for number in range(len(each.shape.leaves))
        )
        alias = sum(size for number, size in enumerate(results) if number in aliased)
        beside = arguments + sum(results) - alias
        sizes |= {f"{prefix}argument": arguments, f"{prefix}output": sum(results)}
        sizes |= {f"{prefix}alias": alias}
        sizes |= {f"{prefix}temp": max(0, assigned[f"{prefix}assigned"] - beside)}
    return sizes


# In: a program that a TPU's compiler has made code of. Out: bytes of its constants. They are a part
# of the code, and of the memory that the compiler reports as assigned as well.
def constant_bytes(program: Program) -> int:
    """Bytes of the constants that lie in a device's memory."""
    return sum(
        bytes_in(instruction, 0)
        for computation in running(program)
        for instruction in computation.instructions
        if instruction.opcode == "constant"
    )


class Peaks:
    """The peaks of a program's computations, each worked out once.

    `resized` is the same program with other sizes of its buffers, by instruction and result.
    """

    def __init__(self, program: Program, chip: Chip | None = None, space: int = 0):
        self.program, self.space = program, space
        scratch = chip is not None and chip.family == "gpu" and space == 0
        self.chip = chip if scratch else None
        self.size: Callable[[Instruction, int], int] = functools.partial(bytes_in, space=space)
        self.known: dict[str, Peak] = {}
        self.ranges: dict[str, Mapping[BufferId, tuple[int, int]]] = {}

    def resized(self, size: Callable[[Instruction, int], int]) -> Peaks:
        other = Peaks(self.program, self.chip, self.space)
        other.size, other.ranges = size, self.ranges
        return other

    def entry(self) -> Peak:
        donated = _ALIASED.findall(self.program.header)
        caller = CallerBuffers(
            counted=True,
            results=frozenset(int(result or 0) for result, _ in donated),
            parameters=frozenset(int(parameter) for _, parameter in donated),
        )
        return self._peak(self.program.entry, caller)

    def called(self, name: str, loop: bool) -> Peak:
        if name not in self.known:
            computation = self.program.computations[name]
            # The caller has set the results aside, and a loop's body writes over its old state.
            results = frozenset(range(len(computation.root.shape.leaves)))
            caller = CallerBuffers(results=results, parameters=frozenset({0} if loop else ()))
            self.known[name] = self._peak(computation, caller)
        return self.known[name]

    def _peak(self, computation: Computation, caller: CallerBuffers) -> Peak:
        if computation.name not in self.ranges:
            live = LiveRanges(self.program, computation, caller)
            self.ranges[computation.name] = live.compute()
        ranges = self.ranges[computation.name]
        begins: dict[int, list[BufferId]] = {}
        ends: dict[int, list[BufferId]] = {}
        for buffer, (first, last) in ranges.items():
            begins.setdefault(first, []).append(buffer)
            ends.setdefault(last, []).append(buffer)
        sizes = {buffer: self.size(computation.by_name[buffer[0]], buffer[1]) for buffer in ranges}
        # One pass over the schedule: add what begins, look, drop what ends.
        results = _results(computation, ranges, sizes) if caller.counted else {}
        total, most, when, highest = 0, -1, 0, Peak(0, ())
        for at, instruction in enumerate(computation.instructions):
            total += sum(sizes[buffer] for buffer in begins.get(at, ()))
            inner = self._inner(instruction, at, results)
            if total + inner.bytes > most:
                most, when, highest = total + inner.bytes, at, inner
            total -= sum(sizes[buffer] for buffer in ends.get(at, ()))
        alive = [
            (computation.name, buffer)
            for buffer, (first, last) in ranges.items()
            if first <= when <= last and sizes[buffer]
        ]
        return Peak(most, (*alive, *highest.buffers), highest.scratch)

    def _inner(self, instruction: Instruction, at: int, results: _Results) -> Peak:
        """The largest peak among the computations that an instruction runs, one at a time."""
        if not instruction.only_calls:
            size = self._scratch(instruction, at, results)
            return Peak(size, (), ((instruction.computation, instruction.name, size),) * (size > 0))
        loop = instruction.opcode == "while"
        peaks = [self.called(name, loop) for how, name in instruction.called if how != "to_apply"]
        return max(peaks, key=lambda peak: peak.bytes, default=Peak(0, ()))

    def _scratch(self, instruction: Instruction, at: int, results: _Results) -> int:
        """Bytes that an instruction needs for itself and finds no place for in idle results."""
        if self.chip is None:
            return 0
        sizes = gpu_scratch.scratch_sizes(self.program, instruction, self.chip)
        if not sizes:
            return 0
        sort = gpu_scratch.library_sort(self.program, instruction, self.chip)
        product = gpu_scratch.eight_bit_product(self.program, instruction)
        # What was packed is taken apart after the sort, and a product of 8-bit numbers is rounded
        # when it is done: their results are idle while they run.
        last = at - 1 if product or len(sizes) == gpu_scratch.PACKED_BUFFERS else at
        idle = [size for made, size in results.values() if made > last]
        own = frozenset(number for name, number in results if name == instruction.name)
        whole = sort is not None or product
        replaced = gpu_scratch.own_results(instruction, own) if whole else 0
        return max(0, gpu_scratch.unplaced(sizes, idle) - replaced)


_Results = Mapping[BufferId, tuple[int, int]]  # when results of the program are made, and bytes


def _results(
    computation: Computation,
    ranges: Mapping[BufferId, tuple[int, int]],
    sizes: Mapping[BufferId, int],
) -> _Results:
    position = {each.name: at for at, each in enumerate(computation.instructions)}
    last = len(computation.instructions) - 1
    return {
        buffer: (position[buffer[0]], sizes[buffer])
        for buffer, held in ranges.items()
        if held == (0, last) and computation.by_name[buffer[0]].opcode != "parameter"
    }


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
