"""`PipelineStep`: what `pipeline(...)` returns, a step that runs as a pipeline over groups."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from meshwright._lazy import later
from meshwright._show import short_repr
from meshwright._text import plural
from meshwright.errors import PipelineError
from meshwright.pipelines.arguments import positional_arguments
from meshwright.pipelines.consistency import PlanConsistency, process_context
from meshwright.pipelines.explanation import Explanation, explain
from meshwright.pipelines.lowered import LoweredStep, lowered_step
from meshwright.pipelines.plan import Plan, Planner
from meshwright.pipelines.plan_cache import PlanCache, plan_key
from meshwright.pipelines.profiling import (
    MeasuredTimeline,
    Record,
    measured_timeline,
    merge,
    record,
)
from meshwright.pipelines.runtime import (
    bind_arguments,
    collect_results,
    donated_alone,
    is_local,
    local_groups,
)
from meshwright.pipelines.step_graph import publish, run_operations, run_watched
from meshwright.schedules.auto import Auto
from meshwright.schedules.types import Schedule
from meshwright.trees.split import Split
from meshwright.watchdog.watchdog import Watchdog

T = TypeVar("T")
# Of a room below this one.
_measure = later("meshwright.calibration.measure", "measure")


class PipelineStep:
    """A step that runs as a pipeline; call it like the function it was made from.

    The first call with arguments of a kind (shapes, dtypes, settings) makes a `Plan`: it traces,
    cuts and compiles. Later calls run that plan; the 16 plans used last are kept. `timeout` is in
    seconds, as for `pipeline`.

    >>> import jax.numpy as jnp, meshwright as mw
    >>> def loss(params, x):
    ...     return jnp.mean(mw.stage_end(x @ params["a"]) @ params["b"])
    >>> params = {"a": jnp.eye(4), "b": jnp.eye(4)}
    >>> step = mw.pipeline(loss, mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp"), microbatches=2)
    >>> step
    <PipelineStep loss: 1f1b, 2 groups, 2 microbatches>
    >>> step.explain(params, jnp.ones((8, 4)))
    <Explanation 2 stages in 2 groups, 1f1b, 2 microbatches>
    """

    def __init__(self, planner: Planner, timeout: float):
        self.planner, self.timeout = planner, timeout
        self.fn, self.donated = planner.fn, planner.donated
        self.groups = planner.shardings.groups
        self.local_groups = local_groups(self.groups)
        # A single process needs no link, no watchdog, and no other's plans to compare with.
        self.process_context = process_context() if self.groups.spans_processes else None
        self.link = None if self.process_context is None else self.process_context.link
        self.consistency = (
            None
            if self.process_context is None
            else PlanConsistency(self.process_context, self.process_context.register(timeout))
        )
        self.closed = False
        self._cache = PlanCache(self.fn)
        self._plans = self._cache.plans

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run one step. Returns what the function does, as arrays that may not be ready yet."""
        return self._call(positional_arguments(self.fn, args, keywords), "", self._run)[0]

    def _call(
        self, args: tuple[Any, ...], why: str, run: Callable[[Plan, list[Any]], T]
    ) -> tuple[Any, T]:
        """Run one step by `run`, of a plan and its slots; return its results, and what that did."""
        parts = self._check_arguments(args)
        plan = self._begin_step(parts, why)
        if len(parts.arrays) != len(plan.paths):  # the first call: which numbers are data is new
            parts = self._cache.split(args)
        builder = plan.assembled.builder
        unused = donated_alone(parts.arrays, plan.unused_donations)
        slots = bind_arguments(builder, parts.arrays, self.local_groups, plan.donated)
        ran = run(plan, slots)
        # Programs that are still to read them hold their memory until they have.
        for array in unused:
            if not array.is_deleted():
                array.delete()
        arrays = collect_results(builder, slots, plan.assembled.results, self.local_groups)
        return plan.traced.out.rebuild(arrays), ran

    def _run(self, plan: Plan, slots: list[Any]) -> None:
        if self.process_context is None:
            run_operations(plan.operations, slots)
        else:
            watchdog = self.process_context.watchdog
            _run_together(watchdog, lambda: run_watched(plan.operations, slots, watchdog))

    def explain(self, *args: Any, **keywords: Any) -> Explanation:
        """Explain what became of the function: its stages, what each holds, sends and recomputes.

        Takes the arguments of a call, arrays or shapes; without them it explains the last call.
        Compiles if needed, and runs nothing.
        """
        positional = positional_arguments(self.fn, args, keywords)
        plan = self.plan_of(*positional) if positional else self._cache.last()
        return explain(plan)

    def lower(self, *args: Any, **keywords: Any) -> LoweredStep:
        """Return the programs of a step with these arguments, arrays or shapes; runs nothing.

        They are compiled too, if no call did that before: `lower(...).compile()` only looks at
        them the other way.

        >>> import jax.numpy as jnp, meshwright as mw
        >>> def loss(params, x):
        ...     return jnp.mean(mw.stage_end(x @ params["a"]) @ params["b"])
        >>> params = {"a": jnp.eye(4), "b": jnp.eye(4)}
        >>> step = mw.pipeline(loss, mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp"), microbatches=2)
        >>> lowered = step.lower(params, jnp.ones((8, 4)))
        >>> lowered["F1"], len(lowered.in_shardings[0]["b"].device_set)
        (<StepProgram F1 of group 1, 2 calls>, 4)
        >>> "stablehlo.dot_general" in lowered["F1"].lowered.as_text()
        True
        """
        if self.groups.compile_only:
            raise PipelineError(
                "the groups are on hardware that is not here. rehearse_pipeline(step, ...) "
                "compiles every task for it."
            )
        positional = positional_arguments(self.fn, args, keywords)
        if not positional:
            raise PipelineError("lower() compiles a step: pass its arguments, or their shapes.")
        plan = self.plan_of(*positional)
        parts = self._cache.split(positional)
        return lowered_step(self, plan, plan_key(parts), parts)

    def call_compiled(
        self, plan: Plan, key: Hashable, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Run a plan that `lower(...).compile()` holds; refuse arguments of another kind."""
        self._cache.restore(plan, key, positional_arguments(self.fn, args, keywords))
        return self(*args, **keywords)

    def timeline(self, *args: Any, **keywords: Any) -> MeasuredTimeline:
        """Run a step and measure when every task ran, beside what its times predict.

        The results are dropped; donated arguments are copied first. In several processes all
        call it, and all get the timeline of all groups.
        """
        positional = positional_arguments(self.fn, args, keywords)
        if not positional:
            raise PipelineError("timeline() runs a step: pass its arguments.")
        plan = self._begin_step(self._check_arguments(positional), " (its timeline)")
        copies = [
            jax.tree.map(_copy_if_local, arg) if number in self.donated else arg
            for number, arg in enumerate(positional)
        ]
        arrays = self._cache.split(tuple(copies)).arrays
        slots = bind_arguments(plan.assembled.builder, arrays, self.local_groups)
        return self._record(plan, slots)

    def recorded(self, plan: Plan, *args: Any) -> tuple[Any, MeasuredTimeline]:
        """Run one step as a call does, donated arguments used up; return its results and timeline.

        `plan` is the one that a call would run, or one like it with other programs.
        """
        return self._call(args, " (measured)", lambda _, slots: self._record(plan, slots))

    def _record(self, plan: Plan, slots: list[Any]) -> MeasuredTimeline:
        if self.process_context is None:
            return measured_timeline(plan, record(plan.operations, slots, lambda _: None))
        watchdog = self.process_context.watchdog
        # A barrier: times of processes that begin one after the other would show their waits.
        watchdog.confer("a timeline's begin", "", lambda _: "")
        on_start = functools.partial(publish, watchdog)
        local = _run_together(watchdog, lambda: record(plan.operations, slots, on_start))
        merged = watchdog.confer("its timeline", local.to_text(), merge)
        return measured_timeline(plan, Record.from_text(merged))

    def measure(
        self,
        *args: Any,
        rehearsal: Any = None,
        steps: int = 5,
        speeds: Any = None,
        trace: str | Path | None = None,
        progress: bool = True,
        name: str | None = None,
    ) -> Any:
        """Run steps under the profiler; return a `PipelineMeasurement`: tasks, kernels, waits.

        `mw.measure(step, *args)` is the same. Donated arguments are used up, as by a call: what a
        step returns in place of one goes into the next. In several processes all call it, and all
        get the measurement of all groups.

        Args:
          *args: the step's arguments, as arrays.
          rehearsal: what `rehearse_pipeline` returned for it, to show beside.
          steps: how many to run in each round of timing and under the profiler.
          speeds: measured speeds that the model goes by, as for `rehearse`.
          trace: a folder to keep the profiler's own files in.
          progress: False to show none, as for `rehearse`.
          name: what the result is called; by default the function's name.

        Raises `CalibrationError` as `mw.measure` does.

        >>> import jax.numpy as jnp, meshwright as mw
        >>> def loss(params, x):
        ...     return jnp.mean(mw.stage_end(x @ params["a"]) @ params["b"])
        >>> params = {"a": jnp.eye(4), "b": jnp.eye(4)}
        >>> step = mw.pipeline(loss, mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp"), microbatches=2)
        >>> m = step.measure(params, jnp.ones((8, 4)), steps=1)
        >>> [(task.name, task.group, task.runs) for task in m.tasks]
        [('0F', 0, 2), ('0BW', 0, 2), ('1F', 1, 2), ('1BW', 1, 2)]
        """
        options = {"rehearsal": rehearsal, "steps": steps, "speeds": speeds, "trace": trace}
        return _measure(self, *args, **options, progress=progress, name=name)

    def plan_of(self, *args: Any) -> Plan:
        """Make everything that is worked out and compiled before a call like this runs."""
        parts = self._cache.split(args)
        return self._plan(parts, plan_key(parts))

    def close(self) -> None:
        """Give up the pipeline; it cannot be called any more.

        In several processes the last pipeline that is closed waits for the other processes, then
        stops the watchdog and the link.
        """
        if self.closed:
            return
        self.closed = True
        if self.consistency is not None:
            self.consistency.process_context.unregister(self.consistency.number)

    def __enter__(self) -> PipelineStep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if error is not None and self.process_context is not None:
            self.process_context.watchdog.__exit__(kind, error, trace)
        self.close()

    def __repr__(self) -> str:
        schedule = self.planner.schedule
        named = schedule.name if isinstance(schedule, Schedule) else schedule
        return short_repr(
            self,
            f"{getattr(self.fn, '__name__', 'a function')}: "
            f"{'auto' if isinstance(named, Auto) else named}, "
            f"{plural(self.groups.mpmd_dim, 'group')}, "
            f"{plural(self.planner.microbatches, 'microbatch')}"
            f"{', closed' if self.closed else ''}",
        )

    def _check_arguments(self, args: tuple[Any, ...]) -> Split:
        """Take the arguments apart; refuse those that no step can use."""
        if self.closed:
            raise PipelineError("this pipeline is closed. Make another with meshwright.pipeline.")
        if getattr(jax.config, "jax_disable_jit", False):
            raise PipelineError(
                "jax_disable_jit is set, and a pipeline is made of compiled programs. To debug the "
                "function call it as it is, without pipeline(...)."
            )
        for number in self.donated:
            if number not in range(len(args)):
                raise PipelineError(
                    f"donate_argnums={number}: the step was called with "
                    f"{plural(len(args), 'argument')}.",
                    option="donate_argnums",
                )
        parts = self._cache.split(args)
        self._refuse_donated_twice(parts)
        for path, value in zip(parts.paths, parts.arrays, strict=True):
            _check_array(path, value)
        return parts

    def _refuse_donated_twice(self, parts: Split) -> None:
        """Refuse an array that is passed twice and donated both times.

        Donated once and kept once is fine: then it is kept.
        """
        first_path: dict[int, str] = {}
        for path, value in zip(parts.paths, parts.arrays, strict=True) if self.donated else ():
            first = first_path.setdefault(id(value), path)
            if first == path or not isinstance(value, jax.Array):
                continue
            if all(int(place.partition("/")[0]) in self.donated for place in (path, first)):
                raise PipelineError(
                    f"arguments {first} and {path} are the same array, donated twice. Copy one "
                    "of them: jax.tree.map(jnp.copy, ...).",
                    option="donate_argnums",
                )

    def _begin_step(self, parts: Split, why: str = "") -> Plan:
        """Return the plan of a step that all processes begin now."""
        key = plan_key(parts)
        if self.consistency is None:
            return self._plan(parts, key)
        # Announced before it is compiled, so that a process with other arguments is named at once.
        self.consistency.begin_step(key, parts, why)
        plan = self._plan(parts, key)
        self.consistency.check_plan(key, plan, parts)
        return plan

    def _plan(self, parts: Split, key: Hashable) -> Plan:
        """Return the plan for arguments like these; made the first time."""

        def make() -> Plan:
            with (
                contextlib.nullcontext()
                if self.process_context is None
                else self.process_context.without_timeout("the compiler")
            ):
                return self.planner.plan(parts, self.local_groups, self.link)

        return self._cache.get(parts, key, make)


def _run_together(watchdog: Watchdog, work: Callable[[], T]) -> T:
    """Run while the other processes run theirs; when one fails, all end."""
    try:
        result = work()
    except BaseException as error:
        watchdog.__exit__(type(error), error, error.__traceback__)
        raise
    watchdog.doing = ""
    return result


def _check_array(path: str, value: Any) -> None:
    if isinstance(value, jax.core.Tracer):
        raise PipelineError(
            f"argument {path}: a tracer. A pipeline is a program of its own for each "
            "group: call it outside of jit, grad and vmap."
        )
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSUMm":
        raise PipelineError(
            f"argument {path}: an array of {value.dtype}, and JAX has arrays of numbers "
            "alone. Pass numbers; names and objects go by closure."
        )
    if isinstance(value, jax.ShapeDtypeStruct):
        raise PipelineError(
            f"argument {path}: a shape without data. Pass arrays, or ask explain(...), "
            "which runs nothing."
        )
    if isinstance(value, jax.Array) and value.is_deleted():
        raise PipelineError(
            f"argument {path}: the array was deleted or donated. Use the one that the "
            "last step returned."
        )


def _copy_if_local(value: Any) -> Any:
    """Copy `value` if this process holds shards of it; otherwise return it unchanged."""
    return value.copy() if is_local(value) else value
