"""Options that every rehearsal takes, checked."""

from __future__ import annotations

from pathlib import Path

from meshwright.errors import RehearsalError, short
from meshwright.rehearsal.compiler.store import default_folder


def check_deadline(deadline: float) -> float:
    if not isinstance(deadline, (int, float)) or isinstance(deadline, bool) or not deadline > 0:
        raise RehearsalError(f"deadline: {short(deadline)} is not a number of seconds above 0.")
    return float(deadline)


def choose_folder(cache: bool | str | Path) -> Path | None:
    """The folder that answers are kept in, or `None` for none."""
    if not isinstance(cache, (bool, str, Path)):
        raise RehearsalError(f"cache: {short(cache)} is not a folder, True or False.")
    if isinstance(cache, bool):
        return default_folder() if cache else None
    return Path(cache).expanduser()
