"""`StagedProgram`: one microbatch's flat program and, for every equation, its stage.

The passes of `stages.py` and `stage_outputs.py` fill and change its tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from meshwright._compat import Atom, Eqn, Jaxpr, Var, is_literal
from meshwright.pipelines.trace_marks import Reduction, Region, stage_end_primitive
from meshwright.pipelines.tracing import is_rematerialized
from meshwright.schedules.types import TaskKind
from meshwright.trees.walk import is_key

# The forward or the whole backward of a stage: (FORWARD or BACKWARD, stage). Which part of the
# backward is a schedule's B and which its W is decided later, in `task_programs.py`.
StageKey = tuple[TaskKind, int]
# Of values that no stage computes: they are the same for every microbatch.
NO_STAGE: StageKey = (TaskKind.FORWARD, -1)


@dataclasses.dataclass(frozen=True, eq=False)
class StagedProgram:
    """A flat program while passes 2 and 3 split it into stages; their result is a `StageProgram`.

    An equation that depends on `roots` alone (parameters, constants, whole operands, random keys)
    is *recomputable*: it has no stage, and every task that needs it computes it again. All others
    are in `eqns`, with their stages beside them in `stage_of_eqn`.
    """

    jaxpr: Jaxpr
    stages: int
    roots: frozenset[Var]
    # Operands that are carried from microbatch to microbatch.
    state: tuple[Var, ...]
    # How the results `outs` leave the microbatches; `grads` are added up.
    reductions: tuple[Reduction, ...]
    outs: list[Atom]
    grads: list[Atom]
    # Equations without stage ends, in program order, and their stages: None where one is dropped.
    eqns: list[Eqn] = dataclasses.field(default_factory=list)
    stage_of_eqn: list[StageKey | None] = dataclasses.field(default_factory=list)
    # Equations that the jaxpr does not have; they run last in their stage.
    added: dict[StageKey, list[Eqn]] = dataclasses.field(default_factory=dict)
    # A variable and the recomputable equation that makes it.
    recomputable: dict[Var, Eqn] = dataclasses.field(default_factory=dict)
    # A result of a stage end, and the variable it stands for: stage ends are taken out, so that
    # users on both sides read the same variable.
    alias: dict[Var, Atom] = dataclasses.field(default_factory=dict)
    # Variables that pass a stage end: they stay where they are computed.
    pinned: set[Var] = dataclasses.field(default_factory=set)
    # The stage of a variable as its users see it. The result of a stage end belongs to the next
    # stage, although the variable that it stands for is made in the one before.
    stage_of_var: dict[Var, StageKey] = dataclasses.field(default_factory=dict)
    source_cache: dict[Var, frozenset[Var]] = dataclasses.field(default_factory=dict)


def make_staged_program(region: Region, jaxpr: Jaxpr) -> StagedProgram:
    """Return a region's flat program with empty tables."""
    roles = list(zip(jaxpr.invars, region.roles, strict=True))
    shared = {var for var, role in roles if role in ("whole", "params") or _is_key(var)}
    values = len(region.reductions)
    return StagedProgram(
        jaxpr,
        sum(map(_ends_stage, jaxpr.eqns)) + 1,
        frozenset(jaxpr.constvars) | shared,
        tuple(var for var, role in roles if role == "carry"),
        region.reductions,
        list(jaxpr.outvars[:values]),
        list(jaxpr.outvars[values:]),
    )


def stage_names(jaxpr: Jaxpr) -> tuple[str | None, ...]:
    """Return the names that stage ends give to their stages; the last stage has none."""
    return (*(eqn.params["name"] for eqn in jaxpr.eqns if _ends_stage(eqn)), None)


def equations_by_stage(program: StagedProgram) -> dict[StageKey, list[Eqn]]:
    """Return the equations of every stage: in program order, then those that were added."""
    by_stage: dict[StageKey, list[Eqn]] = {}
    for eqn, at in zip(program.eqns, program.stage_of_eqn, strict=True):
        if at is not None:
            by_stage.setdefault(at, []).append(eqn)
    for at, added in program.added.items():
        by_stage.setdefault(at, []).extend(added)
    return by_stage


def resolve_alias(program: StagedProgram, atom: Atom) -> Atom:
    """Return the variable before all stage ends, which only hand it over."""
    return atom if is_literal(atom) else program.alias.get(atom, atom)


def sources(program: StagedProgram, var: Var) -> frozenset[Var]:
    """Return the roots that a recomputable variable comes from; any other comes from itself."""
    if var not in program.source_cache:
        eqn = program.recomputable.get(var)
        inner = [] if eqn is None else [sources(program, v) for v in variables(eqn.invars)]
        program.source_cache[var] = frozenset([var]) if eqn is None else frozenset().union(*inner)
    return program.source_cache[var]


def variables(operands: Iterable[Atom]) -> list[Var]:
    """Return the operands that are not literals, as often as they stand there."""
    return [atom for atom in operands if not is_literal(atom)]


def variables_read(eqns: Sequence[Eqn]) -> list[Var]:
    """Return every variable that equations read, once, in order."""
    return list(dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars)))


def is_rematerialized_end(eqn: Eqn) -> bool:
    """Return whether a stage end is one that a remat passes a second time, in the backward."""
    return is_rematerialized(eqn) and not eqn.params["backward"]


def _ends_stage(eqn: Eqn) -> bool:
    return (
        eqn.primitive is stage_end_primitive()
        and not eqn.params["backward"]
        and not is_rematerialized_end(eqn)
    )


def _is_key(var: Var) -> bool:
    return is_key(var.aval.dtype)
