"""`CutProgram`: which operations of a step belong to its layers, and what is around them.

Layers are the runs of a loop, or the calls of a function that the user marked with `block` or put
under `jax.checkpoint`. The rest belongs to the first stage of a pipeline, to the last, or to the
optimizer.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

from meshwright.planning.dim_groups import Layout
from meshwright.planning.group_names import data_values
from meshwright.planning.marked_blocks import BLOCK_SCOPE
from meshwright.planning.remat_choice import Variant
from meshwright.planning.stored_values import kept_values, values_behind
from meshwright.planning.traced_program import LOOP_SCOPE, Operation, TracedProgram

_MARK = re.compile(rf"{BLOCK_SCOPE}(\d+)")
_BACKWARD = "transpose("  # in the name scopes of what JAX's AD makes
_MOST_BLOCKS = 8  # marked functions of one layer
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
NO_LAYERS = (
    "No pipeline was looked for: the step has no loop over layers, and no function that is called "
    "once per layer is marked. Mark it with mw.block, and plan again."
)
NO_EQUAL_LAYERS = (
    "No pipeline was looked for: no two marked blocks in a row compute the same, so they are no "
    "layers that stages could share."
)

Owner = int | str  # the number of a layer, "first", or "last"


@dataclasses.dataclass(frozen=True)
class CutProgram:
    """A program by parts: its layers, forward and backward, and what is around them.

    `part` has a label for every operation: "layer F" and "layer B" are run once per layer and
    microbatch, those of all layers together where they are written out; "first F", "first B" and
    "last" once per microbatch; "once" and "once first", "once last" once per step, the former for
    all layers. `batch`: the kind of the rows of data. `carried`: values that a layer hands to the
    next. `saved`: values of all layers that are kept for the backward pass. `stacks`: those that
    have a part for each layer. `owner`: of values that belong to one layer, by its number, or to
    the first or the last stage. `ends`: of every layer the number of the block that ends it, where
    blocks were called one after the other; () for a loop. `marked`: whether `block` marked them.
    """

    layers: int
    rows: int
    batch: int
    part: tuple[str, ...]
    carried: tuple[int, ...]
    saved: tuple[int, ...]
    stacks: frozenset[int]
    owner: Mapping[int, Owner]
    ends: tuple[int, ...] = ()
    marked: bool = False

    def elsewhere(self, layers: int, first: bool, last: bool) -> Iterator[int]:
        """The values that a stage of so many layers does not have."""
        for value, owner in self.owner.items():
            if owner == "first":
                absent = not first
            elif owner == "last":
                absent = not last
            else:
                absent = int(owner) >= layers
            if absent:
                yield value


def cut_program(variant: Variant) -> CutProgram | str:
    """Find the layers in a step, and what belongs to the first and the last stage; or say why not.

    Marked blocks come first, then loops, and then what is under `jax.checkpoint`.
    """
    program, layout = variant.program, variant.groups.layout
    data = data_values(variant.step, program)
    kinds = collections.Counter(layout[v][0][0] for v in data if layout[v] and layout[v][0][0] >= 0)
    if not kinds:
        return "No pipeline was looked for: the data have no rows that microbatches could share."
    batch = kinds.most_common(1)[0][0]
    rows = min(layout[v][0][1] for v in data if layout[v] and layout[v][0][0] == batch)
    marks = _marked_blocks(program)
    spans = _layers_of(program, marks)
    loops = None if spans else _layer_loops(program, set(data))
    if not spans and not loops:
        spans = _layers_of(program, _checkpointed_blocks(program))
    if spans:
        return _cut_at_blocks(program, layout, spans, batch, rows, bool(marks))
    if loops:
        return _cut_at_loops(program, layout, *loops, batch, rows)
    return NO_EQUAL_LAYERS if len({mark[0] for mark in marks.values()}) > 1 else NO_LAYERS


# Layers that are written out. A block is the number of a call, and whether it is of the backward.

Blocks = dict[int, tuple[int, bool]]  # by the number of an operation


@dataclasses.dataclass(frozen=True)
class _Spans:
    """Equal layers in a row: for operations the layer, and whether they are of the backward.

    `ends`: the number of the last block of each layer.
    """

    layer_of: dict[int, tuple[int, bool]]
    ends: tuple[int, ...]

    def range(self, backward: bool) -> tuple[int, int]:
        """The numbers of the first operation of a pass, and of the one after the last."""
        numbers = [n for n, (_, back) in self.layer_of.items() if back == backward]
        return min(numbers), max(numbers) + 1


def _marked_blocks(program: TracedProgram) -> Blocks:
    """The operations of marked blocks, but not of those inside of loops: the loop has the layers.

    JAX's AD keeps the name scope of a call in all that it makes of it. Of blocks in blocks the
    outermost counts.
    """
    known: dict[str, tuple[int, bool] | None] = {}
    blocks: Blocks = {}
    for number, operation in enumerate(program.operations):
        scope = operation.scope
        if scope not in known:
            around = scope.partition(LOOP_SCOPE)[0]
            mark = _MARK.search(around)
            known[scope] = None if mark is None else (int(mark[1]), _BACKWARD in around)
        if (block := known[scope]) is not None:
            blocks[number] = block
    return blocks


# In: a program. Out: the operations of functions under `jax.checkpoint`, by the order of calls.
# What the backward computes again is one equation for each call, in reverse order. Its inputs are
# those of the call, and what it saved: the first of them that is made for it alone is where the
# call begins in the forward pass, in which JAX leaves no trace of it. The last one is as long as
# the one before.
def _checkpointed_blocks(program: TracedProgram) -> Blocks:
    rematted = program.rematted
    if len(rematted) < 2:
        return {}
    maker = {
        value: number
        for number, operation in enumerate(program.operations[: rematted[0][0]])
        for value in operation.outputs
    }
    uses = collections.Counter(value for *_, inputs in rematted for value in set(inputs))
    blocks: Blocks = {}
    starts = []
    for call, (start, end, inputs) in enumerate(reversed(rematted)):
        blocks.update((number, (call, True)) for number in range(start, end))
        own = [maker[value] + 1 for value in inputs if value in maker and uses[value] == 1]
        starts.append(min(own, default=-1))
    if any(one >= other for one, other in itertools.pairwise(starts)):
        return {}
    stops = [*starts[1:], min(rematted[0][0], 2 * starts[-1] - starts[-2])]
    for call, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        blocks.update((number, (call, False)) for number in range(max(0, start), stop))
    return blocks


def _layers_of(program: TracedProgram, blocks: Blocks) -> _Spans | None:
    """Find the layers among blocks: the equal ones in a row, or groups of them, with most work."""
    work: dict[int, list[Operation]] = collections.defaultdict(list)
    has_backward = set()
    for number, (block, backward) in blocks.items():
        operation = program.operations[number]
        if backward:
            has_backward.add(block)
        elif operation.primitive in _PRODUCTS:
            work[block].append(operation)
    order = sorted(has_backward)
    flops = [sum(each.flops * each.times for each in work[block]) for block in order]
    shapes: list[Hashable] = [
        frozenset((each.primitive, *(program.shapes[v] for v in each.values)) for each in work[b])
        for b in order
    ]
    found = _equal_run(shapes, flops)
    if found is None:
        return None
    first, layers, period = found
    run = order[first : first + layers * period]
    layer = {block: number // period for number, block in enumerate(run)}
    return _Spans(
        {
            number: (layer[block], back)
            for number, (block, back) in blocks.items()
            if block in layer
        },
        tuple(run[period - 1 :: period]),
    )


def _equal_run(kinds: Sequence[Hashable], weights: Sequence[float]) -> tuple[int, int, int] | None:
    """Find what repeats with most weight: where it begins, how often it is there, its length.

    >>> _equal_run("eabababh", [1] * 8)
    (1, 3, 2)
    """
    best, found = 0.0, None
    for period in range(1, min(_MOST_BLOCKS, len(kinds) // 2) + 1):
        start = 0
        for number in range(period, len(kinds) + 1):
            if number < len(kinds) and kinds[number] == kinds[number - period]:
                continue
            count = (number - start) // period
            weight = sum(weights[start : start + count * period])
            if count > 1 and weight > best * (1 + 1e-6):
                best, found = weight, (start, count, period)
            start = number - period + 1
    return found


def _cut_at_blocks(
    program: TracedProgram,
    layout: Sequence[Layout],
    spans: _Spans,
    batch: int,
    rows: int,
    marked: bool,
) -> CutProgram:
    """Cut a program at layers that are written out; what is between two of them is the layers'."""
    (forward, forward_end), (backward, backward_end) = spans.range(False), spans.range(True)
    part = []
    for number, operation in enumerate(program.operations):
        own = spans.layer_of.get(number)
        if own is not None:
            part.append("layer B" if own[1] else "layer F")
        elif not _has_rows(operation, layout, batch):
            part.append("once")
        elif number < forward:
            part.append("first F")
        elif number < forward_end:
            part.append("layer F")
        elif number < backward:
            part.append("last")
        else:
            part.append("layer B" if number < backward_end else "first B")
    layer_of = {number: layer for number, (layer, _) in spans.layer_of.items()}
    owner = _owners(program, part, layer_of, _joined(program, part))
    before = {
        v
        for n, each in enumerate(program.operations)
        for v in each.outputs
        if part[n] in ("first F", "layer F")
    }
    readers = {number for number, label in enumerate(part) if label == "layer B"}
    saved = values_behind(program, kept_values(program), readers) & before
    return CutProgram(
        len(spans.ends),
        rows,
        batch,
        _with_ends(program, part, owner),
        _handed_over(program, layout, part, spans, batch),
        tuple(sorted(saved)),
        frozenset(),
        owner,
        spans.ends,
        marked,
    )


def _handed_over(
    program: TracedProgram, layout: Sequence[Layout], part: Sequence[str], spans: _Spans, batch: int
) -> tuple[int, ...]:
    """The values with rows that the layers of the second half take from before."""
    middle = len(spans.ends) // 2
    start = min(n for n, (layer, back) in spans.layer_of.items() if layer >= middle and not back)
    made = {
        value
        for number, operation in enumerate(program.operations[:start])
        if part[number] in ("first F", "layer F")
        for value in operation.outputs
    }
    taken = {
        value
        for number, operation in enumerate(program.operations[start:], start)
        if part[number] == "layer F"
        for value in operation.inputs
        if value in made and any(kind == batch for kind, _ in layout[value])
    }
    return tuple(sorted(taken))


# Layers that a loop goes along.

Loop = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def _loops(program: TracedProgram) -> list[Loop]:
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


# In: a traced step. Out: the length of its loops over layers, and these, or `None` where there is
# none with a backward one. AD makes one loop backward for each forward, in reverse order, so of the
# loops of one length the first half are forward.
# Only loops that take weights of their own in each run: those of one over time steps are the same.
def _layer_loops(program: TracedProgram, data: Collection[int]) -> tuple[int, list[Loop]] | None:
    weights = _made_of_weights(program, data)
    by_length: dict[int, list[Loop]] = collections.defaultdict(list)
    weight: dict[int, float] = collections.defaultdict(float)
    for loop in _loops(program):
        inside = program.operations[loop[0] : loop[1]]
        stacks = [program.shapes[v][0] for v in loop[2] if (v, 0) in program.stacked]
        if inside and stacks and stacks[0] > 1:
            by_length[stacks[0]].append(loop)
            weight[stacks[0]] += sum(each.flops * each.times for each in inside)
    of_layers = [
        length
        for length, loops in by_length.items()
        if any((v, 0) in program.stacked and v in weights for loop in loops for v in loop[2])
    ]
    length = max(of_layers, key=lambda n: (weight[n], n), default=0)
    loops = by_length[length]
    if len(loops) < 2 or len(loops) % 2 or not weight[length]:
        return None
    return length, loops


def _made_of_weights(program: TracedProgram, data: Collection[int]) -> set[int]:
    """Return the arguments that are no data, and what is computed of them alone."""
    others = set(data).union(*(outputs for kind, _, outputs in program.events if kind == "scan"))
    for operation in program.operations:
        if others.intersection(operation.inputs):
            others.update(operation.outputs)
    return set(range(len(program.shapes))) - others


def _cut_at_loops(
    program: TracedProgram,
    layout: Sequence[Layout],
    length: int,
    loops: Sequence[Loop],
    batch: int,
    rows: int,
) -> CutProgram:
    forward, backward = loops[: len(loops) // 2], loops[len(loops) // 2 :]
    part: list[str] = []
    for number, operation in enumerate(program.operations):
        if any(start <= number < end for start, end, *_ in forward):
            part.append("layer F")
        elif any(start <= number < end for start, end, *_ in backward):
            part.append("layer B")
        elif not _has_rows(operation, layout, batch):
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
    joined = _joined(program, part)
    owner = _owners(program, part, {}, joined)
    with_moments = {joined[value] for value in stacked}
    return CutProgram(
        length,
        rows,
        batch,
        _with_ends(program, part, owner),
        tuple(v for v in carried if any(kind == batch for kind, _ in layout[v])),
        tuple(sorted(made & read & stacked)),
        frozenset(value for value, other in enumerate(joined) if other in with_moments),
        owner,
    )


def _has_rows(operation: Operation, layout: Sequence[Layout], batch: int) -> bool:
    return any(kind == batch for v in operation.values for kind, _ in layout[v])


# Whose values are.


# In: a program and its parts. Out: for every value one that stands for all that it is joined with.
# What runs once per step joins values of one size: a weight, its gradient, and what the optimizer
# keeps of it. Example: m = 0.9 * m + 0.1 * g joins m and g.
def _joined(program: TracedProgram, part: Sequence[str]) -> list[int]:
    parent = list(range(len(program.shapes)))

    def find(value: int) -> int:
        while parent[value] != value:
            parent[value] = value = parent[parent[value]]
        return value

    for operation, label in zip(program.operations, part, strict=True):
        by_size: dict[int, int] = {}
        for value in operation.values if label == "once" else ():
            size = math.prod(program.shapes[value])
            if size > 1:
                one, other = find(value), find(by_size.setdefault(size, value))
                parent[max(one, other)] = min(one, other)
    return [find(value) for value in range(len(parent))]


# In: a program, its parts, the layers of operations, and what is joined. Out: the layer, or the end
# of the program, that values belong to. An activation is that of the layer that makes it, what
# several use belongs to none. Example: a head that only "last" reads is "last", and so are its
# moments.
def _owners(
    program: TracedProgram,
    part: Sequence[str],
    layer_of: Mapping[int, int],
    joined: Sequence[int],
) -> dict[int, Owner]:
    maker: dict[int, Owner] = {}
    users: dict[int, set[Owner]] = collections.defaultdict(set)
    for number, (operation, label) in enumerate(zip(program.operations, part, strict=True)):
        if label == "once":
            continue
        whose = layer_of.get(number, label.split()[0])
        for value in operation.inputs:
            # What a layer hands on stays its own; what the ends do is there for both.
            if not isinstance(maker.get(value), int):
                users[joined[value]].add(whose)
        for value in operation.outputs:
            maker[value] = whose
            users[joined[value]].add(whose)
    owners = {}
    for value, together in enumerate(joined):
        those = users.get(together, set())
        if len(those) == 1 and "layer" not in those:
            owners[value] = next(iter(those))
    return owners


def _with_ends(
    program: TracedProgram, part: Sequence[str], owner: Mapping[int, Owner]
) -> tuple[str, ...]:
    """Give what runs once per step to the end of the program whose weights it is about."""
    labels = []
    for operation, label in zip(program.operations, part, strict=True):
        whose = {owner.get(value) for value in operation.values} if label == "once" else set()
        end = next((each for each in ("first", "last") if each in whose), "")
        labels.append(f"{label} {end}".rstrip())
    return tuple(labels)
