"""`stage_end(y)`: the end of a stage, inside an ordinary function."""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright.errors import PipelineError

_numbers = itertools.count()


@functools.cache
def mark() -> Any:
    """The primitive in a traced program where a stage ends; its transpose ends it backwards."""
    return _compat.identity_primitive("stage_mark")


def stage_end(values: Any, name: str | None = None) -> Any:
    """End a stage of a pipeline here: what comes next belongs to the next stage.

    `values` is what the next stage goes on with, an array or a tree of them; they come back
    unchanged. `explain()` calls the stage that ends here by its `name`. Outside of `pipeline(...)`
    this does nothing.

    >>> import jax, jax.numpy as jnp, meshwright as mw
    >>> def loss(params, x):
    ...     h = mw.stage_end(jnp.tanh(x @ params["a"]))
    ...     return jnp.mean((h @ params["b"]) ** 2)
    >>> params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
    >>> jax.jit(loss)(params, jnp.zeros((4, 2)))
    Array(0., dtype=float32)
    """
    leaves, treedef = jax.tree.flatten(values)
    where = caller(__file__)
    if not leaves:
        raise PipelineError(f"stage_end(...) at {where}: nothing to go on with.")
    # Whole numbers have no gradient, so no backward: beside others they need no mark.
    inexact = [n for n, leaf in enumerate(leaves) if jnp.issubdtype(_dtype(leaf), jnp.inexact)]
    chosen = inexact or range(len(leaves))
    marked = mark().bind(
        *(jnp.asarray(leaves[n]) for n in chosen),
        number=next(_numbers),
        where=where,
        name=name,
        backward=False,
    )
    for n, value in zip(chosen, marked, strict=True):
        leaves[n] = value
    return jax.tree.unflatten(treedef, leaves)


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", None) or jnp.result_type(type(leaf))


def caller(file: str) -> str:
    """File and line of the nearest frame outside of a file."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == file:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
