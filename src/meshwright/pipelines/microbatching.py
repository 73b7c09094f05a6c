"""`value_and_grad(...)`: the part of a training step that runs once per microbatch.

Outside of a pipeline it is `jax.value_and_grad`. While a pipeline traces a step, a call is traced
with the shapes of one microbatch and left in the step's jaxpr as a single equation, whose parameter
is a `Region`: the program of one microbatch, and how its results are reduced over all of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright._compat import Jaxpr
from meshwright.errors import PipelineError, near, short
from meshwright.pipelines.arguments import (
    BatchArray,
    check_same_rows,
    has_key_per_microbatch,
    microbatch_shape,
    positional_arguments,
    takes_positional,
)
from meshwright.pipelines.stage_mark import caller_line
from meshwright.trees.split import EMPTY, Split, as_data, as_shape, split_arrays

Role = Literal["whole", "params", "split", "carry"]
REDUCTIONS = ("mean", "sum", "max", "stack")
CLOSURE = "closure"  # the name of operands that are no arguments


class MicrobatchOptions(TypedDict, total=False):
    """The options of `value_and_grad` and `forward`, for functions that pass them on."""

    argnums: int
    has_aux: bool
    reduce: str
    aux: Any
    carry: int | None
    whole: int | Sequence[int]
    cut: int | Sequence[int]
    outputs: Any


def value_and_grad(
    fn: Callable[..., Any],
    argnums: int = 0,
    *,
    has_aux: bool = False,
    reduce: str = "mean",
    aux: Any = "stack",
    carry: int | None = None,
    whole: int | Sequence[int] = (),
    cut: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Differentiate `fn` as `jax.value_and_grad` does, in microbatches if it runs in a pipeline.

    In a pipeline the arguments other than `argnums` (one number) are cut along dim 0 into
    microbatches; those without dims, and those that `whole` names, go whole to each. An argument
    with more or fewer rows than the others is refused unless `cut` names it, or it holds one random
    key per microbatch. The value and the gradients are the `reduce` ("mean" or "sum") over
    microbatches. Auxiliary outputs (`has_aux=True`) are reduced by `aux`, one word or a tree of
    them: "stack" (a new first dim), "mean", "sum" or "max". `carry` is the number of an argument
    that each microbatch hands on to the next, such as batch statistics; `fn` then returns
    `value, carry`, or `value, (carry, aux)`.

    Outside of a pipeline this is `jax.value_and_grad` of the whole batch. Leaves of the
    differentiated argument that are no floating-point arrays get `None` as their gradient. Options
    that do not fit the call raise `PipelineError`.

    >>> import jax.numpy as jnp, meshwright as mw
    >>> mw.value_and_grad(lambda w, x: jnp.mean(w["a"] * x))({"a": jnp.ones(4)}, jnp.ones(4))
    (Array(1., dtype=float32), {'a': Array([0.25, 0.25, 0.25, 0.25], dtype=float32)})
    """
    if reduce not in ("mean", "sum"):
        raise PipelineError(f"reduce: {short(reduce)} is not 'mean' or 'sum'.", option="reduce")

    @functools.wraps(fn)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        call = _Call(
            takes_positional(fn),
            tuple(map(split_arrays, positional_arguments(fn, args, keywords))),
            argnums,
            carry,
            has_aux,
            whole=_as_tuple(whole),
            cut=_as_tuple(cut),
        )
        trace = _region_trace.get()
        if trace is None:
            return call.rebuild(call.run([list(part.arrays) for part in call.parts]))
        return call.rebuild(_record_region(call, aux, reduce, trace))

    return wrapped


def forward(
    fn: Callable[..., Any],
    *,
    outputs: Any = "stack",
    whole: int | Sequence[int] = (),
    cut: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Run `fn` in microbatches without gradients: its first argument whole, the others cut."""

    def wrapped(*args: Any) -> Any:
        call = _Call(
            fn,
            tuple(map(split_arrays, args)),
            0,
            None,
            False,
            gradient=False,
            whole=_as_tuple(whole),
            cut=_as_tuple(cut),
        )
        trace = _region_trace.get()
        if trace is None:
            return fn(*args)
        return call.rebuild(_record_region(call, outputs, None, trace))

    return wrapped


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A program that runs once per microbatch, as it stands in the trace of a step.

    `jaxpr` has no constants. Its inputs are what `roles` say: "params" are differentiated, "split"
    is this microbatch's part of the batch, "whole" is the same in every microbatch, and "carry"
    comes from the microbatch before. `names` are what messages call them. Results are values,
    reduced over microbatches as `reductions` say ("carry" goes into the next microbatch), then one
    gradient per "params" input, reduced by `gradient` (None without gradients). `where` is the
    user's line that called for it.
    """

    jaxpr: Jaxpr
    roles: tuple[Role, ...]
    names: tuple[str, ...]
    reductions: tuple[str, ...]
    gradient: str | None
    microbatches: int
    where: str

    @property
    def result_shapes(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of every result, after the reduction over microbatches."""
        shapes = []
        for var, how in zip(self.jaxpr.outvars, self.all_reductions, strict=True):
            shape = (self.microbatches, *var.aval.shape) if how == "stack" else var.aval.shape
            shapes.append((shape, _reduced_dtype(var.aval.dtype, how)))
        return shapes

    @property
    def all_reductions(self) -> tuple[str, ...]:
        """How every result is reduced, gradients included."""
        grads = self.roles.count("params") if self.gradient else 0
        return self.reductions + (self.gradient or "",) * grads


def _reduced_dtype(dtype: Any, how: str) -> Any:
    """Return the dtype as in `jnp`: booleans are summed as int32, means of integers are float32."""
    if how == "sum" and dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    if how == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.dtype(jnp.float32)
    return dtype


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


@dataclasses.dataclass(eq=False)
class _Call:
    """One call of `value_and_grad` or `forward`, with its arguments split into arrays and the rest.

    `run` and `rebuild` are two halves: between them the results are a flat list, which is either
    computed at once or recorded as the results of a region.
    """

    fn: Callable[..., Any]
    parts: tuple[Split, ...]
    argnums: int
    carry: int | None
    has_aux: bool
    gradient: bool = True
    whole: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()
    extra: Split = EMPTY  # what `fn` returns with the value; `run` sets it, `rebuild` reads it

    def __post_init__(self) -> None:
        if isinstance(self.argnums, (tuple, list)):
            raise PipelineError(
                f"argnums={self.argnums}: a pipeline differentiates one argument. Put what is to "
                "be trained into one tree, such as a tuple, and pass that.",
                option="argnums",
            )
        named = [
            ("argnums", self.argnums),
            ("carry", self.carry),
            *(("whole", n) for n in self.whole),
            *(("cut", n) for n in self.cut),
        ]
        for option, number in named:
            if number is not None and number not in range(len(self.parts)):
                raise PipelineError(
                    f"{option}={number}: the function got {len(self.parts)} arguments.",
                    option=option,
                )
        for option, numbers in (("whole", self.whole), ("cut", self.cut)):
            if self.argnums in numbers:
                raise PipelineError(
                    f"{option}={self.argnums}: argument {self.argnums} holds the parameters, which "
                    "are never cut.",
                    option=option,
                )
        for number in set(self.whole) & set(self.cut):
            raise PipelineError(
                f"whole={number} and cut={number}: say one of the two.", option="whole"
            )
        if self.carry == self.argnums:
            raise PipelineError(
                f"carry={self.carry}: argument {self.carry} is differentiated.", option="carry"
            )

    @property
    def trained(self) -> list[int]:
        """The positions of the arrays of argument `argnums` that have a gradient."""
        if not self.gradient:
            return []
        # `jax.grad` refuses integers and keys, which modules hold beside their weights.
        arrays = self.parts[self.argnums].arrays
        return [n for n, x in enumerate(arrays) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

    def run(self, arrays: list[list[Any]]) -> list[Any]:
        """Call `fn` with these arrays: the value, the leaves that come with it, the gradients."""
        trained = self.trained

        def value_and_extra(weights: list[Any]) -> Any:
            params = list(arrays[self.argnums])
            for n, weight in zip(trained, weights, strict=True):
                params[n] = weight
            values = [*arrays[: self.argnums], params, *arrays[self.argnums + 1 :]]
            out = self.fn(*(p.rebuild(x) for p, x in zip(self.parts, values, strict=True)))
            return self._split_output(out)

        weights = [arrays[self.argnums][n] for n in trained]
        if not self.gradient:
            _, extra = value_and_extra(weights)
            return [*extra]
        (value, extra), grads = jax.value_and_grad(value_and_extra, has_aux=True)(weights)
        return [value, *extra, *grads]

    def rebuild(self, results: list[Any]) -> Any:
        """Put a list of results such as `run` gives into the trees that the caller expects."""
        if not self.gradient:
            return self.extra.rebuild(results)
        count = len(results) - len(self.trained) - 1
        value, extra, grads = results[0], results[1 : 1 + count], results[1 + count :]
        params = self.parts[self.argnums]
        grad_of: list[Any] = [None] * len(params.arrays)
        for n, grad in zip(self.trained, grads, strict=True):
            grad_of[n] = grad
        tree = params.rebuild(grad_of, other=None)
        if not self.has_aux and self.carry is None:
            return value, tree
        return (value, self.extra.rebuild(extra)), tree

    def _split_output(self, out: Any) -> tuple[Any, list[Any]]:
        """Take what `fn` returned apart: the value, and the arrays that come with it."""
        if not self.gradient:
            self.extra = split_arrays(as_data(out))
            return None, list(self.extra.arrays)
        value, extra = out, None
        if self.has_aux or self.carry is not None:
            if not isinstance(out, tuple) or len(out) != 2:
                raise PipelineError(
                    f"the function returned {short(out)}; with has_aux or carry it returns a pair.",
                    option="has_aux" if self.has_aux else "carry",
                )
            value, extra = out
        if isinstance(value, (tuple, list, dict)):
            raise PipelineError(
                f"the function returned a {type(value).__name__}, not one number. With outputs "
                "beside the value pass has_aux=True.",
                option="has_aux",
            )
        self.extra = self._split_extra(extra)
        return value, list(self.extra.arrays)

    def _split_extra(self, extra: Any) -> Split:
        """Split what comes with the value: numbers are data in an output, settings in a carry.

        A carry goes into the function again, so that it must have the structure of the argument.
        """
        if self.carry is None:
            return split_arrays(as_data(extra))
        if not self.has_aux:
            return split_arrays(extra)
        if not isinstance(extra, tuple) or len(extra) != 2:
            raise PipelineError(
                "with carry and has_aux the function returns value, (carry, aux).", option="carry"
            )
        return split_arrays((extra[0], as_data(extra[1])), 1)


# Record a call as a region.
#
# In: a call with the arrays (tracers of the step) of the whole batch. Out: the results of one
# equation, which stand for those of all microbatches, reduced. Invariant: the region's jaxpr has
# one input for each operand of that equation, in the order of `roles`, constants first; only
# "split" inputs have another shape than their operands. Example: `value_and_grad(loss)(w, x)` with
# 4 microbatches and x of 8 rows leaves `v:f32[] g:f32[4,4] = microbatched[region=...] w x`, whose
# region takes 2 rows of x.


def _record_region(call: _Call, aux: Any, reduce: str | None, trace: RegionTrace) -> list[Any]:
    """Trace the call with one microbatch, and leave it in the outer trace as a region."""
    trace.regions += 1
    microbatches = trace.microbatches
    roles: list[Role] = []
    names, operands, shapes = list[str](), list[Any](), list[list[Any]]()
    batch: list[BatchArray] = []
    for number, part in enumerate(call.parts):
        trained = set(call.trained) if number == call.argnums else set()
        shapes.append([])
        for n, (path, array) in enumerate(zip(part.paths, part.arrays, strict=True)):
            name = f"argument {number}" + (f", {path}" if path else "")
            role = _role(call, number, n in trained, array)
            shape = as_shape(array)
            if role == "split":
                rows = BatchArray(number, name, shape.shape[0])
                if not has_key_per_microbatch(shape, microbatches):
                    batch.append(rows)
                shape = microbatch_shape(shape, microbatches, rows)
            shapes[-1].append(shape)
            roles.append(role)
            names.append(name)
            operands.append(array)
    # After the loop, so that rows that do not divide are named first, and all lengths are known.
    check_same_rows(batch, call.cut, microbatches)
    # Closed-over arrays, tracers of the step among them, are constants of this trace. As operands
    # of the equation they stay visible to the step, which knows where each of them comes from.
    closed = jax.make_jaxpr(call.run)(shapes)
    closure: list[Role] = ["whole"] * len(closed.consts)
    region = Region(
        _compat.constants_as_inputs(closed.jaxpr),
        (*closure, *roles),
        (CLOSURE,) * len(closed.consts) + tuple(names),
        (*(() if reduce is None else (reduce,)), *_reductions(call, aux)),
        reduce,
        microbatches,
        caller_line(__file__),
    )
    _check_carry(call, region)
    results: list[Any] = region_primitive().bind(*closed.consts, *operands, region=region)
    return results


def _as_tuple(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _role(call: _Call, number: int, trained: bool, array: Any) -> Role:
    if number == call.carry:
        return "carry"
    if trained:
        return "params"
    uncut = number == call.argnums or number in call.whole
    return "whole" if uncut or not jnp.ndim(array) else "split"


def _reductions(call: _Call, aux: Any) -> tuple[str, ...]:
    """Return how each leaf beside the value is reduced; known once the call was traced."""
    carried = call.extra.rebuild(["carry"] * len(call.extra.arrays), other=None)
    if call.carry is None:
        return tuple(_reduction_per_leaf(aux, carried))
    if not call.has_aux:
        return tuple(jax.tree.leaves(carried))
    state, outputs = carried
    return (*jax.tree.leaves(state), *_reduction_per_leaf(aux, outputs))


def _reduction_per_leaf(words: Any, tree: Any) -> Sequence[str]:
    """Spread one word, or a tree of words that is a prefix of `tree`, over the leaves."""
    try:
        per_leaf = jax.tree.leaves(
            jax.tree.map(lambda word, part: jax.tree.map(lambda _: word, part), words, tree)
        )
    except ValueError as error:
        raise PipelineError(
            f"aux: {short(words)} is not like the outputs: {error}", option="aux"
        ) from error
    for word in per_leaf:
        if word not in REDUCTIONS:
            hint = near(str(word), REDUCTIONS)
            raise PipelineError(
                f"aux: {short(word)} is not one of {list(REDUCTIONS)}.{hint}", option="aux"
            )
    return [str(word) for word in per_leaf]


def _check_carry(call: _Call, region: Region) -> None:
    """Refuse a carry that comes out with other shapes or dtypes than it went in with."""
    if call.carry is None:
        return
    into = [
        v.aval for v, role in zip(region.jaxpr.invars, region.roles, strict=True) if role == "carry"
    ]
    out = [
        v.aval
        for v, how in zip(region.jaxpr.outvars, region.all_reductions, strict=True)
        if how == "carry"
    ]
    if [(x.shape, x.dtype) for x in into] != [(x.shape, x.dtype) for x in out]:
        raise PipelineError(
            f"carry={call.carry}: the function takes {short([x.str_short() for x in into])} and "
            f"hands on {short([x.str_short() for x in out])}. They must be alike.",
            option="carry",
        )
