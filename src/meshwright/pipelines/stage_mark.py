"""`stage_end(y)`: marks the end of a pipeline stage inside an ordinary function."""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright.errors import PipelineError, short
from meshwright.trees.walk import is_array

# Every call of `stage_end` gets a number. One number may occur several times in a program: JAX
# caches traces, so a jitted function that is called twice brings the same equation twice.
_numbers = itertools.count()


def stage_end(values: Any, name: str | None = None) -> Any:
    """End a stage of a pipeline here: what comes next belongs to the next stage.

    `values` is what the next stage goes on with, an array or a tree of them; they come back
    unchanged. `explain()` calls the stage that ends here by its `name`. Outside of `pipeline(...)`
    this does nothing. An empty tree raises `PipelineError`.

    >>> import jax, jax.numpy as jnp, meshwright as mw
    >>> def loss(params, x):
    ...     h = mw.stage_end(jnp.tanh(x @ params["a"]))
    ...     return jnp.mean((h @ params["b"]) ** 2)
    >>> params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
    >>> jax.jit(loss)(params, jnp.zeros((4, 2)))
    Array(0., dtype=float32)
    """
    leaves, treedef = jax.tree.flatten(values)
    where = caller_line(__file__)
    if name is not None and not isinstance(name, str):
        raise PipelineError(
            f"stage_end(...) at {where}: name {short(name)} is not a string. Several arrays go in "
            "one tuple: stage_end((x, y)).",
            option="name",
        )
    for leaf in leaves:
        if not is_array(leaf) and not isinstance(leaf, (bool, int, float, complex)):
            raise PipelineError(
                f"stage_end(...) at {where}: {short(leaf)} is no array. Pass the arrays that the "
                "next stage uses; settings go around it.",
                option="values",
            )
    if not leaves:
        raise PipelineError(
            f"stage_end(...) at {where}: got an empty tree; pass the arrays the next stage uses."
        )
    # Integers have no gradient, so the backward never passes their stage end. Beside arrays that
    # have one they go around it; alone they are bound, and `schedule="forward"` can use them.
    inexact = [n for n, leaf in enumerate(leaves) if jnp.issubdtype(_dtype(leaf), jnp.inexact)]
    bound = inexact or range(len(leaves))
    results = stage_end_primitive().bind(
        *(jnp.asarray(leaves[n]) for n in bound),
        number=next(_numbers),
        where=where,
        name=name,
        backward=False,
    )
    for n, value in zip(bound, results, strict=True):
        leaves[n] = value
    return jax.tree.unflatten(treedef, leaves)


@functools.cache
def stage_end_primitive() -> Any:
    """Return the primitive that ends a stage; its transpose, `backward=True`, begins its backward.

    Made at the first use: `import meshwright` must not import `jax.interpreters`.
    """
    return _compat.identity_primitive("stage_end")


def caller_line(file: str) -> str:
    """Return file and line of the nearest frame outside of `file`, as `path.py:3`."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == file:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", None) or jnp.result_type(type(leaf))
