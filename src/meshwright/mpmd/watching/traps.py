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
