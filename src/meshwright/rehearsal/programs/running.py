"""How often each computation runs: loops multiplied, branches counted once each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshwright.rehearsal.programs.instructions import Instruction
from meshwright.rehearsal.programs.loops import trip_count
from meshwright.rehearsal.programs.tracing import Tracer


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
