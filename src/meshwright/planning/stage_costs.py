"""`StageCosts`: what the parts of a step take in a pipeline, of a step cut by `layer_parts`.

The same operations are costed with the rows of a microbatch, on the devices of a stage.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

from meshwright.planning.dim_groups import HEAVY, VIEWS, DimGroups, Layout, kind_sizes
from meshwright.planning.layer_parts import CutProgram
from meshwright.planning.operation_work import Work
from meshwright.planning.plan_costs import Lists
from meshwright.planning.remat_choice import Variant
from meshwright.planning.stored_values import kept_values
from meshwright.planning.traced_program import Operation, TracedProgram
from meshwright.schedules.types import Costs

_NEGLIGIBLE = 1e-4  # part of all work below which an operation is left out
_LEAST = 1e-9  # seconds: a task takes some


def scaled_program(
    variant: Variant, cut: CutProgram, microbatches: int, share: float = 1.0
) -> tuple[TracedProgram, DimGroups]:
    """The program with the rows of a microbatch, and with a share of the layers in its stacks."""
    program, groups = variant.program, variant.groups
    scaled: dict[Layout, tuple[Layout, tuple[int, ...], float]] = {}
    shapes, layouts, sizes = [], [], []
    for value, layout in enumerate(groups.layout):
        if layout not in scaled:
            new = tuple(
                (k, size // microbatches if k == cut.batch and size % microbatches == 0 else size)
                for k, size in layout
            )
            ratio = math.prod(s for _, s in new) / max(1, math.prod(s for _, s in layout))
            scaled[layout] = new, tuple(size for _, size in new), ratio
        new, shape, ratio = scaled[layout]
        shapes.append(shape)
        layouts.append(new)
        sizes.append(int(program.bytes[value] * ratio * (share if value in cut.stacks else 1.0)))
    layouts_once = [new for new, *_ in scaled.values()]
    new_sizes = kind_sizes(layouts_once, groups.count, groups.weights, groups.every)
    return dataclasses.replace(program, shapes=shapes, bytes=sizes), dataclasses.replace(
        groups, layout=tuple(layouts), sizes=new_sizes
    )


@dataclasses.dataclass(frozen=True)
class PartWork:
    """An operation that stands for all of its part that cost the same; `times`: how often they run.

    `rows`: whether it has less to do with fewer rows.
    """

    label: str
    operation: Operation
    times: float
    rows: bool


def fold_parts(variant: Variant, cut: CutProgram) -> list[PartWork]:
    """Sum up what costs the same in one part of a step; of layers, what one of them runs."""
    program, layout = variant.program, variant.groups.layout
    kept = kept_values(program)
    folded: dict[tuple[str, Work], tuple[Operation, float]] = {}
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
                and any(layout[operation.values[w]][d][0] == cut.batch for w, d in dim.at)
                for dim in operation.dims
            )
            if label == "layer B" and sums and operation.flops:
                label = "layer W"
        key = label, variant.costs.work(operation)
        first, before = folded.get(key, (operation, 0.0))
        folded[key] = first, before + times
    return [
        PartWork(
            label,
            operation,
            times,
            any(kind == cut.batch for v in operation.values for kind, _ in layout[v]),
        )
        for (label, _), (operation, times) in folded.items()
    ]


Seconds = dict[str, float]  # by part of the program


class StageCosts:
    """Seconds of the parts of a program, with the rows of one microbatch, under plans."""

    def __init__(
        self, variant: Variant, cut: CutProgram, works: Sequence[PartWork], microbatches: int
    ):
        program, groups = scaled_program(variant, cut, microbatches)
        self.costs = variant.costs.resized(program, groups)
        self.cut, self.microbatches = cut, microbatches
        folded: dict[tuple[str, Work], float] = collections.defaultdict(float)
        for each in works:
            operation = each.operation
            if each.rows and operation.flops:
                operation = dataclasses.replace(
                    operation,
                    flops=operation.flops / microbatches,
                    exponentials=operation.exponentials / microbatches,
                )
            folded[each.label, self.costs.work(operation)] += each.times
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
