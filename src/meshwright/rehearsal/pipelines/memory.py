"""A group's memory, followed through its operations.

Arguments stay unless a program is donated them, for the caller holds them too; results live until
their last use, and each program adds its own temporaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from meshwright.hardware import Chip
from meshwright.mpmd.pipelines.board import Board
from meshwright.mpmd.pipelines.operations import Code, Operation
from meshwright.partitioning.leaves import bits
from meshwright.rehearsal.memory.limits import available
from meshwright.rehearsal.memory.use import Memory


def group_memory(
    board: Board, operations: Sequence[Operation], group: int, chip: Chip
) -> tuple[Memory, int]:
    """The peak of a group as its operations run, and what of it lives between them.

    `operations` are those of all groups: what is sent away is forgotten by the group that takes it.
    """
    own = [operation for operation in operations if operation.group == group]
    given = {argument.cell for argument in board.placed if argument.group == group}
    given |= {cell for cell in board.fixed if board.group_of[cell] == group}

    def total(cells: Iterable[int]) -> int:
        return sum(bytes_on_device(board, cell) for cell in cells)

    arguments = total(given)
    alive = set(given)
    peak, held = arguments, 0
    for operation in operations:
        if operation.group != group:
            alive -= set(operation.drop) - given
            continue
        between = total(alive - given)
        code = operation.code
        working = total(operation.outs) if code is None else _working(code)
        if total(alive & given) + between + working > peak:
            peak, held = total(alive & given) + between + working, between
        alive |= set(operation.outs)
        alive -= set(operation.drop) - given
        alive -= set() if code is None else {operation.ins[n] for n in code.donated}
    programs = sum(
        each.compiled.memory_analysis().generated_code_size_in_bytes
        for each in {id(o.code): o.code for o in own if o.code is not None}.values()
    )
    rest = max(0, peak - arguments)
    return Memory(arguments, 0, 0, rest, programs, available(chip), chip.name, chip.family), held


def _working(code: Code) -> int:
    """What a program needs besides what it is given."""
    report = code.compiled.memory_analysis()
    new = report.output_size_in_bytes - report.alias_size_in_bytes
    return int(report.temp_size_in_bytes + new)


def bytes_on_device(board: Board, cell: int) -> int:
    """What a device holds of a value."""
    aval, lies = board.avals[cell], board.lies[cell]
    shape = aval.shape if lies is None else lies.shard_shape(aval.shape)
    return math.ceil(math.prod(shape) * bits(aval.dtype) / 8)
