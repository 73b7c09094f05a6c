"""Cut a flat program into stages: every equation gets a home in some stage's F or B.

Program order decides (`ordering`): what stands between two marks belongs to the stage between
them, forwards and backwards. In the last stage the forward is what the results come from. The
exceptions, each for a reason:

- What depends only on parameters, constants and random keys is *free*: every task that needs it
  computes it again. Else "cast all parameters first" would tie everything to stage 0.
- A backward equation that touches one stage only goes back to that stage, however late it comes:
  the cast of a gradient, at the very end, belongs where the gradient is made.
- A mark that a remat passes again ends no stage: behind it stands the value that was handed over
  the first time. Where one trace was passed several times (a function called twice), nobody can
  say which that was, and what is computed again goes on.
- What depends only on the batch, before the first mark, moves to the stage that needs it (labels).
- What nobody needs is dropped, unless it has effects. What a remat computes again goes to the
  backward that needs it (`moving`).
- What is computed only to be carried on stays in the stage that uses what is carried, and a
  carried value that is made earlier is copied into that stage.
- A result that is free, or an operand as it came, is copied by the forward of the first stage by
  which all that it comes from has been used. Truths that are to be summed are copied as whole
  numbers (`settling`).
- A gradient that is a sum over stages stays in parts, one per stage; so does a cast, a transpose
  and the like of such a sum. A gradient that is free is copied by one stage's backward
  (`gradients`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from meshwright import _compat
from meshwright.errors import PipelineError
from meshwright.pipelines.microbatching import Region
from meshwright.pipelines.stage_mark import mark
from meshwright.pipelines.stage_outputs import Parts, assign_result_stages, split_gradients_by_stage
from meshwright.pipelines.staged_program import (
    StagedProgram,
    StageKey,
    equations,
    is_recomputed,
    look,
    make_staged_program,
    stage_names,
    variables,
    vars_of,
)
from meshwright.pipelines.tracing import flat, is_again


@dataclasses.dataclass(frozen=True, eq=False)
class StageProgram:
    """A region's equations by home, in program order, with marks taken out.

    `free` maps a variable to the equation that every user computes again. `outs` are the
    region's results, `grads` the partial sums of each parameter's gradient: (home, variable).
    `names` are the stages', None where the user gave none.
    """

    region: Region
    stages: int
    invars: tuple[Any, ...]
    consts: dict[Any, Any]
    eqns: dict[StageKey, list[Any]]
    free: dict[Any, Any]
    outs: tuple[Any, ...]
    grads: tuple[Parts, ...]
    names: tuple[str | None, ...]

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The variables that stand for trained parameters."""
        return tuple(
            var
            for var, role in zip(self.invars, self.region.roles, strict=True)
            if role == "params"
        )


def cut(region: Region) -> StageProgram:
    """Cut a region at its marks."""
    closed = flat(region.jaxpr, open_remat=True)
    program = make_staged_program(region, closed.jaxpr)
    assign_stages_by_order(program)
    sink_to_first_use(program)
    eliminate_dead_and_delay_remat(program)
    assign_result_stages(program)
    grads = split_gradients_by_stage(program)
    return StageProgram(
        region,
        program.stages,
        tuple(closed.jaxpr.invars),
        dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)),
        equations(program),
        program.free,
        tuple(program.outs),
        grads,
        stage_names(closed.jaxpr),
    )


# Read a program from top to bottom: what stands between two marks is at home between them.


def assign_stages_by_order(program: StagedProgram) -> None:
    """Homes by program order; free equations and marks are taken out on the way."""
    here: StageKey = ("F", 0)
    opened: dict[int, list[int]] = {}  # a mark traced once may be passed several times
    ends: dict[int, list[Any]] = {}
    last, forwards = ("F", program.stages - 1), _needed_forwards(program)
    used = {*variables([*program.outs, *program.grads]), *vars_of(program.jaxpr.eqns)}
    for n, eqn in enumerate(program.jaxpr.eqns):
        if eqn.primitive is not mark():
            ended = here == last and program.grads and n not in forwards
            _place(program, eqn, ("B", here[1]) if ended else here)
        elif is_recomputed(eqn):
            _pass_again(program, eqn, ends[eqn.params["number"]], here)
        else:
            _refuse_unused(eqn, used)
            _refuse_whole_numbers(program, eqn)
            _refuse_inner_gradient(program, eqn, here, opened)
            if not eqn.params["backward"]:
                ends.setdefault(eqn.params["number"], []).append(eqn)
            here = _beyond(eqn, here, opened)
            _hand_over(program, eqn, here)
    program.outs[:] = [look(program, var) for var in program.outs]
    program.grads[:] = [look(program, var) for var in program.grads]


def _needed_forwards(program: StagedProgram) -> set[int]:
    """Equations that the results come from: the last stage's forward; the rest is backward."""
    needed = set(variables(program.outs))
    found = set()
    for n in reversed(range(len(program.jaxpr.eqns))):
        eqn = program.jaxpr.eqns[n]
        if eqn.effects or any(var in needed for var in eqn.outvars):
            found.add(n)
            needed.update(variables(eqn.invars))
    return found


def _refuse_unused(eqn: Any, used: set[Any]) -> None:
    """A mark that nothing comes after divides nothing: its result was dropped."""
    if not eqn.params["backward"] and not used.intersection(eqn.outvars):
        raise PipelineError(
            f"stage_end(...) at {eqn.params['where']}: its result is not used, so the next stage "
            "takes nothing from this one. Write y = stage_end(y), and go on with y."
        )


def _refuse_whole_numbers(program: StagedProgram, eqn: Any) -> None:
    """A gradient must be able to come back through every mark."""
    if program.grads and not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):
        raise PipelineError(
            f"stage_end(...) at {eqn.params['where']}: no array of floating-point numbers to go on "
            "with, so no gradient comes back. Mark what the next stage is computed from."
        )


def _refuse_inner_gradient(
    program: StagedProgram, eqn: Any, here: StageKey, opened: dict[int, list[int]]
) -> None:
    """All marks are passed forwards, then all backwards, unless there are two gradients."""
    back = eqn.params["backward"]
    if (back and program.grads and opened.get(eqn.params["number"])) or (
        not back and here[0] == "F"
    ):
        return
    raise PipelineError(
        f"stage_end(...) at {eqn.params['where']} is inside of a gradient that the function itself "
        "takes, which cannot be cut. Move the mark outside of it."
    )


def _beyond(eqn: Any, here: StageKey, opened: dict[int, list[int]]) -> StageKey:
    """The home of what comes after a mark; `opened` keeps the stages that marks have ended."""
    passes = opened.setdefault(eqn.params["number"], [])
    if not eqn.params["backward"]:
        passes.append(here[1])
        return ("F", here[1] + 1)
    stage = passes.pop()
    return ("B", stage) if here[0] == "F" or stage < here[1] else here


def _hand_over(program: StagedProgram, eqn: Any, here: StageKey) -> None:
    """Take a mark out: beyond it, its values keep their old names."""
    for before, after in zip(eqn.invars, eqn.outvars, strict=True):
        origin = look(program, before)
        program.alias[after] = origin
        program.home_of[after] = here
        program.pinned.update(variables([origin]))


def _pass_again(program: StagedProgram, eqn: Any, ends: Sequence[Any], here: StageKey) -> None:
    """A mark in what a remat computes again: the stage has its value from the first time."""
    for n, (before, after) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
        only = ends[0].outvars[n] if len(ends) == 1 else None
        program.alias[after] = look(program, before if only is None else only)
        program.home_of[after] = here if only is None else program.home_of[only]


def _place(program: StagedProgram, eqn: Any, here: StageKey) -> None:
    """Free, or at home here, or back in the one stage that a backward equation touches."""
    plain = eqn.replace(invars=[look(program, var) for var in eqn.invars])
    used = variables(plain.invars)
    if all(var in program.free or var in program.roots for var in used) and not eqn.effects:
        program.free.update(dict.fromkeys(eqn.outvars, plain))
        return
    if here[0] == "B":
        seen = variables(eqn.invars)
        touched = {program.home_of[var] for var in seen if var in program.home_of}
        stages = {stage for _, stage in touched}
        if len(stages) == 1 and any(kind == "B" for kind, _ in touched):
            here = ("B", stages.pop())
    program.eqns.append(plain)
    program.stage_of_eqn.append(here)
    program.home_of.update(dict.fromkeys(eqn.outvars, here))


# Move equations from where they stand to where they are needed, and drop the others.


def sink_to_first_use(program: StagedProgram) -> None:
    """What nobody hands over at the first mark goes to the first stage that needs it."""
    dropped = _compat.jaxprs().DropVar
    needed: dict[Any, int] = {}
    kept = set(variables(program.outs)) | program.pinned
    for n in reversed(range(len(program.eqns))):
        eqn, home = program.eqns[n], program.stage_of_eqn[n]
        made = [var for var in eqn.outvars if not isinstance(var, dropped)]
        stage = home[1] if home is not None else 0
        if home == ("F", 0) and not any(var in kept for var in made):
            stage = min((needed[var] for var in made if var in needed), default=0)
            program.stage_of_eqn[n] = ("F", stage)
        for var in variables(eqn.invars):
            needed[var] = min(stage, needed.get(var, stage))


def eliminate_dead_and_delay_remat(program: StagedProgram) -> None:
    """Drop what nobody needs; what only later backwards need is computed there.

    The latter is what a remat computes again, for several stages at once.
    """
    results = set(variables((*program.outs, *program.grads)))
    fixed = results | program.pinned | _cotangents(program)
    users: dict[Any, set[StageKey]] = {}
    for n in reversed(range(len(program.eqns))):
        eqn, home = program.eqns[n], program.stage_of_eqn[n]
        needed = any(var in results or var in users for var in eqn.outvars)
        if home is None or not (needed or eqn.effects):
            program.stage_of_eqn[n] = None
            continue
        if home[0] == "B" and not any(var in fixed for var in eqn.outvars):
            stages = [at[1] for var in eqn.outvars for at in users.get(var, ())]
            home = program.stage_of_eqn[n] = ("B", min(home[1], max(stages, default=home[1])))
        for var in variables(eqn.invars):
            users.setdefault(var, set()).add(home)


def _cotangents(program: StagedProgram) -> set[Any]:
    """What the backward makes, but for what a remat computes again from the forward."""
    found: set[Any] = set()
    for eqn, home in zip(program.eqns, program.stage_of_eqn, strict=True):
        if home is not None and home[0] == "B":
            if not is_again(eqn) or any(var in found for var in variables(eqn.invars)):
                found.update(eqn.outvars)
    return found
