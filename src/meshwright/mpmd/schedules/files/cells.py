"""Tasks as the cells of a table: `2F5`, a pair that overlaps `2F5+5BW1`; and PyTorch's letters."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.errors import ScheduleError, near, short
from meshwright.mpmd.schedules.tasks import KINDS, Task

NOTATIONS = ("meshwright", "torch")

# PyTorch writes B for the whole backward and I for the gradient of the input.
_OF_TORCH = {"F": "F", "I": "B", "W": "W", "B": "BW"}
_TO_TORCH = {ours: theirs for theirs, ours in _OF_TORCH.items()}
_TASK = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})")
_TORCH_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_TORCH_MOVES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")


def read_cell(cell: str, where: str, notation: str = "meshwright") -> tuple[Task, ...]:
    """The task of a cell, or the two that overlap; none of an empty one.

    >>> read_cell("2F5+5BW1", "a.csv")
    (Task(kind='F', stage=2, microbatch=5), Task(kind='BW', stage=5, microbatch=1))
    >>> read_cell("(2F5;5B1)OVERLAP_F_B", "a.csv", "torch") == read_cell("2F5+5BW1", "a.csv")
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


def write_cell(tasks: Sequence[Task], notation: str = "meshwright") -> str:
    """One task, or two that overlap."""
    if notation == "meshwright":
        return "+".join(map(str, tasks))
    texts = [f"{task.stage}{_TO_TORCH[task.kind]}{task.microbatch}" for task in tasks]
    return texts[0] if len(texts) == 1 else f"({';'.join(texts)})OVERLAP_F_B"


def check_notation(notation: str) -> None:
    if notation not in NOTATIONS:
        raise ScheduleError(
            f"notation {short(notation)} is not one of {list(NOTATIONS)}."
            f"{near(str(notation), NOTATIONS)}"
        )


def _read_task(text: str, where: str, notation: str) -> Task:
    kinds = {kind: kind for kind in KINDS} if notation == "meshwright" else _OF_TORCH
    found = _TASK.fullmatch(text)
    if found and found[2] in kinds and found[3]:
        return Task(kinds[found[2]], int(found[1]), int(found[3]))
    if found and found[2] in _TORCH_MOVES:
        raise ScheduleError(
            f"{where}: {short(text)} is a transfer of PyTorch's. They are worked out here: write "
            "the file with format='compute_only' there."
        )
    hint = ""
    if notation == "meshwright" and ((found and found[2] == "I") or text.startswith("(")):
        hint = " PyTorch's letters are read with notation='torch'."
    raise ScheduleError(
        f"{where}: {short(text)} is no task. A task is stage, kind and microbatch, e.g. 2F5; "
        f"kinds are {', '.join(kinds)}.{hint}"
    )
