"""Settle the results of a microbatch: which forward makes each, and where carried state stays."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright.pipelines.staged_program import (
    FREE,
    StagedProgram,
    StageKey,
    is_literal,
    sources,
    variables,
)


def assign_result_stages(program: StagedProgram) -> None:
    """Give every result an equation in the forward of a stage, the right one where carried."""
    used = first_uses(program)
    at = _settle_state(program, used)
    carried = iter(program.state)
    made = {var for eqn in program.eqns for var in eqn.outvars}
    for n, (var, how) in enumerate(zip(program.outs, program.reductions, strict=True)):
        user = next(carried) if how == "carry" else None
        stage = used.get(user, 0) if user is not None else 0
        if is_literal(var) or var not in made:
            roots = [] if is_literal(var) else sources(program, var)
            stage = max(stage, *(used.get(root, 0) for root in roots), 0)
            program.outs[n] = copied(program, var, ("F", stage))
        elif user is not None and at[var] < stage:
            program.outs[n] = copied(program, var, ("F", stage))
        elif how in ("sum", "mean") and var.aval.dtype == jnp.bool_:
            program.outs[n] = copied(program, var, ("F", at[var]), lambda x: x.astype(jnp.int32))


def first_uses(program: StagedProgram) -> dict[Any, int]:
    """The first stage whose forward uses an operand or a constant."""
    alone, found = set(_for_state_only(program)), dict[Any, int]()
    for n, (eqn, home) in enumerate(zip(program.eqns, program.stage_of_eqn, strict=True)):
        if n in alone or home is None or home[0] != "F":
            continue
        for root in {root for var in variables(eqn.invars) for root in sources(program, var)}:
            found[root] = min(home[1], found.get(root, home[1]))
    return found


def _settle_state(program: StagedProgram, used: dict[Any, int]) -> dict[Any, int]:
    """Move what is only carried on to its user's stage; the stage of all that forwards make."""
    at = {
        var: home[1]
        for eqn, home in zip(program.eqns, program.stage_of_eqn, strict=True)
        if home is not None and home[0] == "F"
        for var in eqn.outvars
    }
    at.update({var: used[var] for var in program.state if var in used})
    alone = _for_state_only(program)
    for n in alone:
        eqn = program.eqns[n]
        for var in eqn.outvars:
            at.pop(var, None)
        known = [at[var] for var in variables(eqn.invars) if var in at]
        if known:
            at.update(dict.fromkeys(eqn.outvars, max(known)))
    # State that nothing but its own update uses is updated where it meets other values.
    for n in reversed(alone):
        eqn = program.eqns[n]
        users = [m for m in alone if set(eqn.outvars) & set(variables(program.eqns[m].invars))]
        if not any(var in at for var in eqn.outvars):
            met = max((home[1] for m in users if (home := program.stage_of_eqn[m])), default=0)
            at.update(dict.fromkeys(eqn.outvars, met))
        program.stage_of_eqn[n] = ("F", max(at[var] for var in eqn.outvars if var in at))
    return at


def _for_state_only(program: StagedProgram) -> list[int]:
    """Forward equations that make nothing but what is carried on to the next microbatch."""
    outs = list(zip(program.outs, program.reductions, strict=True))
    state = set(variables(var for var, how in outs if how == "carry"))
    others = set(variables(var for var, how in outs if how != "carry"))
    others.update(variables(program.grads))
    found = []
    for n in reversed(range(len(program.eqns))):
        eqn, home = program.eqns[n], program.stage_of_eqn[n]
        if home is None:
            continue
        if home[0] == "B" or eqn.effects or any(var in others for var in eqn.outvars):
            others.update(variables(eqn.invars))
        elif any(var in state for var in eqn.outvars):
            state.update(variables(eqn.invars))
            found.append(n)
    return found[::-1]


# Gradients in parts: a sum over stages is added up once per step, not once per microbatch.


Parts = tuple[tuple[StageKey, Any], ...]
# What is the same of a sum as of its parts, added up.
_LINEAR = ("convert_element_type", "transpose", "reshape", "neg", "squeeze", "copy")


@dataclasses.dataclass(frozen=True, eq=False)
class _Flow:
    """The equation that makes a variable, by its number, and how often a variable is used."""

    makers: dict[Any, int]
    uses: collections.Counter[Any]


def split_gradients_by_stage(program: StagedProgram) -> tuple[Parts, ...]:
    """The parts of every gradient. What stood for their sum loses its home."""
    flow = _Flow(
        {var: n for n, eqn in enumerate(program.eqns) for var in eqn.outvars},
        collections.Counter(
            [var for eqn in program.eqns for var in variables(eqn.invars)]
            + variables((*program.outs, *program.grads))
        ),
    )
    return tuple(_parts(program, flow, var) for var in program.grads)


def _parts(program: StagedProgram, flow: _Flow, var: Any) -> Parts:
    """A gradient as sums that stay within their stages, to be added once per step.

    A sum over stages is taken apart; so is a cast, a transpose and the like of such a sum.
    """
    if is_literal(var):
        return ((FREE, var),)
    if var in program.free or var in program.roots:
        return _part_of_free(program, var)
    if var not in flow.makers:
        return ((("B", 0), var),)  # the batch itself
    n = flow.makers[var]
    eqn, home = program.eqns[n], program.stage_of_eqn[n]
    if home is None:
        return ((FREE, var),)
    used = variables(eqn.invars)
    adds = eqn.primitive is _compat.known_primitives()["add"]
    linear = eqn.primitive.name in _LINEAR and len(used) == 1
    if (adds or linear) and flow.uses[var] <= 1:
        pieces = tuple(piece for side in used for piece in _parts(program, flow, side))
        if len({stage for (_, stage), _ in pieces}) > 1:
            program.stage_of_eqn[n] = None
            if adds:
                return pieces
            return tuple((at, again(program, eqn, at, piece)) for at, piece in pieces)
    return ((home, var),)


def _part_of_free(program: StagedProgram, var: Any) -> Parts:
    """The same for every microbatch, as the gradient of a weight decay is."""
    roots = sources(program, var)
    if not roots:
        return ((FREE, var),)
    used = first_uses(program)
    last = ("B", max(used.get(root, 0) for root in roots))
    return ((last, copied(program, var, last)),)


# Equations that a program does not have, but a stage needs.


def copied(
    program: StagedProgram, var: Any, home: StageKey, how: Callable[[Any], Any] = jnp.copy
) -> Any:
    """A variable that an equation of this home makes of another."""
    # A function of its own each time: JAX remembers traces, with their variables.
    (eqn,) = jax.make_jaxpr(lambda x: how(x))(_like(var)).jaxpr.eqns
    program.added.setdefault(home, []).append(eqn.replace(invars=[var]))
    return eqn.outvars[0]


def again(program: StagedProgram, eqn: Any, home: StageKey, operand: Any) -> Any:
    """The same equation of another operand, in another home; returns its variable."""
    (fresh,) = jax.make_jaxpr(lambda x: x)(_like(eqn.outvars[0])).jaxpr.invars
    program.added.setdefault(home, []).append(eqn.replace(invars=[operand], outvars=[fresh]))
    return fresh


def _like(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)  # type: ignore[no-untyped-call]
