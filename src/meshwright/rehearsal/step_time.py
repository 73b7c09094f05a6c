"""`StepTime`: how long a step takes by a roofline model, and what it waits for.

Every kernel takes the longer of computing and moving its bytes. A collective takes its modelled
time; what runs between its start and its end hides that much of it, the rest is exposed.

Instructions of the entry, of loops, branches and calls are kernels; what is fused into one works
on chip. A kernel that only slices an operand, or only updates a slice of it, moves the slice.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from meshwright._show import short_repr
from meshwright._text import duration, table
from meshwright.hardware.chips import Chip
from meshwright.hlo.instructions import Computation, Instruction
from meshwright.hlo.program import Program, flops
from meshwright.rehearsal.collectives.types import Collective, Collectives

# GHz: the peak of each chip divided by what its multipliers do in a cycle.
_CLOCK = {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}


@dataclasses.dataclass(frozen=True, repr=False)
class StepTime:
    """Seconds of a step on one device, by the model. Prints itself; `to_json()`.

    `compute` and `memory`: kernels that wait for the one or the other. `exposed`: communication
    that nothing hides; `hidden` runs beside kernels and is not in the total. `start`: the launches
    of kernels. `compiler` is the compiler's own estimate of its kernels, where it gives one.
    """

    compute: float
    memory: float
    start: float
    exposed: float
    hidden: float
    flops: float
    bytes: float
    peak_flops: float
    compiler: float | None = None

    @property
    def total(self) -> float:
        """Modelled seconds of one step."""
        return self.compute + self.memory + self.start + self.exposed

    @property
    def utilisation(self) -> float:
        """The part of the chip's nominal speed that goes into the program's multiplications."""
        return self.flops / self.peak_flops / self.total if self.total else 0.0

    def parts(self) -> dict[str, float]:
        """Return the parts of the total, in seconds."""
        return {
            "compute": self.compute,
            "memory": self.memory,
            "starting kernels": self.start,
            "exposed communication": self.exposed,
        }

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {duration(size)}" for name, size in self.parts().items())
        return short_repr(self, f"{duration(self.total)}: {parts}")

    def __str__(self) -> str:
        rows = [["modelled time of a step", "", ""]]
        rows += [
            [name, duration(seconds), f"{seconds / (self.total or 1):.0%}"]
            for name, seconds in self.parts().items()
        ]
        rows.append(["total", duration(self.total), f"utilisation {self.utilisation:.0%}"])
        if self.hidden:
            rows.append(["hidden communication", duration(self.hidden), "not in the total"])
        if self.compiler is not None:
            rows.append(["kernels as the compiler sees it", duration(self.compiler), ""])
        return table(rows, [False, True, True])

    def to_json(self) -> dict[str, Any]:
        """Return the total and its parts as plain data, in seconds."""
        return {
            "seconds": self.total,
            "parts": self.parts(),
            "hidden": self.hidden,
            "flops": self.flops,
            "bytes": self.bytes,
            "utilisation": self.utilisation,
            "compiler": self.compiler,
        }


_PARTS = ("compute", "memory", "start", "exposed", "hidden", "flops", "bytes")


# In: a scheduled program, its collectives and a chip. Out: the modelled time of one run on one
# device. Invariant: every kernel and every collective counts once for each time that it runs.
# Example: an all-gather of 3 ms whose start and end have a dot of 2 ms between them adds 2 ms to
# `hidden` and 1 ms to `exposed`; the dot adds its 2 ms to `compute`.
def step_time(program: Program, collectives: Collectives, chip: Chip) -> StepTime:
    """Model the time of a step."""
    speed = speeds(chip)
    by_name = {name: entry for entry in collectives for name in entry.instructions}
    parts = dict.fromkeys(_PARTS, 0.0)
    met: set[int] = set()
    for computation in running(program):
        times = program.run_count(computation.name).count
        for name, value in _one_run(program, computation, speed, by_name, met).items():
            parts[name] += value * times
    for entry in collectives:
        if id(entry) not in met:  # it runs inside of kernels, in pieces
            hidden = min(entry.seconds, speed.compute(entry.meanwhile, "bf16"))
            parts["hidden"] += hidden * entry.times.count
            parts["exposed"] += (entry.seconds - hidden) * entry.times.count
    cycles = program.estimated_cycles
    clock = _CLOCK.get(chip.name)
    return StepTime(
        **parts,
        peak_flops=chip.tflops * 1e12 / chip.cores,
        compiler=None if cycles is None or clock is None else cycles / (clock * 1e9),
    )


def _one_run(
    program: Program,
    computation: Computation,
    speed: Speeds,
    by_name: dict[str, Collective],
    met: set[int],
) -> dict[str, float]:
    """The parts of one run of a computation; the collectives that are here are added to `met`."""
    parts = dict.fromkeys(_PARTS, 0.0)
    work = {kernel.instruction.name: kernel for kernel in kernels(program, computation)}
    started: dict[int, float] = {}  # when, by the kernels' time so far
    passed = 0.0
    for instruction in computation.instructions:
        entry = by_name.get(instruction.name)
        if entry is not None:
            met.add(id(entry))
            if id(entry) not in started:
                started[id(entry)] = passed
            if instruction.name == entry.instructions[-1]:
                hidden = min(entry.seconds, passed - started.pop(id(entry)))
                parts["hidden"] += hidden
                parts["exposed"] += entry.seconds - hidden
            continue
        kernel = work.get(instruction.name)
        if kernel is None:
            continue
        compute = speed.compute(kernel.flops, kernel.dtype)
        memory = kernel.bytes / speed.bytes
        parts["compute" if compute > memory else "memory"] += max(compute, memory)
        parts["start"] += speed.start if max(compute, memory) > 0 else 0.0
        parts["flops"] += kernel.flops
        parts["bytes"] += kernel.bytes
        passed += max(compute, memory)
    return parts


# A single large product reaches 0.79 of an H200's nominal speed and a copy 0.9; these come
# closest to whole train steps there (benchmarks/rehearsal_gpu.py).
_COMPUTE, _MEMORY = 0.7, 0.8
_LAUNCH = {"gpu": 3e-6, "tpu": 1e-6, "cpu": 5e-6}  # seconds

# Speed of multiplications by dtype against bf16. TPUs multiply float32 in bf16 by default.
_DTYPE_SPEED = {
    "gpu": {"f32": 0.5, "f64": 0.067, "f8e4m3fn": 2.0, "f8e5m2": 2.0, "s8": 2.0},
    "tpu": {"f64": 0.05, "s8": 2.0},
    "cpu": {"f64": 0.5},
}


@dataclasses.dataclass(frozen=True)
class Speeds:
    """What one device does in a second, and the seconds that a kernel takes to start."""

    flops: float
    bytes: float
    start: float
    family: str

    def compute(self, flops: float, dtype: str) -> float:
        """Seconds for this many operations on values of this dtype."""
        return flops / (self.flops * _DTYPE_SPEED[self.family].get(dtype, 1.0))


def speeds(chip: Chip) -> Speeds:
    """Return the speeds of one device; the cores of a chip share the chip's."""
    return Speeds(
        chip.tflops * 1e12 / chip.cores * _COMPUTE,
        chip.memory_tbps * 1e12 / chip.cores * _MEMORY,
        _LAUNCH[chip.family],
        chip.family,
    )


# What takes no time of its own: it names a value, or only runs other computations.
_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"),
        *("conditional", "optimization-barrier", "after-all", "partition-id", "replica-id"),
        *("domain", "add-dependency"),
    }
)
_COMMUNICATION = re.compile(
    r"all-(gather|reduce|to-all)|reduce-scatter|collective-|ragged-all-to-all|(send|recv)(-done)?$"
)
# The memory space of a layout; 0 is main memory.
_ON_CHIP = re.compile(r"\{[^{}]*S\([1-9]\d*\)\}")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instruction that takes time; `dtype` is that of what it multiplies, if it does."""

    instruction: Instruction
    flops: float
    bytes: float
    dtype: str


# In: a computation that runs. Out: its kernels in order, each with floating-point operations and
# bytes of main memory, those of what is fused into it included. Collectives are not among them.
# Example: `fusion(%x, %w)` of a dot and an addition is one kernel with the dot's operations, that
# reads x and w and writes its result; what the dot hands to the addition stays on chip.
def kernels(program: Program, computation: Computation) -> Iterator[Kernel]:
    """List the kernels of a computation."""
    for instruction in computation.instructions:
        if _is_free(instruction) or _is_communication(instruction):
            continue
        work, dtype = _work(program, computation, instruction)
        yield Kernel(instruction, work, _traffic(program, computation, instruction), dtype)


def running(program: Program) -> Iterator[Computation]:
    """Yield the entry and the computations of loops, branches and calls, each once."""
    seen = {program.entry.name}
    pending = [program.entry]
    while pending:
        computation = pending.pop()
        yield computation
        for instruction in computation.instructions:
            if not instruction.only_calls:
                continue
            for how, name in instruction.called:
                # `to_apply` is the scalar function of a reduce or a sort, but the body of a call.
                if name not in seen and (how != "to_apply" or instruction.opcode == "call"):
                    seen.add(name)
                    pending.append(program.computations[name])


def _is_free(instruction: Instruction) -> bool:
    ends = instruction.opcode.endswith(("-done", "-update"))
    return instruction.opcode in _FREE or ends or instruction.only_calls


def _is_communication(instruction: Instruction) -> bool:
    return bool(_COMMUNICATION.match(instruction.opcode)) or (
        instruction.opcode == "fusion"
        and any("all-reduce-scatter" in n for _, n in instruction.called)
    )


def _work(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[float, str]:
    """Operations of an instruction and of all that is fused into it, and their dtype."""
    operations = float(flops(instruction, computation))
    dtype = computation.operands(instruction)[0].shape.leaves[0].dtype if operations else ""
    if instruction.opcode == "fusion":
        for _, name in instruction.called:
            inner = program.computations[name]
            for each in inner.instructions:
                more, inner_dtype = _work(program, inner, each)
                operations, dtype = operations + more, dtype or inner_dtype
    return operations, dtype


def _traffic(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Bytes that an instruction reads and writes of main memory."""
    operands = computation.operands(instruction)
    if instruction.opcode == "copy-start":
        return 2.0 * sum(map(_main_memory, operands))
    if instruction.opcode == "dynamic-slice":
        return 2.0 * _main_memory(instruction)
    if instruction.opcode == "dynamic-update-slice":
        return 2.0 * _main_memory(operands[1])
    if instruction.opcode != "fusion":
        return float(_main_memory(instruction) + sum(map(_main_memory, operands)))
    inner = program.computations[next(name for how, name in instruction.called if how == "calls")]
    reads = sum(_read(inner, number, operand) for number, operand in enumerate(operands))
    return float(reads + _written(inner, instruction))


def _read(inner: Computation, number: int, operand: Instruction) -> float:
    """What a fusion reads of an operand: the slices, where it only slices it."""
    whole = _main_memory(operand)
    parameter = inner.parameters.get(number)
    if not whole or parameter is None:
        return whole
    users = _users(inner, parameter)
    if users and all(
        user.opcode == "dynamic-slice"
        or (user.opcode == "dynamic-update-slice" and _base(inner, user) is parameter)
        for user in users
    ):
        slices = (user for user in users if user.opcode == "dynamic-slice")
        return min(whole, sum(user.shape.bytes for user in slices))
    return whole


def _users(inner: Computation, value: Instruction) -> list[Instruction]:
    """What reads a value, seen through bitcasts."""
    users: list[Instruction] = []
    for user in inner.users.get(value.name, []):
        users += _users(inner, user) if user.opcode == "bitcast" else [user]
    return users


def _base(inner: Computation, update: Instruction) -> Instruction:
    """Return the array of which a slice is updated, seen through bitcasts."""
    return _through_bitcasts(inner, inner.operands(update)[0])


def _through_bitcasts(inner: Computation, value: Instruction) -> Instruction:
    while value.opcode == "bitcast":
        value = inner.operands(value)[0]
    return value


def _written(inner: Computation, instruction: Instruction) -> float:
    """What a fusion writes: the update, where it updates a slice in place."""
    root = inner.root
    roots = inner.operands(root) if root.opcode == "tuple" else (root,)
    roots = tuple(_through_bitcasts(inner, each) for each in roots)
    whole = _main_memory(instruction)
    parts = [
        inner.operands(each)[1].shape.bytes
        for each in roots
        if each.opcode == "dynamic-update-slice"
    ]
    if len(parts) == len(roots):
        return min(whole, sum(parts))
    return whole


def _main_memory(instruction: Instruction) -> int:
    """Bytes of a value in main memory; a TPU keeps some on chip."""
    return 0 if _ON_CHIP.search(instruction.shape.text) else instruction.shape.bytes
