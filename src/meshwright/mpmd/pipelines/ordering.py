"""Read a program from top to bottom: what stands between two marks is at home between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from meshwright.errors import PipelineError
from meshwright.mpmd.pipelines.bench import Bench, Home, is_recomputed, look, variables, vars_of
from meshwright.mpmd.pipelines.marks import mark


def read_in_order(bench: Bench) -> None:
    """Homes by program order; free equations and marks are taken out on the way."""
    here: Home = ("F", 0)
    opened: dict[int, list[int]] = {}  # a mark traced once may be passed several times
    ends: dict[int, list[Any]] = {}
    last, forwards = ("F", bench.stages - 1), _needed_forwards(bench)
    used = {*variables([*bench.outs, *bench.grads]), *vars_of(bench.jaxpr.eqns)}
    for n, eqn in enumerate(bench.jaxpr.eqns):
        if eqn.primitive is not mark():
            ended = here == last and bench.grads and n not in forwards
            _place(bench, eqn, ("B", here[1]) if ended else here)
        elif is_recomputed(eqn):
            _pass_again(bench, eqn, ends[eqn.params["number"]], here)
        else:
            _refuse_unused(eqn, used)
            _refuse_whole_numbers(bench, eqn)
            _refuse_inner_gradient(bench, eqn, here, opened)
            if not eqn.params["backward"]:
                ends.setdefault(eqn.params["number"], []).append(eqn)
            here = _beyond(eqn, here, opened)
            _hand_over(bench, eqn, here)
    bench.outs[:] = [look(bench, var) for var in bench.outs]
    bench.grads[:] = [look(bench, var) for var in bench.grads]


def _needed_forwards(bench: Bench) -> set[int]:
    """Equations that the results come from: the last stage's forward; the rest is backward."""
    needed = set(variables(bench.outs))
    found = set()
    for n in reversed(range(len(bench.jaxpr.eqns))):
        eqn = bench.jaxpr.eqns[n]
        if eqn.effects or any(var in needed for var in eqn.outvars):
            found.add(n)
            needed.update(variables(eqn.invars))
    return found


def _refuse_unused(eqn: Any, used: set[Any]) -> None:
    """A mark that nothing comes after divides nothing: its result was dropped."""
    if not eqn.params["backward"] and not used.intersection(eqn.outvars):
        raise PipelineError(
            f"stage(...) at {eqn.params['where']}: its result is not used, so the next stage takes "
            "nothing from this one. Write y = stage(y), and go on with y."
        )


def _refuse_whole_numbers(bench: Bench, eqn: Any) -> None:
    """A gradient must be able to come back through every mark."""
    if bench.grads and not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):
        raise PipelineError(
            f"stage(...) at {eqn.params['where']}: no array of floating-point numbers to go on "
            "with, so no gradient comes back. Mark what the next stage is computed from."
        )


def _refuse_inner_gradient(
    bench: Bench, eqn: Any, here: Home, opened: dict[int, list[int]]
) -> None:
    """All marks are passed forwards, then all backwards, unless there are two gradients."""
    back = eqn.params["backward"]
    if (back and bench.grads and opened.get(eqn.params["number"])) or (not back and here[0] == "F"):
        return
    raise PipelineError(
        f"stage(...) at {eqn.params['where']} is inside of a gradient that the function itself "
        "takes, which cannot be cut. Move the mark outside of it."
    )


def _beyond(eqn: Any, here: Home, opened: dict[int, list[int]]) -> Home:
    """The home of what comes after a mark; `opened` keeps the stages that marks have ended."""
    passes = opened.setdefault(eqn.params["number"], [])
    if not eqn.params["backward"]:
        passes.append(here[1])
        return ("F", here[1] + 1)
    stage = passes.pop()
    return ("B", stage) if here[0] == "F" or stage < here[1] else here


def _hand_over(bench: Bench, eqn: Any, here: Home) -> None:
    """Take a mark out: beyond it, its values keep their old names."""
    for before, after in zip(eqn.invars, eqn.outvars, strict=True):
        origin = look(bench, before)
        bench.alias[after] = origin
        bench.home_of[after] = here
        bench.pinned.update(variables([origin]))


def _pass_again(bench: Bench, eqn: Any, ends: Sequence[Any], here: Home) -> None:
    """A mark in what a remat computes again: the stage has its value from the first time."""
    for n, (before, after) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
        only = ends[0].outvars[n] if len(ends) == 1 else None
        bench.alias[after] = look(bench, before if only is None else only)
        bench.home_of[after] = here if only is None else bench.home_of[only]


def _place(bench: Bench, eqn: Any, here: Home) -> None:
    """Free, or at home here, or back in the one stage that a backward equation touches."""
    plain = eqn.replace(invars=[look(bench, var) for var in eqn.invars])
    used = variables(plain.invars)
    if all(var in bench.free or var in bench.roots for var in used) and not eqn.effects:
        bench.free.update(dict.fromkeys(eqn.outvars, plain))
        return
    if here[0] == "B":
        seen = variables(eqn.invars)
        touched = {bench.home_of[var] for var in seen if var in bench.home_of}
        stages = {stage for _, stage in touched}
        if len(stages) == 1 and any(kind == "B" for kind, _ in touched):
            here = ("B", stages.pop())
    bench.eqns.append(plain)
    bench.homes.append(here)
    bench.home_of.update(dict.fromkeys(eqn.outvars, here))
