"""`Layouts`: how the values of a program lie under a plan, and how its operations use them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.planning.dim_groups import PINNED, Layout
from meshwright.planning.exchange_costs import Cut
from meshwright.planning.plan_costs import Lists, PlanCosts
from meshwright.planning.stored_values import looks_up
from meshwright.planning.traced_program import Operation
from meshwright.planning.traced_step import TracedStep

SMALLEST = 2**16  # bytes, by default
# How many times as large a stack may be of which each layer's part is small, so that it is whole.
_STACKED = 64
# How many times as large rows may be that meet much larger weights, as of a time embedding, so that
# they are whole on axes that cut these: to exchange so few takes as long as to start to.
_FEW_ROWS = 16


def spec_of(cut: Cut, rank: int, names: Sequence[str]) -> PartitionSpec:
    """Write a cut as a `PartitionSpec`."""
    entries: list[Any] = []
    for dim in range(rank):
        axes = tuple(names[axis] for axis in sorted(cut) if cut[axis] == dim)
        entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)  # type: ignore[no-untyped-call]


def axes_of(spec: PartitionSpec) -> set[str]:
    """The mesh axes that a spec names."""
    return {axis for entry in spec for axis in _entry(entry)}


def _with_axes_of(lies: PartitionSpec, spec: PartitionSpec) -> PartitionSpec:
    """A spec with those axes of another that it lacks, each on the dim where that one has it.

    >>> P = PartitionSpec
    >>> _with_axes_of(P("fsdp", "tp"), P(None, None, "fsdp")) == P(None, "tp", "fsdp")
    True
    """
    rank = max(len(lies), len(spec))
    there, here = ((*each, *[None] * (rank - len(each))) for each in (lies, spec))
    taken = axes_of(spec)
    entries: list[Any] = []
    for old, new in zip(there, here, strict=True):
        axes = [*_entry(new), *(axis for axis in _entry(old) if axis not in taken)]
        entries.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)  # type: ignore[no-untyped-call]


def _splits_further(lies: PartitionSpec, made: PartitionSpec) -> bool:
    """Whether a dim that is cut in one spec is cut by more axes in the other."""
    return any(
        set() < {*_entry(one)} < {*_entry(other)} for one, other in zip(made, lies, strict=False)
    )


def _entry(entry: Any) -> tuple[str, ...]:
    """The axes of one dim in a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def local_shape(
    shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of one device's part of an array; `sizes` are those of the mesh's axes.

    >>> local_shape((16, 8, 32), PartitionSpec(("dp", "fsdp"), "tp"), {"dp": 2, "fsdp": 4, "tp": 2})
    (2, 4, 32)
    """
    entries = [*spec, *([None] * (len(shape) - len(spec)))]
    return tuple(
        size // math.prod(sizes[axis] for axis in _entry(entry))
        for size, entry in zip(shape, entries, strict=True)
    )


class Layouts:
    """The specs that a plan gives to the values and operations of a program."""

    def __init__(
        self,
        costs: PlanCosts,
        lists: Lists,
        names: Sequence[str],
        data: Collection[int] = (),
        smallest: int = SMALLEST,
    ):
        self.costs, self.lists, self.names = costs, lists, tuple(names)
        self.smallest = smallest  # bytes: what is smaller is whole, or left to the partitioner
        self.data = frozenset(data)  # values that are cut however small they are
        layout, program = costs.groups.layout, costs.program
        parameters = [value for value in program.arguments if value not in self.data]
        self._of_data = {kind for value in data for kind, _ in layout[value]}
        self._of_rows = self._of_data - {kind for v in parameters for kind, _ in layout[v]}
        self._few_rows = self._rows_of_heavy_products(_FEW_ROWS * smallest)
        self._of_a_layer = self._layers_of({layout[value] for value in parameters})

    def _layers_of(self, parameters: Collection[Layout]) -> dict[Layout, int]:
        """Of stacks that are no larger than they may be to be whole: the bytes of one layer's part.

        That is the least that a loop takes of it in a run, or a loop inside of that one.
        """
        layout, program = self.costs.groups.layout, self.costs.program
        found: dict[Layout, int] = {}
        for part, stack in program.stack_of.items():
            while stack in program.stack_of:
                stack = program.stack_of[stack]
            key = layout[stack]
            if key in parameters and program.bytes[stack] < _STACKED * self.smallest:
                found[key] = min(program.bytes[part], found.get(key, program.bytes[part]))
        return found

    def _rows_of_heavy_products(self, most: int) -> frozenset[int]:
        """Values with rows of data that products with much larger weights read or make."""
        layout, program = self.costs.groups.layout, self.costs.program
        found: set[int] = set()
        for operation in program.operations:
            if operation.primitive != "dot_general":
                continue
            heaviest = self.costs.work(operation).heaviest
            found.update(
                value
                for number, value in enumerate(operation.values)
                if heaviest not in (-1, number) and program.bytes[value] < most
                if any(kind in self._of_rows for kind, _ in layout[value])
            )
        return frozenset(found.difference(program.results))

    def of_value(self, value: int) -> PartitionSpec:
        """How a value lies.

        One that is small, or a stack of those of all layers, is cut only where activations with its
        dims are, too: a bias whose channels an axis cuts, but not one that is gathered for its use.
        So are few rows that meet much larger weights, and by axes that cut no weights.
        """
        layout = self.costs.groups.layout[value]
        cut = self.costs.cut(layout, self.lists)
        size = self._of_a_layer.get(layout, self.costs.program.bytes[value])
        few_rows = value in self._few_rows
        if (size < self.smallest or few_rows) and value not in self.data:
            cut = {
                axis: dim
                for axis, dim in cut.items()
                if self._is_cut(layout[dim][0], axis)
                or (few_rows and self._of_rows.issuperset(self.lists[axis]))
            }
        return spec_of(cut, len(layout), self.names)

    def _is_cut(self, kind: int, axis: int) -> bool:
        """Whether activations are cut by this kind of dim: it takes the axis before any of data."""
        before_data = itertools.takewhile(lambda k: k not in self._of_data, self.lists[axis])
        return kind in before_data

    def of_operand(
        self, operation: Operation, at: int, needed: PartitionSpec, in_full: bool
    ) -> tuple[PartitionSpec, ...]:
        """What is written of an operand that is needed so: one spec after the other.

        That axes are gathered is not, unless all is said `in_full`, or rows are looked up: the
        partitioner gathers all of these where one axis cuts them and another what is looked up.
        Where axes move it is said how it lies before that: the partitioner would else let the
        layers before compute it as it is needed here.
        """
        if in_full:
            return (needed,)
        lies = self.of_value(operation.inputs[at])
        if operation.primitive == "dot_general" and self._sums_part(operation, at, lies, needed):
            return (lies, needed)
        wanted = _with_axes_of(lies, needed)
        last = (needed,) if wanted != needed and looks_up(operation) == "rows" else ()
        if wanted == lies:
            return (lies,) if lies == needed else last
        return (lies, wanted, *last) if axes_of(lies) else (wanted, *last)

    def _sums_part(
        self, operation: Operation, at: int, lies: PartitionSpec, needed: PartitionSpec
    ) -> bool:
        """Whether a product sums over a dim of an operand that lies cut by more axes than it is
        needed cut by, and not by none: the partitioner would gather all of both operands."""
        entries = [*needed, *[None] * (len(lies) - len(needed))]
        summed = {d for dim in operation.dims if dim.kind == "sum" for w, d in dim.at if w == at}
        return any(
            dim in summed and set() < {*_entry(entries[dim])} < {*_entry(entry)}
            for dim, entry in enumerate(lies)
        )

    def of_made(self, value: int, made: PartitionSpec, in_full: bool) -> tuple[PartitionSpec, ...]:
        """What is written of a result that is made so: one spec after the other.

        Partial sums are scattered to where they lie as they are added up; how it lies with them,
        before other axes move, is said: the partitioner would else gather the operands for that.
        """
        lies = self.of_value(value)
        # Not of convolutions: XLA's partitioner computes other numbers where their channels are cut
        # in two steps (jax 0.12, some optimisations left out: conv-tiny with a forced mix of cuts).
        product = self.costs.program.maker.get(value) == "dot_general"
        in_full = in_full or (product and _splits_further(lies, made))
        if not in_full and not axes_of(lies) <= axes_of(made):
            made = _with_axes_of(lies, made)
        return (lies,) if made == lies and not in_full else (made, lies)

    def of_result(self, step: TracedStep, number: int) -> PartitionSpec:
        """How a result lies: as the argument of the next step that it is, or by its own dims."""
        program = self.costs.program
        if number in step.carried:
            return self.of_value(program.arguments[step.carried[number]])
        return self.of_value(program.results[number])

    def around(self, number: int) -> tuple[list[PartitionSpec], list[PartitionSpec], bool] | None:
        """How an operation needs its inputs and makes its outputs; `None` where it is left alone.

        `number` is that of the operation in the program. The last of three: whether all of that is
        to be said. So of what is cut by queries, and of rows that are added to a table one by one:
        the partitioner would cut the table rather than the rows, and each device add all of these.
        """
        operation = self.costs.program.operations[number]
        if operation.primitive not in PINNED:
            return None
        work = self.costs.work(operation)
        way = self.costs.way(work, self.lists)
        shapes = self.costs.program.shapes
        specs = [
            spec_of(cut, len(shapes[value]), self.names)
            for cut, value in zip(way.cuts, operation.values, strict=True)
        ]
        count = len(operation.inputs)
        layout, queries = self.costs.groups.layout, self.costs.groups.queries
        by_queries = any(
            layout[value][dim][0] in queries
            for cut, value in zip(way.cuts, operation.values, strict=True)
            for dim in cut.values()
        )
        return specs[:count], specs[count:], by_queries or bool(work.one_by_one)
