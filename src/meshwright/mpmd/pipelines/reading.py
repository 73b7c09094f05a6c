"""A step as it was traced: what comes before its microbatches, the region, what comes after."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshwright import _compat
from meshwright.errors import MeshwrightError, PipelineError
from meshwright.mpmd.pipelines.inlining import flat, marks_of
from meshwright.mpmd.pipelines.marks import mark
from meshwright.mpmd.pipelines.regions import (
    Region,
    forward,
    region_primitive,
    tracing,
    value_and_grad,
)
from meshwright.mpmd.pipelines.statics import Split, as_shape, take_apart


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A step, flat. `operands` and `results` are the region's, as variables of the step."""

    invars: tuple[Any, ...]
    consts: dict[Any, Any]
    before: tuple[Any, ...]
    region: Region
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    after: tuple[Any, ...]
    outvars: tuple[Any, ...]
    out: Split


def read(
    fn: Callable[..., Any], args: Split, microbatches: int, forward_only: bool, options: Any
) -> Traced:
    """Trace a step, or a loss function, whose gradients are then the step."""
    wrapped = (forward if forward_only else value_and_grad)(fn, **options)
    with tracing(microbatches) as step:
        try:
            closed, out = _trace(fn, args)
        except Exception as error:
            if step.regions or isinstance(error, MeshwrightError):
                raise
            # A loss function may be made for the rows of a microbatch alone.
            closed, out = _trace(wrapped, args)
        else:
            if options and _regions(closed.jaxpr):
                raise PipelineError(
                    f"{', '.join(sorted(options))}: the step calls value_and_grad itself. Give "
                    "these options there."
                )
    if not _regions(closed.jaxpr):
        _refuse_gradients(closed.jaxpr)
        with tracing(microbatches):
            closed, out = _trace(wrapped, args)
    jaxpr = closed.jaxpr
    (place,) = _regions(jaxpr) if len(_regions(jaxpr)) == 1 else (None,)
    if place is None:
        raise PipelineError(
            f"the step calls value_and_grad {len(_regions(jaxpr))} times. A pipeline runs one "
            "region of microbatches per step: put the losses into one function."
        )
    for what in (found for eqn in jaxpr.eqns for found in _outside(eqn)):
        raise PipelineError(
            f"{what} is outside of the differentiated function. Marks belong into "
            "the function that value_and_grad is given."
        )
    eqn = jaxpr.eqns[place]
    before = _ancestors(jaxpr.eqns[:place], eqn.invars)
    rest = [e for n, e in enumerate(jaxpr.eqns[:place]) if n not in before]
    return Traced(
        tuple(jaxpr.invars),
        dict(zip(jaxpr.constvars, closed.consts, strict=True)),
        tuple(jaxpr.eqns[n] for n in sorted(before)),
        eqn.params["region"],
        tuple(eqn.invars),
        tuple(eqn.outvars),
        (*rest, *jaxpr.eqns[place + 1 :]),
        tuple(jaxpr.outvars),
        out,
    )


def _trace(fn: Callable[..., Any], args: Split) -> tuple[Any, Split]:
    """The program of the arrays; what else is returned stands in the split of the result."""
    shapes = [as_shape(array) for array in args.arrays]
    outs: list[Split] = []

    def arrays(*values: Any) -> tuple[Any, ...]:
        out = take_apart(fn(*args.rebuild(values)))
        outs.append(dataclasses.replace(out, arrays=()))
        return out.arrays

    closed = jax.make_jaxpr(arrays)(*shapes)
    jc, jaxpr = _compat.jaxprs(), closed.jaxpr
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    opened = jc.Jaxpr(
        (), [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns, jaxpr.effects, names
    )
    flattened = flat(opened, open_remat=False)
    count = len(closed.consts)
    inner = flattened.jaxpr
    lifted = jc.Jaxpr(
        [*inner.constvars, *inner.invars[:count]],
        inner.invars[count:],
        inner.outvars,
        inner.eqns,
        inner.effects,
        inner.debug_info._replace(arg_names=None, result_paths=None),
    )
    return jc.ClosedJaxpr(lifted, [*flattened.consts, *closed.consts]), outs[-1]


def _regions(jaxpr: Any) -> list[int]:
    return [n for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive is region_primitive()]


def _refuse_gradients(jaxpr: Any) -> None:
    for eqn in jaxpr.eqns:
        if eqn.primitive is mark() and eqn.params["backward"]:
            raise PipelineError(
                f"stage(...) at {eqn.params['where']} is inside of a gradient that the step takes "
                "by itself. Take it with meshwright.value_and_grad, which a pipeline runs in "
                "microbatches."
            )


def _outside(eqn: Any) -> Sequence[str]:
    """Marks of an equation that is not a region."""
    return () if eqn.primitive is region_primitive() else list(marks_of([eqn]))


def _ancestors(eqns: Sequence[Any], targets: Sequence[Any]) -> set[int]:
    jc = _compat.jaxprs()
    needed = {var for var in targets if not isinstance(var, jc.Literal)}
    found = set()
    for n in reversed(range(len(eqns))):
        if any(var in needed for var in eqns[n].outvars):
            found.add(n)
            needed.update(v for v in eqns[n].invars if not isinstance(v, jc.Literal))
    return found
