"""What a step keeps in memory at its worst moments, before it is known how it is cut.

Arguments are there always, and donated results lie in their place. In between, what a product, a
loop or a lookup reads or makes is kept until its last use; what is computed elementwise is not,
since compilers compute it where it is used.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from meshwright._compat_lowering import equations, is_on_host
from meshwright.planning.dim_groups import BYTES, FLOPS, HEAVY, REDUCING, VIEWS, Layout
from meshwright.planning.traced_program import Operation, TracedProgram
from meshwright.trees.walk import bits

_MOMENTS = 8  # parts of a step of which each has a worst moment
_KEPT_MOMENTS = 4  # of them, the worst
_LOOKUP = -1  # the number of the moment of a lookup
_NEARLY_ALL = 0.9  # of a product's result
_SMALL = 5e-4  # of all bytes: layouts with less are summed up
_MUCH, _MOST_SOURCES = 4, 3  # a source is at least a fourth of what is computed from it
# How many times its bytes what is temporary takes: compilers leave gaps between arrays (1 to 24 %
# of 14 steps for TPUs), and that of GPUs copies some of them into another order.
_GAPS = {"tpu": 1.04, "gpu": 1.12}
# Made anywhere, or another array seen otherwise.
_NOT_WRITTEN = VIEWS | {"broadcast_in_dim", "iota"}
_EXPENSIVE = frozenset({"logistic", "exp", "tanh", "div", "rsqrt", "erf"})
_ELEMENTWISE = _EXPENSIVE | {"mul", "sub", "add", "integer_pow", "square", "max"}
_FAR = 0.05  # part of a step's events between a forward pass and its backward pass
# How many times the time to fetch an array may pass between two of its uses, if a TPU's compiler
# is to keep it on the chip; what of these it keeps there at once, and the largest of them.
_FETCHES = 60.0
ON_CHIP, LARGEST_ON_CHIP = 60 * 2**20, 64 * 2**20
_NOT_AGAIN = HEAVY | REDUCING | {None}  # not computed again where it is used

LiveSet = dict[Layout, float]  # bytes by layout, before they are cut


During = Literal["step", "loop", "lookup"]


@dataclasses.dataclass(frozen=True)
class Moment:
    """What is in memory at one of the worst moments of a step.

    `during`: what may need more of it then, for itself: operations of the step, those of a loop, or
    a lookup in rows, as of the words that are right.
    `waiting`: arrays that are there for products that wait, or the sums of these in their place:
    layout, bytes and the products.
    `looked_up`: what a lookup in a table has made: layout, bytes and the lookup.
    `passing`: of that, temporary arrays that a TPU may keep on the chip, where so many devices, a
    power of two, have a copy of them: by layout and that number, bytes of all, and how many arrays.
    """

    live: LiveSet
    during: During
    waiting: list[tuple[Layout, float, tuple[Operation, ...]]]
    looked_up: list[tuple[Layout, float, Operation]]
    passing: dict[tuple[Layout, float], tuple[float, int]]


def constants_of(closed: Any) -> dict[str, int]:
    """Return what a step closes over: types of the arrays and their bytes, the largest first.

    Compilers write them into the program, and no sharding goes through it: each device has all.
    """
    held = list(closed.consts)
    for eqn, *_ in equations(closed):
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                held += getattr(inner, "consts", ())
    sizes = collections.Counter[str]()
    for const in {id(const): const for const in held}.values():
        aval: Any = jax.typeof(const)
        if hasattr(aval, "dtype") and not is_on_host(aval):
            size = math.prod(aval.shape) * bits(aval.dtype) // 8
            sizes[f"{aval.dtype}{list(aval.shape)}"] += size
    return dict(sizes.most_common())


def kept_values(program: TracedProgram, family: str = "") -> set[int]:
    """Return the values that lie in memory at some time.

    `family`: of the chip whose own compiler it is. A TPU's compares rather than scatters where
    every row of zeros gets one number.
    """
    tpu = family == "tpu"
    kept = {*program.arguments, *program.results}

    views = _product_slices(program)

    def written(values: Iterable[int]) -> Iterator[int]:
        return (
            value
            for value in values
            if program.maker.get(value) not in _NOT_WRITTEN and value not in views
        )

    for kind, inputs, outputs in program.events:
        if kind == "scan":  # a constant mask that a loop takes is made inside of it
            kept.update(written(inputs), outputs)
    for operation in program.operations:
        if operation.primitive in HEAVY and not (tpu and _is_one_hot(program, operation)):
            kept.update(operation.outputs)
            kept.update(written(operation.inputs))
        elif operation.primitive in REDUCING:
            kept.update(operation.outputs)
    return kept | _written_images(program) if tpu else kept


def _product_slices(program: TracedProgram) -> set[int]:
    """Slices of nearly all that a product makes: it is made so."""
    return {
        operation.outputs[0]
        for operation in program.operations
        if operation.primitive == "slice"
        and program.maker.get(operation.inputs[0]) == "dot_general"
        and program.bytes[operation.outputs[0]] > _NEARLY_ALL * program.bytes[operation.inputs[0]]
    }


# In: a program. Out: elementwise results of images that a TPU writes once, and reads in the
# backward pass, where it would compute others again: those seen in groups of channels (GroupNorm),
# which lie otherwise than what convolutions read, and what is expensive to compute.
def _written_images(program: TracedProgram) -> set[int]:
    shapes = {
        program.shapes[value]
        for operation in program.operations
        if operation.primitive == "conv_general_dilated"
        for value in (operation.inputs[0], operation.outputs[0])
    }
    counts = {math.prod(shape) for shape in shapes}
    dtypes = {
        program.dtypes[operation.outputs[0]]
        for operation in program.operations
        if operation.primitive == "conv_general_dilated"
    }
    uses: collections.Counter[int] = collections.Counter()
    last: dict[int, int] = {}
    for time, (_, inputs, _) in enumerate(program.events if shapes else ()):
        uses.update(set(inputs))
        last.update((value, time) for value in inputs)
    far = len(program.events) * _FAR
    return {
        value
        for time, (kind, _, outputs) in enumerate(program.events if shapes else ())
        for value in outputs
        if kind == "op" and uses[value] > 1 and last[value] - time > far
        if program.maker[value] in (_EXPENSIVE if program.shapes[value] in shapes else _ELEMENTWISE)
        if math.prod(program.shapes[value]) in counts and program.dtypes[value] in dtypes
    }


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
) -> list[Moment]:
    """Return what is in memory at the worst moments of a step.

    `family`: of the chip whose own compiler it is.
    """
    tpu = family == "tpu"
    sources = _Sources(program, kept, _written_images(program) if tpu else ())
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
    used = dict(last)  # until when it is there for what does not wait
    waits: dict[int, list[Operation]] = collections.defaultdict(list)
    for product, value, time in _delayed(program):
        for source in sources.of(value):
            last[source] = max(last.get(source, 0), time)
            waits[source].append(product)
    late: set[int] = set()
    for value, time in _late_lookups(program):
        for source in (value, *sources.behind(value)):
            last[source] = max(last.get(source, 0), time)
            late.add(source)
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
        if uses[value] and made_from and stays and value not in late:
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
    worst: dict[int, tuple[int, int, frozenset[int], During]] = {}
    lookups = _lookups_in_rows(program)
    loops: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []  # around the event at hand
    for time, event in enumerate(program.events):
        if event[0] == "scan":
            loops = loops[:-1] if event in loops[-1:] else [*loops, event]
        alive.update(starts[time])
        total += sum(stored[value] for value in starts[time])
        part = time * _MOMENTS // len(program.events)
        moment = total, time, frozenset(alive)
        if total > worst.get(part, (0,))[0]:
            worst[part] = (*moment, "loop" if loops else "step")
        if time in lookups and total > worst.get(_LOOKUP, (0,))[0]:
            worst[_LOOKUP] = (*moment, "lookup")
        alive.difference_update(ends[time])
        total -= sum(stored[value] for value in ends[time])
    lookup = worst.pop(_LOOKUP, None)
    moments = sorted(worst.values(), key=lambda each: -each[0])[:_KEPT_MOMENTS]
    if lookup is not None:
        moments.append(lookup)
    taken = [size * _GAPS.get(family, 1.0) for size in stored]
    for value in program.arguments:
        taken[value] = stored[value]
    if tpu:
        for stack, size in _converted_stacks(program).items():
            taken[stack] += size
    clock = _Clock(program) if tpu else None
    tables = {
        operation.outputs[0]: operation
        for operation in program.operations
        if tpu and operation.primitive == "gather" and looks_up(operation) == "table"
    }
    result = []
    for _, time, values, during in moments or [(0, 0, frozenset[int](), "step")]:
        waiting = sorted(value for value in values if value in waits and time > used.get(value, 0))
        looked_up = sorted(value for value in values.difference(waiting) if value in tables)
        present = sorted(values.difference(waiting, looked_up))
        passing: dict[tuple[Layout, float], tuple[float, int]] = {}
        if clock is not None:
            for value in present:
                copies = clock.copies(value, time, born[value], uses[value], stored[value])
                total_here, count = passing.get((layout[value], copies), (0.0, 0))
                passing[layout[value], copies] = total_here + taken[value], count + 1
        live = _by_layout(taken, layout, [*present, *always])
        products = [(layout[v], taken[v], tuple(waits[v])) for v in waiting]
        rows = [(layout[v], taken[v], tables[v]) for v in looked_up]
        result.append(Moment(live, during, products, rows, passing))
    return result


def _lookups_in_rows(program: TracedProgram) -> set[int]:
    """The events that look something up in every row by itself."""
    times = (time for time, (kind, _, _) in enumerate(program.events) if kind == "op")
    return {
        time
        for time, operation in zip(times, program.operations, strict=True)
        if looks_up(operation) == "rows" and operation.primitive == "gather"
    }


def looks_up(operation: Operation) -> str:
    """Whether an operation looks up in, or adds to, every row by itself, or a table for all."""
    if operation.primitive not in ("gather", "scatter-add", "scatter"):
        return ""
    dims = operation.eqn.params["dimension_numbers"]
    return "rows" if dims.operand_batching_dims else "table"


# In: a program. Out: which values a TPU's compiler may keep on the chip at some event. It keeps one
# there from one use to the next if that is not much longer than to fetch it would take, so that
# what a backward pass waits for lies in HBM. Times are those of one device: of many, each takes its
# part of the work, and of the array, unless several have a copy of the same part.
class _Clock:
    """When each event of a step begins, all runs of loops counted."""

    def __init__(self, program: TracedProgram):
        self.runs: dict[int, int] = {}
        self.begins = [0.0]
        operations = iter(program.operations)
        for kind, _, outputs in program.events:
            seconds = 0.0
            if kind == "op":
                operation = next(operations)
                self.runs.update((value, operation.times) for value in outputs)
                if operation.primitive in HEAVY:
                    moved = sum(program.bytes[value] for value in operation.values)
                    seconds = operation.times * max(operation.flops / FLOPS, moved / BYTES)
            self.begins.append(self.begins[-1] + seconds)

    def copies(self, value: int, time: int, born: int, uses: Sequence[int], size: float) -> float:
        """How many devices must have a copy of a value for it to stay on the chip at an event."""
        at = bisect.bisect_right(uses, time)
        before = max(born, uses[at - 1]) if at else born
        after = uses[at] if at < len(uses) else time
        waits = (self.begins[after] - self.begins[before]) / self.runs.get(value, 1)
        longest = _FETCHES * size / BYTES
        if waits <= longest:
            return 1.0
        return 2.0 ** math.ceil(math.log2(waits / longest)) if longest else math.inf


# In: a program. Out: operands that stay longer than their last use, and until when. A product that
# no other waits for, the gradient of a weight, is scheduled after the others of its body, or after
# the loops that follow it: compilers hide its exchange there, or begin it last. Its larger operand
# waits for it, or its sums do, before they are added up, where these are smaller.
def _delayed(program: TracedProgram) -> list[tuple[Operation, int, int]]:
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
            delayed.append((product, operand, ends[-1] if ends else last_loop))
        if product is not None or not awaited.isdisjoint(outputs):
            awaited.update(inputs)
    return delayed


# In: a program. Out: what is looked up for the loss alone, and until when it stays. Nothing waits
# for such a lookup, the logits of the right words, so it comes after the gradient of what it looks
# up in. Example: logits divided by a temperature, which are written for that alone.
def _late_lookups(program: TracedProgram) -> Iterator[tuple[int, int]]:
    lookups = {
        operation.outputs[0]: operation
        for operation in program.operations
        if operation.primitive == "gather" and looks_up(operation) == "rows"
    }
    if not lookups:
        return
    products = {
        operation.outputs[0]
        for operation in program.operations
        if operation.primitive in ("dot_general", "conv_general_dilated")
    }
    made_by = program.maker
    awaited = set(program.carried)
    following = len(program.events) - 1
    for time in range(len(program.events) - 1, -1, -1):
        kind, inputs, outputs = program.events[time]
        is_product = kind == "op" and not products.isdisjoint(outputs)
        if is_product:
            following = time
        if kind == "scan" or is_product or not awaited.isdisjoint(outputs):
            awaited.update(inputs)
        elif outputs and outputs[0] in lookups and made_by.get(inputs[0]) == "slice":
            yield inputs[0], following - 1


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
            if here and same and stored[source] == stored[value] and source not in replaced:
                replaced[source] = time
                break
    return replaced


class _Sources:
    """What must be in memory for each value: itself, or what it is computed from where it is used.

    Of a chain of elementwise operations only the end is written; its beginning stays until then.
    """

    def __init__(self, program: TracedProgram, kept: set[int], once: Collection[int] = ()):
        self.bytes, self.kept, self.maker = program.bytes, kept, program.maker
        self.once = once  # kept ones that are never computed again
        self._from: dict[int, tuple[int, ...]] = {}

    def of(self, value: int) -> tuple[int, ...]:
        """The values in memory that one is computed from; a kept one is there itself."""
        return (value,) if value in self.kept else self._from.get(value, ())

    def behind(self, value: int) -> tuple[int, ...]:
        """The values in memory that a kept one could be computed from again, elementwise."""
        if value in self.once or self.maker.get(value) in _NOT_AGAIN:
            return ()
        return self._from.get(value, ())

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
_GROUPED = 5  # dims of images whose channels are seen in groups


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

    # Groups of channels, beside the channels of each, are never the lanes.
    groups = len(large) - 2 if len(large) >= _GROUPED else -1
    return min(
        padded(last, LANES) * padded(second, _ROWS)
        for n, last in enumerate(large)
        for m, second in enumerate(large)
        if n not in (m, groups)
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
