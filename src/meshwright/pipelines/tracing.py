"""A step as it was traced: what comes before its microbatches, the region, what comes after."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from meshwright import _compat
from meshwright.errors import MeshwrightError, PipelineError
from meshwright.pipelines.microbatching import (
    Region,
    forward,
    region_primitive,
    tracing,
    value_and_grad,
)
from meshwright.pipelines.stage_mark import mark
from meshwright.trees.split import Split, as_shape, split_arrays


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
        out = split_arrays(fn(*args.rebuild(values)))
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
                f"stage_end(...) at {eqn.params['where']} is inside of a gradient that the step "
                "takes by itself. Take it with meshwright.value_and_grad, which a pipeline runs in "
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


# Flatten a traced program: every jit is opened, every remat, and whatever else hides a mark.


AGAIN = "computed_again"  # the scope of what a remat computes in the backward


def is_again(eqn: Any) -> bool:
    return AGAIN in str(eqn.source_info.name_stack).split("/")


def flat(jaxpr: Any, *, open_remat: bool) -> Any:
    """The same program, closed, with marks and regions at its top level.

    A remat is opened because its forward and its backward become different programs, so that
    nothing can undo it.
    """
    avals = [var.aval for var in jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _run(jaxpr, args, open_remat))(
        *(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals)  # type: ignore[no-untyped-call]
    )


def _run(jaxpr: Any, args: Sequence[Any], open_remat: bool) -> list[Any]:
    jc, known = _compat.jaxprs(), _compat.known_primitives()
    values = dict(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, jc.Literal) else values[var]

    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        inner = _opened(eqn, known, open_remat)
        if inner is not None:
            second = eqn.primitive is known["remat"] and eqn.params["differentiated"]
            with jax.named_scope(AGAIN) if second else contextlib.nullcontext():
                found = _run(inner[0], [*inner[1], *operands], open_remat)
        else:
            found = run_equation(jc, eqn, values)
        values.update(zip(eqn.outvars, found, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _opened(eqn: Any, known: dict[str, Any], open_remat: bool) -> tuple[Any, Sequence[Any]] | None:
    """The program inside an equation, with its constants, where it must be opened."""
    primitive = eqn.primitive
    inside = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if primitive is known["remat"] and (open_remat or has_marks(inside)):
        return _closed(inside)
    if primitive is known["jit"]:
        return _closed(inside)
    hidden = [where for program in _programs(eqn) for where in marks_in(program)]
    if not hidden:
        return None
    if primitive in (known["closed_call"], known["custom_jvp"], known["custom_vjp"]):
        return _closed(inside)
    raise PipelineError(
        f"{hidden[0]} is inside of {primitive.name}, which runs as one program and cannot be cut. "
        f"{_way_out(hidden[0], primitive.name)}"
    )


def _way_out(what: str, name: str) -> str:
    """What to do about a mark or a region that control flow hides."""
    if what.startswith("value_and_grad"):
        return "Call it once in a step, outside of control flow."
    if name == "cond":
        return "Choose in Python, or with jnp.where after the mark, or move the mark outside."
    if name in ("scan", "while"):
        return "Write the loop out in Python around the marks, or move the mark outside."
    return "Move the mark outside."


def _closed(program: Any) -> tuple[Any, Sequence[Any]]:
    """A program whose constants are its first operands."""
    jc = _compat.jaxprs()
    consts = getattr(program, "consts", ())
    jaxpr = getattr(program, "jaxpr", program)
    if not jaxpr.constvars:
        return jaxpr, ()
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    opened = jc.Jaxpr(
        (), [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns, jaxpr.effects, names
    )
    return opened, consts


def run_equation(jc: Any, eqn: Any, values: dict[Any, Any]) -> list[Any]:
    """One equation on its own: a program of one line needs no rules for its parameters."""
    used = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jc.Literal)))
    made = [v for v in eqn.outvars if not isinstance(v, jc.DropVar)]
    run = program_of(used, made, [eqn])
    results = dict(zip(made, run(*(values[v] for v in used)), strict=True))
    return [results.get(var) for var in eqn.outvars]


def program_of(ins: Sequence[Any], outs: Sequence[Any], eqns: Sequence[Any]) -> Callable[..., Any]:
    """Equations as a function of `ins` that gives `outs`."""
    jc = _compat.jaxprs()
    effects = jc.no_effects.union(*(eqn.effects for eqn in eqns)) if eqns else jc.no_effects
    names = jc.DebugInfo("pipeline", "task", None, None)
    jaxpr = jc.Jaxpr((), list(ins), list(outs), list(eqns), effects, names)
    run: Callable[..., Any] = jc.jaxpr_as_fun(jc.ClosedJaxpr(jaxpr, ()))
    return run


def has_marks(program: Any) -> bool:
    return next(marks_in(program), None) is not None


def marks_in(program: Any) -> Iterator[str]:
    """The marks and regions inside a program, in words, with the lines they come from."""
    return marks_of(getattr(program, "jaxpr", program).eqns)


def marks_of(eqns: Iterable[Any]) -> Iterator[str]:
    """The same, of equations."""
    for eqn in eqns:
        if eqn.primitive is mark():
            yield f"stage_end(...) at {eqn.params['where']}"
        elif eqn.primitive is region_primitive():
            yield f"value_and_grad(...) at {eqn.params['region'].where}"
        for inner in _programs(eqn):
            yield from marks_in(inner)


def _programs(eqn: Any) -> Iterator[Any]:
    """Programs among an equation's parameters."""
    jc = _compat.jaxprs()
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (jc.Jaxpr, jc.ClosedJaxpr)):
                yield item
