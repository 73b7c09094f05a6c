"""Gradients in parts: a sum over stages is added up once per step, not once per microbatch."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from meshwright import _compat
from meshwright.mpmd.pipelines.adding import again, copied
from meshwright.mpmd.pipelines.bench import FREE, Bench, Home, is_literal, sources, variables
from meshwright.mpmd.pipelines.settling import first_uses

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
