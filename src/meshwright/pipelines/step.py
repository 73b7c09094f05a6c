"""`PipelineStep`: a step that runs as a pipeline over groups."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import numpy as np

from meshwright.errors import PipelineError
from meshwright.pipelines.arguments import positional_arguments
from meshwright.pipelines.consistency import PlanConsistency, process_context
from meshwright.pipelines.explanation import Explanation, explain
from meshwright.pipelines.plan import Plan, Planner
from meshwright.pipelines.profiling import MeasuredTimeline, Record, merge, record, timelines
from meshwright.pipelines.runtime import bind_arguments, is_here, local_groups, results
from meshwright.pipelines.step_graph import run, run_watched
from meshwright.pipelines.step_graph import tell as tell_watch
from meshwright.trees.split import Split, split_arrays
from meshwright.watchdog.watchdog import Watchdog

T = TypeVar("T")


class PipelineStep:
    """A step that runs as a pipeline; call it like the function it was made from."""

    def __init__(
        self,
        planner: Planner,
        limit: float,
    ):
        self.limit, self.planner = limit, planner
        self.fn, self.donated = planner.fn, planner.donated
        groups = self.groups = planner.layouts.groups
        self.local_groups = local_groups(groups)
        self.process_context = process_context() if groups.spans_processes else None
        self.link = None if self.process_context is None else self.process_context.link
        self.consistency = (
            None
            if self.process_context is None
            else PlanConsistency(self.process_context, self.process_context.enter(limit))
        )
        self.closed = False
        self._plans: dict[Any, Plan] = {}

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        parts = self._checked(positional_arguments(self.fn, args, keywords))
        plan = self._begun(parts)
        builder = plan.assembled.builder
        slots = bind_arguments(builder, parts.arrays, self.local_groups, plan.donated)
        if self.process_context is None:
            run(plan.operations, slots)
        else:
            watch = self.process_context.watch
            self._among_others(watch, lambda: run_watched(plan.operations, slots, watch))
        found = results(builder, slots, plan.assembled.results, self.local_groups)
        return plan.traced.out.rebuild(found)

    def _among_others(self, watch: Watchdog, work: Callable[[], T]) -> T:
        """Run while the other processes run theirs; when one fails, all end."""
        try:
            found = work()
        except BaseException as error:
            watch.__exit__(type(error), error, error.__traceback__)
            raise
        watch.doing = ""
        return found

    def close(self) -> None:
        """In several processes: the last pipeline that is closed waits for the others, then stops
        watching and listening."""
        if self.closed:
            return
        self.closed = True
        if self.consistency is not None:
            self.consistency.process_context.leave(self.consistency.number)

    def __enter__(self) -> PipelineStep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if error is not None and self.process_context is not None:
            self.process_context.watch.__exit__(kind, error, trace)
        self.close()

    def _checked(self, args: tuple[Any, ...]) -> Split:
        """The arguments taken apart, if they can be used at all."""
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
                    f"donate_argnums={number}: the step was called with {len(args)}."
                )
        parts = split_arrays(args, 1)
        self._refuse_twice(parts)
        for path, value in zip(parts.paths, parts.arrays, strict=True):
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
        return parts

    def _refuse_twice(self, parts: Split) -> None:
        """An array cannot be given up twice; beside one that is kept it is kept, too."""
        seen: dict[int, str] = {}
        for path, value in zip(parts.paths, parts.arrays, strict=True) if self.donated else ():
            other = seen.setdefault(id(value), path)
            if other == path or not isinstance(value, jax.Array):
                continue
            given = [int(one.partition("/")[0]) in self.donated for one in (path, other)]
            if all(given):
                raise PipelineError(
                    f"arguments {other} and {path} are the same array, donated twice. Copy one "
                    "of them: jax.tree.map(jnp.copy, ...)."
                )

    def explain(self, *args: Any, **keywords: Any) -> Explanation:
        """What became of the function: its stages, what each holds, sends and repeats.

        Takes the arguments of a call; without them it means the last one. Nothing runs.
        """
        places = positional_arguments(self.fn, args, keywords)
        plan = self.plan_of(*places) if places else self._last()
        return explain(plan, plan.names)

    def plan_of(self, *args: Any) -> Plan:
        """Everything that is worked out and compiled before a call like this runs."""
        parts = split_arrays(args, 1)
        return self._plan(parts, _kind(parts))

    def timeline(self, *args: Any, **keywords: Any) -> MeasuredTimeline:
        """Run a step and note when every task ran, against what its times predict.

        The results are dropped; donated arguments are copied first. In several processes all
        call it, and all get the whole.
        """
        places = positional_arguments(self.fn, args, keywords)
        if not places:
            raise PipelineError("timeline() runs a step: pass its arguments.")
        plan = self._begun(self._checked(places), " (its timeline)")
        copies = [
            jax.tree.map(_copied, arg) if number in self.donated else arg
            for number, arg in enumerate(places)
        ]
        arrays = split_arrays(tuple(copies), 1).arrays
        slots = bind_arguments(plan.assembled.builder, arrays, self.local_groups)
        if self.process_context is None:
            return timelines(plan, record(plan.operations, slots, lambda _: None))
        watch = self.process_context.watch
        watch.confer("a timeline's begin", "", lambda _: "")
        tell = functools.partial(tell_watch, watch)
        found = self._among_others(watch, lambda: record(plan.operations, slots, tell))
        whole = watch.confer("its timeline", found.to_text(), merge)
        return timelines(plan, Record.from_text(whole))

    def _last(self) -> Plan:
        if not self._plans:
            raise PipelineError("explain() before the first call: pass the step's arguments.")
        return next(reversed(self._plans.values()))

    def _begun(self, parts: Split, why: str = "") -> Plan:
        """The plan of a step that all processes now begin."""
        kind = _kind(parts)
        if self.consistency is None:
            return self._plan(parts, kind)
        self.consistency.enter(kind, parts, why)
        plan = self._plan(parts, kind)
        self.consistency.agree(kind, plan, parts)
        return plan

    def _plan(self, parts: Split, kind: Hashable) -> Plan:
        """What to do with arguments like these; worked out and compiled the first time."""
        if kind not in self._plans:
            alone = contextlib.nullcontext()
            with (
                alone
                if self.process_context is None
                else self.process_context.without_timeout("the compiler")
            ):
                self._plans[kind] = self.planner.plan(parts, self.local_groups, self.link)
        return self._plans[kind]


def _kind(parts: Split) -> Hashable:
    """What tells arguments apart that need plans of their own."""
    kinds = tuple(
        (np.shape(x), getattr(x, "dtype", type(x)), bool(getattr(x, "weak_type", False)))
        for x in parts.arrays
    )
    settings = tuple((type(leaf), leaf) for leaf in parts.static)  # 1 is not True
    found = (parts.treedef, parts.positions, settings, kinds)
    try:
        hash(found)
    except TypeError as error:
        raise PipelineError(
            f"an argument holds a leaf that is neither an array nor hashable: {error}. Pass "
            "it by closure."
        ) from error
    return found


def _copied(value: Any) -> Any:
    """Of what another process holds there is nothing to copy."""
    return value.copy() if is_here(value) else value
