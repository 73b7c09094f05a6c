"""A timeline as events in Chrome's trace format, for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.errors import ScheduleError, short
from meshwright.schedules.text_plot import headline
from meshwright.schedules.types import KIND_NAMES, Key, Task, TaskKind, gives, needs
from meshwright.schedules.validation import live_activations

# Only for annotations: `Timeline.trace` calls `chrome_trace`.
if TYPE_CHECKING:
    from meshwright.schedules.timeline import Timeline

Event = dict[str, Any]


def chrome_trace(timeline: Timeline, *, microseconds: float = 1000.0) -> dict[str, Any]:
    """Make events for a trace viewer: a thread per group, arrows for transfers, activations held.

    `microseconds` is the length of a unit of cost: by default a millisecond; 1e6 for costs in
    seconds.

    >>> from meshwright.schedules import schedule, simulate
    >>> trace = simulate(schedule("gpipe", groups=2, microbatches=2)).trace()
    >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    ['0F0', '0F1', '0BW0', '0BW1', '1F0', '1F1', '1BW0', '1BW1']
    """
    if isinstance(microseconds, bool) or not isinstance(microseconds, (int, float)):
        raise ScheduleError(
            f"microseconds is how long a unit is, not {short(microseconds)}.", option="microseconds"
        )
    if not 0 < microseconds < float("inf"):
        raise ScheduleError(
            f"microseconds is a number above 0, not {short(microseconds)}.", option="microseconds"
        )
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": timeline.schedule.name}},
        *_threads(timeline),
        *_tasks(timeline, microseconds),
        *_transfers(timeline, microseconds),
        *_held(timeline, microseconds),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"schedule": headline(timeline), "microseconds per unit": microseconds},
    }


# Phases of the format: "M" is metadata, "X" a slice with a duration, "s" and "f" the two ends of
# an arrow, "C" a counter. Times are in microseconds.


def _threads(timeline: Timeline) -> Iterator[Event]:
    for group in range(timeline.schedule.groups):
        where = {"ph": "M", "pid": 0, "tid": group}
        yield {**where, "name": "thread_name", "args": {"name": f"group {group}"}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": group}}


def _tasks(timeline: Timeline, unit: float) -> Iterator[Event]:
    schedule = timeline.schedule
    for group, row in enumerate(schedule.tasks):
        starts, ends = timeline.starts[group], timeline.ends[group]
        for at, task in enumerate(row):
            more = {}
            if at in schedule.overlapped[group]:
                more["overlaps"] = str(row[at + 1])
            elif at - 1 in schedule.overlapped[group]:
                more["overlaps"] = str(row[at - 1])
            yield {
                "ph": "X",
                "name": str(task),
                "cat": KIND_NAMES[task.kind],
                "pid": 0,
                "tid": group,
                "ts": starts[at] * unit,
                "dur": (ends[at] - starts[at]) * unit,
                "args": {
                    "kind": task.kind,
                    "stage": task.stage,
                    "microbatch": task.microbatch,
                    **more,
                },
            }


def _transfers(timeline: Timeline, unit: float) -> Iterator[Event]:
    """An arrow from each task that gives a result to the one in another group that needs it."""
    schedule = timeline.schedule
    sent: dict[Key, tuple[int, float]] = {}
    for group, row in enumerate(schedule.tasks):
        times = zip(row, timeline.starts[group], timeline.ends[group], strict=True)
        for task, start, end in times:
            # Inside the task, since a viewer ties an arrow to the slice around its end.
            sent[gives(task)] = group, start + 0.99 * (end - start)
    number = 0
    for group, row in enumerate(schedule.tasks):
        for task, start in zip(row, timeline.starts[group], strict=True):
            for source, at in _awaited(task, schedule.stages, sent):
                if source != group:
                    arrow = {"name": "transfer", "cat": "transfer", "id": number, "pid": 0}
                    # "bp": "e" binds the end to the slice around it, not to the next one.
                    yield {**arrow, "ph": "s", "tid": source, "ts": at * unit}
                    yield {**arrow, "ph": "f", "bp": "e", "tid": group, "ts": start * unit}
                    number += 1


def _awaited(
    task: Task, stages: int, sent: dict[Key, tuple[int, float]]
) -> Iterator[tuple[int, float]]:
    """Yield the group and the time of each of a task's inputs.

    A measured timeline leaves out tasks that are empty in the compiled step; what such a task
    would have passed on comes from the tasks before it.
    """
    for needed in needs(task, stages):
        if needed in sent:
            yield sent[needed]
        else:
            yield from _awaited(Task(*needed), stages, sent)


def _held(timeline: Timeline, unit: float) -> Iterator[Event]:
    """How many activations each group holds, as it changes."""
    for group, held in enumerate(live_activations(timeline.schedule)):
        name = f"activations of group {group}"
        row = timeline.schedule.tasks[group]
        for at, (task, now) in enumerate(zip(row, held, strict=True)):
            if task.kind == TaskKind.FORWARD:
                time, value = timeline.starts[group][at], now
            elif task.kind != TaskKind.INPUT_GRADIENT:
                time, value = timeline.ends[group][at], now - 1
            else:
                continue
            yield {"ph": "C", "name": name, "pid": 0, "ts": time * unit, "args": {"held": value}}
