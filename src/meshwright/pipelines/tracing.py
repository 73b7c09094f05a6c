"""Pass 1: trace a step, inline what hides stage ends, and find its region of microbatches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from meshwright import _compat
from meshwright._compat import Atom, Eqn, Jaxpr, Var, is_literal
from meshwright.errors import MeshwrightError, PipelineError
from meshwright.pipelines.arguments import CheckedOptions
from meshwright.pipelines.microbatching import in_microbatches
from meshwright.pipelines.trace_marks import (
    Region,
    recording_regions,
    region_primitive,
    stage_end_primitive,
)
from meshwright.trees.split import Split, as_shape, split_arrays


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A traced step: the equations before its region of microbatches, the region, those after.

    `prologue` is what the region's operands are computed from, `epilogue` everything else, which
    includes equations that stand before the region but do not lead to it. `operands` and `results`
    are the region's, as variables of the step. `out` rebuilds what the step returns.
    """

    invars: tuple[Var, ...]
    consts: dict[Var, Any]
    prologue: tuple[Eqn, ...]
    region: Region
    operands: tuple[Atom, ...]
    results: tuple[Var, ...]
    epilogue: tuple[Eqn, ...]
    outvars: tuple[Atom, ...]
    out: Split


# Pass 1, trace.
#
# In: a Python function and the shapes of its arguments. Out: a `Traced`. Invariant: exactly one
# equation is a region; no `jit` is left at the top level, and no stage end is anywhere but in the
# region. Example: `loss, g = value_and_grad(f)(w * 2, x); return w - g` becomes
#     prologue [b = mul w 2.0]   region (b, x) -> (loss, g)   epilogue [c = sub w g]


def trace_step(
    fn: Callable[..., Any], args: Split, microbatches: int, options: CheckedOptions
) -> Traced:
    """Trace a step, or a loss function, whose value and gradients are then the step."""
    wrapped = in_microbatches(fn, options)
    with recording_regions(microbatches) as trace:
        try:
            closed, out = _trace(fn, args)
        except Exception as error:
            if trace.regions or isinstance(error, MeshwrightError):
                raise
            # A loss function may only work with the rows of one microbatch: try it as that.
            closed, out = _trace(wrapped, args)
        else:
            given = options.given
            if given and _regions(closed.jaxpr):
                raise PipelineError(
                    f"{', '.join(given)}: the step calls value_and_grad itself. Give these options "
                    "there.",
                    option=given[0],
                )
    if not _regions(closed.jaxpr):
        _refuse_gradients(closed.jaxpr)
        with recording_regions(microbatches):
            closed, out = _trace(wrapped, args)
    jaxpr = closed.jaxpr
    regions = _regions(jaxpr)
    if len(regions) != 1:
        raise PipelineError(
            f"the step calls value_and_grad {len(regions)} times. A pipeline runs one "
            "region of microbatches per step: put the losses into one function."
        )
    for text in _stage_ends_outside(jaxpr.eqns):
        raise PipelineError(
            f"{text} is outside of the differentiated function. Stage ends belong in "
            "the function that value_and_grad is given."
        )
    (place,) = regions
    eqn = jaxpr.eqns[place]
    prologue = _ancestors(jaxpr.eqns[:place], eqn.invars)
    rest = [e for n, e in enumerate(jaxpr.eqns[:place]) if n not in prologue]
    return Traced(
        tuple(jaxpr.invars),
        dict(zip(jaxpr.constvars, closed.consts, strict=True)),
        tuple(jaxpr.eqns[n] for n in sorted(prologue)),
        eqn.params["region"],
        tuple(eqn.invars),
        tuple(eqn.outvars),
        (*rest, *jaxpr.eqns[place + 1 :]),
        tuple(jaxpr.outvars),
        out,
    )


def _trace(fn: Callable[..., Any], args: Split) -> tuple[Any, Split]:
    """Trace `fn` as a program of its arrays; what it returns besides arrays is in the `Split`."""
    shapes = [as_shape(array) for array in args.arrays]
    outs: list[Split] = []

    def arrays(*values: Any) -> tuple[Any, ...]:
        out = split_arrays(fn(*args.rebuild(values)))
        outs.append(dataclasses.replace(out, arrays=()))
        return out.arrays

    closed = jax.make_jaxpr(arrays)(*shapes)
    # `inline` evaluates a program of its inputs alone, so the constants are inputs meanwhile.
    inlined = inline(_compat.constants_as_inputs(closed.jaxpr), remat=False)
    jaxpr, count = inlined.jaxpr, len(closed.consts)
    jc = _compat.jaxprs()
    lifted = jc.Jaxpr(
        [*jaxpr.constvars, *jaxpr.invars[:count]],
        jaxpr.invars[count:],
        jaxpr.outvars,
        jaxpr.eqns,
        jaxpr.effects,
        jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return jc.ClosedJaxpr(lifted, [*inlined.consts, *closed.consts]), outs[-1]


def _regions(jaxpr: Jaxpr) -> list[int]:
    """Return the positions of regions among a program's equations."""
    return [n for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive is region_primitive()]


def _refuse_gradients(jaxpr: Jaxpr) -> None:
    """Refuse a step that differentiates through stage ends with `jax.grad`."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is stage_end_primitive() and eqn.params["backward"]:
            raise PipelineError(
                f"stage_end(...) at {eqn.params['where']} is inside of a gradient that the step "
                "takes by itself. Take it with meshwright.value_and_grad, which a pipeline runs in "
                "microbatches."
            )


def _stage_ends_outside(eqns: Iterable[Eqn]) -> Iterator[str]:
    """Yield stage ends in equations that are no regions, in words."""
    return boundaries_of(eqn for eqn in eqns if eqn.primitive is not region_primitive())


def _ancestors(eqns: Sequence[Eqn], targets: Sequence[Atom]) -> set[int]:
    """Return the positions of the equations that `targets` are computed from."""
    needed = {var for var in targets if not is_literal(var)}
    positions = set()
    for n in reversed(range(len(eqns))):
        if any(var in needed for var in eqns[n].outvars):
            positions.add(n)
            needed.update(v for v in eqns[n].invars if not is_literal(v))
    return positions


# Inline.
#
# In: a jaxpr. Out: a closed jaxpr that computes the same. Invariant: stage ends and regions are at
# its top level; `jit` is always inlined, `remat` if asked or if it holds a boundary, `closed_call`,
# `custom_jvp` and `custom_vjp` only if they hold one. What a remat computes in the backward is
# marked by the name scope REMAT_SCOPE. Example:
#     b = jit[jaxpr={ c = tanh a; d = stage_end c; e = sin d }] a
# becomes c = tanh a; d = stage_end c; e = sin d.

REMAT_SCOPE = "computed_again"


def is_rematerialized(eqn: Eqn) -> bool:
    """Return whether a remat computes this equation a second time, for the backward."""
    return REMAT_SCOPE in str(eqn.source_info.name_stack).split("/")


def inline(jaxpr: Jaxpr, *, remat: bool) -> Any:
    """Return the program, closed, with stage ends and regions at its top level.

    With `remat=True` every remat is inlined. Within one program the compiler could then merge what
    is computed twice; here forward and backward become different programs, so nothing undoes it.
    """
    avals = [var.aval for var in jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _evaluate(jaxpr, args, remat))(
        *(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals)  # type: ignore[no-untyped-call]
    )


def _evaluate(jaxpr: Jaxpr, args: Sequence[Any], remat: bool) -> list[Any]:
    known = _compat.known_primitives()
    values = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if is_literal(atom) else values[atom]

    for eqn in jaxpr.eqns:
        body = _body_to_inline(eqn, known, remat)
        if body is None:
            results = run_equation(eqn, values)
        else:
            inner, consts = body
            # `differentiated` is set on the copy of a remat that its backward holds.
            again = eqn.primitive is known["remat"] and eqn.params["differentiated"]
            with jax.named_scope(REMAT_SCOPE) if again else contextlib.nullcontext():
                results = _evaluate(inner, [*consts, *map(read, eqn.invars)], remat)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _body_to_inline(
    eqn: Eqn, known: dict[str, Any], remat: bool
) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the program inside an equation, with its constants, where it must be inlined."""
    primitive = eqn.primitive
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if primitive is known["remat"] and (remat or any(boundaries_in(body))):
        return _opened(body)
    if primitive is known["jit"]:
        return _opened(body)
    hidden = [text for inner in _inner_programs(eqn) for text in boundaries_in(inner)]
    if not hidden:
        return None
    # Inlining loses a custom derivative, which is not needed any more: the trace already has the
    # gradients.
    if primitive in (known["closed_call"], known["custom_jvp"], known["custom_vjp"]):
        return _opened(body)
    raise PipelineError(
        f"{hidden[0]} is inside of {primitive.name}, which runs as one program and cannot be cut. "
        f"{_remedy(hidden[0], primitive.name)}"
    )


def _remedy(boundary: str, primitive: str) -> str:
    """Say what to do about a stage end or a region inside of control flow."""
    if boundary.startswith("value_and_grad"):
        return "Call it once in a step, outside of control flow."
    if primitive == "cond":
        return "Choose in Python, or with jnp.where after stage_end, or move stage_end outside."
    if primitive in ("scan", "while"):
        return (
            "Write the loop out in Python around stage_end, or move stage_end outside: give "
            "stacked weights as a list with a stack for each stage, and scan inside of each."
        )
    return "Move stage_end outside."


def _opened(program: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Return a jaxpr whose first inputs are its constants, and the constants."""
    jaxpr = getattr(program, "jaxpr", program)
    if not jaxpr.constvars:
        return jaxpr, ()
    return _compat.constants_as_inputs(jaxpr), getattr(program, "consts", ())


def run_equation(eqn: Eqn, values: dict[Var, Any]) -> list[Any]:
    """Run one equation, as a program of one line: that needs no rules for its parameters."""
    ins = list(dict.fromkeys(v for v in eqn.invars if not is_literal(v)))
    outs = [v for v in eqn.outvars if not isinstance(v, _compat.jaxprs().DropVar)]
    run = equations_as_function(ins, outs, [eqn])
    results = dict(zip(outs, run(*(values[v] for v in ins)), strict=True))
    return [results.get(var) for var in eqn.outvars]


def equations_as_function(
    ins: Sequence[Var], outs: Sequence[Atom], eqns: Sequence[Eqn]
) -> Callable[..., Any]:
    """Return a function of the values of `ins` that gives those of `outs`."""
    jc = _compat.jaxprs()
    effects = jc.no_effects.union(*(eqn.effects for eqn in eqns)) if eqns else jc.no_effects
    debug_info = jc.DebugInfo("pipeline", "task", None, None)
    jaxpr = jc.Jaxpr((), list(ins), list(outs), list(eqns), effects, debug_info)
    run: Callable[..., Any] = jc.jaxpr_as_fun(jc.ClosedJaxpr(jaxpr, ()))
    return run


# Boundaries are what a pipeline cuts at: stage ends, and regions of microbatches.


def boundaries_in(program: Any) -> Iterator[str]:
    """Yield the boundaries inside a jaxpr, closed or not, in words, with their source lines."""
    return boundaries_of(getattr(program, "jaxpr", program).eqns)


def boundaries_of(eqns: Iterable[Eqn]) -> Iterator[str]:
    """Yield the boundaries among equations and inside of them, in words."""
    for eqn in eqns:
        if eqn.primitive is stage_end_primitive():
            yield f"stage_end(...) at {eqn.params['where']}"
        elif eqn.primitive is region_primitive():
            yield f"value_and_grad(...) at {eqn.params['region'].where}"
        for inner in _inner_programs(eqn):
            yield from boundaries_in(inner)


def _inner_programs(eqn: Eqn) -> Iterator[Any]:
    """Yield jaxprs among an equation's parameters; that of a region is hidden in a `Region`."""
    jc = _compat.jaxprs()
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (jc.Jaxpr, jc.ClosedJaxpr)):
                yield item
