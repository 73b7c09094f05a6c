"""Pass 4: the program of each task: which values it takes, gives, and adds up over microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from meshwright._compat import Atom, Eqn, Var, is_literal
from meshwright.pipelines.reductions import is_total
from meshwright.pipelines.staged_program import NO_STAGE, StageKey, variables_read
from meshwright.pipelines.stages import StageProgram
from meshwright.schedules.types import TaskKind

TaskKey = tuple[str, int]  # (the letters of a TaskKind, stage): what a schedule's tasks are made of
Sum = tuple[int, int]  # (result, part): a result may be added up in parts, one per stage


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The equations of one task.

    `eqns` begins with `recomputed`, which other tasks may compute too. `outs` are what other tasks
    take and results of single microbatches; `sums` are values, made here or taken as inputs, that
    the task adds to accumulators.
    """

    kind: str
    stage: int
    eqns: tuple[Eqn, ...]
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    sums: dict[Sum, Var]
    recomputed: tuple[Eqn, ...]

    @property
    def name(self) -> str:
        """As it is called in traces and messages: `F0`."""
        return f"{self.kind}{self.stage}"


# Pass 4, programs of tasks.
#
# In: equations by stage, and the tasks that the schedule has. Out: one `Program` per task.
# Invariant: every input of a program is an operand of the region, a constant, or an output of
# another program for the same microbatch; nothing but what others need is an output. Example: stage
# 1 of mean((stage_end(x @ a) @ b) ** 2) with B and W split:
#     F1  h, b -> y            y = dot h b; l = ...    sums: l
#     B1  y, b -> dy, dh       dy = ...; dh = dot dy b
#     W1  h, dy -> nothing     db = dot h dy           sums: db


def programs(stages: StageProgram, tasks: Iterable[TaskKey]) -> dict[TaskKey, Program]:
    """Return the programs of the tasks that a schedule names."""
    keys = sorted(set(tasks))  # every process builds the same plan, and a set has no order
    own = {key: _equations(stages, *key) for key in keys}
    again = {key: recomputed(stages, variables_read(own[key])) for key in keys}
    computed = {key: {var for eqn in own[key] for var in eqn.outvars} for key in keys}
    sums = {key: _sums(stages, key, computed) for key in keys}
    ins = {}
    for key in keys:
        body = [*again[key], *own[key]]
        defined = {var for eqn in body for var in eqn.outvars}
        used = dict.fromkeys([*variables_read(body), *sums[key].values()])
        ins[key] = tuple(var for var in used if var not in defined)
    # Only now: what a task gives is what the inputs of all others ask for.
    results = _results(stages) | _gradients(stages)
    by_task = {}
    for key in keys:
        wanted = results.union(*(ins[other] for other in keys if not _exclusive(key, other)))
        outs = tuple(var for eqn in own[key] for var in eqn.outvars if var in wanted)
        eqns = (*again[key], *own[key])
        by_task[key] = Program(*key, eqns, ins[key], outs, sums[key], tuple(again[key]))
    return by_task


def _equations(stages: StageProgram, kind: str, stage: int) -> list[Eqn]:
    """Return the equations of a task, without those that it computes again."""
    if kind == TaskKind.FORWARD:
        return stages.eqns.get((TaskKind.FORWARD, stage), [])
    backward = stages.eqns.get((TaskKind.BACKWARD, stage), [])
    if kind == TaskKind.BACKWARD:
        return backward
    urgent = _urgent(stages, stage)
    return [eqn for eqn in backward if (id(eqn) in urgent) == (kind == TaskKind.INPUT_GRADIENT)]


def _urgent(stages: StageProgram, stage: int) -> set[int]:
    """Return the equations (by id) of a backward that other stages wait for: its B, not its W."""
    key = (TaskKind.BACKWARD, stage)
    others = [eqn for at, eqns in stages.eqns.items() if at != key for eqn in eqns]
    needed = set(variables_read(others)) | _results(stages)
    urgent = set()
    for eqn in reversed(stages.eqns.get(key, [])):
        if any(var in needed for var in eqn.outvars):
            urgent.add(id(eqn))
            needed.update(variables_read([eqn]))
    return urgent


def _sums(stages: StageProgram, key: TaskKey, computed: dict[TaskKey, set[Var]]) -> dict[Sum, Var]:
    """Return what a task adds up: reduced results and parts of gradients that it makes.

    What no task of the stage makes, an operand as it came, is added up by its F, B or BW.
    """
    kind, stage = key
    sums = {}
    for number, (at, var) in all_sums(stages).items():
        if at[1] != stage or (at[0] == TaskKind.FORWARD) != (kind == TaskKind.FORWARD):
            continue
        made_by_none = not any(var in computed[other] for other in computed if other[1] == stage)
        if var in computed[key] or (made_by_none and kind != TaskKind.WEIGHT_GRADIENT):
            sums[number] = var
    return sums


def all_sums(stages: StageProgram) -> dict[Sum, tuple[StageKey, Var]]:
    """Return every value that is added up over microbatches, and its stage."""
    maker = {var: at for at, eqns in stages.eqns.items() for e in eqns for var in e.outvars}
    sums = {}
    for number, (atom, how) in enumerate(zip(stages.outs, stages.region.reductions, strict=True)):
        if is_total(how) and not is_literal(atom) and atom in maker:
            sums[number, 0] = maker[atom], atom
    first = len(stages.outs)
    for number, parts in enumerate(stages.grads if is_total(stages.region.gradient or "") else ()):
        for part, (at, var) in enumerate(parts):
            if at != NO_STAGE:
                sums[first + number, part] = at, var
    return sums


def _results(stages: StageProgram) -> set[Atom]:
    """Return values of single microbatches that leave the tasks: joined, or carried on."""
    return {
        atom
        for atom, how in zip(stages.outs, stages.region.reductions, strict=True)
        if not is_total(how) and not is_literal(atom)
    }


def _gradients(stages: StageProgram) -> set[Atom]:
    """Return parts of gradients of single microbatches that leave the tasks: those stacked."""
    if is_total(stages.region.gradient or "mean"):
        return set()
    return {part for parts in stages.grads for at, part in parts if at != NO_STAGE}


def _exclusive(key: TaskKey, other: TaskKey) -> bool:
    """Whether two tasks never run for the same microbatch, or are the same.

    A schedule may have BW for some microbatches and B and W for others: neither feeds the other.
    """
    kinds = (key[0], other[0])
    whole = TaskKind.BACKWARD in kinds and TaskKind.FORWARD not in kinds
    return key == other or (key[1] == other[1] and whole)


def recomputed(stages: StageProgram, needed: Sequence[Var]) -> list[Eqn]:
    """Return the recomputable equations that these variables come from, in order."""
    eqns: dict[int, Eqn] = {}
    visited: set[int] = set()

    def add_maker(var: Var) -> None:
        eqn = stages.recomputable.get(var)
        if eqn is None or id(eqn) in visited:
            return
        visited.add(id(eqn))
        for operand in variables_read([eqn]):
            add_maker(operand)
        eqns[id(eqn)] = eqn

    for var in needed:
        add_maker(var)
    return list(eqns.values())
