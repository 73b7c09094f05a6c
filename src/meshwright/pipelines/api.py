"""`pipeline(...)`: what is asked for, checked before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AxisType

from meshwright._checks import check_integer
from meshwright.errors import PipelineError, ScheduleError, near, short
from meshwright.mpmd.groups import Groups, as_groups
from meshwright.pipelines.arguments import takes_places
from meshwright.pipelines.plan import Planner
from meshwright.pipelines.stage_mark import stage_end
from meshwright.pipelines.step import PipelineStep
from meshwright.pipelines.step_graph import GroupShardings
from meshwright.schedules.auto import Auto
from meshwright.schedules.named import check_name
from meshwright.schedules.types import Schedule


def pipeline(
    fn: Callable[..., Any] | Sequence[Callable[..., Any]],
    groups: Any,
    *,
    schedule: str | Schedule | Auto = "1f1b",
    microbatches: int,
    rules: Any = None,
    unused: str = "error",
    donate: int | Sequence[int] = (),
    limit: float = 60.0,
    **options: Any,
) -> PipelineStep:
    """A step that runs as a pipeline over groups; call it like `fn`.

    `fn` is a loss function (the step then gives its value and gradients, with the options of
    `value_and_grad`), a whole training step that calls `value_and_grad`, or a list of stage
    functions `f(params[i], x)`. `groups` is an `MpmdMesh`, a `MeshGroups` or a list of meshes.
    `schedule` is a name, a `Schedule` or an `Auto`; "forward" has no gradients. Arguments but the
    first are cut along dim 0 into `microbatches`. `rules` say how parameters are split inside
    their groups, and `unused` whether all must be obeyed, as in `partition`; by default shapes
    decide. Arguments that `donate` names are given up. The first call with arguments of a kind
    traces, cuts and compiles.

    In several processes all call it, best as `with pipeline(...) as step`. When one of them
    fails, or makes no progress for `limit` seconds, all end with a line that says why.

    >>> import jax, jax.numpy as jnp, meshwright as mw
    >>> def loss(params, x):
    ...     h = mw.stage_end(jnp.tanh(x @ params["a"]))
    ...     return jnp.mean((h @ params["b"]) ** 2)
    >>> params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}
    >>> step = mw.pipeline(loss, mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp"), microbatches=2)
    >>> value, grads = step(params, jnp.ones((8, 4)))
    >>> round(float(value), 3), grads["b"].shape
    (15.979, (4, 4))
    """
    if not callable(fn):
        fn = chained(fn)
    check_integer("pipeline: microbatches", microbatches, error=ScheduleError)
    donated = donate if isinstance(donate, (tuple, list)) else (donate,)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in donated):
        raise PipelineError(f"donate: {short(donate)} is not an argument's number, or several.")
    _check_options(schedule, limit, options)
    layouts = GroupShardings(_auto_axes(groups), rules, unused)
    planner = Planner(takes_places(fn), layouts, schedule, microbatches, tuple(donated), options)
    return PipelineStep(planner, limit)


def _check_options(schedule: Any, limit: Any, options: dict[str, Any]) -> None:
    known = ("argnums", "has_aux", "reduce", "aux", "carry", "whole", "cut", "outputs")
    for name in options:
        if name not in known:
            raise PipelineError(
                f"pipeline has no option {name!r}.{near(name, (*known, 'donate', 'rules'))}"
            )
    if isinstance(schedule, str):
        check_name(schedule)
    elif not isinstance(schedule, (Schedule, Auto)):
        raise PipelineError(f"schedule: {short(schedule)} is not a name, a Schedule or an Auto.")
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise PipelineError(f"limit: {short(limit)} is not a number of seconds.")


def _auto_axes(groups: Any) -> Groups:
    """Groups whose axes the compiler may use as it likes; others are refused."""
    found = as_groups(groups)
    for number, mesh in enumerate(found.meshes):
        if any(kind != AxisType.Auto for kind in mesh.axis_types):
            raise PipelineError(
                f"group {number}: its mesh has axes that are not of type Auto. Pipelines leave "
                "shardings inside a group to the compiler: make the mesh with mw.mesh, or with "
                "axis_types=(AxisType.Auto, ...)."
            )
    return found


# A list of stage functions as one function with marks.


def chained(functions: Any) -> Callable[..., Any]:
    """Stage functions one after the other: `f(params[i], x)` gives the next one's `x`.

    The first takes the batch, or the beginning of it if it has no room for more. A later one that
    asks for more than `x` gets the end of the batch: `loss(params, x, labels)`.
    """
    if not isinstance(functions, Sequence) or not functions or not all(map(callable, functions)):
        raise PipelineError(f"{short(functions)} is not a function or a list of stage functions.")
    first, *later = functions
    labels = [max(0, _asked(function) - 1) for function in later]

    def chain(params: Any, *batch: Any) -> Any:
        _check_parameters(params, len(functions))
        taken = len(batch) if _has_room(first, len(batch)) else _asked(first)
        if taken + max(labels, default=0) < len(batch):
            raise PipelineError(
                f"argument {taken + 1} goes to no stage function. The first takes {taken} after "
                "its parameters; a later one that needs the end of the batch asks for it: "
                "f(params, x, labels)."
            )
        value = first(params[0], *batch[:taken])
        for before, function, own, count in zip(
            functions[:-1], later, params[1:], labels, strict=True
        ):
            given = stage_end(value, getattr(before, "__name__", None))
            value = function(own, given, *batch[len(batch) - count :])
        return value

    return chain


def _asked(function: Callable[..., Any]) -> int:
    """How many arguments a stage function needs after its parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return sum(one.kind in kinds and one.default is one.empty for one in found) - 1


def _has_room(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(None, *[None] * count)
    except TypeError:
        return False
    return True


def _check_parameters(params: Any, count: int) -> None:
    if isinstance(params, Mapping) or not hasattr(params, "__len__"):
        raise PipelineError(
            f"the parameters are a {type(params).__name__}. A list of stage functions takes a "
            "list of as many, params[i] for function i."
        )
    if len(params) != count:
        raise PipelineError(f"{count} stages, but parameters for {len(params)}.")
