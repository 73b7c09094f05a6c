"""What a step leaves in its trace: ends of stages, and regions that run once per microbatch.

`stage_end` marks values in the user's function. `microbatching.py` records regions, pass 1 finds
both in the trace, and all later passes read them. A region's results become the step's as its
reductions say, by words or by a function of two:

"mean", "sum" and "max" are added up while the tasks run, in one array. All others keep the value of
every microbatch and join them at the end: "stack" along a new first dim, "concat" (or "concat:1")
along a dim that they have, and a function `f(total, value)` from the first microbatch to the last.
"carry" is what each microbatch hands on to the next: the last one's is the result.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright._compat import Jaxpr
from meshwright.errors import PipelineError, near, short
from meshwright.trees.walk import bits, is_array

# Ends of stages.

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


# Reductions over microbatches.

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
    stars = jax.tree.map(lambda _: "*", tree)
    try:
        return jax.tree.leaves(
            jax.tree.map(lambda word, part: jax.tree.map(lambda _: word, part), words, tree)
        )
    except ValueError as error:
        raise PipelineError(
            f"{option}: {short(words)} is not like the outputs, {short(stars)}. Give one "
            "word for all of them, or a tree of words like theirs.",
            option=option,
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
    """Return the dtype as in `jnp`: small integers are summed as wide ones, their means float32."""
    if how == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.dtype(jnp.float32)
    return summed_dtype(dtype) if how == "sum" else dtype


def summed_dtype(dtype: Any) -> Any:
    """Return the dtype in which values are added up: int8 would overflow, booleans saturate.

    >>> [str(summed_dtype(jnp.dtype(name))) for name in ("int8", "uint16", "bool", "bfloat16")]
    ['int32', 'uint32', 'int32', 'bfloat16']
    """
    narrow = jnp.issubdtype(dtype, jnp.integer) and bits(dtype) < 32
    if dtype == jnp.bool_ or (narrow and jnp.issubdtype(dtype, jnp.signedinteger)):
        return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.uint32) if narrow else dtype


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


# Regions.

Role = Literal["whole", "params", "split", "carry"]
CLOSURE = "closure"  # the name of operands that are no arguments


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A program that runs once per microbatch, as it stands in the trace of a step.

    `jaxpr` has no constants. Its inputs are what `roles` say: "params" are differentiated, "split"
    is this microbatch's part of the batch, cut along the dim that `dims` has, "whole" is the same
    in every microbatch, and "carry" comes from the microbatch before. `names` are what messages
    call them. Results are values, reduced over microbatches as `reductions` say ("carry" goes into
    the next microbatch), then one gradient per "params" input, reduced by `gradient` (None without
    gradients). `where` is the user's line that called for it.
    """

    jaxpr: Jaxpr
    roles: tuple[Role, ...]
    dims: tuple[int, ...]
    names: tuple[str, ...]
    reductions: tuple[Reduction, ...]
    gradient: str | None
    microbatches: int
    where: str

    @property
    def result_shapes(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of every result, after the reduction over microbatches."""
        return [
            (
                reduced_shape(var.aval.shape, how, self.microbatches),
                reduced_dtype(var.aval.dtype, how),
            )
            for var, how in zip(self.jaxpr.outvars, self.all_reductions, strict=True)
        ]

    @property
    def all_reductions(self) -> tuple[Reduction, ...]:
        """How every result is reduced, gradients included."""
        grads = self.roles.count("params") if self.gradient else 0
        return self.reductions + (self.gradient or "",) * grads


@functools.cache
def region_primitive() -> Any:
    """Return the primitive of the one equation that stands for a region; it is never run."""
    return _compat.region_primitive("microbatched", lambda region: region.result_shapes)


@dataclasses.dataclass
class RegionTrace:
    """The trace of a step in progress: how many regions it has recorded so far."""

    microbatches: int
    regions: int = 0


# A context variable, not a global: another thread may call the same function as it is.
_region_trace: contextvars.ContextVar[RegionTrace | None] = contextvars.ContextVar(
    "region_trace", default=None
)


@contextlib.contextmanager
def recording_regions(microbatches: int) -> Iterator[RegionTrace]:
    """Make `value_and_grad` and `forward` record regions instead of running."""
    trace = RegionTrace(microbatches)
    token = _region_trace.set(trace)
    try:
        yield trace
    finally:
        _region_trace.reset(token)


def region_trace() -> RegionTrace | None:
    """Return the trace in progress; None where functions simply run."""
    return _region_trace.get()
