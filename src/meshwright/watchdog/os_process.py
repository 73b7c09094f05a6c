"""Signals noticed from another thread, with no handler in Python and nothing left behind.

Python runs its handlers in the main thread only, which may be deep inside a computation. So a
harmless function of libc is the handler, for one time: once the signal has come, the system puts
the default back, and that can be seen from any thread.

SIGTERM gets `abs`, which does nothing. SIGABRT gets `sleep`, called with the signal's number: six
seconds of life for the other threads. Without them JAX's client, which aborts when process 0 is
lost, would end this process before it has said why.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_set: list[Trap] = []


class _Action(ctypes.Structure):
    """GNU's struct sigaction."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class Trap:
    """Notices one signal, once. Does nothing where the system's libc is not GNU's."""

    def __init__(self, number: signal.Signals, function: str) -> None:
        libc = ctypes.CDLL(None)
        self.number, self.set = number, hasattr(libc, "sysv_signal")
        if not self.set:
            return
        self._before = _action(number)
        libc.sysv_signal.restype = ctypes.c_void_p
        libc.sysv_signal(int(number), ctypes.cast(getattr(libc, function), ctypes.c_void_p))
        self._ours = _action(number)
        _set.append(self)

    @property
    def sprung(self) -> bool:
        """Whether the signal has come: no handler, but our flags, not those of a default."""
        if not self.set:
            return False
        now = _action(self.number)
        return now.handler is None and now.flags == self._ours.flags

    def restore(self) -> None:
        """Put back what was there before, unless somebody else has come since."""
        if self.set and (self.sprung or _action(self.number).handler == self._ours.handler):
            ctypes.CDLL(None).sigaction(int(self.number), ctypes.byref(self._before), None)
        with contextlib.suppress(ValueError):
            _set.remove(self)
        self.set = False


def unhandled(number: signal.Signals) -> bool:
    """Whether no Python code waits for this signal. What C code does about it is not looked at."""
    return signal.getsignal(number) in (signal.SIG_DFL, None)


def _action(number: signal.Signals) -> _Action:
    """The action for a signal as the system has it."""
    found = _Action()
    ctypes.CDLL(None).sigaction(int(number), None, ctypes.byref(found))
    return found


def _forget() -> None:
    """A forked child has no watch: signals do there what they did before."""
    for trap in list(_set):
        trap.restore()


os.register_at_fork(after_in_child=_forget)


# Whether a process of this machine lives, is stopped or is gone, as the system knows it.
#
# A process whose interpreter is busy for seconds is silent, but neither dead nor stopped. On one
# machine Linux tells these apart; from another machine only the silence is seen.


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
