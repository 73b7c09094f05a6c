"""`live_sets`: what a step keeps in memory at its worst moments, before it is known how it is cut.

Arguments are there always, and donated results lie in their place. In between, what lies in memory
at all (`stored_values`) does so from when it is made to its last use.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

from meshwright.planning.dim_groups import BYTES, FLOPS, HEAVY, Layout
from meshwright.planning.stored_values import (
    Sources,
    converted_stacks,
    looks_up,
    stored_bytes,
    written_images,
)
from meshwright.planning.traced_program import Operation, TracedProgram

_MOMENTS = 8  # parts of a step of which each has a worst moment
_KEPT_MOMENTS = 4  # of them, the worst
_LOOKUP = -1  # the number of the moment of a lookup
_SMALL = 5e-4  # of all bytes: layouts with less are summed up
# How many times its bytes what is temporary takes: compilers leave gaps between arrays (1 to 24 %
# of 14 steps for TPUs), and that of GPUs copies some of them into another order.
_GAPS = {"tpu": 1.02, "gpu": 1.12}
# How many times the time to fetch an array may pass between two of its uses, if a TPU's compiler
# is to keep it on the chip; what of these it keeps there at once, and the largest of them.
_FETCHES = 60.0
ON_CHIP, LARGEST_ON_CHIP = 60 * 2**20, 64 * 2**20

LiveSet = dict[Layout, float]  # bytes by layout, before they are cut
Use = tuple[Operation, int]  # an operation, and the number of its operand

During = Literal["step", "loop", "lookup"]


@dataclasses.dataclass(frozen=True)
class Moment:
    """What is in memory at one of the worst moments of a step.

    `during`: what may need more of it then, for itself: operations of the step, those of a loop, or
    a lookup in rows, as of the words that are right.
    `waiting`: arrays that are there for products that wait, or the sums of these in their place:
    layout, bytes and the products.
    `looked_up`: what a lookup in a table has made: layout, bytes and the lookup.
    `gathered`: operands that a TPU gathers once for several products, by the first of these.
    `passing`: of that, temporary arrays that a TPU may keep on the chip, where so many devices, a
    power of two, have a copy of them: by layout and that number, bytes of all, and how many arrays.
    """

    live: LiveSet
    during: During
    waiting: list[tuple[Layout, float, tuple[Operation, ...]]]
    looked_up: list[tuple[Layout, float, Operation]]
    gathered: list[Use]
    passing: dict[tuple[Layout, float], tuple[float, int]]


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
    stored = stored_bytes(program, kept, family)
    lives = _Lives(program, kept, stored, tpu)
    always = [*program.arguments, *_results_apart(program, layout, donated)]
    taken = [size * _GAPS.get(family, 1.0) for size in stored]
    for value in program.arguments:
        taken[value] = stored[value]
    if tpu:
        for stack, size in converted_stacks(program).items():
            taken[stack] += size
    clock = _Clock(program) if tpu else None
    tables = {
        operation.outputs[0]: operation
        for operation in program.operations
        if tpu and operation.primitive == "gather" and looks_up(operation) == "table"
    }
    result = []
    shared = list(_shared_operands(program, lives.delayed)) if tpu else []
    for time, values, during in _worst_moments(program, lives, stored):
        waiting = sorted(value for value in values if lives.waits(value, time))
        looked_up = sorted(value for value in values.difference(waiting) if value in tables)
        present = sorted(values.difference(waiting, looked_up))
        passing: dict[tuple[Layout, float], tuple[float, int]] = {}
        if clock is not None:
            for value in present:
                uses = lives.uses[value]
                copies = clock.copies(value, time, lives.born[value], uses, stored[value])
                total_here, count = passing.get((layout[value], copies), (0.0, 0))
                passing[layout[value], copies] = total_here + taken[value], count + 1
        live = _by_layout(taken, layout, [*present, *always])
        products = [(layout[v], taken[v], tuple(lives.products[v])) for v in waiting]
        rows = [(layout[v], taken[v], tables[v]) for v in looked_up]
        gathered = [use for first, last, use in shared if first <= time <= last]
        result.append(Moment(live, during, products, rows, gathered, passing))
    return result


class _Lives:
    """When the values of a program are made and used, and when they are in memory.

    `starts` and `ends`: by event, the values that come into memory there, and that leave it after.
    `products`: those that wait for each value.
    """

    def __init__(self, program: TracedProgram, kept: set[int], stored: Sequence[int], tpu: bool):
        sources = Sources(program, kept, written_images(program) if tpu else ())
        self.born: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.uses: dict[int, list[int]] = collections.defaultdict(list)
        for time, (_, inputs, outputs) in enumerate(program.events):
            for source in {source for value in inputs for source in sources.of(value)}:
                self.last[source] = time
                self.uses[source].append(time)
            for value in outputs:
                sources.add(value, inputs)
                self.born.setdefault(value, time)
                self.last[value] = time
        self._used = dict(self.last)  # until when it is there for what does not wait
        self.products: dict[int, list[Operation]] = collections.defaultdict(list)
        self.delayed = _delayed(program)
        for product, value, time in self.delayed:
            for source in sources.of(value):
                self._stays_until(source, time)
                self.products[source].append(product)
        late: set[int] = set()
        for value, time in _late_lookups(program):
            for source in (value, *sources.behind(value)):
                self._stays_until(source, time)
                late.add(source)
        self._replaced = _replaced(program, kept, sources, self, stored)
        self.starts: dict[int, list[int]] = collections.defaultdict(list)
        self.ends: dict[int, list[int]] = collections.defaultdict(list)
        temporary = (kept & self.born.keys()).difference(program.results, program.arguments)
        again: set[int] = set()  # computed again for later uses
        operands = {
            value
            for operation in program.operations
            if operation.primitive == "dot_general"
            for value in operation.inputs
        }
        for value in sorted(temporary, key=lambda value: (self.born[value], value)):
            made_from = () if value in late else sources.behind(value)
            stays = all(
                self.last[each] >= self.last[value] and each not in again for each in made_from
            )
            if not (made_from and stays and self.uses[value]):
                self._add(value, self.born[value], self.last[value])
                continue
            # What it is computed from is there anyway: it need not wait for its later uses.
            again.add(value)
            if tpu and value in operands:
                continue  # a TPU computes it in its products
            first, *later = self.uses[value]
            self._add(value, self.born[value], first)
            for time in later:
                self._add(value, time, time)

    def _stays_until(self, value: int, time: int) -> None:
        self.last[value] = max(self.last.get(value, 0), time)

    def _add(self, value: int, start: int, end: int) -> None:
        makes_room = end == self._replaced.get(value)
        if makes_room and end == start + 1:
            return  # made where it is used: only what is computed from it is written
        self.starts[start].append(value)
        self.ends[end - makes_room].append(value)

    def waits(self, value: int, time: int) -> bool:
        """Whether a value is there at an event for products alone that wait."""
        return value in self.products and time > self._used.get(value, 0)


# In: a program, when its values are in memory, and their bytes. Out: for parts of the step, and for
# lookups in rows, the event at which most bytes are alive, the worst first; with the values there.
def _worst_moments(
    program: TracedProgram, lives: _Lives, stored: Sequence[int]
) -> list[tuple[int, frozenset[int], During]]:
    """Find when most is in memory; one moment at least."""
    alive: set[int] = set()
    total = 0
    worst: dict[int, tuple[int, int, frozenset[int], During]] = {}
    lookups = _lookups_in_rows(program)
    loops: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []  # around the event at hand
    for time, event in enumerate(program.events):
        if event[0] == "scan":
            loops = loops[:-1] if event in loops[-1:] else [*loops, event]
        alive.update(lives.starts[time])
        total += sum(stored[value] for value in lives.starts[time])
        part = time * _MOMENTS // len(program.events)
        if total > worst.get(part, (0,))[0]:
            worst[part] = total, time, frozenset(alive), "loop" if loops else "step"
        if time in lookups and total > worst.get(_LOOKUP, (0,))[0]:
            worst[_LOOKUP] = total, time, frozenset(alive), "lookup"
        alive.difference_update(lives.ends[time])
        total -= sum(stored[value] for value in lives.ends[time])
    lookup = worst.pop(_LOOKUP, None)
    moments = sorted(worst.values(), key=lambda each: -each[0])[:_KEPT_MOMENTS]
    if lookup is not None:
        moments.append(lookup)
    return [moment[1:] for moment in moments] or [(0, frozenset(), "step")]


def _lookups_in_rows(program: TracedProgram) -> set[int]:
    """The events that look something up in every row by itself."""
    times = (time for time, (kind, _, _) in enumerate(program.events) if kind == "op")
    return {
        time
        for time, operation in zip(times, program.operations, strict=True)
        if looks_up(operation) == "rows" and operation.primitive == "gather"
    }


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


# In: a program. Out: operands that several products of a body read: when the first and the last of
# them run, the first, and the operand's number in it. What is gathered for the first is kept for
# the others: weights from a forward pass to its backward pass, rows for the gradients that wait for
# the end of a loop's body. Of a step that is no loop, these have their operands as they lie.
def _shared_operands(
    program: TracedProgram, delayed: Iterable[tuple[Operation, int, int]]
) -> Iterator[tuple[int, int, Use]]:
    ends = {id(product): until for product, _, until in delayed}
    uses: dict[tuple[int, int], list[tuple[int, Use]]] = collections.defaultdict(list)
    operations = iter(program.operations)
    for time, (kind, _, _) in enumerate(program.events):
        if kind != "op":
            continue
        operation = next(operations)
        until = ends.get(id(operation), time)
        if operation.primitive == "dot_general" and (until == time or operation.body):
            for number, value in enumerate(operation.inputs):
                uses[value, operation.body].append((until, (operation, number)))
    for found in uses.values():
        if len(found) > 1:
            times, read = zip(*found, strict=True)
            yield min(times), max(times), read[0]


def _products(program: TracedProgram) -> dict[int, Operation]:
    """The products and convolutions of a program, by what they make."""
    return {
        operation.outputs[0]: operation
        for operation in program.operations
        if operation.primitive in ("dot_general", "conv_general_dilated")
    }


# In: a program. Out: operands that stay longer than their last use, and until when. A product that
# no other waits for, the gradient of a weight, is scheduled after the others of its body, or after
# the loops that follow it: compilers hide its exchange there, or begin it last. Its larger operand
# waits for it, or its sums do, before they are added up, where these are smaller.
def _delayed(program: TracedProgram) -> list[tuple[Operation, int, int]]:
    products = _products(program)
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
    products = _products(program)
    awaited = set(program.carried)
    following = len(program.events) - 1
    for time in range(len(program.events) - 1, -1, -1):
        kind, inputs, outputs = program.events[time]
        is_product = bool(outputs) and outputs[0] in products
        if is_product:
            following = time
        if kind == "scan" or is_product or not awaited.isdisjoint(outputs):
            awaited.update(inputs)
        elif outputs and outputs[0] in lookups and program.maker.get(inputs[0]) == "slice":
            yield inputs[0], following - 1


def _replaced(
    program: TracedProgram,
    kept: Collection[int],
    sources: Sources,
    lives: _Lives,
    stored: Sequence[int],
) -> dict[int, int]:
    """Return the values in whose place another comes that is computed from them, and when.

    Elementwise, in the same shape, at their last use; or at their only one. Of as many bytes, or
    made where it is used, so that only what is computed from it is written.
    """
    replaced: dict[int, int] = {}
    for value, time in lives.born.items():
        if value not in kept:
            continue
        for source in sources.behind(value):
            same = program.shapes[source] == program.shapes[value] or len(lives.uses[source]) == 1
            here = lives.last[source] == time > lives.born.get(source, time)
            fused = time == lives.born.get(source, time) + 1
            fits = stored[source] == stored[value] or (fused and stored[source] > stored[value])
            if here and same and fits and source not in replaced:
                replaced[source] = time
                break
    return replaced


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
