"""Pass 2: split a flat program into stages: every equation goes to a forward or a backward.

Program order decides: what stands between two stage ends belongs to the stage between them,
forwards and backwards. In the last stage the forward is what the results come from. The exceptions,
each for a reason:

- What depends only on parameters, constants and random keys is *recomputable*: every task that
  needs it computes it again. Else "cast all parameters first" would tie everything to stage 0.
- A backward equation that touches one stage only goes back to that stage, however late it comes:
  the cast of a gradient, at the very end, belongs where the gradient is made.
- A stage end that a remat passes again ends no stage: behind it stands the value that was handed
  over the first time. Where one trace was passed several times (a function called twice), it is
  not known which that was, and the recomputed value is used.
- What depends only on the batch, before the first stage end, moves to the stage that needs it
  (labels).
- An equation that no result needs is dropped, unless it has effects. What a remat computes again
  goes to the backward that needs it.
- What is computed only to be carried on stays in the stage that uses what is carried, and a
  carried value that is made earlier is copied into that stage.
- A result that is recomputable, or an operand as it came, is copied by the forward of the first
  stage by which all that it comes from has been used. Booleans that are to be summed are copied as
  integers.
- A gradient that is a sum over stages stays in parts, one per stage; so does a cast, a transpose
  and the like of such a sum. A gradient that is recomputable is copied by one stage's backward.

The last three are pass 3, in `staged_program.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from meshwright import _compat
from meshwright._compat import Atom, Eqn, Var
from meshwright.errors import PipelineError
from meshwright.pipelines.staged_program import (
    Parts,
    StagedProgram,
    StageKey,
    assign_result_stages,
    equations_by_stage,
    is_rematerialized_end,
    make_staged_program,
    resolve_alias,
    split_gradients_by_stage,
    stage_names,
    variables,
    variables_read,
)
from meshwright.pipelines.trace_marks import Region, stage_end_primitive
from meshwright.pipelines.tracing import inline, is_rematerialized
from meshwright.schedules.types import TaskKind


@dataclasses.dataclass(frozen=True, eq=False)
class StageProgram:
    """The result of passes 2 and 3: a region's equations by stage, with stage ends taken out.

    Immutable, unlike the `StagedProgram` that those passes work on. Equations of a stage are in
    program order.

    `recomputable` maps a variable to the equation that every user computes again. `outs` are the
    region's results, `grads` the partial sums of each parameter's gradient: (stage, variable).
    `names` are the stages', None where the user gave none.
    """

    region: Region
    stages: int
    invars: tuple[Var, ...]
    consts: dict[Var, Any]
    eqns: dict[StageKey, list[Eqn]]
    recomputable: dict[Var, Eqn]
    outs: tuple[Atom, ...]
    grads: tuple[Parts, ...]
    names: tuple[str | None, ...]

    @property
    def parameters(self) -> tuple[Var, ...]:
        """The variables that stand for trained parameters."""
        return tuple(
            var
            for var, role in zip(self.invars, self.region.roles, strict=True)
            if role == "params"
        )


def split_into_stages(region: Region) -> StageProgram:
    """Split a region at its stage ends: passes 2 and 3."""
    closed = inline(region.jaxpr, remat=True)
    program = make_staged_program(region, closed.jaxpr)
    assign_stages_by_order(program)
    # Results and gradients come last: they ask which stage's equations use an operand first, so
    # these must be in place, and dead ones gone.
    sink_to_first_use(program)
    eliminate_dead_and_delay_remat(program)
    assign_result_stages(program)
    grads = split_gradients_by_stage(program)
    return StageProgram(
        region,
        program.stages,
        tuple(closed.jaxpr.invars),
        dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)),
        equations_by_stage(program),
        program.recomputable,
        tuple(program.outs),
        grads,
        stage_names(closed.jaxpr),
    )


# Pass 2a, stages by program order.
#
# In: a flat jaxpr. Out: `eqns`, `stage_of_eqn`, `recomputable`. Invariant: no equation of `eqns` is
# a stage end or reads the result of one, and an equation comes after all that it reads. Example,
# for the loss mean((stage_end(x @ a) @ b) ** 2):
#     h = dot x a        F0           dy = mul y ...       BW1 (no result comes from it)
#     i = stage_end h    taken out    db = dot h dy        BW1
#     y = dot i b        F1           dh = dot dy b        BW1
#     l = ...            F1           di = stage_end dh    taken out (backward=True)
#                                     da = dot x dh        BW0


def assign_stages_by_order(program: StagedProgram) -> None:
    """Read the program from top to bottom; take out recomputable equations and stage ends."""
    here: StageKey = (TaskKind.FORWARD, 0)
    # The stages that each stage end has closed and the backward not yet reopened: a list, since a
    # stage end that is traced once may be passed several times.
    closed: dict[int, list[int]] = {}
    ends: dict[int, list[Eqn]] = {}
    last, forwards = (TaskKind.FORWARD, program.stages - 1), _forward_equations(program)
    used = {*variables([*program.outs, *program.grads]), *variables_read(program.jaxpr.eqns)}
    for n, eqn in enumerate(program.jaxpr.eqns):
        if eqn.primitive is not stage_end_primitive():
            is_backward = here == last and program.grads and n not in forwards
            _assign(program, eqn, (TaskKind.BACKWARD, here[1]) if is_backward else here)
        elif is_rematerialized_end(eqn):
            _pass_again(program, eqn, ends[eqn.params["number"]], here)
        else:
            _refuse_unused(eqn, used)
            _refuse_integers(program, eqn)
            _refuse_inner_gradient(program, eqn, here, closed)
            if not eqn.params["backward"]:
                ends.setdefault(eqn.params["number"], []).append(eqn)
            here = _stage_beyond(eqn, here, closed)
            _hand_over(program, eqn, here)
    program.outs[:] = [resolve_alias(program, atom) for atom in program.outs]
    program.grads[:] = [resolve_alias(program, atom) for atom in program.grads]


def _forward_equations(program: StagedProgram) -> set[int]:
    """Return the equations that results come from: in the last stage, they are its forward."""
    needed = set(variables(program.outs))
    positions = set()
    for n in reversed(range(len(program.jaxpr.eqns))):
        eqn = program.jaxpr.eqns[n]
        if eqn.effects or any(var in needed for var in eqn.outvars):
            positions.add(n)
            needed.update(variables(eqn.invars))
    return positions


def _refuse_unused(eqn: Eqn, used: set[Var]) -> None:
    """Refuse a stage end that nothing comes after: it divides nothing."""
    if not eqn.params["backward"] and not used.intersection(eqn.outvars):
        raise PipelineError(
            f"stage_end(...) at {eqn.params['where']}: its result is not used, so the next stage "
            "takes nothing from this one. Write y = stage_end(y), and go on with y."
        )


def _refuse_integers(program: StagedProgram, eqn: Eqn) -> None:
    """Refuse a stage end through which no gradient can come back."""
    if program.grads and not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):
        raise PipelineError(
            f"stage_end(...) at {eqn.params['where']}: no array of floating-point numbers to go on "
            "with, so no gradient comes back. Pass what the next stage is computed from."
        )


def _refuse_inner_gradient(
    program: StagedProgram, eqn: Eqn, here: StageKey, closed: dict[int, list[int]]
) -> None:
    """Refuse stage ends that are not passed all forwards, then all backwards.

    That is so when the function takes a gradient itself, through a stage end.
    """
    back = eqn.params["backward"]
    if (back and program.grads and closed.get(eqn.params["number"])) or (
        not back and here[0] == TaskKind.FORWARD
    ):
        return
    raise PipelineError(
        f"stage_end(...) at {eqn.params['where']} is inside of a gradient that the function itself "
        "takes, which cannot be cut. Move stage_end outside of it."
    )


def _stage_beyond(eqn: Eqn, here: StageKey, closed: dict[int, list[int]]) -> StageKey:
    """Return the stage of what comes after a stage end; `closed` is brought up to date."""
    passes = closed.setdefault(eqn.params["number"], [])
    if not eqn.params["backward"]:
        passes.append(here[1])
        return (TaskKind.FORWARD, here[1] + 1)
    stage = passes.pop()
    # The backward goes from the last stage to the first; it never goes back to a later one.
    ahead = here[0] == TaskKind.FORWARD or stage < here[1]
    return (TaskKind.BACKWARD, stage) if ahead else here


def _hand_over(program: StagedProgram, eqn: Eqn, here: StageKey) -> None:
    """Take a stage end out: beyond it, its values keep their old names."""
    for before, after in zip(eqn.invars, eqn.outvars, strict=True):
        origin = resolve_alias(program, before)
        program.alias[after] = origin
        program.stage_of_var[after] = here
        program.pinned.update(variables([origin]))


def _pass_again(program: StagedProgram, eqn: Eqn, ends: Sequence[Eqn], here: StageKey) -> None:
    """Take out a stage end that a remat passes again.

    Its users read the value of the first pass. If the trace was passed several times, it is not
    known which of `ends` was that one, and they read the recomputed value.
    """
    for n, (before, after) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
        first = ends[0].outvars[n] if len(ends) == 1 else None
        program.alias[after] = resolve_alias(program, before if first is None else first)
        program.stage_of_var[after] = here if first is None else program.stage_of_var[first]


def _assign(program: StagedProgram, eqn: Eqn, here: StageKey) -> None:
    """Make an equation recomputable, or give it the stage `here`.

    A backward equation that touches one stage only goes back to that one.
    """
    plain = eqn.replace(invars=[resolve_alias(program, atom) for atom in eqn.invars])
    if not eqn.effects and all(
        var in program.recomputable or var in program.roots for var in variables(plain.invars)
    ):
        program.recomputable.update(dict.fromkeys(eqn.outvars, plain))
        return
    if here[0] == TaskKind.BACKWARD:
        # The original operands, not `plain`: an alias knows on which side of a stage end it is.
        operands = variables(eqn.invars)
        touched = {program.stage_of_var[var] for var in operands if var in program.stage_of_var}
        stages = {stage for _, stage in touched}
        if len(stages) == 1 and any(kind == TaskKind.BACKWARD for kind, _ in touched):
            here = (TaskKind.BACKWARD, stages.pop())
    program.eqns.append(plain)
    program.stage_of_eqn.append(here)
    program.stage_of_var.update(dict.fromkeys(eqn.outvars, here))


# Pass 2b, sink to the first use.
#
# In: equations with stages. Out: equations of F0 that no stage end hands over, in the forward of
# the first stage that needs them. Invariant: an equation still runs no later than its first user.
# Example: `one_hot(labels)` at the top of the loss moves from F0 to the last stage, so that the
# labels go there, not to stage 0 and from there through all stages.


def sink_to_first_use(program: StagedProgram) -> None:
    """Move what no stage end hands over from the first stage to the first that needs it."""
    dropped = _compat.jaxprs().DropVar
    needed: dict[Var, int] = {}  # the first stage that needs a variable
    kept = set(variables(program.outs)) | program.pinned
    # Backwards, so that users have moved before what they use.
    for n in reversed(range(len(program.eqns))):
        eqn, at = program.eqns[n], program.stage_of_eqn[n]
        outs = [var for var in eqn.outvars if not isinstance(var, dropped)]
        stage = at[1] if at is not None else 0
        if at == (TaskKind.FORWARD, 0) and not any(var in kept for var in outs):
            stage = min((needed[var] for var in outs if var in needed), default=0)
            program.stage_of_eqn[n] = (TaskKind.FORWARD, stage)
        for var in variables(eqn.invars):
            needed[var] = min(stage, needed.get(var, stage))


# Pass 2c, eliminate dead equations, delay what a remat computes again.
#
# In: equations with stages. Out: None as the stage of those that have no effect and that no result
# comes from; what a remat computes again, in the backward of its first user. Invariant: backwards
# run from the last stage to the first, so an equation may move to a lower stage as long as no user
# is in a higher one. Example: a remat around a loss of three stages computes all of it again where
# the backward begins, in BW2; what belongs to stages 0 and 1 moves to BW0 and BW1.


def eliminate_dead_and_delay_remat(program: StagedProgram) -> None:
    """Drop equations that no result needs; move rematerialized ones to the backward of a user."""
    results = set(variables((*program.outs, *program.grads)))
    fixed = results | program.pinned | _cotangents(program)
    users: dict[Var, set[StageKey]] = {}
    for n in reversed(range(len(program.eqns))):
        eqn, at = program.eqns[n], program.stage_of_eqn[n]
        needed = any(var in results or var in users for var in eqn.outvars)
        if at is None or not (needed or eqn.effects):
            program.stage_of_eqn[n] = None
            continue
        if at[0] == TaskKind.BACKWARD and not any(var in fixed for var in eqn.outvars):
            stages = [user[1] for var in eqn.outvars for user in users.get(var, ())]
            latest = min(at[1], max(stages, default=at[1]))
            at = program.stage_of_eqn[n] = (TaskKind.BACKWARD, latest)
        for var in variables(eqn.invars):
            users.setdefault(var, set()).add(at)


def _cotangents(program: StagedProgram) -> set[Var]:
    """Return what the backward computes, without what a remat recomputes from the forward."""
    cotangents: set[Var] = set()
    for eqn, at in zip(program.eqns, program.stage_of_eqn, strict=True):
        if at is not None and at[0] == TaskKind.BACKWARD:
            if not is_rematerialized(eqn) or any(
                var in cotangents for var in variables(eqn.invars)
            ):
                cotangents.update(eqn.outvars)
    return cotangents
