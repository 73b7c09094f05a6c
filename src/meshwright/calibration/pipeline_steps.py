"""`measure_pipeline`: run a pipeline's steps, and join their timelines with the profiler's trace.

Threads note when tasks are done, as for `step.timeline`, while the profiler notes their kernels.
Each process reads the trace of its own devices, and all exchange what they found.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from meshwright._progress import Pulse
from meshwright._text import plural
from meshwright.calibration.joining import Instructions, join, own_records, read_records
from meshwright.calibration.measurement import Part
from meshwright.calibration.pipeline_measurement import (
    MeasuredGroup,
    MeasuredTask,
    PipelineMeasurement,
)
from meshwright.calibration.step_checks import refuse_pipeline_rehearsal, refuse_recording
from meshwright.calibration.timing import NO_GRAPHS, elements, refuse_donation, structure, wait
from meshwright.calibration.trace import Trace, record
from meshwright.errors import CalibrationError
from meshwright.pipelines.plan import Plan, lower_function
from meshwright.pipelines.profiling import MeasuredTimeline
from meshwright.pipelines.step import PipelineStep
from meshwright.pipelines.step_graph import Operation, TaskFunction
from meshwright.placement.placement import Placement
from meshwright.rehearsal.collectives.analyze import analyze
from meshwright.rehearsal.kernel_speeds import speeds as kernel_speeds
from meshwright.rehearsal.pipelines import PipelineRehearsal, modelled_timeline
from meshwright.rehearsal.repeated_work import find_repeated_work
from meshwright.rehearsal.step_arguments import array_types
from meshwright.rehearsal.step_time import step_time
from meshwright.rehearsal.task_compiler import task_program
from meshwright.schedules.types import KINDS

_ROUNDS = 3  # of timing
T = TypeVar("T")


def measure_pipeline(
    step: PipelineStep,
    args: Sequence[Any],
    rehearsal: PipelineRehearsal | None,
    steps: int,
    place: Callable[[Any], Placement],
    folder: Path | None,
    name: str,
    pulse: Pulse,
) -> PipelineMeasurement:
    """Run a pipeline's steps under the profiler; `place` says how a group's mesh lies."""
    arguments = array_types(args)

    def check() -> list[Placement]:
        refuse_recording(folder)
        if rehearsal is not None:
            sizes = [mesh.size for mesh in step.groups.meshes]
            refuse_pipeline_rehearsal(rehearsal, sizes, step.planner.microbatches, arguments)
        return [place(mesh) for mesh in step.groups.meshes]

    # What can be refused is refused before the first call: it uses donated arguments up.
    placements = _checked_by_all(step, check)
    run = _Run(step, list(args))
    pulse.now("compiling", done=0.0)
    run.once()
    run.once()
    times = []
    for number in range(_ROUNDS):
        words = f"{plural(steps, 'step')}, round {number + 1} of {_ROUNDS}"
        pulse.now(words, done=(number + 1) / (_ROUNDS + 3))
        times.append(run.round(steps))
    times.sort()
    plan = step.plan_of(*run.args)
    notes = []
    if placements[0].topology.chip.family == "gpu":
        pulse.now("compiling without CUDA graphs")
        plan = _without_graphs(plan)
        run.recorded(plan)
        notes.append(
            "Traced without CUDA graphs (command buffers), which hide the names of kernels; the "
            "step's own time is with them."
        )
    done = (_ROUNDS + 1) / (_ROUNDS + 3)
    pulse.now(f"{plural(steps, 'step')} under the profiler", done=done)
    timelines = []
    with record(folder) as recording:
        began = time.perf_counter()
        for _ in range(steps):
            timelines.append(run.recorded(plan))
        traced = (time.perf_counter() - began) / steps
    pulse.now("reading the trace", done=(_ROUNDS + 2) / (_ROUNDS + 3))
    programs, peaks = _of_all_groups(step, plan, recording.trace, placements, steps)
    if placements[0].topology.chip.family == "cpu":
        notes.append(
            "Simulated devices share this machine's cores: counts, waiting and order are real, "
            "speeds are not those of any accelerator."
        )
    waits = _waits(timelines)
    rows = [_task(row, timelines, waits) for row in programs]
    tasks = tuple(sorted((each for each in rows if each.kind), key=_order))
    measured = PipelineMeasurement(
        name,
        f"{len(placements)} x {placements[0].topology.name}",
        placements[0].topology.chip.whose_speeds(placements[0].topology.num_devices),
        steps,
        statistics.median(times),
        times[0],
        times[-1],
        traced,
        statistics.fmean(each.measured.makespan for each in timelines) / 1e3,
        sorted(timelines, key=lambda each: each.measured.makespan)[len(timelines) // 2],
        modelled_timeline(plan, {(t.stage or 0, t.kind or ""): 1e3 * t.modelled for t in tasks}),
        tasks,
        tuple(each for each in rows if not each.kind),
        tuple(_groups(step, timelines, rows, peaks)),
        tuple(notes),
        None,
        run.results,
        arguments,
    )
    return measured if rehearsal is None else measured.compare(rehearsal)


def _checked_by_all(step: PipelineStep, check: Callable[[], T]) -> T:
    """What `check` returns; what it refuses in one process ends all, before they wait for it."""
    if step.process_context is None or step.closed:
        return check()
    confer = functools.partial(step.process_context.watchdog.confer, "checks of measure")
    try:
        answer = check()
    except Exception as error:
        confer(str(error) or type(error).__name__, _as_json)
        raise
    for process, problem in enumerate(json.loads(confer("", _as_json))):
        if problem:
            raise CalibrationError(f"process {process}: {problem} All end; nothing was measured.")
    return answer


def _as_json(texts: Sequence[str]) -> str:
    return json.dumps(list(texts))


def _order(task: MeasuredTask) -> tuple[int, int, int]:
    return task.group, task.stage or 0, KINDS.index(task.kind or "F")


def _task(
    row: Mapping[str, Any],
    timelines: Sequence[MeasuredTimeline],
    waits: Mapping[tuple[str, int], dict[str, float]],
) -> MeasuredTask:
    """A row of a program, with what the timelines have of its runs."""
    fields = {name: value for name, value in row.items() if name not in ("by", "peak", "parts")}
    parts = tuple(Part(**part) for part in row["parts"])
    if not row["kind"]:
        return MeasuredTask(**fields, measured=row["kernels"], parts=parts)
    spans = [
        end - start
        for each in timelines
        for tasks, *times in zip(
            each.measured.schedule.tasks, each.measured.starts, each.measured.ends, strict=True
        )
        for task, start, end in zip(tasks, *times, strict=True)
        if (task.kind, task.stage) == (row["kind"], row["stage"])
    ]
    waited = waits.get((row["kind"], row["stage"]), {})
    awaited = max(waited, key=lambda task: waited[task], default="")
    return MeasuredTask(
        **fields,
        measured=statistics.fmean(spans) / 1e3,
        parts=parts,
        waited=sum(waited.values()) / len(spans) / 1e3,
        awaited=awaited,
    )


def _waits(timelines: Sequence[MeasuredTimeline]) -> dict[tuple[str, int], dict[str, float]]:
    """Milliseconds that groups waited before tasks, by the task's kind and what it waited for."""
    waits: dict[tuple[str, int], dict[str, float]] = {}
    for each in timelines:
        for gap in each.measured.gaps:
            if gap.awaited is not None:
                waited = waits.setdefault(
                    (gap.task.kind, gap.task.stage), collections.defaultdict(float)
                )
                waited[f"{gap.awaited.stage}{gap.awaited.kind}"] += gap.waited
    return waits


def _groups(
    step: PipelineStep,
    timelines: Sequence[MeasuredTimeline],
    rows: Sequence[MeasuredTask],
    peaks: Mapping[int, int],
) -> Iterator[MeasuredGroup]:
    """How each group spends a step, the mean of the timelines."""
    scale = 1e-3 / len(timelines)
    for group, mesh in enumerate(step.groups.meshes):
        waiting: dict[int, float] = collections.defaultdict(float)
        span = starting = done = 0.0
        for timeline in (each.measured for each in timelines):
            span += timeline.makespan
            done += timeline.makespan - max(timeline.ends[group], default=0.0)
            for gap in timeline.gaps:
                if gap.group == group:
                    starting += gap.starting
                    if gap.awaited is not None:
                        waiting[timeline.schedule.group_of[gap.awaited.stage]] += gap.waited
        own = [each for each in rows if each.group == group]
        yield MeasuredGroup(
            group,
            tuple(sorted({device.process_index for device in mesh.devices.flat})),
            mesh.size,
            # Not `timeline.busy`: of a group in two processes tasks may overlap.
            (span - starting - done - sum(waiting.values())) * scale,
            {other: waited * scale for other, waited in sorted(waiting.items())},
            starting * scale,
            done * scale,
            sum(each.runs * each.kernels for each in own),
            peaks.get(group) or None,
        )


class _Run:
    """A step that is run again and again; what it returns takes the place of what it donates."""

    def __init__(self, step: PipelineStep, args: list[Any]):
        self.step, self.args = step, args
        self.results: Any = None
        self.taken: dict[int, int] | None = None

    def once(self) -> None:
        self._take(self.step(*self.args))

    def recorded(self, plan: Plan) -> MeasuredTimeline:
        results, timeline = self.step.recorded(plan, *self.args)
        self._take(results)
        return timeline

    def round(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self.once()
        return (time.perf_counter() - began) / steps

    def _take(self, results: Any) -> None:
        self.results = results
        leaves = jax.tree.leaves(results)
        wait([leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.addressable_shards])
        given = elements(results)
        if self.taken is None:
            self.taken = self._match(given)
        for number, result in self.taken.items():
            self.args[number] = given[result]

    def _match(self, given: Sequence[Any]) -> dict[int, int]:
        free, taken = list(range(len(given))), {}
        for number in self.step.donated:
            wanted = structure(self.args[number])
            match = next((n for n in free if structure(given[n]) == wanted), None)
            if match is None:
                raise refuse_donation(f"argument {number}", self.args[number], given)
            free.remove(match)
            taken[number] = match
        return taken


def _without_graphs(plan: Plan) -> Plan:
    """The same plan, with programs whose kernels keep their names in a trace."""
    functions: dict[int, TaskFunction] = {}
    operations = []
    for operation in plan.operations:
        function = operation.function
        if function is None:
            operations.append(operation)
            continue
        if id(function) not in functions:
            lowered = lower_function(plan.assembled.builder, function, operation)
            compiled = lowered.compile(NO_GRAPHS)
            functions[id(function)] = dataclasses.replace(function, compiled=compiled)
        named = functions[id(function)]
        operations.append(dataclasses.replace(operation, function=named, call=named.compiled))
    return dataclasses.replace(plan, operations=operations)


# In: the trace of this process. Out: a row for each program of every group, as plain data, and each
# group's peak. Invariant: all processes of a group have its programs, so the first of them joins
# what all have recorded. Example: of two processes with a group each, each makes the rows of its
# own, and both get all.
def _of_all_groups(
    step: PipelineStep,
    plan: Plan,
    trace: Trace,
    placements: Sequence[Placement],
    steps: int,
) -> tuple[list[dict[str, Any]], dict[int, int]]:
    meshes = step.groups.meshes
    joined: dict[tuple[int, str], tuple[Operation, int, Instructions]] = {}
    own: list[Any] = []
    seen = False
    for operation, calls in _programs(plan):
        function, group = operation.function, operation.group
        if function is None or group not in step.local_groups:
            continue
        program = task_program(function.compiled)
        instructions = Instructions(program, analyze(program, placements[group]))
        key = group, function.name
        joined[key] = operation, calls, instructions
        text = function.compiled.as_text()
        module = str(text).split(maxsplit=2)[1].rstrip(",")
        records = own_records(meshes[group], trace.events.get(module, []), instructions)
        seen = seen or any(record.runs for record in records)
        own.append([group, function.name, [record.to_json() for record in records]])
    everything = _exchange(step, "what ran", own if seen else None)
    records_of: dict[tuple[int, str], list[Any]] = collections.defaultdict(list)
    for group, name, records in everything:
        records_of[group, name] += records
    rows: list[dict[str, Any]] = []
    peaks: dict[int, int] = {}
    for (group, name), (operation, calls, instructions) in joined.items():
        records = read_records(records_of[group, name])
        placed, runs = placements[group], calls * steps
        chip = placed.topology.chip
        collectives = analyze(instructions.program, placed)
        repeated = find_repeated_work(instructions.program, placed)
        parts = join(records, instructions, collectives, placed, kernel_speeds(chip), runs)
        task = operation.task
        rows.append(
            {
                "name": name if task is None else f"{task.stage}{task.kind}",
                "group": group,
                "stage": task and task.stage,
                "kind": task and str(task.kind),
                "runs": calls,
                "modelled": step_time(instructions.program, collectives, chip, repeated).total,
                "kernels": statistics.fmean(each.busy for each in parts.devices),
                "collectives": statistics.fmean(each.collectives for each in parts.devices),
                "parts": [part.to_json() for part in parts.parts],
                "by": min(device.process_index for device in meshes[group].devices.flat),
                "peak": max((each.peak or 0 for each in parts.devices), default=0),
            }
        )
    here = jax.process_index()
    mine = [each for each in rows if each["by"] == here or step.process_context is None]
    rows = _exchange(step, "its programs", mine)
    for each in rows:
        peaks[each["group"]] = max(peaks.get(each["group"], 0), each["peak"])
    return rows, peaks


def _programs(plan: Plan) -> Iterator[tuple[Operation, int]]:
    """One operation of each program of this process, in order, and how often a step calls it."""
    calls = collections.Counter(id(each.function) for each in plan.operations)
    first: dict[int, Operation] = {}
    for operation in plan.operations:
        if operation.function is not None:
            first.setdefault(id(operation.function), operation)
    for number, operation in first.items():
        yield operation, calls[number]


def _exchange(step: PipelineStep, about: str, own: list[Any] | None) -> list[Any]:
    """The lists of all processes, joined; None says that this process has none where it must."""
    texts = json.dumps(own)
    if step.process_context is not None:
        texts = step.process_context.watchdog.confer(
            about, texts, lambda all_texts: json.dumps([json.loads(text) for text in all_texts])
        )
        lists = json.loads(texts)
    else:
        lists = [own]
    if None in lists:
        raise CalibrationError(
            f"the profiler's trace in process {lists.index(None)} has no events of the pipeline's "
            "programs on any device. Another profiler may hold the devices (Nsight, DCGM, xprof); "
            "end it and try again."
        )
    return [each for part in lists for each in part]
