"""`StageCosts`: a step cut at its loop over layers, and what its parts take in a pipeline.

The loop is found in the traced program; the rest belongs to the first stage, to the last, or to the
optimizer. The same operations are costed with the rows of a microbatch, on the devices of a stage.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from meshwright.planning.dim_groups import HEAVY, VIEWS, DimGroups, kind_sizes
from meshwright.planning.exchange_costs import Work
from meshwright.planning.group_names import data_values
from meshwright.planning.plan_costs import Lists
from meshwright.planning.plan_memory import kept_values
from meshwright.planning.remat_choice import Variant
from meshwright.planning.traced_program import TracedProgram
from meshwright.schedules.types import Costs

_NEGLIGIBLE = 1e-4  # part of all work below which an operation is left out
_LEAST = 1e-9  # seconds: a task takes some


@dataclasses.dataclass(frozen=True)
class CutProgram:
    """A program by parts: the layers' loops, forward and backward, and what is around them.

    `part` has a label for every operation: "layer F" and "layer B" are run once per layer and
    microbatch; "first F", "first B" and "last" once per microbatch; "once" and "once first", "once
    last" once per step, the former on stacks of all layers. `batch`: the kind of the rows of data.
    `carried`: values that a layer hands to the next. `saved`: stacks kept for the backward pass.
    `first` and `last`: shapes of weights that only those stages have.
    """

    layers: int
    rows: int
    batch: int
    part: tuple[str, ...]
    carried: tuple[int, ...]
    saved: tuple[int, ...]
    first: frozenset[tuple[int, ...]]
    last: frozenset[tuple[int, ...]]


def _loops(program: TracedProgram) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """The outermost loops: numbers of the first operation and of the one after, inputs, outputs."""
    loops, number = [], 0
    opened: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    for kind, inputs, outputs in program.events:
        if kind == "op":
            number += 1
        elif opened and opened[-1][1:] == (inputs, outputs):
            start = opened.pop()[0]
            if not opened:
                loops.append((start, number, inputs, outputs))
        else:
            opened.append((number, inputs, outputs))
    return loops


# In: a traced step. Out: its parts, or `None` where there is no loop over layers with a backward
# one. AD makes one loop backward for each forward, in reverse order, so of the loops of one length
# the first half are forward.
def cut_program(variant: Variant) -> CutProgram | None:
    """Find the loops over layers in a step, and what belongs to the first and the last stage."""
    program, layout = variant.program, variant.groups.layout
    data = data_values(variant.step, program)
    kinds = collections.Counter(layout[v][0][0] for v in data if layout[v] and layout[v][0][0] >= 0)
    if not kinds:
        return None
    batch = kinds.most_common(1)[0][0]
    rows = min(layout[v][0][1] for v in data if layout[v] and layout[v][0][0] == batch)
    by_length: dict[int, list[Any]] = collections.defaultdict(list)
    weight: dict[int, float] = collections.defaultdict(float)
    for loop in _loops(program):
        inside = program.operations[loop[0] : loop[1]]
        stacks = [program.shapes[v][0] for v in loop[2] if (v, 0) in program.stacked]
        if inside and stacks and stacks[0] > 1:
            by_length[stacks[0]].append(loop)
            weight[stacks[0]] += sum(each.flops * each.times for each in inside)
    length = max(weight, key=lambda n: (weight[n], n), default=0)
    loops = by_length[length]
    if len(loops) < 2 or len(loops) % 2 or not weight[length]:
        return None
    forward, backward = loops[: len(loops) // 2], loops[len(loops) // 2 :]
    part: list[str] = []
    for number, operation in enumerate(program.operations):
        has_rows = any(kind == batch for v in operation.values for kind, _ in layout[v])
        if any(start <= number < end for start, end, *_ in forward):
            part.append("layer F")
        elif any(start <= number < end for start, end, *_ in backward):
            part.append("layer B")
        elif not has_rows:
            part.append("once")
        elif number < forward[0][0]:
            part.append("first F")
        elif number < backward[0][0]:
            part.append("last")
        else:
            part.append("first B")
    stacked = {v for v, dim in program.stacked if program.shapes[v][dim] == length}
    made = {v for *_, outputs in forward for v in outputs}
    read = {v for _, _, inputs, _ in backward for v in inputs}
    carried = [v for *_, outputs in forward[:1] for v in outputs if v not in stacked]
    first, last = _end_weights(program, part)
    return CutProgram(
        length,
        rows,
        batch,
        tuple(
            _end_of(label, {program.shapes[v] for v in operation.values}, first, last)
            for operation, label in zip(program.operations, part, strict=True)
        ),
        tuple(v for v in carried if any(kind == batch for kind, _ in layout[v])),
        tuple(sorted(made & read & stacked)),
        first,
        last,
    )


Shapes = frozenset[tuple[int, ...]]


def _end_weights(program: TracedProgram, part: Sequence[str]) -> tuple[Shapes, Shapes]:
    """The shapes of the weights that only the first stage, and only the last stage uses.

    Optimizers keep arrays of the same shapes, which so belong to the same stage.
    """
    shapes: dict[str, set[tuple[int, ...]]] = collections.defaultdict(set)
    for operation, label in zip(program.operations, part, strict=True):
        shapes[label.split()[0]].update(program.shapes[v] for v in operation.inputs)
    weights = {program.shapes[v] for v in program.arguments if len(program.shapes[v]) > 1}
    layers = shapes["layer"]
    return (
        frozenset(weights & shapes["first"] - shapes["last"] - layers),
        frozenset(weights & shapes["last"] - shapes["first"] - layers),
    )


def _end_of(label: str, shapes: set[tuple[int, ...]], first: Shapes, last: Shapes) -> str:
    """Give what runs once per step to the stage whose weights it is about."""
    if label == "once" and shapes & first:
        return "once first"
    return "once last" if label == "once" and shapes & last else label


def scaled_program(
    variant: Variant, cut: CutProgram, microbatches: int, share: float = 1.0
) -> tuple[TracedProgram, DimGroups]:
    """The program with the rows of a microbatch, and with a share of the layers in its stacks."""
    program, groups = variant.program, variant.groups
    shapes, layouts, sizes = [], [], []
    for value, layout in enumerate(groups.layout):
        new = tuple(
            (kind, size // microbatches if kind == cut.batch and size % microbatches == 0 else size)
            for kind, size in layout
        )
        ratio = math.prod(s for _, s in new) / max(1, math.prod(s for _, s in layout))
        if (value, 0) in program.stacked and program.shapes[value][0] == cut.layers:
            ratio *= share
        shapes.append(tuple(size for _, size in new))
        layouts.append(new)
        sizes.append(int(program.bytes[value] * ratio))
    operations = [
        dataclasses.replace(each, flops=each.flops / microbatches)
        if each.flops and any(k == cut.batch for v in each.values for k, _ in groups.layout[v])
        else each
        for each in program.operations
    ]
    scaled = dataclasses.replace(program, shapes=shapes, bytes=sizes, operations=operations)
    new_sizes = kind_sizes(layouts, groups.count, groups.weights, groups.every)
    return scaled, dataclasses.replace(groups, layout=tuple(layouts), sizes=new_sizes)


Seconds = dict[str, float]  # by part of the program


class StageCosts:
    """Seconds of the parts of a program, with the rows of one microbatch, under plans."""

    def __init__(self, variant: Variant, cut: CutProgram, microbatches: int):
        program, groups = scaled_program(variant, cut, microbatches)
        self.costs = variant.costs.copy()
        self.costs.program, self.costs.groups = program, groups
        self.cut, self.microbatches = cut, microbatches
        kept = kept_values(program)
        folded: dict[tuple[str, Work], float] = collections.defaultdict(float)
        for operation, label in zip(program.operations, cut.part, strict=True):
            counts = operation.primitive in HEAVY or kept.intersection(operation.outputs)
            if operation.primitive in VIEWS or not counts:
                continue
            times = float(operation.times)
            if label.startswith("layer"):
                times = times / cut.layers
                # A sum over rows makes the gradient of weights.
                sums = any(
                    dim.kind == "sum"
                    and any(
                        groups.layout[operation.values[w]][d][0] == cut.batch for w, d in dim.at
                    )
                    for dim in operation.dims
                )
                if label == "layer B" and sums and operation.flops:
                    label = "layer W"
            folded[label, self.costs.work(operation)] += times
        self.costs.on(())
        alone = {key: times * self.costs.way(key[1], ()).compute for key, times in folded.items()}
        least = _NEGLIGIBLE * sum(alone.values())
        self.folded = {key: times for key, times in folded.items() if alone[key] > least}

    def seconds(self, lists: Lists) -> Seconds:
        """Seconds by part: of a layer and a microbatch, or of a step."""
        total: Seconds = collections.defaultdict(float)
        for (label, work), times in self.folded.items():
            way = self.costs.way(work, lists)
            total[label] += times * (way.compute + way.exchange)
        return total

    def bytes(self, values: Sequence[int], lists: Lists) -> float:
        """Bytes of values on a device."""
        layout, sizes = self.costs.groups.layout, self.costs.program.bytes
        return sum(
            sizes[v]
            / math.prod(self.costs.sizes[axis] for axis in self.costs.cut(layout[v], lists))
            for v in values
        )


def whole_step(seconds: Seconds, cut: CutProgram, microbatches: int = 1) -> float:
    """Add up the parts of a step that is not cut."""
    return sum(
        value
        * (cut.layers if label.startswith("layer") else 1)
        * (1 if label.startswith("once") else microbatches)
        for label, value in seconds.items()
    )


def task_costs(seconds: Seconds, layers: Sequence[int]) -> list[Costs]:
    """The costs of every stage's tasks, for one microbatch; the head's backward is twice its F."""
    result = []
    for number, count in enumerate(layers):
        forward = count * seconds["layer F"]
        by_input, by_weights = count * seconds["layer B"], count * seconds["layer W"]
        if number == 0:
            forward += seconds["first F"]
            by_weights += seconds["first B"]
        if number == len(layers) - 1:
            forward += seconds["last"] / 3
            by_input += seconds["last"] / 3
            by_weights += seconds["last"] / 3
        result.append(Costs(max(forward, _LEAST), max(by_input, _LEAST), by_weights))
    return result


def optimizer_seconds(seconds: Seconds, layers: Sequence[int], total: int) -> float:
    """Seconds of the slowest stage's optimizer."""
    each = [count / total * seconds["once"] for count in layers]
    each[0] += seconds["once first"]
    each[-1] += seconds["once last"]
    return max(each)
