"""`read_schedule` and `write_schedule`: schedules in CSV and JSON files.

A CSV file has a line per group and a cell per task: `2F5` is stage 2, forward, microbatch 5, and
`2F5+5BW1` are two that overlap. PyTorch's pipeline files look alike but use the letter `B` for
another task, so which notation a file is in must be said. Whatever is wrong in a file is named by
file, line and cell.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright._text import write_text
from meshwright.errors import ScheduleError, near, short
from meshwright.schedules.types import KINDS, Schedule, Task, TaskKind
from meshwright.schedules.validation import check

NOTATIONS = ("meshwright", "torch")

# PyTorch writes B for the whole backward and I for the gradient of the input
# (torch.distributed.pipelining.schedules); plain letters, as tasks hold them.
_FROM_TORCH = {
    "F": TaskKind.FORWARD.value,
    "I": TaskKind.INPUT_GRADIENT.value,
    "W": TaskKind.WEIGHT_GRADIENT.value,
    "B": TaskKind.BACKWARD.value,
}
_TO_TORCH = {ours: theirs for theirs, ours in _FROM_TORCH.items()}
_TASK = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})")
_TORCH_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
# PyTorch's actions that are no tasks but transfers, gathers of parameters and reductions.
_TORCH_TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")

_KEYS = ("name", "microbatches", "group_of", "tasks", "overlapped")  # of a JSON file
_Rows = list[list[tuple[Task, ...]]]  # the cells of each group, each a task or two that overlap


def write_schedule(
    schedule: Schedule, path: str | os.PathLike[str], *, notation: str = "meshwright"
) -> None:
    """Check a schedule and write it to a `.csv` or `.json` file, all of it or nothing.

    A CSV file has a line per group and a cell per task: `2BW5` is stage 2, whole backward,
    microbatch 5, and `2F5+5BW1` are two that overlap. `notation="torch"` writes the letters of
    PyTorch's pipeline files instead: `I` for the gradient of the input, `B` for both. Raises
    `ScheduleError` if the schedule cannot run, and `OSError` if the file cannot be written.

    >>> import meshwright as mw, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "zb-h1.csv")
    ...     zb_h1 = mw.schedules.schedule("zb-h1", groups=2, microbatches=2)
    ...     mw.schedules.write_schedule(zb_h1, file)
    ...     print(file.read_text(), end="")
    0F0,0F1,0B0,0W0,0B1,0W1
    1F0,1B0,1F1,1B1,1W0,1W1
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"write_schedule takes a Schedule, not a {type(schedule).__name__}.")
    _check_notation(notation)
    kind = _format(path, notation)
    check(schedule)  # a broken one could not be read back
    if kind == "json":
        text = json.dumps(schedule.to_json(), indent=1) + "\n"
    else:
        text = _csv_text(schedule, notation)
    write_text(path, text)


def read_schedule(path: str | os.PathLike[str], *, notation: str = "meshwright") -> Schedule:
    """Read a schedule from a `.csv` or `.json` file, and check that it runs.

    A CSV file says by its cells which stage is in which group and how many microbatches there
    are; the schedule is named after the file. Empty cells mean nothing. PyTorch's pipeline files
    (`format="compute_only"`) use `B` for what is `BW` here, so they are read with
    `notation="torch"`, never by guessing.

    >>> import meshwright as mw, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "mine.csv")
    ...     _ = file.write_text("0F0,0F1,,0B0,0B1\\n,1F0,1B0,1F1,1B1\\n")
    ...     mine = mw.schedules.read_schedule(file, notation="torch")
    >>> mine, str(mine.tasks[1][1])
    (Schedule('mine', groups=2, stages=2, microbatches=2, tasks=8), '1BW0')
    """
    _check_notation(notation)
    kind, path = _format(path, notation), Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path}: not text in UTF-8 ({error}).") from error
    schedule = _from_json(text, path) if kind == "json" else _from_csv(text, path, notation)
    try:
        check(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    return schedule


def _format(path: str | os.PathLike[str], notation: str) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise ScheduleError(f"path: {short(path)} is not the path of a file.", option="path")
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in ("csv", "json"):
        raise ScheduleError(f"{path}: a schedule's file ends in .csv or .json.")
    if kind == "json" and notation != "meshwright":
        raise ScheduleError(
            f"{path}: PyTorch's notation is one of CSV files. Name it .csv.", option="notation"
        )
    return kind


def _csv_text(schedule: Schedule, notation: str) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row, pairs in zip(schedule.tasks, schedule.overlapped, strict=True):
        cells, at = [], 0
        while at < len(row):
            stop = at + 2 if at in pairs else at + 1
            cells.append(_write_cell(row[at:stop], notation))
            at = stop
        writer.writerow(cells)
    return out.getvalue()


def _read_cell(cell: str, where: str, notation: str = "meshwright") -> tuple[Task, ...]:
    """Read the task of a cell, or the two that overlap; none of an empty one.

    >>> _read_cell("2F5+5BW1", "a.csv")
    (Task(kind='F', stage=2, microbatch=5), Task(kind='BW', stage=5, microbatch=1))
    >>> _read_cell("(2F5;5B1)OVERLAP_F_B", "a.csv", "torch") == _read_cell("2F5+5BW1", "a.csv")
    True
    """
    cell = cell.strip()
    if not cell:
        return ()
    if notation == "torch":
        pair = _TORCH_PAIR.fullmatch(cell)
        parts: Sequence[str] = pair.groups() if pair else [cell]
    else:
        parts = cell.split("+")
    if len(parts) > 2:
        raise ScheduleError(f"{where}: {short(cell)} has {len(parts)} tasks; at most two overlap.")
    return tuple(_read_task(part.strip(), where, notation) for part in parts)


def _write_cell(tasks: Sequence[Task], notation: str = "meshwright") -> str:
    """Write one task, or two that overlap."""
    if notation == "meshwright":
        return "+".join(map(str, tasks))
    texts = [f"{task.stage}{_TO_TORCH[task.kind]}{task.microbatch}" for task in tasks]
    return texts[0] if len(texts) == 1 else f"({';'.join(texts)})OVERLAP_F_B"


def _check_notation(notation: str) -> None:
    if notation not in NOTATIONS:
        raise ScheduleError(
            f"notation {short(notation)} is not one of {list(NOTATIONS)}."
            f"{near(str(notation), NOTATIONS)}",
            option="notation",
        )


def _read_task(text: str, where: str, notation: str) -> Task:
    kinds = {kind: kind for kind in KINDS} if notation == "meshwright" else _FROM_TORCH
    match = _TASK.fullmatch(text)
    if match and match[2] in kinds and match[3]:
        return Task(kinds[match[2]], int(match[1]), int(match[3]))
    if match and match[2] in _TORCH_TRANSFERS:
        raise ScheduleError(
            f"{where}: {short(text)} is a transfer of PyTorch's. Here they follow from the tasks: "
            "write the file with format='compute_only' there."
        )
    hint = ""
    if notation == "meshwright" and ((match and match[2] == "I") or text.startswith("(")):
        hint = " PyTorch's letters are read with notation='torch'."
    raise ScheduleError(
        f"{where}: {short(text)} is no task. A task is stage, kind and microbatch, e.g. 2F5; "
        f"kinds are {', '.join(kinds)}.{hint}"
    )


def _from_csv(text: str, path: Path, notation: str) -> Schedule:
    """Read a line per group; the numbers of stages and microbatches follow from the tasks."""
    try:
        lines = list(csv.reader(io.StringIO(text.rstrip(), newline="")))
    except csv.Error as error:
        raise ScheduleError(f"{path}: not CSV ({error}).") from error
    rows: _Rows = [
        [
            unit
            for place, cell in enumerate(line, 1)
            if (unit := _read_cell(cell, f"{path}, line {number}, cell {place}", notation))
        ]
        for number, line in enumerate(lines, 1)
    ]
    if not any(rows):
        raise ScheduleError(f"{path}: no tasks. Write a line per group, e.g. 0F0,0F1,0BW0,0BW1.")
    tasks = tuple(tuple(task for unit in row for task in unit) for row in rows)
    microbatches = 1 + max(task.microbatch for row in tasks for task in row)
    name = path.stem or "schedule"
    return Schedule(name, microbatches, _group_of(tasks, path), tasks, _overlapped(rows))


def _group_of(tasks: tuple[tuple[Task, ...], ...], path: Path) -> tuple[int, ...]:
    """Return the group of every stage: the line that its tasks are in."""
    group_of: dict[int, int] = {}
    for group, row in enumerate(tasks):
        if not row:
            raise ScheduleError(f"{path}, line {group + 1}: no tasks. Every line is a group.")
        for task in row:
            if (first := group_of.setdefault(task.stage, group)) != group:
                raise ScheduleError(
                    f"{path}, line {group + 1}: {task} in group {group}, but stage {task.stage} "
                    f"is in group {first} (line {first + 1}). Keep a stage in one group."
                )
    for stage in range(len(group_of)):
        if stage not in group_of:
            raise ScheduleError(
                f"{path}: no task of stage {stage}, though stage {max(group_of)} is there. Stages "
                "count from 0."
            )
    return tuple(group_of[stage] for stage in range(len(group_of)))


def _overlapped(rows: _Rows) -> tuple[frozenset[int], ...]:
    pairs = []
    for row in rows:
        at, starts = 0, set()
        for unit in row:
            if len(unit) == 2:
                starts.add(at)
            at += len(unit)
        pairs.append(frozenset(starts))
    return tuple(pairs)


def _from_json(text: str, path: Path) -> Schedule:
    """Read what `Schedule.to_json` returns."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:  # lists nested too deep recurse
        raise ScheduleError(f"{path}: not JSON ({error}).") from error
    if not isinstance(data, dict):
        raise ScheduleError(f"{path}: a schedule is an object with {', '.join(_KEYS)}.")
    for key in data:
        if key not in _KEYS:
            raise ScheduleError(f"{path}: {short(key)} is not one of {_KEYS}.{near(key, _KEYS)}")
    for key in _KEYS[:-1]:  # `overlapped` may be left out
        if key not in data:
            raise ScheduleError(f"{path}: {key!r} is missing.")
    for key, depth in (("group_of", 1), ("tasks", 2), ("overlapped", 2)):
        if not _is_list(data.get(key, []), depth):
            raise ScheduleError(f"{path}: {key!r} is a list{' of lists' * (depth - 1)}.")
    if not all(type(at) is int for row in data.get("overlapped", []) for at in row):
        raise ScheduleError(f"{path}: 'overlapped' holds positions, integers from 0.")
    tasks = [
        [
            _read_one_task(cell, f"{path}, group {group}, position {at}")
            for at, cell in enumerate(row)
        ]
        for group, row in enumerate(data["tasks"])
    ]
    try:
        return Schedule(**{**data, "tasks": tasks})
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error


def _read_one_task(cell: Any, where: str) -> Task:
    unit = _read_cell(cell, where) if isinstance(cell, str) else ()
    if len(unit) != 1:
        raise ScheduleError(f"{where}: {short(cell)} is no task. Write e.g. '2F5'.")
    return unit[0]


def _is_list(value: Any, depth: int) -> bool:
    return isinstance(value, list) and (depth == 1 or all(_is_list(v, depth - 1) for v in value))
