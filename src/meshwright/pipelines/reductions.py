"""How results of single microbatches become results of the step: words, or a function of two.

"mean", "sum" and "max" are added up while the tasks run, in one array. All others keep the value of
every microbatch and join them at the end: "stack" along a new first dim, "concat" (or "concat:1")
along a dim that they have, and a function `f(total, value)` from the first microbatch to the last.
"carry" is what each microbatch hands on to the next: the last one's is the result.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import PipelineError, near, short

Reduction = str | Callable[[Any, Any], Any]
REDUCTIONS = ("mean", "sum", "max", "stack", "concat")
_CONCAT = re.compile(r"concat(?::([0-9]{1,2}))?")


def is_total(how: Reduction) -> bool:
    """Whether tasks add a result up as they go; otherwise every microbatch's value is kept."""
    return how in ("mean", "sum", "max")


def check_words(option: str, words: Any) -> None:
    """Refuse a tree of reductions with a leaf that is none."""
    for word in jax.tree.leaves(words, is_leaf=lambda x: x is None):
        if callable(word) or word in REDUCTIONS or _concat_dim(word) is not None:
            continue
        hint = near(str(word), REDUCTIONS)
        raise PipelineError(
            f"{option}: {short(word)} is not one of {list(REDUCTIONS)}, 'concat:1' for another dim "
            f"than the first, or a function of two values.{hint}",
            option=option,
        )


def reduction_per_leaf(option: str, words: Any, tree: Any) -> Sequence[Reduction]:
    """Spread one reduction, or a tree of them that is a prefix of `tree`, over its leaves."""
    try:
        return jax.tree.leaves(
            jax.tree.map(lambda word, part: jax.tree.map(lambda _: word, part), words, tree)
        )
    except ValueError as error:
        raise PipelineError(
            f"{option}: {short(words)} is not like the outputs: {error}", option=option
        ) from error


def check_reduced(option: str, how: Reduction, shape: tuple[int, ...], dtype: Any) -> None:
    """Refuse a dim that a value does not have, and a function that makes another kind of it."""
    dim = _concat_dim(how)
    if dim is not None and dim >= len(shape):
        raise PipelineError(
            f"{option}={how!r}: an output of shape {shape} has no dim {dim} to be joined along. "
            "Use 'stack', which adds one.",
            option=option,
        )
    if callable(how):
        value = jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
        out = jax.eval_shape(how, value, value)
        if (getattr(out, "shape", None), getattr(out, "dtype", None)) != (shape, dtype):
            raise PipelineError(
                f"{option}: {getattr(how, '__name__', short(how))} takes two values of "
                f"{dtype}{list(shape)} and makes {short(out)}. A reduction makes one like them.",
                option=option,
            )


def reduced_shape(shape: tuple[int, ...], how: Reduction, microbatches: int) -> tuple[int, ...]:
    """Return the shape of a result after the reduction over microbatches.

    >>> [reduced_shape((2, 3), how, 4) for how in ("mean", "stack", "concat", "concat:1")]
    [(2, 3), (4, 2, 3), (8, 3), (2, 12)]
    """
    if how == "stack":
        return (microbatches, *shape)
    dim = _concat_dim(how)
    if dim is None:
        return shape
    return (*shape[:dim], microbatches * shape[dim], *shape[dim + 1 :])


def reduced_dtype(dtype: Any, how: Reduction) -> Any:
    """Return the dtype as in `jnp`: booleans are summed as int32, means of integers are float32."""
    if how == "sum" and dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    if how == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.dtype(jnp.float32)
    return dtype


def join(how: Reduction, values: Sequence[Any]) -> Any:
    """Make a result of the values of all microbatches; of a carry, of the last one alone."""
    if callable(how):
        return functools.reduce(how, values)
    if how == "carry":
        return values[-1]
    dim = _concat_dim(how)
    return jnp.stack(values) if dim is None else jnp.concatenate(values, dim)


def _concat_dim(how: Any) -> int | None:
    """Return the dim along which values are joined; None for other reductions."""
    match = _CONCAT.fullmatch(how) if isinstance(how, str) else None
    return None if match is None else int(match[1] or 0)
