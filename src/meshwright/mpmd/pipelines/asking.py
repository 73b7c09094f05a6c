"""`pipeline(...)`: what is asked for, checked before anything is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import AxisType

from meshwright.errors import PipelineError, near, short
from meshwright.mpmd.groups import Groups, as_groups
from meshwright.mpmd.pipelines.chaining import chained
from meshwright.mpmd.pipelines.keywords import takes_places
from meshwright.mpmd.pipelines.layouts import Layouts
from meshwright.mpmd.pipelines.planning import Planner
from meshwright.mpmd.pipelines.step import PipelineStep
from meshwright.mpmd.schedules.auto import Auto
from meshwright.mpmd.schedules.named.catalogue import check_name
from meshwright.mpmd.schedules.schedule import Schedule, count


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
    ...     h = mw.stage(jnp.tanh(x @ params["a"]))
    ...     return jnp.mean((h @ params["b"]) ** 2)
    >>> params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}
    >>> step = mw.pipeline(loss, mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp"), microbatches=2)
    >>> value, grads = step(params, jnp.ones((8, 4)))
    >>> round(float(value), 3), grads["b"].shape
    (15.979, (4, 4))
    """
    if not callable(fn):
        fn = chained(fn)
    count(microbatches, "microbatches", "pipeline")
    donated = donate if isinstance(donate, (tuple, list)) else (donate,)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in donated):
        raise PipelineError(f"donate: {short(donate)} is not an argument's number, or several.")
    _check_options(schedule, limit, options)
    layouts = Layouts(_auto_axes(groups), rules, unused)
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
