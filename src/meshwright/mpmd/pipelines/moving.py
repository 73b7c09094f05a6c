"""Move equations from where they stand to where they are needed, and drop the others."""

from __future__ import annotations

from typing import Any

from meshwright import _compat
from meshwright.mpmd.pipelines.bench import Bench, Home, variables
from meshwright.mpmd.pipelines.inlining import is_again


def move_to_users(bench: Bench) -> None:
    """What nobody hands over at the first mark goes to the first stage that needs it."""
    dropped = _compat.jaxprs().DropVar
    needed: dict[Any, int] = {}
    kept = set(variables(bench.outs)) | bench.pinned
    for n in reversed(range(len(bench.eqns))):
        eqn, home = bench.eqns[n], bench.homes[n]
        made = [var for var in eqn.outvars if not isinstance(var, dropped)]
        stage = home[1] if home is not None else 0
        if home == ("F", 0) and not any(var in kept for var in made):
            stage = min((needed[var] for var in made if var in needed), default=0)
            bench.homes[n] = ("F", stage)
        for var in variables(eqn.invars):
            needed[var] = min(stage, needed.get(var, stage))


def drop_and_delay(bench: Bench) -> None:
    """Drop what nobody needs; what only later backwards need is computed there.

    The latter is what a remat computes again, for several stages at once.
    """
    results = set(variables((*bench.outs, *bench.grads)))
    fixed = results | bench.pinned | _cotangents(bench)
    users: dict[Any, set[Home]] = {}
    for n in reversed(range(len(bench.eqns))):
        eqn, home = bench.eqns[n], bench.homes[n]
        needed = any(var in results or var in users for var in eqn.outvars)
        if home is None or not (needed or eqn.effects):
            bench.homes[n] = None
            continue
        if home[0] == "B" and not any(var in fixed for var in eqn.outvars):
            stages = [at[1] for var in eqn.outvars for at in users.get(var, ())]
            home = bench.homes[n] = ("B", min(home[1], max(stages, default=home[1])))
        for var in variables(eqn.invars):
            users.setdefault(var, set()).add(home)


def _cotangents(bench: Bench) -> set[Any]:
    """What the backward makes, but for what a remat computes again from the forward."""
    found: set[Any] = set()
    for eqn, home in zip(bench.eqns, bench.homes, strict=True):
        if home is not None and home[0] == "B":
            if not is_again(eqn) or any(var in found for var in variables(eqn.invars)):
                found.update(eqn.outvars)
    return found
