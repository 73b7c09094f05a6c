"""`pipeline(...)`: a training or inference step that runs as a pipeline over groups."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType

from meshwright.errors import PipelineError, near, short
from meshwright.mpmd.groups import Groups, as_groups
from meshwright.mpmd.pipelines.agreeing import Agreement
from meshwright.mpmd.pipelines.assembling import Assembled, assemble
from meshwright.mpmd.pipelines.board import Board
from meshwright.mpmd.pipelines.chaining import chained
from meshwright.mpmd.pipelines.compiling import compile_all
from meshwright.mpmd.pipelines.cutting import Cut, cut
from meshwright.mpmd.pipelines.explaining import Explanation, explain
from meshwright.mpmd.pipelines.keywords import by_place, takes_places
from meshwright.mpmd.pipelines.layouts import Layouts
from meshwright.mpmd.pipelines.measuring import MeasuredTimeline, timelines
from meshwright.mpmd.pipelines.operations import Operation, run, run_watched, set_drops
from meshwright.mpmd.pipelines.operations import tell as tell_watch
from meshwright.mpmd.pipelines.placing import begin, is_here, results, settle_constants
from meshwright.mpmd.pipelines.programs import Key, Program, programs
from meshwright.mpmd.pipelines.reading import Traced, read
from meshwright.mpmd.pipelines.recording import Record, merge, record
from meshwright.mpmd.pipelines.sharing import local_groups, share
from meshwright.mpmd.pipelines.statics import Split, take_apart
from meshwright.mpmd.schedules.auto import Auto
from meshwright.mpmd.schedules.named.catalogue import check_name
from meshwright.mpmd.schedules.named.catalogue import schedule as named_schedule
from meshwright.mpmd.schedules.proving import Proof, check
from meshwright.mpmd.schedules.schedule import Schedule, count
from meshwright.mpmd.transfers import connect
from meshwright.mpmd.watching import Watch

T = TypeVar("T")


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
    return PipelineStep(fn, layouts, schedule, microbatches, tuple(donated), options, limit)


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


class PipelineStep:
    """A step that runs as a pipeline; call it like the function it was made from."""

    def __init__(
        self,
        fn: Callable[..., Any],
        layouts: Layouts,
        schedule: str | Schedule | Auto,
        microbatches: int,
        donated: tuple[int, ...],
        options: dict[str, Any],
        limit: float = 60.0,
    ):
        self.limit = limit
        self.layouts, groups = layouts, layouts.groups
        self.fn, self.groups, self.schedule = takes_places(fn), groups, schedule
        self.microbatches, self.options, self.donated = microbatches, options, donated
        self.mine = local_groups(groups)
        self.link = connect() if groups.spans_processes else None
        self.watch = Watch(limit, name="pipeline").start() if groups.spans_processes else None
        self.agreement = None if self.watch is None else Agreement(self.watch)
        self._steps = 0
        self._plans: dict[Any, Plan] = {}

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        parts = self._checked(by_place(self.fn, args, keywords))
        plan = self._plan(parts)
        board = plan.assembled.board
        cells = begin(board, parts.arrays, self.mine, plan.donated)
        if self.agreement is None:
            run(plan.operations, cells)
        else:
            self.agreement.enter(self._steps, plan)
            watch = self.agreement.watch
            self._among_others(watch, lambda: run_watched(plan.operations, cells, watch))
        found = results(board, cells, plan.assembled.results, self.mine)
        return jax.tree.unflatten(plan.traced.out_tree, found)

    def _among_others(self, watch: Watch, work: Callable[[], T]) -> T:
        """Run while the other processes run theirs; when one fails, all end."""
        self._steps += 1
        try:
            found = work()
        except BaseException as error:
            watch.__exit__(type(error), error, error.__traceback__)
            raise
        watch.doing = ""
        return found

    def close(self) -> None:
        """In several processes: wait for the others, then stop watching and listening."""
        if self.watch is not None and not self.watch.closed:
            self.watch.close()
        if self.link is not None:
            self.link.close()

    def __enter__(self) -> PipelineStep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if error is not None and self.watch is not None:
            self.watch.__exit__(kind, error, trace)
        self.close()

    def _checked(self, args: tuple[Any, ...]) -> Split:
        """The arguments taken apart, if they can be used at all."""
        for number in self.donated:
            if number not in range(len(args)):
                raise PipelineError(f"donate={number}: the step was called with {len(args)}.")
        parts = take_apart(args, 1)
        for path, value in zip(parts.paths, parts.arrays, strict=True):
            if isinstance(value, jax.core.Tracer):
                raise PipelineError(
                    f"argument {path}: a tracer. A pipeline is a program of its own for each "
                    "group: call it outside of jit, grad and vmap."
                )
            if isinstance(value, jax.Array) and value.is_deleted():
                raise PipelineError(
                    f"argument {path}: the array was deleted or donated. Use the one that the "
                    "last step returned."
                )
        return parts

    def explain(self, *args: Any, **keywords: Any) -> Explanation:
        """What became of the function: its stages, what each holds, sends and repeats.

        Takes the arguments of a call; without them it means the last one. Nothing runs.
        """
        places = by_place(self.fn, args, keywords)
        plan = self._plan(take_apart(places, 1)) if places else self._last()
        return explain(plan, plan.names)

    def plan_of(self, *args: Any) -> Plan:
        """Everything that is worked out and compiled before a call like this runs."""
        return self._plan(take_apart(args, 1))

    def timeline(self, *args: Any, **keywords: Any) -> MeasuredTimeline:
        """Run a step and note when every task ran, against what its times predict.

        The results are dropped; donated arguments are copied first. In several processes all
        call it, and all get the whole.
        """
        places = by_place(self.fn, args, keywords)
        plan = self._plan(take_apart(places, 1))
        copies = [
            jax.tree.map(_copied, arg) if number in self.donated else arg
            for number, arg in enumerate(places)
        ]
        arrays = take_apart(tuple(copies), 1).arrays
        cells = begin(plan.assembled.board, arrays, self.mine)
        if self.agreement is None:
            return timelines(plan, record(plan.operations, cells, lambda _: None))
        watch = self.agreement.watch
        self.agreement.enter(self._steps, plan)
        watch.confer("a timeline's begin", "", lambda _: "")
        tell = functools.partial(tell_watch, watch)
        found = self._among_others(watch, lambda: record(plan.operations, cells, tell))
        whole = watch.confer("its timeline", found.to_text(), merge)
        return timelines(plan, Record.from_text(whole))

    def _last(self) -> Plan:
        if not self._plans:
            raise PipelineError("explain() before the first call: pass the step's arguments.")
        return next(reversed(self._plans.values()))

    def _plan(self, parts: Split) -> Plan:
        """What to do with arguments like these; worked out and compiled the first time."""
        kinds = tuple(
            (np.shape(x), getattr(x, "dtype", type(x)), bool(getattr(x, "weak_type", False)))
            for x in parts.arrays
        )
        key = (parts.treedef, parts.places, parts.rest, kinds)
        try:
            hash(key)
        except TypeError as error:
            raise PipelineError(
                f"an argument holds a leaf that is neither an array nor hashable: {error}. Pass "
                "it by closure."
            ) from error
        if key not in self._plans:
            if self.watch is not None:
                # Tracing and compiling take what they take; others wait for us meanwhile.
                self.watch.limit = math.inf
            self._plans[key] = self._make_plan(parts)
            if self.watch is not None:
                self.watch.limit = self.limit
        return self._plans[key]

    def _make_plan(self, parts: Split) -> Plan:
        traced = read(self.fn, parts, self.microbatches, self._is_forward(), self.options)
        if self._is_forward() == bool(traced.region.gradient):
            have = "has no backward" if self._is_forward() else "has one"
            raise PipelineError(
                f"the step {'takes gradients' if traced.region.gradient else 'takes none'}, and "
                f"the schedule {have}. Use 'forward' for steps without gradients only."
            )
        stages = cut(traced.region)
        proof = check(self._schedule(stages.stages))
        tasks = {(task.kind, task.stage) for row in proof.schedule.tasks for task in row}
        numbers = [int(path.partition("/")[0]) for path in parts.paths]
        names = [path.partition("/")[2] or path for path in parts.paths]
        self.layouts.check_rules(names)
        board = Board(
            self.layouts,
            {var: n for n, var in enumerate(traced.invars)},
            traced.consts,
            parts.arrays,
            names,
        )
        donated = frozenset(n for n, number in enumerate(numbers) if number in self.donated)
        pieces = programs(stages, tasks)
        assembled = assemble(traced, stages, pieces, proof, board, donated)
        if not self.groups.compile_only:
            settle_constants(board, self.mine)
        operations = share(board, self.mine, self.link)
        kept = {cell for by_group in assembled.results for cell in by_group.values()}
        set_drops(operations, kept | set(board.fixed))
        compile_all(board, operations)
        return Plan(
            traced, stages, pieces, proof, assembled, operations, names, parts.paths, donated
        )

    def _is_forward(self) -> bool:
        if isinstance(self.schedule, Schedule):
            return self.schedule.forward_only
        return isinstance(self.schedule, str) and self.schedule.strip().lower() == "forward"

    def _schedule(self, stages: int) -> Schedule:
        groups = self.groups.mpmd_dim
        if isinstance(self.schedule, Schedule):
            found = self.schedule
        elif isinstance(self.schedule, Auto):
            found = self.schedule.build(groups, self.microbatches, stages)
        else:
            found = named_schedule(
                self.schedule, groups=groups, microbatches=self.microbatches, stages=stages
            )
        if (found.groups, found.microbatches, found.stages) != (groups, self.microbatches, stages):
            raise PipelineError(
                f"schedule {found.name} has {found.groups} groups, {found.microbatches} "
                f"microbatches and {found.stages} stages; the pipeline has {groups}, "
                f"{self.microbatches} and {stages} (one more than marks)."
            )
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A step for arguments of one kind: traced, proved, put together and compiled."""

    traced: Traced
    cut: Cut
    programs: dict[Key, Program]
    proof: Proof
    assembled: Assembled
    operations: Sequence[Operation]
    names: Sequence[str]
    paths: Sequence[str]
    donated: frozenset[int]


def _copied(value: Any) -> Any:
    """Of what another process holds there is nothing to copy."""
    return value.copy() if is_here(value) else value
