"""A stage's tasks as programs: which values each takes, gives and adds up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from meshwright import _compat
from meshwright.pipelines.staged_program import FREE, StageKey, vars_of
from meshwright.pipelines.stages import StageProgram

TaskKey = tuple[str, int]  # (kind of task, stage)
Sum = tuple[int, int]  # (result, part): a result may be added up in parts, one per stage


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Equations of one task. `sums` are the values that it adds up over microbatches."""

    kind: str
    stage: int
    eqns: tuple[Any, ...]
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    sums: dict[Sum, Any]
    cloned: tuple[Any, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}{self.stage}"


def programs(cut: StageProgram, kinds: Iterable[TaskKey]) -> dict[TaskKey, Program]:
    """The programs of the tasks that a schedule names."""
    keys = sorted(set(kinds))
    own = {key: _equations(cut, *key) for key in keys}
    cloned = {key: recomputed(cut, vars_of(own[key])) for key in keys}
    made = {key: {var for eqn in own[key] for var in eqn.outvars} for key in keys}
    sums = {key: _sums(cut, key, made) for key in keys}
    ins = {}
    for key in keys:
        body = [*cloned[key], *own[key]]
        defined = {var for eqn in body for var in eqn.outvars}
        used = dict.fromkeys([*vars_of(body), *sums[key].values()])
        ins[key] = tuple(var for var in used if var not in defined)
    results = _results(cut)
    found = {}
    for key in keys:
        others = (set(ins[other]) for other in keys if not _instead(key, other))
        wanted = results.union(*others)
        outs = tuple(var for eqn in own[key] for var in eqn.outvars if var in wanted)
        eqns = (*cloned[key], *own[key])
        found[key] = Program(*key, eqns, ins[key], outs, sums[key], tuple(cloned[key]))
    return found


def _equations(cut: StageProgram, kind: str, stage: int) -> list[Any]:
    if kind == "F":
        return cut.eqns.get(("F", stage), [])
    backward = cut.eqns.get(("B", stage), [])
    if kind == "BW":
        return backward
    urgent = _urgent(cut, stage)
    return [eqn for eqn in backward if (id(eqn) in urgent) == (kind == "B")]


def _urgent(cut: StageProgram, stage: int) -> set[int]:
    """Of a backward, the equations that other stages wait for."""
    backward = cut.eqns.get(("B", stage), [])
    others = [eqn for home, eqns in cut.eqns.items() if home != ("B", stage) for eqn in eqns]
    needed = set(vars_of(others)) | _results(cut)
    found = set()
    for eqn in reversed(backward):
        if any(var in needed for var in eqn.outvars):
            found.add(id(eqn))
            needed.update(vars_of([eqn]))
    return found


def _sums(cut: StageProgram, key: TaskKey, made: dict[TaskKey, set[Any]]) -> dict[Sum, Any]:
    """What a task adds up: reduced results and parts of gradients that it makes."""
    kind, stage = key
    found = {}
    for number, (home, var) in all_sums(cut).items():
        if home[1] != stage or (home[0] == "F") != (kind == "F"):
            continue
        nobody = not any(var in made[other] for other in made if other[1] == stage)
        if var in made[key] or (nobody and kind != "W"):
            found[number] = var
    return found


def all_sums(cut: StageProgram) -> dict[Sum, tuple[StageKey, Any]]:
    """Every value that is added up over microbatches, and its home."""
    makers = {var: home for home, eqns in cut.eqns.items() for e in eqns for var in e.outvars}
    found = {}
    for number, (var, how) in enumerate(zip(cut.outs, cut.region.reductions, strict=True)):
        if how in ("mean", "sum", "max") and _is_var(var) and var in makers:
            found[number, 0] = makers[var], var
    first = len(cut.outs)
    for number, parts in enumerate(cut.grads):
        for part, (home, var) in enumerate(parts):
            if home != FREE:
                found[first + number, part] = home, var
    return found


def _results(cut: StageProgram) -> set[Any]:
    """Values of single microbatches that leave the tasks: stacked, or carried on."""
    return {
        var
        for var, how in zip(cut.outs, cut.region.reductions, strict=True)
        if how in ("stack", "carry") and _is_var(var)
    }


def _instead(key: TaskKey, other: TaskKey) -> bool:
    """Whether two tasks never run for the same microbatch, or are the same."""
    whole = "BW" in (key[0], other[0]) and "F" not in (key[0], other[0])
    return key == other or (key[1] == other[1] and whole)


def recomputed(cut: StageProgram, variables: Sequence[Any]) -> list[Any]:
    """The free equations that these variables come from, in order."""
    found: dict[int, Any] = {}
    visited: set[int] = set()

    def fetch(var: Any) -> None:
        eqn = cut.free.get(var)
        if eqn is None or id(eqn) in visited:
            return
        visited.add(id(eqn))
        for inner in vars_of([eqn]):
            fetch(inner)
        found[id(eqn)] = eqn

    for var in variables:
        fetch(var)
    return list(found.values())


def _is_var(var: Any) -> bool:
    return not isinstance(var, _compat.jaxprs().Literal)
