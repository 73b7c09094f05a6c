"""The text of a schedule's file, read: whatever is wrong is named by file, line and cell."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from meshwright.errors import ScheduleError, near, short
from meshwright.mpmd.schedules.files.cells import read_cell
from meshwright.mpmd.schedules.schedule import Schedule
from meshwright.mpmd.schedules.tasks import Task

_KEYS = ("name", "microbatches", "group_of", "tasks", "overlapped")
_Rows = list[list[tuple[Task, ...]]]


def from_csv(text: str, path: Path, notation: str) -> Schedule:
    """A line per group; stages and microbatches are counted."""
    try:
        lines = list(csv.reader(io.StringIO(text.rstrip(), newline="")))
    except csv.Error as error:
        raise ScheduleError(f"{path}: not CSV ({error}).") from error
    rows: _Rows = [
        [
            unit
            for place, cell in enumerate(line, 1)
            if (unit := read_cell(cell, f"{path}, line {number}, cell {place}", notation))
        ]
        for number, line in enumerate(lines, 1)
    ]
    if not any(rows):
        raise ScheduleError(f"{path}: no tasks. Write a line per group, e.g. 0F0,0F1,0BW0,0BW1.")
    tasks = tuple(tuple(task for unit in row for task in unit) for row in rows)
    microbatches = 1 + max(task.microbatch for row in tasks for task in row)
    name = path.stem or "schedule"
    return Schedule(name, microbatches, _group_of(tasks, path), tasks, _pairs(rows))


def _group_of(tasks: tuple[tuple[Task, ...], ...], path: Path) -> tuple[int, ...]:
    """The group of every stage, by where its tasks stand."""
    home: dict[int, int] = {}
    for group, row in enumerate(tasks):
        if not row:
            raise ScheduleError(f"{path}, line {group + 1}: no tasks. Every line is a group.")
        for task in row:
            if (first := home.setdefault(task.stage, group)) != group:
                raise ScheduleError(
                    f"{path}, line {group + 1}: {task} in group {group}, but stage {task.stage} "
                    f"is in group {first} (line {first + 1}). Keep a stage in one group."
                )
    for stage in range(len(home)):
        if stage not in home:
            raise ScheduleError(
                f"{path}: no task of stage {stage}, though stage {max(home)} is there. Stages "
                "count from 0."
            )
    return tuple(home[stage] for stage in range(len(home)))


def _pairs(rows: _Rows) -> tuple[frozenset[int], ...]:
    pairs = []
    for row in rows:
        at, starts = 0, set()
        for unit in row:
            if len(unit) == 2:
                starts.add(at)
            at += len(unit)
        pairs.append(frozenset(starts))
    return tuple(pairs)


def from_json(text: str, path: Path) -> Schedule:
    """What `Schedule.to_json` makes."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ScheduleError(f"{path}: not JSON ({error}).") from error
    if not isinstance(data, dict):
        raise ScheduleError(f"{path}: a schedule is an object with {', '.join(_KEYS)}.")
    for key in data:
        if key not in _KEYS:
            raise ScheduleError(f"{path}: {short(key)} is not one of {_KEYS}.{near(key, _KEYS)}")
    for key in _KEYS[:-1]:
        if key not in data:
            raise ScheduleError(f"{path}: {key!r} is missing.")
    for key, depth in (("group_of", 1), ("tasks", 2), ("overlapped", 2)):
        if not _is_list(data.get(key, []), depth):
            raise ScheduleError(f"{path}: {key!r} is a list{' of lists' * (depth - 1)}.")
    if not all(type(at) is int for row in data.get("overlapped", []) for at in row):
        raise ScheduleError(f"{path}: 'overlapped' holds positions, whole numbers from 0.")
    tasks = [
        [_one(cell, f"{path}, group {group}, position {at}") for at, cell in enumerate(row)]
        for group, row in enumerate(data["tasks"])
    ]
    try:
        return Schedule(**{**data, "tasks": tasks})
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error


def _one(cell: Any, where: str) -> Task:
    unit = read_cell(cell, where) if isinstance(cell, str) else ()
    if len(unit) != 1:
        raise ScheduleError(f"{where}: {short(cell)} is no task. Write e.g. '2F5'.")
    return unit[0]


def _is_list(value: Any, depth: int) -> bool:
    return isinstance(value, list) and (depth == 1 or all(_is_list(v, depth - 1) for v in value))
