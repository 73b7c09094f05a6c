"""`value_and_grad(...)`: the part of a training step that runs once per microbatch.

Outside of a pipeline it is `jax.value_and_grad`. While a pipeline traces a step, a call is traced
with the shapes of one microbatch and left in the step's jaxpr as a single equation, whose parameter
is a `Region`: the program of one microbatch, and how its results are reduced over all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright.errors import PipelineError, short
from meshwright.pipelines.arguments import (
    Argument,
    BatchArray,
    CheckedOptions,
    argument_label,
    check_options,
    check_same_rows,
    has_key_per_microbatch,
    microbatch_shape,
    positional_arguments,
    resolve_names,
    takes_positional,
)
from meshwright.pipelines.trace_marks import (
    CLOSURE,
    Reduction,
    Region,
    RegionTrace,
    Role,
    caller_line,
    check_reduced,
    reduction_per_leaf,
    region_primitive,
    region_trace,
)
from meshwright.trees.split import (
    EMPTY,
    Split,
    as_data,
    as_shape,
    changed_numbers,
    split_arrays,
)


def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    reduce: str = "mean",
    aux: Any = None,
    carry: Argument | None = None,
    whole: Argument | Sequence[Argument] = (),
    cut: Argument | Sequence[Argument] | Mapping[Argument, int] = (),
) -> Callable[..., Any]:
    """Differentiate `fn` as `jax.value_and_grad` does, in microbatches if it runs in a pipeline.

    Outside of a pipeline this is `jax.value_and_grad` of the whole batch. Leaves of the
    differentiated argument that are not floating-point arrays get `None` as their gradient.

    Args:
      fn: the function, of which the first output is the value.
      argnums: number of the argument to differentiate, or several. In a pipeline all others are cut
        along dim 0 into microbatches; those without dims go whole to each.
      has_aux: whether `fn` returns `value, aux`.
      reduce: "mean" or "sum" of value and gradients over microbatches, or "stack" for those of
        every microbatch, along a new first dim.
      aux: how auxiliary outputs are reduced, one word or a tree of them: "stack" (the default),
        "concat" (along dim 0, "concat:1" along dim 1), "mean", "sum", "max", or a function of two
        values.
      carry: an argument that each microbatch hands on to the next, such as batch statistics; `fn`
        then returns `value, carry`, or `value, (carry, aux)`. A number or a name.
      whole: arguments that are not cut, by number or name.
      cut: arguments that are cut although they have more or fewer rows than the others, which is
        refused otherwise (but one random key per microbatch); `{1: 2}` cuts argument 1 along dim 2.

    Raises:
      PipelineError: for options that are wrong, or do not fit the call.

    >>> import jax.numpy as jnp, meshwright as mw
    >>> mw.value_and_grad(lambda w, x: jnp.mean(w["a"] * x))({"a": jnp.ones(4)}, jnp.ones(4))
    (Array(1., dtype=float32), {'a': Array([0.25, 0.25, 0.25, 0.25], dtype=float32)})
    """
    if not callable(fn):
        raise PipelineError(f"value_and_grad: {short(fn)} is not a function.", option="fn")
    given = {
        "argnums": argnums,
        "has_aux": has_aux,
        "reduce": reduce,
        "carry": carry,
        "whole": whole,
        "cut": cut,
    }
    return in_microbatches(
        fn, check_options(given if aux is None else given | {"aux": aux}, gradient=True)
    )


def in_microbatches(fn: Callable[..., Any], options: CheckedOptions) -> Callable[..., Any]:
    """Return `fn`, or its value and gradients, as a function that a pipeline cuts.

    Without gradients its parameters (argument `argnums`) are whole, and the others are cut.
    """

    @functools.wraps(fn)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        positional = positional_arguments(fn, args, keywords)
        call = _Call(
            takes_positional(fn),
            tuple(map(split_arrays, positional)),
            tuple(map(argument_label, positional, range(len(positional)))),
            resolve_names(options, fn, positional),
        )
        trace = region_trace()
        if trace is None:
            return call.rebuild(call.run([list(part.arrays) for part in call.parts]))
        return call.rebuild(_record_region(call, trace))

    return wrapped


@dataclasses.dataclass(eq=False)
class _Call:
    """One call of a function in microbatches, with its arguments split into arrays and the rest.

    `run` and `rebuild` are two halves: between them the results are a flat list, which is either
    computed at once or recorded as the results of a region: the value (of a step without gradients
    all arrays of its outputs), what comes with it, the gradients.
    """

    fn: Callable[..., Any]
    parts: tuple[Split, ...]
    labels: tuple[Argument, ...]
    options: CheckedOptions  # with numbers of arguments, not names
    # What `fn` returns, and what with it; `run` sets them, `rebuild` reads them.
    value: Split = EMPTY
    extra: Split = EMPTY

    @property
    def trained(self) -> list[tuple[int, int]]:
        """The arrays that have a gradient: the argument, and the position among its arrays."""
        if not self.options.gradient:
            return []
        # `jax.grad` refuses integers and keys, which modules hold beside their weights.
        return [
            (number, n)
            for number in sorted(self.options.differentiated)
            for n, x in enumerate(self.parts[number].arrays)
            if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        ]

    def run(self, arrays: list[list[Any]]) -> list[Any]:
        """Call `fn` with these arrays; returns the flat list of results."""
        trained = self.trained

        def value_and_extra(weights: list[Any]) -> Any:
            values = [list(part) for part in arrays]
            for (number, n), weight in zip(trained, weights, strict=True):
                values[number][n] = weight
            out = self.fn(*(p.rebuild(x) for p, x in zip(self.parts, values, strict=True)))
            return self._split_output(out)

        if not self.options.gradient:
            values, extra = value_and_extra([])
            return [*values, *extra]
        weights = [arrays[number][n] for number, n in trained]
        (value, extra), grads = jax.value_and_grad(value_and_extra, has_aux=True)(weights)
        return [value, *extra, *grads]

    def rebuild(self, results: list[Any]) -> Any:
        """Put a list of results such as `run` gives into the trees that the caller expects."""
        values = 1 if self.options.gradient else len(self.value.arrays)
        grads = len(results) - len(self.trained)
        value, extra = results[:values], results[values:grads]
        out = value[0] if self.options.gradient else self.value.rebuild(value)
        if self.options.returns_pair:
            out = (out, self.extra.rebuild(extra))
        return (out, self._gradient_trees(results[grads:])) if self.options.gradient else out

    def _gradient_trees(self, grads: list[Any]) -> Any:
        """Return the gradients as a tree like the argument, or a tuple of them for several."""
        grad_of = dict(zip(self.trained, grads, strict=True))
        trees = tuple(
            part.rebuild([grad_of.get((number, n)) for n in range(len(part.arrays))], other=None)
            for number, part in ((n, self.parts[n]) for n in self.options.differentiated)
        )
        return trees[0] if isinstance(self.options.argnums, int) else trees

    def _split_output(self, out: Any) -> tuple[Any, list[Any]]:
        """Take what `fn` returned apart: the value, and the arrays that come with it."""
        value, extra = out, None
        if self.options.returns_pair:
            if not isinstance(out, tuple) or len(out) != 2:
                raise PipelineError(
                    f"the function returned {short(out)}; with has_aux or carry it returns a pair.",
                    option="has_aux" if self.options.has_aux else "carry",
                )
            value, extra = out
        self.extra = self._split_extra(extra)
        if not self.options.gradient:
            self.value = split_arrays(as_data(value))
            return list(self.value.arrays), list(self.extra.arrays)
        if isinstance(value, (tuple, list, dict)):
            raise PipelineError(
                f"the function returned a {type(value).__name__}, not one number. With outputs "
                "beside the value pass has_aux=True.",
                option="has_aux",
            )
        return value, list(self.extra.arrays)

    def _split_extra(self, extra: Any) -> Split:
        """Split what comes with the value: numbers are data in an output, settings in a carry.

        A carry goes into the function again, so that it must have the structure of the argument.
        """
        if self.options.carry is None:
            return split_arrays(as_data(extra))
        if not self.options.has_aux:
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


def _record_region(call: _Call, trace: RegionTrace) -> list[Any]:
    """Trace the call with one microbatch, and leave it in the outer trace as a region."""
    trace.regions += 1
    inputs = _RegionInputs(call, trace.microbatches)
    # Closed-over arrays, tracers of the step among them, are constants of this trace. As operands
    # of the equation they stay visible to the step, which knows where each of them comes from.
    closed = jax.make_jaxpr(call.run)(inputs.shapes)
    if _carry_counts(call):
        inputs = _RegionInputs(call, trace.microbatches)
        closed = jax.make_jaxpr(call.run)(inputs.shapes)
    closure: list[Role] = ["whole"] * len(closed.consts)
    region = Region(
        _compat.constants_as_inputs(closed.jaxpr),
        (*closure, *inputs.roles),
        (0,) * len(closed.consts) + tuple(inputs.dims),
        (CLOSURE,) * len(closed.consts) + tuple(inputs.names),
        tuple(_reductions(call)),
        call.options.reduce if call.options.gradient else None,
        trace.microbatches,
        caller_line(__file__),
    )
    _check_carry(call, region)
    for n, (var, how) in enumerate(zip(region.jaxpr.outvars, region.reductions, strict=False)):
        option = "outputs" if n < len(call.value.arrays) else "aux"
        check_reduced(option, how, var.aval.shape, var.aval.dtype)
    results: list[Any] = region_primitive().bind(*closed.consts, *inputs.operands, region=region)
    return results


class _RegionInputs:
    """The arrays of a call as operands of a region: what they are, and their part in a microbatch.

    `shapes` are by argument, the other lists are flat.
    """

    def __init__(self, call: _Call, microbatches: int):
        self.roles: list[Role] = []
        self.dims: list[int] = []
        self.names: list[str] = []
        self.operands: list[Any] = []
        self.shapes: list[list[Any]] = []
        batch: list[BatchArray] = []
        trained = set(call.trained)
        for number, part in enumerate(call.parts):
            self.shapes.append([])
            for n, (path, array) in enumerate(zip(part.paths, part.arrays, strict=True)):
                label = call.labels[number]
                # The path of a keyword-only argument begins with its name.
                inside = path if isinstance(label, int) else path.partition("/")[2]
                name = f"argument {label!r}" + (f", {inside}" if inside else "")
                role = _role(call.options, number, (number, n) in trained, array)
                shape, dim = as_shape(array), 0
                if role == "split":
                    dim = call.options.cut.get(number, 0)
                    rows = BatchArray(label, name, shape.shape, dim)
                    if not has_key_per_microbatch(shape, microbatches):
                        batch.append(rows)
                    shape = microbatch_shape(shape, microbatches, rows)
                self.shapes[-1].append(shape)
                self.roles.append(role)
                self.dims.append(dim)
                self.names.append(name)
                self.operands.append(array)
        # After the loop, so that rows that do not divide are named first, and all lengths are
        # known.
        named = [call.labels[int(n)] for n in call.options.cut]
        check_same_rows(batch, named, microbatches)


def _role(options: CheckedOptions, number: int, trained: bool, array: Any) -> Role:
    if number == options.carry:
        return "carry"
    if trained:
        return "params"
    uncut = number in options.differentiated or number in options.whole
    return "whole" if uncut or not jnp.ndim(array) else "split"


def _carry_counts(call: _Call) -> bool:
    """Turn Python numbers of a carry that the function changes into data; return if there are any.

    As settings they would have the same value in every microbatch.
    """
    number = call.options.carry
    if number is None:
        return False
    before = call.parts[int(number)]
    changed = changed_numbers(before, call.extra)
    if changed:
        tree = before.rebuild(before.arrays)
        data = jax.tree.unflatten(
            before.treedef,
            [
                jnp.asarray(leaf) if n in changed else leaf
                for n, leaf in enumerate(jax.tree.leaves(tree))
            ],
        )
        parts = list(call.parts)
        parts[int(number)] = split_arrays(data)
        call.parts = tuple(parts)
    return bool(changed)


def _reductions(call: _Call) -> list[Reduction]:
    """Return how each result but the gradients is reduced; known once the call was traced."""
    options = call.options
    values: list[Reduction] = [options.reduce]
    if not options.gradient:
        outputs = call.value.rebuild([""] * len(call.value.arrays), other=None)
        values = list(reduction_per_leaf("outputs", options.outputs, outputs))
    carried = call.extra.rebuild(["carry"] * len(call.extra.arrays), other=None)
    if options.carry is None:
        return [*values, *reduction_per_leaf("aux", options.aux, carried)]
    if not options.has_aux:
        return [*values, *jax.tree.leaves(carried)]
    state, beside = carried
    return [*values, *jax.tree.leaves(state), *reduction_per_leaf("aux", options.aux, beside)]


def _check_carry(call: _Call, region: Region) -> None:
    """Refuse a carry that comes out with other shapes or dtypes than it went in with."""
    if call.options.carry is None:
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
            f"carry={call.options.carry}: the function takes "
            f"{short([x.str_short() for x in into])} and hands on "
            f"{short([x.str_short() for x in out])}. They must be alike.",
            option="carry",
        )
