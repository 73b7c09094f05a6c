"""What a step keeps in memory at its worst moments, before it is known how it is cut.

Arguments are there always, and donated results lie in their place. In between, what a product, a
loop or a lookup reads or makes is kept until its last use; what is computed elementwise is not,
since compilers compute it where it is used.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from meshwright.planning.dim_groups import HEAVY, REDUCING, VIEWS, Layout
from meshwright.planning.traced_program import Operation, TracedProgram

_MOMENTS = 8  # parts of a step of which each has a worst moment
_KEPT_MOMENTS = 4  # of them, the worst
_SMALL = 5e-4  # of all bytes: layouts with less are summed up
_MUCH, _MOST_SOURCES = 4, 3  # a source is at least a fourth of what is computed from it
# How many times its bytes what is temporary takes: compilers leave gaps between arrays (1 to 24 %
# of 14 steps for TPUs), and that of GPUs copies some of them into another order.
_GAPS = {"tpu": 1.03, "gpu": 1.08}
# Made anywhere, or another array seen otherwise.
_NOT_WRITTEN = VIEWS | {"broadcast_in_dim", "iota"}
_NOT_AGAIN = HEAVY | REDUCING | {None}  # not computed again where it is used

LiveSet = dict[Layout, float]  # bytes by layout, before they are cut


def kept_values(program: TracedProgram, family: str = "") -> set[int]:
    """Return the values that lie in memory at some time.

    `family`: of the chip whose own compiler it is. A TPU's compares rather than scatters where
    every row of zeros gets one number.
    """
    tpu = family == "tpu"
    kept = {*program.arguments, *program.results}

    def written(values: Iterable[int]) -> Iterator[int]:
        return (value for value in values if program.maker.get(value) not in _NOT_WRITTEN)

    for kind, inputs, outputs in program.events:
        if kind == "scan":  # a constant mask that a loop takes is made inside of it
            kept.update(written(inputs), outputs)
    for operation in program.operations:
        if operation.primitive in HEAVY and not (tpu and _is_one_hot(program, operation)):
            kept.update(operation.outputs)
            kept.update(written(operation.inputs))
        elif operation.primitive in REDUCING:
            kept.update(operation.outputs)
    return kept


def _is_one_hot(program: TracedProgram, operation: Operation) -> bool:
    """Whether an operation puts one number into every row of zeros: the gradient of a choice."""
    if operation.primitive != "scatter-add":
        return False
    zeros, _, updates = operation.inputs
    dims = operation.eqn.params["dimension_numbers"]
    return (
        program.maker.get(zeros) == "broadcast_in_dim"
        and not dims.update_window_dims
        and program.bytes[updates] * 16 <= program.bytes[operation.outputs[0]]
    )


def values_behind(program: TracedProgram, kept: set[int], readers: Collection[int]) -> set[int]:
    """Return the values in memory that some operations read, or compute from what they read."""
    sources, number = _Sources(program, kept), 0
    behind: set[int] = set()
    for kind, inputs, outputs in program.events:
        if kind == "op":
            if number in readers:
                behind.update(source for value in inputs for source in sources.of(value))
            number += 1
        for value in outputs:
            sources.add(value, inputs)
    return behind


# In: a program, what is kept of it, and which arguments are donated. Out: for the worst moments of
# a step, the bytes that are alive by layout. Invariant: a result takes the place of a donated
# argument of its shape and layout, others need room of their own.
def live_sets(
    program: TracedProgram,
    layout: Sequence[Layout],
    kept: set[int],
    donated: Sequence[bool],
    family: str = "",
) -> list[tuple[LiveSet, bool]]:
    """Return what is in memory at the worst moments of a step, by layout, and which are in loops.

    `family`: of the chip whose own compiler it is.
    """
    tpu = family == "tpu"
    sources = _Sources(program, kept)
    last: dict[int, int] = {}
    born: dict[int, int] = {}
    uses: dict[int, list[int]] = collections.defaultdict(list)
    for time, (_, inputs, outputs) in enumerate(program.events):
        for source in {source for value in inputs for source in sources.of(value)}:
            last[source] = time
            uses[source].append(time)
        for value in outputs:
            sources.add(value, inputs)
            born.setdefault(value, time)
            last[value] = time
    for value, time in _delayed(program):
        for source in sources.of(value):
            last[source] = max(last.get(source, 0), time)
    stored = _stored_bytes(program, kept, family)
    arguments, results = set(program.arguments), set(program.results)
    starts: dict[int, list[int]] = collections.defaultdict(list)
    ends: dict[int, list[int]] = collections.defaultdict(list)
    again: set[int] = set()  # computed again for later uses
    replaced = _replaced(program, kept, sources, born, last, uses, stored)
    operands = {
        value
        for operation in program.operations
        if operation.primitive == "dot_general"
        for value in operation.inputs
    }
    for value in sorted((kept & born.keys()) - results - arguments, key=lambda v: (born[v], v)):
        spans = [(born[value], last[value])]
        made_from = sources.behind(value)
        stays = all(last[each] >= last[value] and each not in again for each in made_from)
        if uses[value] and made_from and stays:
            # What it is computed from is there anyway: it need not wait for its later uses.
            again.add(value)
            first, *later = uses[value]
            spans = [(born[value], first), *((time, time) for time in later)]
            if tpu and value in operands:
                spans = []  # a TPU computes it in its products
        for start, end in spans:
            if end == replaced.get(value) and end == start + 1:
                continue  # made where it is used: only what is computed from it is written
            starts[start].append(value)
            ends[end - (end == replaced.get(value))].append(value)
    always = [*program.arguments, *_results_apart(program, layout, donated)]
    alive: set[int] = set()
    total = 0
    worst: dict[int, tuple[int, frozenset[int], bool]] = {}
    loops: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []  # around the event at hand
    for time, event in enumerate(program.events):
        if event[0] == "scan":
            loops = loops[:-1] if event in loops[-1:] else [*loops, event]
        alive.update(starts[time])
        total += sum(stored[value] for value in starts[time])
        part = time * _MOMENTS // len(program.events)
        if total > worst.get(part, (0,))[0]:
            worst[part] = (total, frozenset(alive), bool(loops))
        alive.difference_update(ends[time])
        total -= sum(stored[value] for value in ends[time])
    moments = sorted(worst.values(), key=lambda each: -each[0])[:_KEPT_MOMENTS]
    taken = [size * _GAPS.get(family, 1.0) for size in stored]
    for value in program.arguments:
        taken[value] = stored[value]
    if tpu:
        for stack, size in _converted_stacks(program).items():
            taken[stack] += size
    return [
        (_by_layout(taken, layout, [*values, *always]), looped)
        for _, values, looped in (moments or [(0, frozenset(), False)])
    ]


# In: a program. Out: operands that stay longer than their last use, and until when. A product that
# no other waits for, the gradient of a weight, is scheduled after the others of its body, or after
# the loops that follow it: compilers hide its exchange there, or begin it last. Its larger operand
# waits for it (or its sums do, before they are added up, which are about as large).
def _delayed(program: TracedProgram) -> list[tuple[int, int]]:
    products = {
        operation.outputs[0]: operation
        for operation in program.operations
        if operation.primitive in ("dot_general", "conv_general_dilated")
    }
    scans = [time for time, (kind, _, _) in enumerate(program.events) if kind == "scan"]
    ends: list[int] = []  # of the bodies around the event at hand, from the outermost
    awaited = set(program.carried)
    delayed = []
    last_loop = scans[-1] if scans else 0
    for time in range(len(program.events) - 1, -1, -1):
        kind, inputs, outputs = program.events[time]
        if kind == "scan":
            if ends and program.events[ends[-1]] == program.events[time]:
                ends.pop()
            else:
                ends.append(time)
            awaited.update(inputs)
            continue
        product = products.get(outputs[0]) if outputs else None
        if product is not None and awaited.isdisjoint(outputs):
            operand = max(product.inputs, key=lambda value: (program.bytes[value], value))
            delayed.append((operand, ends[-1] if ends else last_loop))
        if product is not None or not awaited.isdisjoint(outputs):
            awaited.update(inputs)
    return delayed


def _replaced(
    program: TracedProgram,
    kept: set[int],
    sources: _Sources,
    born: Mapping[int, int],
    last: Mapping[int, int],
    uses: Mapping[int, Sequence[int]],
    stored: Sequence[int],
) -> dict[int, int]:
    """Return the values in whose place another comes that is computed from them, and when.

    Elementwise, in the same shape, at their last use; or at their only one.
    """
    replaced: dict[int, int] = {}
    for value, time in born.items():
        if value not in kept:
            continue
        for source in sources.behind(value):
            same = program.shapes[source] == program.shapes[value] or len(uses[source]) == 1
            here = last[source] == time > born.get(source, time)
            if here and same and stored[source] >= stored[value] and source not in replaced:
                replaced[source] = time
                break
    return replaced


class _Sources:
    """What must be in memory for each value: itself, or what it is computed from where it is used.

    Of a chain of elementwise operations only the end is written; its beginning stays until then.
    """

    def __init__(self, program: TracedProgram, kept: set[int]):
        self.bytes, self.kept, self.maker = program.bytes, kept, program.maker
        self._from: dict[int, tuple[int, ...]] = {}

    def of(self, value: int) -> tuple[int, ...]:
        """The values in memory that one is computed from; a kept one is there itself."""
        return (value,) if value in self.kept else self._from.get(value, ())

    def behind(self, value: int) -> tuple[int, ...]:
        """The values in memory that a kept one could be computed from again, elementwise."""
        return () if self.maker.get(value) in _NOT_AGAIN else self._from.get(value, ())

    def add(self, value: int, inputs: Sequence[int]) -> None:
        """Note what a value is computed from: the largest few."""
        found = {source for each in inputs for source in self.of(each)} - {value}
        large = [each for each in found if self.bytes[each] * _MUCH >= self.bytes[value]]
        large.sort(key=lambda each: (-self.bytes[each], each))
        self._from[value] = tuple(large[:_MOST_SOURCES])


def _stored_bytes(program: TracedProgram, kept: set[int], family: str) -> list[int]:
    """Return the bytes of values as the compilers of chips store them.

    A TPU multiplies float32 in bf16, and what is computed for products alone is written as that.
    """
    stored = list(program.bytes)
    if family != "tpu":
        return stored
    others: set[int] = {*program.arguments, *program.results}
    for kind, inputs, outputs in program.events:
        if kind == "scan":
            others.update(inputs, outputs)
    for operation in program.operations:
        if operation.primitive not in ("dot_general", "conv_general_dilated"):
            others.update(operation.inputs)
        if operation.primitive in HEAVY:
            others.update(operation.outputs)
    for value in kept - others:
        if program.dtypes[value] == "float32":
            stored[value] //= 2
    return stored


def _converted_stacks(program: TracedProgram) -> dict[int, int]:
    """Return stacked arguments that a TPU converts whole before the loop, and the bytes of that."""
    return {
        stack: program.bytes[stack] * program.bytes[narrow] // program.bytes[part]
        for operation in program.operations
        if operation.primitive == "convert_element_type"
        for part, narrow in [(operation.inputs[0], operation.outputs[0])]
        for stack in [program.stack_of.get(part)]
        if stack in program.arguments and program.bytes[narrow] < program.bytes[part]
    }


LANES, _ROWS = 128, 8  # a TPU's tile


@functools.lru_cache(maxsize=65536)
def tile_padding(dims: tuple[int, ...]) -> float:
    """How many times its bytes an array takes on a TPU: in tiles of 8 x 128 of its last two dims.

    The compiler chooses which dims are the last ones, so that the padding is small.

    >>> tile_padding((16, 256, 512))
    1.0
    >>> round(tile_padding((16, 56, 56, 32, 8)), 2)
    2.29
    """
    large = [dim for dim in dims if dim > 1]
    if len(large) < 2:
        return 1.0

    def padded(dim: int, tile: int) -> float:
        return -(-dim // tile) * tile / dim

    return min(
        padded(last, LANES) * padded(second, _ROWS)
        for n, last in enumerate(large)
        for m, second in enumerate(large)
        if n != m
    )


def _results_apart(
    program: TracedProgram, layout: Sequence[Layout], donated: Sequence[bool]
) -> Iterable[int]:
    """Return results that no donated argument of the same shape makes room for."""
    room = collections.Counter(
        (layout[value], program.dtypes[value])
        for value, gone in zip(program.arguments, donated, strict=True)
        if gone
    )
    apart = []
    for value in dict.fromkeys(program.results):
        key = (layout[value], program.dtypes[value])
        if room[key]:
            room[key] -= 1
        elif value not in program.arguments:
            apart.append(value)
    return apart


def _by_layout(stored: Sequence[float], layout: Sequence[Layout], values: Sequence[int]) -> LiveSet:
    total: dict[Layout, float] = collections.defaultdict(float)
    for value in values:
        total[layout[value]] += stored[value]
    small = _SMALL * sum(total.values())
    result: LiveSet = {}
    for key, size in total.items():
        place = key if size >= small else ()
        result[place] = result.get(place, 0.0) + size
    return result
