"""`StagedProgram`: one microbatch's flat program with the stage of every equation; and pass 3.

The passes of `stages.py` fill and change its tables. Pass 3 says which stage makes each result,
keeps carried state, and adds up each part of a gradient.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright._compat import Atom, Eqn, Jaxpr, Var, is_literal
from meshwright.pipelines.trace_marks import Reduction, Region, stage_end_primitive, summed_dtype
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


# Pass 3a, the stages of results.
#
# In: equations with stages. Out: `outs` of which each is made by an equation in some stage's
# forward. Invariant: what is carried from one microbatch to the next is made in the stage that uses
# it, so that a microbatch never waits for a later stage of the one before. Example: with `return
# loss, 0.9 * state + mean(h)`, where stage 0 uses `state` and the last lines stand behind two stage
# ends, `mul`, `mean` and `add` move from F2 to F0.


def assign_result_stages(program: StagedProgram) -> None:
    """Give every result an equation in the forward of a stage, the right one where carried."""
    first_use = first_uses(program)
    stage_of = _assign_state_stages(program, first_use)
    carried = iter(program.state)
    computed = {var for eqn in program.eqns for var in eqn.outvars}
    for n, (atom, how) in enumerate(zip(program.outs, program.reductions, strict=True)):
        operand = next(carried) if how == "carry" else None
        stage = first_use.get(operand, 0) if operand is not None else 0
        wide = summed_dtype(atom.aval.dtype) if how in ("sum", "mean") else atom.aval.dtype
        widen = functools.partial(jnp.asarray, dtype=wide) if wide != atom.aval.dtype else None
        if is_literal(atom) or atom not in computed:
            # Recomputable, or an operand as it came. No stage has made it: the first in which all
            # that it comes from is at hand copies it.
            roots = [] if is_literal(atom) else sources(program, atom)
            stage = max(stage, *(first_use.get(root, 0) for root in roots), 0)
            program.outs[n] = add_copy(program, atom, (TaskKind.FORWARD, stage), widen or jnp.copy)
        elif operand is not None and stage_of[atom] < stage:
            program.outs[n] = add_copy(program, atom, (TaskKind.FORWARD, stage))
        elif widen is not None:
            program.outs[n] = add_copy(program, atom, (TaskKind.FORWARD, stage_of[atom]), widen)


def first_uses(program: StagedProgram) -> dict[Var, int]:
    """Return the first stage whose forward uses each operand or constant.

    Equations that only update carried state do not count.
    """
    updates, stages = set(_state_updates(program)), dict[Var, int]()
    for n, (eqn, at) in enumerate(zip(program.eqns, program.stage_of_eqn, strict=True)):
        if n in updates or at is None or at[0] != TaskKind.FORWARD:
            continue
        for root in {root for var in variables(eqn.invars) for root in sources(program, var)}:
            stages[root] = min(at[1], stages.get(root, at[1]))
    return stages


def _assign_state_stages(program: StagedProgram, first_use: dict[Var, int]) -> dict[Var, int]:
    """Move updates of state to the stage that uses it; return the stages of forward variables."""
    stage_of = {
        var: at[1]
        for eqn, at in zip(program.eqns, program.stage_of_eqn, strict=True)
        if at is not None and at[0] == TaskKind.FORWARD
        for var in eqn.outvars
    }
    stage_of.update({var: first_use[var] for var in program.state if var in first_use})
    updates = _state_updates(program)
    # Top down: an update runs as early as its operands allow.
    for n in updates:
        eqn = program.eqns[n]
        for var in eqn.outvars:
            stage_of.pop(var, None)
        known = [stage_of[var] for var in variables(eqn.invars) if var in stage_of]
        if known:
            stage_of.update(dict.fromkeys(eqn.outvars, max(known)))
    # Bottom up: state that nothing but its own update uses is updated where it meets other values.
    for n in reversed(updates):
        eqn = program.eqns[n]
        users = [m for m in updates if set(eqn.outvars) & set(variables(program.eqns[m].invars))]
        if not any(var in stage_of for var in eqn.outvars):
            met = max((at[1] for m in users if (at := program.stage_of_eqn[m])), default=0)
            stage_of.update(dict.fromkeys(eqn.outvars, met))
        stage = max(stage_of[var] for var in eqn.outvars if var in stage_of)
        program.stage_of_eqn[n] = (TaskKind.FORWARD, stage)
    return stage_of


def _state_updates(program: StagedProgram) -> list[int]:
    """List forward equations that make only what is carried on to the next microbatch."""
    outs = list(zip(program.outs, program.reductions, strict=True))
    state = set(variables(atom for atom, how in outs if how == "carry"))
    others = set(variables(atom for atom, how in outs if how != "carry"))
    others.update(variables(program.grads))
    positions = []
    for n in reversed(range(len(program.eqns))):
        eqn, at = program.eqns[n], program.stage_of_eqn[n]
        if at is None:
            continue
        backward = at[0] == TaskKind.BACKWARD
        if backward or eqn.effects or any(var in others for var in eqn.outvars):
            others.update(variables(eqn.invars))
        elif any(var in state for var in eqn.outvars):
            state.update(variables(eqn.invars))
            positions.append(n)
    return positions[::-1]


# Pass 3b, gradients in parts.
#
# In: `grads`, one variable per parameter. Out: for each its parts, (stage, variable), whose sum it
# is. Invariant: a part is made in its own stage's backward, so that accumulating it sends nothing;
# a sum over stages is added up once per step, not once per microbatch. Example: a weight that
# stages 0 and 2 use has the gradient `g = add_any g2 g0`, which stands in BW0 and would send g2
# there for every microbatch. `g` is dropped, and the parts are ((BW2, g2), (BW0, g0)).

Parts = tuple[tuple[StageKey, Atom], ...]
# f(a + b) = f(a) + f(b) for these, so that they may be applied to each part.
_LINEAR = ("convert_element_type", "transpose", "reshape", "neg", "squeeze", "copy")


@dataclasses.dataclass(frozen=True, eq=False)
class _Dataflow:
    """The position of the equation that makes a variable, and how often a variable is used."""

    maker: dict[Var, int]
    uses: collections.Counter[Var]


def split_gradients_by_stage(program: StagedProgram) -> tuple[Parts, ...]:
    """Return the parts of every gradient; equations that only added them up are dropped."""
    flow = _Dataflow(
        {var: n for n, eqn in enumerate(program.eqns) for var in eqn.outvars},
        collections.Counter(
            [var for eqn in program.eqns for var in variables(eqn.invars)]
            + variables((*program.outs, *program.grads))
        ),
    )
    return tuple(_parts(program, flow, atom) for atom in program.grads)


def _parts(program: StagedProgram, flow: _Dataflow, atom: Atom) -> Parts:
    """Take a sum over stages apart; so a cast, a transpose and the like of such a sum."""
    if is_literal(atom):
        return ((NO_STAGE, atom),)
    if atom in program.recomputable or atom in program.roots:
        return _part_of_recomputable(program, atom)
    if atom not in flow.maker:  # the batch itself, copied: a task must make it
        key = (TaskKind.BACKWARD, 0)
        return ((key, add_copy(program, atom, key)),)
    n = flow.maker[atom]
    eqn, at = program.eqns[n], program.stage_of_eqn[n]
    if at is None:
        return ((NO_STAGE, atom),)
    operands = variables(eqn.invars)
    adds = eqn.primitive is _compat.known_primitives()["add"]
    linear = eqn.primitive.name in _LINEAR and len(operands) == 1
    # A sum that something else uses too, such as an auxiliary output, must be computed as it is.
    if (adds or linear) and flow.uses[atom] <= 1:
        parts = tuple(part for operand in operands for part in _parts(program, flow, operand))
        if len({stage for (_, stage), _ in parts}) > 1:
            program.stage_of_eqn[n] = None
            if adds:
                # The 1.0 of `loss + w` is a part, too.
                literals = [atom for atom in eqn.invars if is_literal(atom)]
                return (*parts, *((NO_STAGE, literal) for literal in literals))
            return tuple((key, add_equation(program, eqn, key, part)) for key, part in parts)
    return ((at, atom),)


def _part_of_recomputable(program: StagedProgram, var: Var) -> Parts:
    """Return one part for a gradient that is the same in every microbatch (a weight decay)."""
    roots = sources(program, var)
    if not roots:
        return ((NO_STAGE, var),)
    first_use = first_uses(program)
    key = (TaskKind.BACKWARD, max(first_use.get(root, 0) for root in roots))
    return ((key, add_copy(program, var, key)),)


# Equations that a program does not have, but a stage needs.


def add_copy(
    program: StagedProgram, atom: Atom, key: StageKey, how: Callable[[Any], Any] = jnp.copy
) -> Var:
    """Add an equation to a stage that computes `how` of a value; returns its variable."""
    # A lambda of its own each time: JAX caches traces by function, with their variables.
    (eqn,) = jax.make_jaxpr(lambda x: how(x))(_shape_of(atom)).jaxpr.eqns
    program.added.setdefault(key, []).append(eqn.replace(invars=[atom]))
    return eqn.outvars[0]


def add_equation(program: StagedProgram, eqn: Eqn, key: StageKey, operand: Atom) -> Var:
    """Add an equation to a stage that is like `eqn` with another operand; returns its variable.

    Without a stage it is recomputable, as its operand is.
    """
    (fresh,) = jax.make_jaxpr(lambda x: x)(_shape_of(eqn.outvars[0])).jaxpr.invars
    added = eqn.replace(invars=[operand], outvars=[fresh])
    if key == NO_STAGE:
        program.recomputable[fresh] = added
    else:
        program.added.setdefault(key, []).append(added)
    return fresh


def _shape_of(atom: Atom) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)  # type: ignore[no-untyped-call]
