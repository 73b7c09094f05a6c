"""Dataflow of an HLO program: where a value comes from, back through copies, tuples, fusions and
loops (`Dataflow`); how many trips a loop makes and how often each computation runs (`count_runs`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

from meshwright._show import short_repr
from meshwright._text import plural
from meshwright.hlo.instructions import Computation, Instruction, integers

# Opcodes whose result consists of elements of their first operand, some of them or all.
_FORWARDS = frozenset(
    "bitcast bitcast-convert collective-permute collective-permute-done collective-permute-start "
    "convert copy copy-done copy-start dynamic-slice optimization-barrier reduce-precision reshape "
    "slice slice-done slice-start transpose all-gather all-gather-start all-gather-done "
    "fusion-done async-done async-update call-done".split()
)
_COPIES = frozenset("bitcast copy copy-done copy-start optimization-barrier".split())
# Opcodes whose result is the root of the computation they call.
_CALLS = frozenset("fusion fusion-start call call-start async-start".split())
# No chain in a real program is as long; a text whose instructions form a cycle must not hang us.
_MOST_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Origin:
    """An instruction and, if it makes a tuple, the element that is meant."""

    instruction: Instruction
    path: tuple[int, ...] = ()


# Following a value back.
# Input: an instruction (and the element of its tuple). Output: the `Origin` it consists of.
# Invariant: the value consists of elements of the origin, of this device or (after a collective) of
# others, changed only in type, order and place; where that cannot be shown, e.g. if there are two
# callers or a loop changes the value, the search ends. Operands after the first are not followed.
# Example: from %y it goes to %w, across a fusion, a tuple and a cast:
#   %f   (p: f32[4]) { %p = parameter(0)  ROOT %c = bf16[4] convert(%p) }
#   main             { %t = tuple(%w, %b)  %g = get-tuple-element(%t), index=0
#                      %y = bf16[4] fusion(%g), calls=%f }


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataflow:
    """Follows values through the computations of one program."""

    computations: Mapping[str, Computation]

    @functools.cached_property
    def callers(self) -> dict[str, list[Instruction]]:
        """`{computation: the instructions that call it}`."""
        callers: dict[str, list[Instruction]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for _, name in instruction.called:
                    callers.setdefault(name, []).append(instruction)
        return callers

    def origin(self, instruction: Instruction, path: tuple[int, ...] = ()) -> Origin:
        """Return the first instruction on the way back that does more than forward its operand."""
        origin = Origin(instruction, path)
        for _ in range(_MOST_STEPS):
            before = self._before(origin.instruction, origin.path)
            if before is None:
                return origin
            origin = before
        return origin

    def __repr__(self) -> str:
        return short_repr(self, plural(len(self.computations), "computation"))

    def _before(self, instruction: Instruction, path: tuple[int, ...]) -> Origin | None:
        """Go back by one instruction; `None` if this one makes the value."""
        opcode = instruction.opcode
        if opcode in _FORWARDS:
            return Origin(self._operand(instruction, 0), path)
        if opcode == "get-tuple-element":
            index = integers(instruction.attribute("index"))
            return Origin(self._operand(instruction, 0), (*index, *path))
        if opcode == "tuple":
            return Origin(self._operand(instruction, path[0]), path[1:]) if path else None
        if opcode == "while":
            return self._through_loop(instruction, path)
        if opcode == "parameter":
            return self._from_caller(instruction, path)
        if opcode in _CALLS and instruction.called:
            return Origin(self.computations[instruction.called[0][1]].root, path)
        # A custom call of the TPU compiler that moves nothing.
        if opcode == "custom-call" and '"ConcatBitcast"' in instruction.attributes:
            return Origin(self._operand(instruction, 0), path)
        return None

    def _operand(self, instruction: Instruction, number: int) -> Instruction:
        computation = self.computations[instruction.computation]
        return computation.by_name[instruction.operands[number]]

    def _from_caller(self, parameter: Instruction, path: tuple[int, ...]) -> Origin | None:
        """Go from a parameter to the operand that its one caller passes."""
        callers = self.callers.get(parameter.computation, [])
        if len(callers) != 1:
            return None
        caller = callers[0]
        if caller.opcode == "while":
            return self._through_loop(caller, path)
        if caller.opcode in _CALLS:
            return Origin(self._operand(caller, int(parameter.operand_text)), path)
        return None

    def _through_loop(self, loop: Instruction, path: tuple[int, ...]) -> Origin | None:
        """Go to the loop's operand, if no trip changes this element of what it carries.

        Nor does a trip that copies it from another such element which it equals from the start: a
        table in HBM, say, fetched to VMEM for the next trip.
        """
        key = (loop.computation, loop.name, path)
        if key not in self._through:
            self._through[key] = None  # for loops in loops that ask for one another
            if path and self._is_unchanged(loop, path):
                self._through[key] = Origin(self._operand(loop, 0), path)
        return self._through[key]

    @functools.cached_property
    def _through(self) -> dict[tuple[str, str, tuple[int, ...]], Origin | None]:
        return {}

    def _is_unchanged(self, loop: Instruction, path: tuple[int, ...]) -> bool:
        body, operand = dict(loop.called)["body"], self._operand(loop, 0)
        source = self._copied_from(body, path[0])
        if source is None or source == path[0]:
            return source is not None
        first, other = self.origin(operand, path), self.origin(operand, (source, *path[1:]))
        same = first.instruction is other.instruction and first.path == other.path
        return same and self._copied_from(body, source) == source

    def _copied_from(self, body: str, index: int) -> int | None:
        """Return which element of its parameter a body copies to an element; `None` for others."""
        origin = Origin(self.computations[body].root, (index,))
        for _ in range(_MOST_STEPS):
            here = origin.instruction
            if here.opcode == "parameter" and here.computation == body:
                return origin.path[0] if len(origin.path) == 1 else None
            moves = here.opcode in _FORWARDS and here.opcode not in _COPIES
            before = None if moves else self._before(here, origin.path)
            if before is None:
                return None
            origin = before
        return None


# Trip counts.
# Input: a `while`. Output: how many times its body runs, or `None` if that is not known.
# GPU and CPU compilers write it down (`known_trip_count`). The TPU compiler does not; there it is
# derived from a counter that is compared with a constant; if start, step or bound are not constants
# the answer is `None`. It is exact if the body adds its constant to the counter itself, as those of
# `scan` and `fori_loop` do; that is not checked. Example, 6 trips:
#   init:      tuple(%zero, ...)             with %zero = constant(0)
#   condition: compare(%i, %six), direction=LT
#   body:      tuple(%next, ...)             with %next = add(%i, %one)

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INTEGER = re.compile(r"-?\d+")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


def trip_count(loop: Instruction, dataflow: Dataflow) -> int | None:
    """Return the trips of a `while`, or `None` if the text does not tell."""
    known = _KNOWN.search(loop.attributes)
    return int(known[1]) if known else _derive_trip_count(loop, dataflow)


def _derive_trip_count(loop: Instruction, dataflow: Dataflow) -> int | None:
    called = dict(loop.called)
    condition = dataflow.computations[called["condition"]]
    test = dataflow.origin(condition.root).instruction
    if test.opcode != "compare":
        return None
    left, right = _operand_origins(test, dataflow)
    direction = test.attribute("direction") or ""
    if _constant(left) is not None:
        left, right, direction = right, left, _MIRRORED.get(direction, "")
    bound = _constant(right)
    # The counter must be one element of what the loop carries.
    if bound is None or len(left.path) != 1:
        return None
    init = dataflow.computations[loop.computation].by_name[loop.operands[0]]
    start = _constant(dataflow.origin(init, left.path))
    step = _increment(dataflow.computations[called["body"]], left.path, dataflow)
    if start is None or step is None:
        return None
    return count_trips(start, step, bound, direction)


def count_trips(start: int, step: int, bound: int, direction: str) -> int | None:
    """Count the trips of `i = start; while i <direction> bound: i += step`.

    `None` if the counter moves away from its bound, so that the loop would end by overflow only.

    >>> count_trips(0, 1, 6, "LT"), count_trips(5, -1, 0, "GE"), count_trips(0, 2, 5, "LT")
    (6, 6, 3)
    >>> count_trips(0, 0, 5, "LT")
    """
    last = bound + {"LE": 1, "GE": -1}.get(direction, 0)
    upwards = direction in ("LT", "LE") or (direction == "NE" and bound > start)
    if direction not in _MIRRORED or step == 0 or upwards != (step > 0):
        return None
    return max(0, -((start - last) // step))


def _operand_origins(instruction: Instruction, dataflow: Dataflow) -> list[Origin]:
    computation = dataflow.computations[instruction.computation]
    return [dataflow.origin(operand) for operand in computation.operands(instruction)]


def _constant(origin: Origin) -> int | None:
    instruction = origin.instruction
    if instruction.opcode != "constant" or not _INTEGER.fullmatch(instruction.operand_text):
        return None
    return int(instruction.operand_text)


def _increment(body: Computation, path: tuple[int, ...], dataflow: Dataflow) -> int | None:
    """Return what a trip adds to the counter, if that is a constant."""
    update = dataflow.origin(body.root, path).instruction
    if update.opcode not in ("add", "subtract"):
        return None
    sign = 1 if update.opcode == "add" else -1
    for origin in _operand_origins(update, dataflow):
        number = _constant(origin)
        if number is not None:
            return sign * number
    return None


# Run counts.
# Input: the computations and the name of the entry. Output: how often each runs when the program
# runs once. Invariant: callers are counted before what they call, so every sum is complete when it
# is used; HLO has no recursion, so such an order exists.
# Example: a body of 3 trips inside one of 5 runs 15 times, its condition (3 + 1) * 5 = 20 times;
# both branches of a conditional run at most once, printed as `<=1`.


@dataclasses.dataclass(frozen=True)
class RunCount:
    """A number of runs.

    `at_most`: there is a branch above that may not be taken. `at_least`: there is a loop above
    whose trip count is unknown and was taken as one.

    >>> print(RunCount(6), RunCount(6, at_most=True), RunCount(6, at_least=True))
    6 <=6 >=6
    >>> print(RunCount(6, at_most=True, at_least=True))
    ~6
    """

    count: int
    at_most: bool = False
    at_least: bool = False

    def __str__(self) -> str:
        sign = {(True, False): "<=", (False, True): ">=", (True, True): "~"}
        return sign.get((self.at_most, self.at_least), "") + str(self.count)

    def __add__(self, other: RunCount) -> RunCount:
        return RunCount(
            self.count + other.count,
            self.at_most or other.at_most,
            self.at_least or other.at_least,
        )

    def __mul__(self, other: RunCount) -> RunCount:
        return RunCount(
            self.count * other.count,
            self.at_most or other.at_most,
            self.at_least or other.at_least,
        )


_ONCE = RunCount(1)
_AT_MOST_ONCE = RunCount(1, at_most=True)


def count_runs(dataflow: Dataflow, entry: str) -> dict[str, RunCount]:
    """Return how often each computation runs that is called from the entry.

    One that is applied to elements (of a reduction, a sort) counts once for the instruction that
    applies it.
    """
    calls = {
        name: [
            (called, runs_per_call(how, instruction, dataflow))
            for instruction in computation.instructions
            for how, called in instruction.called
        ]
        for name, computation in dataflow.computations.items()
    }
    runs = {entry: _ONCE}
    for name in _callers_first(calls, entry):
        for called, factor in calls[name]:
            more = runs[name] * factor
            runs[called] = runs[called] + more if called in runs else more
    return runs


def runs_per_call(how: str, instruction: Instruction, dataflow: Dataflow) -> RunCount:
    """Return how often one run of an instruction runs a computation that it calls as `how`."""
    if instruction.opcode == "while":
        trips = trip_count(instruction, dataflow)
        if trips is None:
            return RunCount(1, at_least=True)
        # The condition is evaluated once more, to find that the loop ends.
        return RunCount(trips + 1 if how == "condition" else trips)
    return _AT_MOST_ONCE if instruction.opcode == "conditional" else _ONCE


def _callers_first(calls: Mapping[str, list[tuple[str, RunCount]]], entry: str) -> list[str]:
    """Sort computations topologically, each after all that call it.

    With a stack of its own rather than by recursion: computations may be nested deeply.
    """
    finished: dict[str, None] = {}
    pending: list[tuple[str, bool]] = [(entry, False)]
    while pending:
        name, is_expanded = pending.pop()
        if is_expanded:
            finished.setdefault(name)
        elif name not in finished:
            pending.append((name, True))
            pending += [(called, False) for called, _ in calls[name]]
    return list(reversed(finished))
