"""Whether a process of this machine lives, is stopped or is gone, as the system knows it.

A process whose interpreter is busy for seconds is silent, but neither dead nor stopped. On one
machine Linux tells these apart; from another machine only the silence is seen.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

ALIVE, STOPPED, DEAD, UNKNOWN = "alive", "stopped", "dead", "unknown"
_PROC = Path("/proc")
_STATE, _FLAGS, _STARTED = 0, 6, 19  # of /proc/*/stat, counted after the name
_EXITING = 0x4 | 0x200  # exiting, dumping core


def place() -> str:
    """This process's place in the world: machine, namespace, number, start; or nothing."""
    try:
        machine = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").readlink()
        me = os.getpid()
        return f"{machine} {namespace} {me} {_stat(me)[_STARTED]} {_aborts_caught(me):d}"
    except (OSError, IndexError):
        return ""


def condition(there: str) -> str:
    """How the process at a place is; unknown from another machine, or without /proc."""
    here, parts = place().split(), there.split()
    if len(here) != 5 or len(parts) != 5 or parts[:2] != here[:2]:
        return UNKNOWN
    try:
        stat, caught = _stat(int(parts[2])), _aborts_caught(int(parts[2]))
    except (FileNotFoundError, ProcessLookupError):
        return DEAD
    except OSError:
        return UNKNOWN
    if stat[_STARTED] != parts[3] or stat[_STATE] in "ZX" or int(stat[_FLAGS]) & _EXITING:
        return DEAD
    if stat[_STATE] == "T":
        return STOPPED
    # The trap for SIGABRT has sprung: it aborts, and holds the interpreter meanwhile.
    return DEAD if parts[4] == "1" and not caught else ALIVE


def wake(there: str) -> None:
    """Let a stopped process of this machine go on, so that it hears that all end."""
    if condition(there) == STOPPED:
        with contextlib.suppress(OSError):
            os.kill(int(there.split()[2]), signal.SIGCONT)


def _stat(process: int) -> list[str]:
    text = (_PROC / str(process) / "stat").read_text()
    return text[text.rindex(")") + 1 :].split()


def _aborts_caught(process: int) -> bool:
    text = (_PROC / str(process) / "status").read_text()
    return bool(int(text.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGABRT - 1) & 1)
