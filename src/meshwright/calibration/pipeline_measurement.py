"""`PipelineMeasurement`: the steps of a pipeline as they ran, and who waits for whom."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from pathlib import Path
from typing import Any

from meshwright._html import Html, page, style
from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import amount, duration, plural, ranges
from meshwright.calibration.measurement import PAGE, Part, row, save
from meshwright.calibration.step_checks import refuse_pipeline_rehearsal, with_note
from meshwright.errors import CalibrationError, short
from meshwright.pipelines.profiling import MeasuredTimeline
from meshwright.rehearsal.pipelines import PipelineRehearsal
from meshwright.schedules.timeline import Timeline

_MOST_ROWS = 40


@dataclasses.dataclass(frozen=True)
class MeasuredTask:
    """One program of a step: a kind of task of a stage, or what runs before or after the tasks.

    Seconds are of one run, of which a step has `runs`. `measured` is from its start to its end as
    the host saw it; in `kernels` of it something ran on a device, of that `collectives` in
    collectives, as the trace has them; `parts` are its classes of kernels. `waited`: how long its
    group did nothing before it because it waited for `awaited`, a task of another group.
    """

    name: str
    group: int
    stage: int | None
    kind: str | None
    runs: int
    modelled: float
    measured: float
    kernels: float
    collectives: float
    parts: tuple[Part, ...]
    waited: float = 0.0
    awaited: str = ""
    rehearsed: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class MeasuredGroup:
    """How a group spends a step, in seconds: the mean of the steps under the profiler.

    From the first task of the step to the last, `busy` is in tasks, `waiting` until tasks of other
    groups were done, by their group; `starting`: results were on their way or the next task was not
    dispatched yet; `done`: after its last task. `kernels` is the time in which something ran on a
    device, before and after the tasks too. `peak`: bytes of a device so far, where it is known.
    """

    group: int
    processes: tuple[int, ...]
    devices: int
    busy: float
    waiting: dict[int, float]
    starting: float
    done: float
    kernels: float
    peak: int | None
    rehearsed_peak: int | None = None

    @property
    def idle(self) -> float:
        """Seconds between the first task of a step and the last in which it is in no task."""
        return sum(self.waiting.values()) + self.starting + self.done

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {**dataclasses.asdict(self), "idle": self.idle}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PipelineMeasurement(Shown):
    """A pipeline's step as it ran. Prints itself; HTML in a notebook; `to_json()`, `save(path)`.

    `seconds` is the time of a step without the profiler, the median of some rounds, between
    `fastest` and `slowest`; `traced` is the same under the profiler, of which all other figures
    are. `timeline` is that of the step in the middle; `model` the schedule with the modelled times
    of the programs that ran, in milliseconds. `others` are the programs before and after the tasks.
    `results` is what the last step returned. `array_types` are the shapes and dtypes of the arrays
    that the step takes.
    """

    name: str
    on: str
    speeds: str
    steps: int
    seconds: float
    fastest: float
    slowest: float
    traced: float
    makespan: float
    timeline: MeasuredTimeline
    model: Timeline
    tasks: tuple[MeasuredTask, ...]
    others: tuple[MeasuredTask, ...]
    groups: tuple[MeasuredGroup, ...]
    notes: tuple[str, ...]
    rehearsal: PipelineRehearsal | None
    results: Any
    array_types: tuple[str, ...] = ()

    @property
    def modelled(self) -> float:
        """Modelled seconds of a step: the schedule, and what runs before and after its tasks."""
        beside = collections.defaultdict[int, float](float)
        for each in self.others:
            beside[each.group] += each.runs * each.modelled
        return self.model.makespan / 1e3 + max(beside.values(), default=0.0)

    @property
    def ratio(self) -> float:
        """The modelled time of a step divided by the measured one."""
        return self.modelled / self.seconds

    @property
    def overhead(self) -> float:
        """What the profiler and the notes of the timeline added to a step, as a part of it."""
        return self.traced / self.seconds - 1

    @property
    def idle(self) -> float:
        """The part of the time from the first task to the last that groups are in no task."""
        return statistics.fmean(group.idle for group in self.groups) / self.makespan

    def compare(self, rehearsal: PipelineRehearsal) -> PipelineMeasurement:
        """The same measurement beside this rehearsal, with its times of tasks and its peaks.

        Raises `CalibrationError` where it is of other arguments, groups or microbatches; a note
        says what was rehearsed where the name, the schedule or the hardware is another.
        """
        if not isinstance(rehearsal, PipelineRehearsal):
            raise CalibrationError(
                f"compare: {short(rehearsal)} is not what rehearse_pipeline returns."
            )
        ran = self.model.schedule
        sizes = [group.devices for group in self.groups]
        refuse_pipeline_rehearsal(rehearsal, sizes, ran.microbatches, self.array_types)
        schedule = ran if rehearsal.timeline is None else rehearsal.timeline.schedule
        rehearsed = rehearsal.name, schedule.name, rehearsal.on
        promised = {
            (task.stage, str(task.kind)): task.time.total
            for group in rehearsal.groups
            for task in group.tasks
        }
        peaks = {group.group: group.memory.peak for group in rehearsal.groups}
        return dataclasses.replace(
            self,
            tasks=tuple(
                dataclasses.replace(
                    task, rehearsed=promised.get((task.stage or 0, task.kind or ""))
                )
                for task in self.tasks
            ),
            groups=tuple(
                dataclasses.replace(group, rehearsed_peak=peaks.get(group.group))
                for group in self.groups
            ),
            notes=with_note(self.notes, rehearsed, (self.name, ran.name, self.on)),
            rehearsal=rehearsal,
        )

    def __repr__(self) -> str:
        words = f"of {self.name}, {self._of()}: {duration(self.seconds)}, idle {self.idle:.0%}"
        return short_repr(self, words)

    def _of(self) -> str:
        schedule = self.model.schedule
        sizes = plural(schedule.groups, "group"), plural(schedule.microbatches, "microbatch")
        return f"{schedule.name}, {', '.join(sizes)} on {self.on}"

    def save(self, path: str | Path) -> Path:
        """Write a page that works offline, or JSON where the name ends in `.json`."""
        return save(self, path)

    def page(self) -> str:
        """All of it as one page of HTML that works offline."""
        title = f"{self.name} on {self.on}, measured"
        return page(title, self._sheet().inside(), css=style() + PAGE, body_class="mw")

    def to_json(self) -> dict[str, Any]:
        """Return everything but the results as plain data; times in seconds, timelines in ms."""
        own = ("name", "on", "speeds", "steps", "seconds", "fastest", "slowest", "traced")
        more = ("overhead", "makespan", "modelled", "ratio", "idle")
        rehearsed = self.rehearsal and self.rehearsal.timeline
        return {
            **{name: getattr(self, name) for name in (*own, *more)},
            "rehearsed": rehearsed
            and self.rehearsal
            and {
                "name": self.rehearsal.name,
                "on": self.rehearsal.on,
                "makespan": rehearsed.makespan / 1e3,
            },
            "tasks": [task.to_json() for task in self.tasks],
            "others": [task.to_json() for task in self.others],
            "groups": [group.to_json() for group in self.groups],
            "timeline": self.timeline.to_json(),
            "model": self.model.to_json(),
            "notes": list(self.notes),
        }

    def _sheet(self) -> Sheet:
        spread = f"{duration(self.fastest)} to {duration(self.slowest)}"
        headline = (
            f"{self.name}, {self._of()}: a step takes {duration(self.seconds)} ({spread}), "
            f"modelled {duration(self.modelled)}"
        )
        drawn = Html(self.timeline.svg())
        tables = [self._step_table(), self._tasks_table(), self._parts_table()]
        return Sheet(headline, [drawn, *tables, self._groups_table(), *self._remarks()])

    def _step_table(self) -> Table:
        span = self.model.makespan / 1e3
        idle = statistics.fmean(1 - busy / self.model.makespan for busy in self.model.busy) * span
        rows = [
            row("from the first task to the last", "", span, self.makespan),
            row("of that a group is idle", "", idle, self.idle * self.makespan),
            row(
                "before and after the tasks", "", self.modelled - span, self.traced - self.makespan
            ),
            row("a step", "", self.modelled, self.seconds),
        ]
        heading = ["part of a step", "modelled", "measured", "modelled / measured"]
        cells = [[each[0], *each[2:]] for each in rows]
        if self.rehearsal is None or self.rehearsal.timeline is None:
            return Table(heading, cells, [False, True, True, True])
        promised = self.rehearsal.timeline
        idle = statistics.fmean(promised.makespan - busy for busy in promised.busy)
        told = [duration(promised.makespan / 1e3), duration(idle / 1e3), "", ""]
        cells = [[one[0], word, *one[1:]] for one, word in zip(cells, told, strict=True)]
        return Table([heading[0], "rehearsed", *heading[1:]], cells, [False, *[True] * 4])

    def _tasks_table(self) -> Table:
        heading = ["one run of", "group", "runs", "modelled", "measured", "modelled / measured"]
        heading += ["kernels", "collectives", "group waited before it", "for"]
        right = [False, *[True] * 8, False]
        rows = []
        for task in (*self.tasks, *self.others):
            first = [task.name, str(task.group), str(task.runs)]
            times = row("", "", task.modelled, task.measured)[2:]
            inside = [duration(task.kernels), duration(task.collectives)]
            rows.append([*first, *times, *inside, duration(task.waited), task.awaited])
        if self.rehearsal is not None:
            heading.insert(3, "rehearsed")
            right.insert(3, True)
            for cells, task in zip(rows, (*self.tasks, *self.others), strict=True):
                cells.insert(3, "" if task.rehearsed is None else duration(task.rehearsed))
        return Table(heading, rows[:_MOST_ROWS], right, _more(len(rows), "program"))

    def _parts_table(self) -> Table:
        heading = ["kernels of one run", "class", "runs", "modelled", "measured"]
        rows = [
            [task.name, part.name, str(part.runs), *row("", "", part.modelled, part.measured)[2:]]
            for task in (*self.tasks, *self.others)
            for part in task.parts
            if part.runs
        ]
        right = [False, False, True, True, True, True]
        cut = _more(len(rows), "class", "classes")
        return Table([*heading, "modelled / measured"], rows[:_MOST_ROWS], right, cut)

    def _groups_table(self) -> Table:
        heading = ["group", "process", "in tasks", "waits for others", "mostly for"]
        heading += ["transfers, starting", "done early", "idle", "kernels", "peak memory"]
        rows = []
        for group in self.groups:
            most = max(group.waiting, key=lambda other: group.waiting[other], default=None)
            waited = sum(group.waiting.values())
            rows.append(
                [
                    str(group.group),
                    ranges(group.processes),
                    duration(group.busy),
                    duration(waited),
                    f"group {most}" if most is not None and waited else "",
                    *map(duration, (group.starting, group.done)),
                    f"{group.idle / self.makespan:.0%}",
                    duration(group.kernels),
                    amount(group.peak) if group.peak else "unknown",
                ]
            )
        right = [True, True, True, True, False, *[True] * 5]
        return Table(heading, rows[:_MOST_ROWS], right, _more(len(rows), "group"))

    def _remarks(self) -> list[str]:
        lines = [f"speeds: {self.speeds}"]
        lines.append(
            f"{plural(self.steps, 'step')} under the profiler, {duration(self.traced)} each "
            f"({self.overhead:+.1%}); tasks, kernels and waits are of those."
        )
        waits = [
            (seconds, group.group, other)
            for group in self.groups
            for other, seconds in group.waiting.items()
        ]
        if waits and (most := max(waits))[0] > 0:
            seconds, group, other = most
            task = max(
                (task for task in self.tasks if task.group == group and task.awaited),
                key=lambda task: task.runs * task.waited,
            )
            lines.append(
                f"Group {group} waits longest, {duration(seconds)} of a step for group {other}, "
                f"mostly for {task.awaited} before {task.name}."
            )
        for each in self.groups:
            if each.peak and each.rehearsed_peak:
                lines.append(
                    f"Peak memory of group {each.group}: rehearsed {amount(each.rehearsed_peak)}, "
                    f"measured {amount(each.peak)} ({each.rehearsed_peak / each.peak:.2f})."
                )
        return [*lines, *self.notes]


def _more(count: int, one: str, many: str | None = None) -> str:
    left = count - _MOST_ROWS
    return f"... and {left} more {one if left == 1 else many or one + 's'}" if left > 0 else ""
