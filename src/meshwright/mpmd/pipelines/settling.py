"""Settle the results of a microbatch: which forward makes each, and where carried state stays."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from meshwright.mpmd.pipelines.adding import copied
from meshwright.mpmd.pipelines.bench import Bench, is_literal, sources, variables


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
