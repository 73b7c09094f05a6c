"""Where a value comes from: back through copies, casts, cuts, tuples, fusions and loops."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

from meshwright.hlo.instructions import Computation, Instruction, whole_numbers

# What hands on the elements of its first operand, some of them or all.
_PASSES_ON = frozenset(
    "bitcast bitcast-convert collective-permute collective-permute-done collective-permute-start "
    "convert copy copy-done copy-start dynamic-slice optimization-barrier reduce-precision reshape "
    "slice slice-done slice-start transpose all-gather all-gather-start all-gather-done "
    "fusion-done async-done async-update call-done".split()
)
_ENTERS = frozenset("fusion fusion-start call call-start async-start".split())
_MOST_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Origin:
    """An instruction and, where it makes a tuple, the element meant."""

    instruction: Instruction
    path: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Tracer:
    """Follows values through the computations of one program."""

    computations: Mapping[str, Computation]

    @functools.cached_property
    def callers(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                if "%" in instruction.rest:
                    for _, name in instruction.called:
                        found.setdefault(name, []).append(instruction)
        return found

    def origin(self, instruction: Instruction, path: tuple[int, ...] = ()) -> Origin:
        """The first instruction on the way back that does more than hand its operand on."""
        here = Origin(instruction, path)
        for _ in range(_MOST_STEPS):
            before = self._before(here.instruction, here.path)
            if before is None:
                return here
            here = before
        return here

    def _before(self, instruction: Instruction, path: tuple[int, ...]) -> Origin | None:
        opcode = instruction.opcode
        if opcode in _PASSES_ON:
            return Origin(self._operand(instruction, 0), path)
        if opcode == "get-tuple-element":
            index = whole_numbers(instruction.attribute("index"))
            return Origin(self._operand(instruction, 0), (*index, *path))
        if opcode == "tuple":
            return Origin(self._operand(instruction, path[0]), path[1:]) if path else None
        if opcode == "while":
            return self._through_loop(instruction, path)
        if opcode == "parameter":
            return self._from_caller(instruction, path)
        if opcode in _ENTERS and instruction.called:
            return Origin(self.computations[instruction.called[0][1]].root, path)
        if opcode == "custom-call" and '"ConcatBitcast"' in instruction.rest:
            return Origin(self._operand(instruction, 0), path)
        return None

    def _operand(self, instruction: Instruction, number: int) -> Instruction:
        where = self.computations[instruction.computation]
        return where.by_name[instruction.operands[number]]

    def _from_caller(self, parameter: Instruction, path: tuple[int, ...]) -> Origin | None:
        callers = self.callers.get(parameter.computation, [])
        if len(callers) != 1:
            return None
        caller = callers[0]
        if caller.opcode == "while":
            return self._through_loop(caller, path)
        if caller.opcode in _ENTERS:
            return Origin(self._operand(caller, int(parameter.inside)), path)
        return None

    def _through_loop(self, loop: Instruction, path: tuple[int, ...]) -> Origin | None:
        """A carried value that no round changes is what the loop was given."""
        if path and self._carried_unchanged(dict(loop.called)["body"], path[0]):
            return Origin(self._operand(loop, 0), path)
        return None

    def _carried_unchanged(self, body: str, index: int) -> bool:
        root = self.computations[body].root
        if root.opcode != "tuple":
            return False
        value = self._operand(root, index)
        while value.opcode in ("copy", "copy-done", "copy-start", "bitcast"):
            value = self._operand(value, 0)
        return (
            value.opcode == "get-tuple-element"
            and whole_numbers(value.attribute("index")) == (index,)
            and self._operand(value, 0).opcode == "parameter"
        )


# How many rounds a loop makes.
#
# GPU and CPU compilers write it down (`known_trip_count`). The TPU compiler does not; there the
# condition tells: a counter compared with a constant, the constant it starts from, the constant
# it grows by.


_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_WHOLE = re.compile(r"-?\d+")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


def trip_count(loop: Instruction, tracer: Tracer) -> int | None:
    """The rounds of a `while`, or `None` where nothing tells."""
    known = _KNOWN.search(loop.rest)
    return int(known[1]) if known else _derived(loop, tracer)


def _derived(loop: Instruction, tracer: Tracer) -> int | None:
    called = dict(loop.called)
    condition = tracer.computations[called["condition"]]
    test = tracer.origin(condition.root).instruction
    if test.opcode != "compare":
        return None
    left, right = _operands(test, tracer)
    direction = test.attribute("direction") or ""
    if _constant(left) is not None:
        left, right, direction = right, left, _MIRRORED.get(direction, "")
    bound = _constant(right)
    if bound is None or len(left.path) != 1:
        return None
    given = tracer.computations[loop.computation].by_name[loop.operands[0]]
    start = _constant(tracer.origin(given, left.path))
    step = _step(tracer.computations[called["body"]], left.path, tracer)
    if start is None or step is None:
        return None
    return rounds(start, step, bound, direction)


def rounds(start: int, step: int, bound: int, direction: str) -> int | None:
    """
    >>> rounds(0, 1, 6, "LT"), rounds(5, -1, 0, "GE"), rounds(0, 2, 5, "LT"), rounds(0, 0, 5, "LT")
    (6, 6, 3, None)
    """
    last = bound + {"LE": 1, "GE": -1}.get(direction, 0)
    upwards = direction in ("LT", "LE") or (direction == "NE" and bound > start)
    if direction not in _MIRRORED or step == 0 or upwards != (step > 0):
        return None
    return max(0, -((start - last) // step))


def _operands(instruction: Instruction, tracer: Tracer) -> list[Origin]:
    where = tracer.computations[instruction.computation]
    return [tracer.origin(operand) for operand in where.operands(instruction)]


def _constant(origin: Origin) -> int | None:
    instruction = origin.instruction
    if instruction.opcode != "constant" or not _WHOLE.fullmatch(instruction.inside):
        return None
    return int(instruction.inside)


def _step(body: Computation, path: tuple[int, ...], tracer: Tracer) -> int | None:
    """What a round adds to the counter."""
    growth = tracer.origin(body.root, path).instruction
    if growth.opcode not in ("add", "subtract"):
        return None
    sign = 1 if growth.opcode == "add" else -1
    for origin in _operands(growth, tracer):
        number = _constant(origin)
        if number is not None:
            return sign * number
    return None


# How often each computation runs: loops multiplied, branches counted once each.


@dataclasses.dataclass(frozen=True)
class Runs:
    """A number of runs. `at_most`: it stands in a branch that may not be taken. `at_least`: it
    stands in a loop whose number of rounds is unknown and was counted as one.

    >>> print(Runs(6), Runs(6, at_most=True), Runs(6, at_least=True), Runs(6, True, True))
    6 <=6 >=6 ~6
    """

    count: int
    at_most: bool = False
    at_least: bool = False

    def __str__(self) -> str:
        sign = {(True, False): "<=", (False, True): ">=", (True, True): "~"}
        return sign.get((self.at_most, self.at_least), "") + str(self.count)

    def __add__(self, other: Runs) -> Runs:
        return Runs(
            self.count + other.count,
            self.at_most or other.at_most,
            self.at_least or other.at_least,
        )

    def __mul__(self, other: Runs) -> Runs:
        return Runs(
            self.count * other.count,
            self.at_most or other.at_most,
            self.at_least or other.at_least,
        )


_ONCE = Runs(1)
_PERHAPS = Runs(1, at_most=True)


def all_runs(tracer: Tracer, entry: str) -> dict[str, Runs]:
    """Runs of every computation. One that is applied to elements (of a sum, a sort) counts once
    for the instruction that applies it."""
    calls = {
        name: [
            (called, per_call(how, instruction, tracer))
            for instruction in computation.instructions
            if "%" in instruction.rest
            for how, called in instruction.called
        ]
        for name, computation in tracer.computations.items()
    }
    runs = {entry: _ONCE}
    for name in _callers_first(calls, entry):
        for called, factor in calls[name]:
            added = runs[name] * factor
            runs[called] = runs[called] + added if called in runs else added
    return runs


def per_call(how: str, instruction: Instruction, tracer: Tracer) -> Runs:
    """How often an instruction calls one of its computations."""
    if instruction.opcode == "while":
        rounds = trip_count(instruction, tracer)
        if rounds is None:
            return Runs(1, at_least=True)
        return Runs(rounds + 1 if how == "condition" else rounds)
    return _PERHAPS if instruction.opcode == "conditional" else _ONCE


def _callers_first(calls: Mapping[str, list[tuple[str, Runs]]], entry: str) -> list[str]:
    """Computations so that each comes after all that call it."""
    done: dict[str, None] = {}
    pending: list[tuple[str, bool]] = [(entry, False)]
    while pending:
        name, seen = pending.pop()
        if seen:
            done.setdefault(name)
        elif name not in done:
            pending.append((name, True))
            pending += [(called, False) for called, _ in calls[name]]
    return list(reversed(done))
