"""`RepeatedWork`: products that several devices compute alike, by source line and mesh axis.

Work that is written twice (`jax.checkpoint`) is not repeated in this sense: every device does its
own part of it twice. Nor is padding: a device that works on padding works on values of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from meshwright._show import short_repr
from meshwright._text import duration, number
from meshwright.hlo.instructions import Instruction, Source, primitives
from meshwright.hlo.program import Program, flops
from meshwright.partitioning.report import LeafRow
from meshwright.placement.placement import Placement
from meshwright.rehearsal.collectives.analyze import Positions, axes_of
from meshwright.rehearsal.collectives.causes import first_origin
from meshwright.rehearsal.collectives.types import AxisPart
from meshwright.rehearsal.kernel_speeds import Speeds, speeds
from meshwright.rehearsal.kernels import kernels, running
from meshwright.rehearsal.replication import Replication
from meshwright.rehearsal.step_arguments import argument_path


@dataclasses.dataclass(frozen=True, repr=False)
class RepeatedWork:
    """Products of one line that `copies` devices compute alike, along `axes` if those are axes.

    `flops` are those of one device in a step, `seconds` what it spends on them beyond its share:
    with 8 copies seven eighths of their time. `arguments` are those of the step that the
    products read.
    """

    source: Source | None
    operation: str
    copies: float
    axes: tuple[AxisPart, ...] | None
    flops: float
    seconds: float
    arguments: tuple[str, ...] = ()

    @property
    def wasted(self) -> float:
        """The operations that a device does beyond its share."""
        return self.flops * (1 - 1 / self.copies)

    @property
    def over(self) -> str:
        """The axes in words: `tp`, `tp:4/8`."""
        return ", ".join(map(str, self.axes)) if self.axes else "groups of devices"

    def __str__(self) -> str:
        where = str(self.source or self.operation or "an operation without a name")
        return (
            f"the products of {where} are done {self.copies:g} times over {self.over} "
            f"({number(self.wasted / 1e9)} GFLOP, {duration(self.seconds)} of a device for nothing)"
        )

    def __repr__(self) -> str:
        return short_repr(self, str(self))

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data; the time in seconds."""
        return {
            "source": None if self.source is None else dataclasses.asdict(self.source),
            "operation": self.operation,
            "copies": self.copies,
            "axes": None if self.axes is None else [dataclasses.asdict(p) for p in self.axes],
            "flops": self.flops,
            "wasted_flops": self.wasted,
            "seconds": self.seconds,
        }


# In: a compiled program and where its mesh lies. Out: the products that are done more than once,
# the longest first. Invariant: what is left of the program's operations when `wasted` is taken off
# is every product once, as in the program before it was partitioned. Example: on dp:2, tp:4 with
# x sharded over dp and w whole, x @ w is done 4 times over tp.
def find_repeated_work(
    program: Program, placement: Placement, arguments: Sequence[LeafRow] = ()
) -> tuple[RepeatedWork, ...]:
    """Find the products that several devices compute alike; `arguments` are the step's."""
    if program.devices == 1:
        return ()
    speed = speeds(placement.topology.chip)
    same = Replication(program, _pieces(program, placement, arguments))
    positions = Positions(placement, program.devices)
    lines: dict[Any, list[_Product]] = {}
    for product in _products(program, speed, same):
        where = program.source(product.instruction)
        # A product that has no line goes by its name, whatever its number.
        key = where or product.instruction.op_name, same.classes(product.instruction).tobytes()
        lines.setdefault(key, []).append(product)
    spec = placement.spec
    repeated = [
        _entry(program, products, same, positions, spec.names, spec.sizes)
        for products in lines.values()
    ]
    return tuple(sorted(repeated, key=lambda entry: -entry.seconds))


def _pieces(
    program: Program, placement: Placement, arguments: Sequence[LeafRow]
) -> dict[str, np.ndarray]:
    """By argument, the number of the piece that each device holds, as its spec says."""
    names, sizes = placement.spec.names, placement.spec.sizes
    if program.devices != placement.positions.size:
        return {}  # written for one slice of several
    coords = dict(zip(names, np.unravel_index(np.arange(program.devices), sizes), strict=True))
    by_path = {row.path: row.spec for row in arguments}
    pieces = {}
    for parameter in program.entry.parameters.values():
        spec = by_path.get(argument_path(parameter.op_name))
        if spec is not None:
            number = np.zeros(program.devices, np.int64)
            for name in _axes(spec):
                number = number * sizes[names.index(name)] + coords[name]
            pieces[parameter.op_name] = number
    return pieces


def _axes(spec: PartitionSpec) -> Iterator[str]:
    for entry in tuple(spec):
        yield from entry if isinstance(entry, tuple) else (entry,) if entry else ()


@dataclasses.dataclass(frozen=True)
class _Product:
    """A dot, a convolution or a custom kernel: its work in a step, and the seconds of that."""

    instruction: Instruction
    flops: float
    seconds: float


def _products(program: Program, speed: Speeds, same: Replication) -> Iterator[_Product]:
    """Every product that is done more than once."""
    for computation in running(program):
        times = program.run_count(computation.name).count
        for kernel in kernels(program, computation):
            if not kernel.flops:
                continue
            seconds = max(speed.kernel(kernel)) * times
            for instruction, work in work_inside(program, kernel.instruction):
                if same.copies(instruction) > 1 and work:
                    yield _Product(instruction, work * times, seconds * work / kernel.flops)


# In: a kernel. Out: every product in it with its operations. Invariant: they add up to the kernel's
# own count. Example: a fusion of add(dot(a, b), c) yields the fusion with 0 and the dot with all.
def work_inside(program: Program, instruction: Instruction) -> Iterator[tuple[Instruction, float]]:
    """An instruction with its own operations, and those that are fused into it."""
    custom = program.kernel_work(instruction)
    if custom is not None:
        yield instruction, custom.flops
        return
    yield instruction, float(flops(instruction, program.computations[instruction.computation]))
    if instruction.opcode == "fusion":
        for _, name in instruction.called:
            for each in program.computations[name].instructions:
                yield from work_inside(program, each)


def _entry(
    program: Program,
    products: Sequence[_Product],
    same: Replication,
    positions: Positions,
    names: Sequence[str],
    sizes: Sequence[int],
) -> RepeatedWork:
    first = max(products, key=lambda product: product.flops).instruction
    classes = same.classes(first)
    alike = [np.flatnonzero(classes == one) for one in range(classes.max() + 1)]
    groups = [there for group in alike for there in positions.of(group)]
    copies = same.copies(first)
    seconds = sum(product.seconds for product in products)
    return RepeatedWork(
        program.source(first),
        ", ".join(primitives(first.op_name)),
        copies,
        axes_of(groups, names, sizes),
        sum(product.flops for product in products),
        seconds * (1 - 1 / copies),
        tuple(dict.fromkeys(_arguments(program, first))),
    )


def _arguments(program: Program, product: Instruction) -> Iterator[str]:
    """Names of the step's arguments among its operands, seen through casts, copies and loops."""
    for operand in program.computations[product.computation].operands(product):
        origin = first_origin(program, operand).instruction
        if origin.opcode == "parameter" and origin.computation == program.entry.name:
            yield origin.op_name
