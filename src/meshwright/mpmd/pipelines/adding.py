"""Equations that a program does not have, but a stage needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.mpmd.pipelines.bench import Bench, Home


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
