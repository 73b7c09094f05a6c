"""Settle the results of a microbatch: which forward makes each, and where carried state stays."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright.pipelines.staged_program import FREE, Bench, Home, is_literal, sources, variables


def settle_results(bench: Bench) -> None:
    """Give every result an equation in the forward of a stage, the right one where carried."""
    used = first_uses(bench)
    at = _settle_state(bench, used)
    carried = iter(bench.state)
    made = {var for eqn in bench.eqns for var in eqn.outvars}
    for n, (var, how) in enumerate(zip(bench.outs, bench.reductions, strict=True)):
        user = next(carried) if how == "carry" else None
        stage = used.get(user, 0) if user is not None else 0
        if is_literal(var) or var not in made:
            roots = [] if is_literal(var) else sources(bench, var)
            stage = max(stage, *(used.get(root, 0) for root in roots), 0)
            bench.outs[n] = copied(bench, var, ("F", stage))
        elif user is not None and at[var] < stage:
            bench.outs[n] = copied(bench, var, ("F", stage))
        elif how in ("sum", "mean") and var.aval.dtype == jnp.bool_:
            bench.outs[n] = copied(bench, var, ("F", at[var]), lambda x: x.astype(jnp.int32))


def first_uses(bench: Bench) -> dict[Any, int]:
    """The first stage whose forward uses an operand or a constant."""
    alone, found = set(_for_state_only(bench)), dict[Any, int]()
    for n, (eqn, home) in enumerate(zip(bench.eqns, bench.homes, strict=True)):
        if n in alone or home is None or home[0] != "F":
            continue
        for root in {root for var in variables(eqn.invars) for root in sources(bench, var)}:
            found[root] = min(home[1], found.get(root, home[1]))
    return found


def _settle_state(bench: Bench, used: dict[Any, int]) -> dict[Any, int]:
    """Move what is only carried on to its user's stage; the stage of all that forwards make."""
    at = {
        var: home[1]
        for eqn, home in zip(bench.eqns, bench.homes, strict=True)
        if home is not None and home[0] == "F"
        for var in eqn.outvars
    }
    at.update({var: used[var] for var in bench.state if var in used})
    alone = _for_state_only(bench)
    for n in alone:
        eqn = bench.eqns[n]
        for var in eqn.outvars:
            at.pop(var, None)
        known = [at[var] for var in variables(eqn.invars) if var in at]
        if known:
            at.update(dict.fromkeys(eqn.outvars, max(known)))
    # State that nothing but its own update uses is updated where it meets other values.
    for n in reversed(alone):
        eqn = bench.eqns[n]
        users = [m for m in alone if set(eqn.outvars) & set(variables(bench.eqns[m].invars))]
        if not any(var in at for var in eqn.outvars):
            met = max((home[1] for m in users if (home := bench.homes[m])), default=0)
            at.update(dict.fromkeys(eqn.outvars, met))
        bench.homes[n] = ("F", max(at[var] for var in eqn.outvars if var in at))
    return at


def _for_state_only(bench: Bench) -> list[int]:
    """Forward equations that make nothing but what is carried on to the next microbatch."""
    outs = list(zip(bench.outs, bench.reductions, strict=True))
    state = set(variables(var for var, how in outs if how == "carry"))
    others = set(variables(var for var, how in outs if how != "carry"))
    others.update(variables(bench.grads))
    found = []
    for n in reversed(range(len(bench.eqns))):
        eqn, home = bench.eqns[n], bench.homes[n]
        if home is None:
            continue
        if home[0] == "B" or eqn.effects or any(var in others for var in eqn.outvars):
            others.update(variables(eqn.invars))
        elif any(var in state for var in eqn.outvars):
            state.update(variables(eqn.invars))
            found.append(n)
    return found[::-1]


# Gradients in parts: a sum over stages is added up once per step, not once per microbatch.


Parts = tuple[tuple[Home, Any], ...]
# What is the same of a sum as of its parts, added up.
_LINEAR = ("convert_element_type", "transpose", "reshape", "neg", "squeeze", "copy")


@dataclasses.dataclass(frozen=True, eq=False)
class _Flow:
    """The equation that makes a variable, by its number, and how often a variable is used."""

    makers: dict[Any, int]
    uses: collections.Counter[Any]


def split_gradients(bench: Bench) -> tuple[Parts, ...]:
    """The parts of every gradient. What stood for their sum loses its home."""
    flow = _Flow(
        {var: n for n, eqn in enumerate(bench.eqns) for var in eqn.outvars},
        collections.Counter(
            [var for eqn in bench.eqns for var in variables(eqn.invars)]
            + variables((*bench.outs, *bench.grads))
        ),
    )
    return tuple(_parts(bench, flow, var) for var in bench.grads)


def _parts(bench: Bench, flow: _Flow, var: Any) -> Parts:
    """A gradient as sums that stay within their stages, to be added once per step.

    A sum over stages is taken apart; so is a cast, a transpose and the like of such a sum.
    """
    if is_literal(var):
        return ((FREE, var),)
    if var in bench.free or var in bench.roots:
        return _part_of_free(bench, var)
    if var not in flow.makers:
        return ((("B", 0), var),)  # the batch itself
    n = flow.makers[var]
    eqn, home = bench.eqns[n], bench.homes[n]
    if home is None:
        return ((FREE, var),)
    used = variables(eqn.invars)
    adds = eqn.primitive is _compat.known_primitives()["add"]
    linear = eqn.primitive.name in _LINEAR and len(used) == 1
    if (adds or linear) and flow.uses[var] <= 1:
        pieces = tuple(piece for side in used for piece in _parts(bench, flow, side))
        if len({stage for (_, stage), _ in pieces}) > 1:
            bench.homes[n] = None
            if adds:
                return pieces
            return tuple((at, again(bench, eqn, at, piece)) for at, piece in pieces)
    return ((home, var),)


def _part_of_free(bench: Bench, var: Any) -> Parts:
    """The same for every microbatch, as the gradient of a weight decay is."""
    roots = sources(bench, var)
    if not roots:
        return ((FREE, var),)
    used = first_uses(bench)
    last = ("B", max(used.get(root, 0) for root in roots))
    return ((last, copied(bench, var, last)),)


# Equations that a program does not have, but a stage needs.


def copied(bench: Bench, var: Any, home: Home, how: Callable[[Any], Any] = jnp.copy) -> Any:
    """A variable that an equation of this home makes of another."""
    # A function of its own each time: JAX remembers traces, with their variables.
    (eqn,) = jax.make_jaxpr(lambda x: how(x))(_like(var)).jaxpr.eqns
    bench.added.setdefault(home, []).append(eqn.replace(invars=[var]))
    return eqn.outvars[0]


def again(bench: Bench, eqn: Any, home: Home, operand: Any) -> Any:
    """The same equation of another operand, in another home; returns its variable."""
    (fresh,) = jax.make_jaxpr(lambda x: x)(_like(eqn.outvars[0])).jaxpr.invars
    bench.added.setdefault(home, []).append(eqn.replace(invars=[operand], outvars=[fresh]))
    return fresh


def _like(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)  # type: ignore[no-untyped-call]
