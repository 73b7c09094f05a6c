"""`value_and_grad(...)`: the part of a step that runs once per microbatch."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright.errors import PipelineError, near, short
from meshwright.pipelines.arguments import (
    Rows,
    by_place,
    check_alike,
    is_key_each,
    one_microbatch,
    takes_places,
)
from meshwright.pipelines.stage_mark import caller
from meshwright.trees.split import EMPTY, Split, as_data, as_shape, split_arrays

Role = Literal["whole", "params", "split", "carry"]
REDUCTIONS = ("mean", "sum", "max", "stack")
CLOSURE = "closure"  # the name of operands that are no arguments


@dataclasses.dataclass
class Tracing:
    """A trace of a step in progress: how many regions it has written down so far."""

    microbatches: int
    regions: int = 0


_tracing: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar("tracing", default=None)


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A program that runs once per microbatch, as it stands in the trace of a step.

    Operands come in the order of `roles`. Results are values, reduced over microbatches as
    `reductions` say ("carry" goes into the next microbatch), then one gradient per "params".
    `where` is the line of the user that called for it.
    """

    jaxpr: Any
    roles: tuple[Role, ...]
    names: tuple[str, ...]
    reductions: tuple[str, ...]
    gradient: str | None
    microbatches: int
    where: str

    @property
    def results(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of every result."""
        found = []
        for var, how in zip(self.jaxpr.outvars, self.all_reductions, strict=True):
            shape = (self.microbatches, *var.aval.shape) if how == "stack" else var.aval.shape
            found.append((shape, _reduced_dtype(var.aval.dtype, how)))
        return found

    @property
    def all_reductions(self) -> tuple[str, ...]:
        grads = self.roles.count("params") if self.gradient else 0
        return self.reductions + (self.gradient or "",) * grads


def _reduced_dtype(dtype: Any, how: str) -> Any:
    """As `jnp.sum` and `jnp.mean` have it: truths are counted, means of whole numbers are not."""
    if how == "sum" and dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    if how == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.dtype(jnp.float32)
    return dtype


@functools.cache
def region_primitive() -> Any:
    return _compat.region_primitive("microbatched", lambda region: region.results)


@contextlib.contextmanager
def tracing(microbatches: int) -> Iterator[Tracing]:
    """Inside, `value_and_grad` and `forward` write down a region instead of running."""
    begun = Tracing(microbatches)
    token = _tracing.set(begun)
    try:
        yield begun
    finally:
        _tracing.reset(token)


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
    """`jax.value_and_grad`, in microbatches when the step runs as a pipeline.

    In a pipeline the arguments other than `argnums` are cut along their first dim into
    microbatches; those without dims, and those that `whole` names, go whole to each. One whose
    rows are not as many as the others' is refused unless `cut` names it; only random keys, one
    for each microbatch, need no word. The value and the
    gradients are the `reduce` ("mean" or "sum") over microbatches. Auxiliary outputs are
    reduced by `aux`, one word or a tree of them: "stack" (a new first dim), "mean", "sum" or "max".
    `carry` is the argument that each microbatch hands on to the next, such as batch statistics;
    then `fn` returns `value, carry`, or `value, (carry, aux)`. Outside of a pipeline this is
    `jax.value_and_grad` of the whole batch. Leaves that are no floating-point arrays have no
    gradient: `None`.

    >>> import jax.numpy as jnp, meshwright as mw
    >>> mw.value_and_grad(lambda w, x: jnp.mean(w["a"] * x))({"a": jnp.ones(4)}, jnp.ones(4))
    (Array(1., dtype=float32), {'a': Array([0.25, 0.25, 0.25, 0.25], dtype=float32)})
    """
    if reduce not in ("mean", "sum"):
        raise PipelineError(f"reduce: {short(reduce)} is not 'mean' or 'sum'.")

    @functools.wraps(fn)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        parts = tuple(map(split_arrays, by_place(fn, args, keywords)))
        call = _Call(
            takes_places(fn),
            parts,
            argnums,
            carry,
            has_aux,
            whole=_several(whole),
            cut=_several(cut),
        )
        step = _tracing.get()
        if step is None:
            return call.packed(call.run([list(part.arrays) for part in call.parts]))
        return call.packed(_write_down(call, aux, reduce, step))

    return wrapped


def forward(
    fn: Callable[..., Any],
    *,
    outputs: Any = "stack",
    whole: int | Sequence[int] = (),
    cut: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """`fn` in microbatches, without gradients: its first argument whole, the others cut."""

    def wrapped(*args: Any) -> Any:
        call = _Call(
            fn,
            tuple(map(split_arrays, args)),
            0,
            None,
            False,
            gradient=False,
            whole=_several(whole),
            cut=_several(cut),
        )
        step = _tracing.get()
        if step is None:
            return fn(*args)
        return call.packed(_write_down(call, outputs, None, step))

    return wrapped


@dataclasses.dataclass(eq=False)
class _Call:
    """One call of a function that is to be differentiated; remembers what its results look like."""

    fn: Callable[..., Any]
    parts: tuple[Split, ...]
    argnums: int
    carry: int | None
    has_aux: bool
    gradient: bool = True
    whole: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()
    extra: Split = EMPTY  # what comes with the value, known once it has run

    def __post_init__(self) -> None:
        if isinstance(self.argnums, (tuple, list)):
            raise PipelineError(
                f"argnums={self.argnums}: a pipeline differentiates one argument. Put what is to "
                "be trained into one tree, such as a tuple, and pass that."
            )
        named = [
            ("argnums", self.argnums),
            ("carry", self.carry),
            *(("whole", n) for n in self.whole),
            *(("cut", n) for n in self.cut),
        ]
        for what, number in named:
            if number is not None and number not in range(len(self.parts)):
                raise PipelineError(
                    f"{what}={number}: the function got {len(self.parts)} arguments."
                )
        for what, numbers in (("whole", self.whole), ("cut", self.cut)):
            if self.argnums in numbers:
                raise PipelineError(
                    f"{what}={self.argnums}: argument {self.argnums} holds the parameters, which "
                    "are never cut."
                )
        for number in set(self.whole) & set(self.cut):
            raise PipelineError(f"whole={number} and cut={number}: say one of the two.")
        if self.carry == self.argnums:
            raise PipelineError(f"carry={self.carry}: argument {self.carry} is differentiated.")

    @property
    def trained(self) -> list[int]:
        """Which arrays of the chosen argument have a gradient."""
        if not self.gradient:
            return []
        arrays = self.parts[self.argnums].arrays
        return [n for n, x in enumerate(arrays) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

    def run(self, arrays: list[list[Any]]) -> list[Any]:
        """The value, the leaves of what comes with it, the gradients: all in a row."""
        trained = self.trained

        def valued(weights: list[Any]) -> Any:
            own = list(arrays[self.argnums])
            for n, weight in zip(trained, weights, strict=True):
                own[n] = weight
            values = [*arrays[: self.argnums], own, *arrays[self.argnums + 1 :]]
            out = self.fn(*(p.rebuild(x) for p, x in zip(self.parts, values, strict=True)))
            return self._apart(out)

        weights = [arrays[self.argnums][n] for n in trained]
        if not self.gradient:
            value, extra = valued(weights)
            return [*extra]
        (value, extra), grads = jax.value_and_grad(valued, has_aux=True)(weights)
        return [value, *extra, *grads]

    def packed(self, results: list[Any]) -> Any:
        """What `run` gave, in the shape that the caller expects."""
        if not self.gradient:
            return self.extra.rebuild(results)
        count = len(results) - len(self.trained) - 1
        value, extra, grads = results[0], results[1 : 1 + count], results[1 + count :]
        part = self.parts[self.argnums]
        by_place: list[Any] = [None] * len(part.arrays)
        for n, grad in zip(self.trained, grads, strict=True):
            by_place[n] = grad
        tree = part.rebuild(by_place, other=None)
        if not self.has_aux and self.carry is None:
            return value, tree
        return (value, self.extra.rebuild(extra)), tree

    def _apart(self, out: Any) -> tuple[Any, list[Any]]:
        if not self.gradient:
            self.extra = split_arrays(as_data(out))
            return None, list(self.extra.arrays)
        value, extra = out, None
        if self.has_aux or self.carry is not None:
            if not isinstance(out, tuple) or len(out) != 2:
                raise PipelineError(
                    f"the function returned {short(out)}; with has_aux or carry it returns a pair."
                )
            value, extra = out
        if isinstance(value, (tuple, list, dict)):
            raise PipelineError(
                f"the function returned a {type(value).__name__}, not one number. With outputs "
                "beside the value pass has_aux=True."
            )
        self.extra = self._beside(extra)
        return value, list(self.extra.arrays)

    def _beside(self, extra: Any) -> Split:
        """What comes with the value: in a carry settings stay settings, else numbers are data."""
        if self.carry is None:
            return split_arrays(as_data(extra))
        if not self.has_aux:
            return split_arrays(extra)
        if not isinstance(extra, tuple) or len(extra) != 2:
            raise PipelineError("with carry and has_aux the function returns value, (carry, aux).")
        return split_arrays((extra[0], as_data(extra[1])), 1)


def _write_down(call: _Call, aux: Any, reduce: str | None, step: Tracing) -> list[Any]:
    """Trace the call with one microbatch, and leave it in the outer trace as a region."""
    step.regions += 1
    microbatches = step.microbatches
    roles: list[Role] = []
    names, operands, shapes = list[str](), list[Any](), list[list[Any]]()
    batch: list[Rows] = []
    for number, part in enumerate(call.parts):
        trained = set(call.trained) if number == call.argnums else set()
        shapes.append([])
        for n, (path, array) in enumerate(zip(part.paths, part.arrays, strict=True)):
            name = f"argument {number}" + (f", {path}" if path else "")
            role = _role(call, number, n in trained, array)
            shape = as_shape(array)
            if role == "split":
                rows = Rows(number, name, shape.shape[0])
                if not is_key_each(shape, microbatches):
                    batch.append(rows)
                shape = one_microbatch(shape, microbatches, rows)
            shapes[-1].append(shape)
            roles.append(role)
            names.append(name)
            operands.append(array)
    check_alike(batch, call.cut, microbatches)
    closed = jax.make_jaxpr(call.run)(shapes)
    reductions = (*(() if reduce is None else (reduce,)), *_words(call, aux))
    whole: list[Role] = ["whole"] * len(closed.consts)
    jc, jaxpr = _compat.jaxprs(), closed.jaxpr
    flat = jc.Jaxpr(
        (),
        [*jaxpr.constvars, *jaxpr.invars],
        jaxpr.outvars,
        jaxpr.eqns,
        jaxpr.effects,
        jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    region = Region(
        flat,
        (*whole, *roles),
        (CLOSURE,) * len(closed.consts) + tuple(names),
        reductions,
        reduce,
        microbatches,
        caller(__file__),
    )
    _check_carry(call, region)
    found: list[Any] = region_primitive().bind(*closed.consts, *operands, region=region)
    return found


def _several(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _role(call: _Call, number: int, trained: bool, array: Any) -> Role:
    if number == call.carry:
        return "carry"
    if trained:
        return "params"
    uncut = number == call.argnums or number in call.whole
    return "whole" if uncut or not jnp.ndim(array) else "split"


def _words(call: _Call, aux: Any) -> tuple[str, ...]:
    """How each leaf that comes with the value is reduced."""
    blank = call.extra.rebuild(["carry"] * len(call.extra.arrays), other=None)
    if call.carry is not None:
        if not call.has_aux:
            return tuple(jax.tree.leaves(blank))
        carried, rest = blank
        return (*jax.tree.leaves(carried), *_spread(aux, rest))
    return tuple(_spread(aux, blank))


def _spread(words: Any, tree: Any) -> Sequence[str]:
    try:
        spread = jax.tree.leaves(
            jax.tree.map(lambda word, part: jax.tree.map(lambda _: word, part), words, tree)
        )
    except ValueError as error:
        raise PipelineError(f"aux: {short(words)} is not like the outputs: {error}") from error
    for word in spread:
        if word not in REDUCTIONS:
            hint = near(str(word), REDUCTIONS)
            raise PipelineError(f"aux: {short(word)} is not one of {list(REDUCTIONS)}.{hint}")
    return [str(word) for word in spread]


def _check_carry(call: _Call, region: Region) -> None:
    if call.carry is None:
        return
    given = [
        v.aval for v, role in zip(region.jaxpr.invars, region.roles, strict=True) if role == "carry"
    ]
    made = [
        v.aval
        for v, how in zip(region.jaxpr.outvars, region.all_reductions, strict=True)
        if how == "carry"
    ]
    if [(x.shape, x.dtype) for x in given] != [(x.shape, x.dtype) for x in made]:
        raise PipelineError(
            f"carry={call.carry}: the function takes {short([x.str_short() for x in given])} and "
            f"hands on {short([x.str_short() for x in made])}. They must be alike."
        )
