"""Schedules in files: CSV, a line per group, and JSON."""

from __future__ import annotations

import csv
import io
import json
import os
import secrets
from pathlib import Path
from typing import Any

from meshwright.errors import ScheduleError
from meshwright.mpmd.schedules.files.cells import check_notation, write_cell
from meshwright.mpmd.schedules.files.reading import from_csv, from_json
from meshwright.mpmd.schedules.proving import check
from meshwright.mpmd.schedules.schedule import Schedule


def write_schedule(
    schedule: Schedule, path: str | os.PathLike[str], *, notation: str = "meshwright"
) -> None:
    """`check` a schedule and write it to a `.csv` or `.json` file, all of it or nothing.

    A CSV file has a line per group and a cell per task: `2BW5` is stage 2, whole backward,
    microbatch 5, and `2F5+5BW1` are two that overlap. `notation="torch"` writes the letters of
    PyTorch's pipeline files instead: `I` for the gradient of the input, `B` for both.

    >>> import meshwright as mw, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "zb-h1.csv")
    ...     mw.write_schedule(mw.schedule("zb-h1", groups=2, microbatches=2), file)
    ...     print(file.read_text(), end="")
    0F0,0F1,0B0,0W0,0B1,0W1
    1F0,1B0,1F1,1B1,1W0,1W1
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"write_schedule takes a Schedule, not a {type(schedule).__name__}.")
    check_notation(notation)
    kind = _format(path, notation)
    check(schedule)  # a broken one could not be read back
    if kind == "json":
        text = json.dumps(as_json(schedule), indent=1) + "\n"
    else:
        text = _csv_text(schedule, notation)
    write_text(path, text)


def read_schedule(path: str | os.PathLike[str], *, notation: str = "meshwright") -> Schedule:
    """Read a schedule from a `.csv` or `.json` file, and `check` it.

    A CSV file says by its cells which stage is in which group and how many microbatches there
    are; the schedule is named after the file. Empty cells mean nothing. PyTorch's pipeline files
    (`format="compute_only"`) use `B` for what is `BW` here, so they are read with
    `notation="torch"`, never by guessing.

    >>> import meshwright as mw, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "mine.csv")
    ...     _ = file.write_text("0F0,0F1,,0B0,0B1\\n,1F0,1B0,1F1,1B1\\n")
    ...     mine = mw.read_schedule(file, notation="torch")
    >>> mine, str(mine.tasks[1][1])
    (Schedule('mine', groups=2, stages=2, microbatches=2, tasks=8), '1BW0')
    """
    check_notation(notation)
    kind, path = _format(path, notation), Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path}: not text in UTF-8 ({error}).") from error
    found = from_json(text, path) if kind == "json" else from_csv(text, path, notation)
    try:
        check(found)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    return found


def as_json(schedule: Schedule) -> dict[str, Any]:
    """Plain data. `overlapped` holds, per group, positions of tasks that run with the next one."""
    return {
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "group_of": list(schedule.group_of),
        "tasks": [[str(task) for task in row] for row in schedule.tasks],
        "overlapped": [sorted(pairs) for pairs in schedule.overlapped],
    }


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """All of a file or nothing: written beside it, then renamed over it."""
    target = Path(path).resolve()
    if target.exists() and not target.is_file():  # a device or a pipe is written, never replaced
        target.write_text(text, encoding="utf-8")
        return
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _format(path: str | os.PathLike[str], notation: str) -> str:
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in ("csv", "json"):
        raise ScheduleError(f"{path}: a schedule's file ends in .csv or .json.")
    if kind == "json" and notation != "meshwright":
        raise ScheduleError(f"{path}: PyTorch's notation is one of CSV files. Name it .csv.")
    return kind


def _csv_text(schedule: Schedule, notation: str) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row, pairs in zip(schedule.tasks, schedule.overlapped, strict=True):
        cells, at = [], 0
        while at < len(row):
            stop = at + 2 if at in pairs else at + 1
            cells.append(write_cell(row[at:stop], notation))
            at = stop
        writer.writerow(cells)
    return out.getvalue()
