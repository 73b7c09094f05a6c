"""`pipeline(...)`: check the options, before anything is traced, and make the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from jax.sharding import AxisType

from meshwright._checks import check_flag, check_integer, check_seconds
from meshwright.errors import PipelineError, ScheduleError, short
from meshwright.mpmd.groups import Groups, as_groups
from meshwright.pipelines.arguments import MicrobatchOptions, check_options, takes_positional
from meshwright.pipelines.plan import Planner
from meshwright.pipelines.step import PipelineStep
from meshwright.pipelines.step_graph import GroupShardings
from meshwright.pipelines.trace_marks import stage_end
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
    donate_argnums: int | Sequence[int] = (),
    timeout: float = 60.0,
    progress: bool = True,
    **options: Unpack[MicrobatchOptions],
) -> PipelineStep:
    """Make a step that runs as a pipeline over groups; call it like `fn`.

    The first call with arguments of a kind traces, cuts and compiles. In several processes all call
    it, best as `with pipeline(...) as step`.

    Args:
      fn: a loss function (the step then gives its value and gradients), a whole training step that
        calls `value_and_grad`, or a list of stage functions `f(params[i], x)`.
      groups: an `MpmdMesh`, a `MeshGroups` or a list of meshes.
      schedule: a name, a `Schedule` or an `Auto`; "forward" has no gradients.
      microbatches: into how many parts arguments are cut along dim 0, all but the first (or those
        of `argnums`).
      rules: how parameters are sharded inside their groups, as in `partition`; by default shapes
        decide.
      unused: `"allow"` permits rules that match nothing.
      donate_argnums: numbers of the arguments that are given up, as in `jax.jit`.
      timeout: seconds without progress after which all processes end, with a line that says why.
      progress: show what is being compiled and for how long, as `rehearse` does; False: nothing.
      **options: those of `value_and_grad`, if `fn` is a loss function; with "forward", `outputs`
        says how results are reduced, as `aux` does.

    Raises:
      PipelineError: for options that are wrong by themselves; what depends on the arguments is
        checked at the first call.

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
    # Checked here, not at the first call: the user's line is still on the stack, no device was
    # touched, and every process comes to the same verdict.
    if not callable(fn):
        fn = chain_stages(fn)
    check_integer("pipeline: microbatches", microbatches, error=ScheduleError)
    donated = _argument_numbers(donate_argnums)
    _check_schedule(schedule)
    checked = check_options(options, gradient=not _is_forward(schedule))
    timeout = check_seconds("timeout", timeout, error=PipelineError)
    shardings = GroupShardings(_auto_axes(groups), rules, unused)
    check_flag("progress", progress, error=PipelineError)
    planner = Planner(
        takes_positional(fn), shardings, schedule, microbatches, donated, checked, progress
    )
    return PipelineStep(planner, timeout)


def _argument_numbers(numbers: Any) -> tuple[int, ...]:
    """Check `donate_argnums`; whether there are such arguments is known at the first call."""
    as_list = numbers if isinstance(numbers, (tuple, list)) else (numbers,)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in as_list):
        raise PipelineError(
            f"donate_argnums: expected an int or a sequence of ints, counted from 0, got "
            f"{short(numbers)}.",
            option="donate_argnums",
        )
    return tuple(as_list)


def _check_schedule(schedule: Any) -> None:
    if isinstance(schedule, str):
        check_name(schedule)
    elif not isinstance(schedule, (Schedule, Auto)):
        raise PipelineError(
            f"schedule: {short(schedule)} is not a name, a Schedule or an Auto.", option="schedule"
        )


def _is_forward(schedule: str | Schedule | Auto) -> bool:
    if isinstance(schedule, Schedule):
        return schedule.forward_only
    return isinstance(schedule, str) and schedule.strip().lower() == "forward"


def _auto_axes(groups: Any) -> Groups:
    """Return groups whose axes are of type Auto; refuse others."""
    checked = as_groups(groups)
    # With Explicit axes shardings are part of a variable's type. The step is traced once, under one
    # mesh, and the variables between its equations keep their types in every group.
    for number, mesh in enumerate(checked.meshes):
        if any(kind != AxisType.Auto for kind in mesh.axis_types):
            raise PipelineError(
                f"group {number}: its mesh has axes that are not of type Auto. Pipelines leave "
                "shardings inside a group to the compiler: make the mesh with mw.mesh, or with "
                "axis_types=(AxisType.Auto, ...).",
                option="groups",
            )
    return checked


# A list of stage functions becomes one function with stage ends, so that there is one kind of input
# to everything that follows.


def chain_stages(functions: Any) -> Callable[..., Any]:
    """Call stage functions one after the other: `f(params[i], x)` gives the next one's `x`.

    The first takes the batch, or the beginning of it if it has no room for more. A later one that
    asks for more than `x` gets the end of the batch: `loss(params, x, labels)`.
    """
    if not isinstance(functions, Sequence) or not functions or not all(map(callable, functions)):
        raise PipelineError(
            f"{short(functions)} is not a function or a list of stage functions.", option="fn"
        )
    first, *later = functions
    # How many arrays from the end of the batch each later function asks for.
    labels = [max(0, _required_after_params(function) - 1) for function in later]

    def chain(params: Any, *batch: Any) -> Any:
        _check_parameters(params, len(functions))
        accepts_all = _accepts(first, len(batch))
        taken = len(batch) if accepts_all else _required_after_params(first)
        if taken + max(labels, default=0) < len(batch):
            raise PipelineError(
                f"argument {taken + 1} goes to no stage function. The first takes {taken} after "
                "its parameters; a later one that needs the end of the batch asks for it: "
                "f(params, x, labels)."
            )
        value = first(params[0], *batch[:taken])
        for before, function, stage_params, count in zip(
            functions[:-1], later, params[1:], labels, strict=True
        ):
            x = stage_end(value, getattr(before, "__name__", None))
            value = function(stage_params, x, *batch[len(batch) - count :])
        return value

    return chain


def _required_after_params(function: Callable[..., Any]) -> int:
    """Count the positional arguments without defaults after the parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in kinds and p.default is p.empty for p in parameters) - 1


def _accepts(function: Callable[..., Any], count: int) -> bool:
    """Whether a stage function can be called with its parameters and `count` arguments."""
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
