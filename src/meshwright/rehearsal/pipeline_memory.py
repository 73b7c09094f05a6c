"""What the groups of a pipeline hold at most over a step: on their devices, and on their hosts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from meshwright import _compat_lowering
from meshwright.hardware.chips import Chip
from meshwright.hlo.program import Program, read_program
from meshwright.pipelines.step_graph import Operation, StepBuilder, TaskFunction
from meshwright.rehearsal.memory import Memory, available
from meshwright.rehearsal.peak import workspace_at_peak
from meshwright.rehearsal.task_compiler import CompiledTask
from meshwright.trees.walk import bits


# In: the operations of all groups in the order in which they run. Out: the most that one group
# holds at once, and what of it lives between tasks then. Arguments stay unless a program is donated
# them, for the caller holds them too; results live until their last use, and each program adds its
# own temporaries. Example, 1F1B with two stages: group 0 holds the activations of two microbatches
# when its first backward begins.
def group_memory(
    builder: StepBuilder, operations: Sequence[Operation], group: int, chip: Chip
) -> tuple[Memory, int]:
    """Follow a group's memory through its operations: its peak, and what is held between tasks.

    `operations` are those of all groups: what is sent away is dropped by the group that takes it.
    """
    own = [operation for operation in operations if operation.group == group]
    given = {argument.slot for argument in builder.placed if argument.group == group}
    given |= {slot for slot in builder.constants if builder.group_of_slot[slot] == group}

    def total(slots: Iterable[int]) -> int:
        return sum(bytes_on_device(builder, slot) for slot in slots)

    arguments = total(given)
    alive = set(given)
    peak, held = arguments, 0
    functions = {id(each.function): each.function for each in own if each.function is not None}
    needs = {number: _working(function, chip) for number, function in functions.items()}
    for operation in operations:
        if operation.group != group:
            alive -= set(operation.drop) - given
            continue
        between = total(alive - given)
        function = operation.function
        working = total(operation.outs) if function is None else needs[id(function)]
        if total(alive & given) + between + working > peak:
            peak, held = total(alive & given) + between + working, between
        alive |= set(operation.outs)
        alive -= set(operation.drop) - given
        alive -= set() if function is None else {operation.ins[n] for n in function.donate_argnums}
    programs = sum(
        each.compiled.memory_analysis().generated_code_size_in_bytes for each in functions.values()
    )
    rest = max(0, peak - arguments)
    return Memory(arguments, 0, 0, rest, programs, available(chip), chip.name, chip.family), held


def group_host_memory(
    builder: StepBuilder, operations: Sequence[Operation], group: int
) -> tuple[int, int]:
    """Follow what a group has on its hosts: bytes of arguments, and at the peak, per device."""
    given = {argument.slot for argument in builder.placed if argument.group == group}

    def total(slots: Iterable[int]) -> int:
        return sum(
            _bytes(builder, n) for n in slots if _compat_lowering.is_on_host(builder.avals[n])
        )

    alive, peak = set(given), total(given)
    for operation in operations:
        if operation.group == group:
            alive |= set(operation.outs)
            code = operation.function
            sizes = None if code is None else code.compiled.memory_analysis()
            peak = max(peak, total(alive) + getattr(sizes, "host_temp_size_in_bytes", 0))
        alive -= set(operation.drop) - given
    return total(given), peak


def _working(function: TaskFunction, chip: Chip) -> int:
    """Bytes that a program needs besides its arguments."""
    report = function.compiled.memory_analysis()
    new = report.output_size_in_bytes - report.alias_size_in_bytes
    if chip.family != "gpu":  # reading a program takes a while
        return int(report.temp_size_in_bytes + new)
    return int(new) + task_temporaries(function.compiled, task_program(function.compiled), chip)


def bytes_on_device(builder: StepBuilder, slot: int) -> int:
    """Bytes that a device holds of the value in a slot; those of its host's memory are no part."""
    return 0 if _compat_lowering.is_on_host(builder.avals[slot]) else _bytes(builder, slot)


def _bytes(builder: StepBuilder, slot: int) -> int:
    aval, sharding = builder.avals[slot], builder.slot_shardings[slot]
    shape = aval.shape if sharding is None else sharding.shard_shape(aval.shape)
    return math.ceil(math.prod(shape) * bits(aval.dtype) / 8)


def task_program(compiled: Any) -> Program:
    """Read what a task was compiled to, here or in another process."""
    tables = compiled.outcome.constants if isinstance(compiled, CompiledTask) else {}
    return read_program(compiled.as_text(), tables)


def task_temporaries(compiled: Any, program: Program, chip: Chip) -> int:
    """Bytes of a task's temporaries, with what libraries need for themselves on a GPU."""
    sizes = compiled.memory_analysis()
    allocated = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    allocated += sizes.temp_size_in_bytes - sizes.alias_size_in_bytes
    return int(sizes.temp_size_in_bytes) + workspace_at_peak(program, chip, int(allocated))
