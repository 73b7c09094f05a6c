"""The kernels of a program: what each computes, and what it reads and writes of main memory.

Instructions of the entry, of loops, branches and calls are kernels; what is fused into one works
on chip. A kernel that only slices an operand, or only updates a slice of it, moves the slice.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from meshwright.rehearsal.programs.counting import flops
from meshwright.rehearsal.programs.instructions import Computation, Instruction
from meshwright.rehearsal.programs.program import Program

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
_ON_CHIP = re.compile(r"\{[^{}]*S\([1-9]\d*\)\}")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instruction that takes time. `type` is that of what it multiplies, if it does."""

    instruction: Instruction
    flops: float
    bytes: float
    type: str


def kernels(program: Program, computation: Computation) -> Iterator[Kernel]:
    """The kernels of a computation that runs, in order; collectives are not among them."""
    for instruction in computation.instructions:
        if _is_free(instruction) or _is_communication(instruction):
            continue
        work, kind = _work(program, computation, instruction)
        yield Kernel(instruction, work, _traffic(program, computation, instruction), kind)


def running(program: Program) -> Iterator[Computation]:
    """The entry and the computations of loops, branches and calls."""
    found = {program.entry.name}
    pending = [program.entry]
    while pending:
        computation = pending.pop()
        yield computation
        for instruction in computation.instructions:
            if not instruction.only_calls:
                continue
            for how, name in instruction.called:
                if name not in found and (how != "to_apply" or instruction.opcode == "call"):
                    found.add(name)
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
    """Operations of an instruction and of all that is fused into it, and their type."""
    found = float(flops(instruction, computation))
    kind = computation.operands(instruction)[0].shape.leaves[0].dtype if found else ""
    if instruction.opcode == "fusion":
        for _, name in instruction.called:
            inner = program.computations[name]
            for each in inner.instructions:
                more, other = _work(program, inner, each)
                found, kind = found + more, kind or other
    return found, kind


def _traffic(program: Program, computation: Computation, instruction: Instruction) -> float:
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
    found: list[Instruction] = []
    for user in inner.users.get(value.name, []):
        found += _users(inner, user) if user.opcode == "bitcast" else [user]
    return found


def _base(inner: Computation, update: Instruction) -> Instruction:
    """What a slice is updated of, seen through bitcasts."""
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
