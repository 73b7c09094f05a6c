"""Ask the operating system whether a process lives, is stopped or is dead (`status`) and whether a
signal has arrived here (`SignalTrap`); and exit this process at once (`exit_now`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

# A process whose interpreter is blocked for seconds publishes nothing, but is neither dead nor
# stopped. Linux tells these apart for processes of the same machine; of a process on another
# machine only the missing heartbeat is known.
ALIVE, STOPPED, DEAD, UNKNOWN = "alive", "stopped", "dead", "unknown"

_PROC = Path("/proc")
# Fields of /proc/<pid>/stat (see proc(5)), counted after the name in brackets.
_STATE, _FLAGS, _STARTED = 0, 6, 19
# PF_EXITING and PF_DUMPCORE of the kernel's include/linux/sched.h: a large process may spend
# seconds in either before it becomes a zombie.
_EXITING = 0x4 | 0x200


def identity() -> str:
    """Return what identifies this process: machine, PID namespace, PID, start time, SIGABRT trap.

    Without /proc it is empty. The boot id and the namespace say whether another process may look
    its PID up; the start time tells it from a later process with the same PID; the last field is
    1 if a handler for SIGABRT was set when this was called.
    """
    try:
        machine = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").readlink()
        pid = os.getpid()
        return f"{machine} {namespace} {pid} {_stat(pid)[_STARTED]} {_catches_sigabrt(pid):d}"
    except (OSError, IndexError):
        return ""


def status(of: str) -> str:
    """Return how the process with an identity is: `ALIVE`, `STOPPED` or `DEAD`.

    It is `UNKNOWN` from another machine or PID namespace, or without /proc.
    """
    own, fields = identity().split(), of.split()
    if len(own) != 5 or len(fields) != 5 or fields[:2] != own[:2]:
        return UNKNOWN
    pid = int(fields[2])
    try:
        stat, catches_sigabrt = _stat(pid), _catches_sigabrt(pid)
    except (FileNotFoundError, ProcessLookupError):
        return DEAD
    except OSError:
        return UNKNOWN
    if stat[_STARTED] != fields[3] or stat[_STATE] in "ZX" or int(stat[_FLAGS]) & _EXITING:
        return DEAD
    if stat[_STATE] == "T":
        return STOPPED
    # Its trap for SIGABRT was triggered: it sleeps in the handler, perhaps with the interpreter
    # locked so that it cannot say so itself, and then aborts.
    return DEAD if fields[4] == "1" and not catches_sigabrt else ALIVE


def resume(of: str) -> None:
    """Send SIGCONT to a stopped process of this machine, so that it learns that all end."""
    if status(of) == STOPPED:
        with contextlib.suppress(OSError):
            os.kill(int(of.split()[2]), signal.SIGCONT)


def _stat(pid: int) -> list[str]:
    text = (_PROC / str(pid) / "stat").read_text()
    # The name may itself hold spaces and brackets.
    return text[text.rindex(")") + 1 :].split()


def _catches_sigabrt(pid: int) -> bool:
    text = (_PROC / str(pid) / "status").read_text()
    return bool(int(text.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGABRT - 1) & 1)


# Python runs its signal handlers in the main thread only, which may be deep inside a computation.
# So a harmless function of libc becomes the handler, for one time (`sysv_signal` sets
# SA_RESETHAND): once the signal has arrived, the kernel puts the default back, and any thread can
# see that with `sigaction`.
#
# SIGTERM gets `abs`, which does nothing. SIGABRT gets `sleep`, called with the signal's number as
# its argument: six seconds of life for the other threads. Without them JAX's client, which aborts
# when process 0 is lost, would end this process before it has said why.

_active: list[SignalTrap] = []


class SignalTrap:
    """Notices that one signal arrived, once. Does nothing where libc is not GNU's.

    `function` names the function of libc that handles it: `int -> anything`, safe in a handler.
    """

    def __init__(self, number: signal.Signals, function: str) -> None:
        libc = ctypes.CDLL(None)
        self.number, self.set = number, hasattr(libc, "sysv_signal")
        if not self.set:
            return
        self._before = _get_action(number)
        libc.sysv_signal.restype = ctypes.c_void_p
        libc.sysv_signal(int(number), ctypes.cast(getattr(libc, function), ctypes.c_void_p))
        self._ours = _get_action(number)
        _active.append(self)

    @property
    def triggered(self) -> bool:
        """Whether the signal has arrived."""
        if not self.set:
            return False
        # The kernel resets the handler but not the flags, which tells this from SIG_DFL set by
        # other code.
        now = _get_action(self.number)
        return now.handler is None and now.flags == self._ours.flags

    def restore(self) -> None:
        """Put back the earlier action, unless other code has set another one since."""
        if self.set and (self.triggered or _get_action(self.number).handler == self._ours.handler):
            ctypes.CDLL(None).sigaction(int(self.number), ctypes.byref(self._before), None)
        with contextlib.suppress(ValueError):
            _active.remove(self)
        self.set = False


def unhandled(number: signal.Signals) -> bool:
    """Whether no Python code handles this signal. Handlers set by C code are not seen."""
    return signal.getsignal(number) in (signal.SIG_DFL, None)


class _Action(ctypes.Structure):
    """GNU's struct sigaction."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _get_action(number: signal.Signals) -> _Action:
    """Return the action for a signal as libc has it, whoever set it."""
    action = _Action()
    ctypes.CDLL(None).sigaction(int(number), None, ctypes.byref(action))
    return action


def _restore_after_fork() -> None:
    # A forked child has no monitor thread: a trap there would swallow its first SIGTERM.
    for trap in list(_active):
        trap.restore()


os.register_at_fork(after_in_child=_restore_after_fork)


# The exit of a process that cannot go on. JAX's own exit waits up to 300 s for the other processes,
# so these do not pass through it, nor through Python's `atexit`.

_FLUSH_TIMEOUT = 1.0


def exit_after(seconds: float, status: int) -> None:
    """Exit the process after a time, whatever its other threads wait for then."""

    def wait_and_exit() -> None:
        time.sleep(seconds)
        os._exit(status)

    threading.Thread(target=wait_and_exit, name="meshwright end", daemon=True).start()


def exit_now(status: int) -> None:
    """Flush what was printed and exit."""
    exit_after(_FLUSH_TIMEOUT, status)  # a full pipe that nobody reads blocks the flush
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
