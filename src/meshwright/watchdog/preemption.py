"""`Preemption`: once one process of a job is told to stop, all of them save before the same step.

A step is the same where no process has begun it and all have begun those before. So a process that
hears of the signal, its own or another's, begins no further step and publishes how many it has
begun; process 0 publishes the largest of these numbers, and the others go on up to there. The
numbers are published by another thread than the one that trains, which may be inside of a step that
waits for a process that goes on no more.

JAX's sync point does the same, but holds Python's lock while it waits for all processes. If one has
died, as when an engine stops the rest of a job, it waits for 100 s and no thread can say why.
"""

from __future__ import annotations

import os
import signal
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.watchdog.failure_detector import State
from meshwright.watchdog.os_process import SignalTrap, keep_action

_POLL_EVERY = 0.05  # seconds


class Preemption:
    """Where this process and the others stand with the step to save before.

    >>> alone = Preemption(process=0, count=1)
    >>> alone.reached(), alone.reached()
    (False, False)
    >>> signal.raise_signal(signal.SIGTERM)
    >>> alone.exchange({})  # has begun two steps, saves before the next
    (2, 2)
    >>> alone.reached()
    True
    >>> alone.close()
    """

    def __init__(self, process: int, count: int) -> None:
        self._process, self._count = process, count
        self._changed = threading.Condition()
        self._begun = 0  # steps
        self._halted = -1  # how many had begun when this process heard of it
        self._save_before = -1  # how many begin before all save
        self._signal = _Sigterm()

    def reached(self, on_wait: Callable[[], None] = lambda: None) -> bool:
        """Whether all processes save now; else the step begins. The training thread calls it.

        `on_wait` is called before the others are waited for.
        """
        with self._changed:
            self._hear({})
            if self._halted >= 0 > self._save_before:
                on_wait()
                # With a timeout: Python handles signals in between.
                while self._save_before < 0:
                    self._changed.wait(_POLL_EVERY)
            if self._begun == self._save_before:
                return True
            self._begun += 1
            return False

    def exchange(self, states: Mapping[int, State]) -> tuple[int, int]:
        """Return the two numbers to publish, given what all have published; -1 where not known."""
        with self._changed:
            self._hear(states)
            if self._process:
                self._save_before = states[0].save_before if 0 in states else -1
            elif self._halted >= 0 > self._save_before:
                begun = {process: state.halted for process, state in states.items()}
                begun[0] = self._halted
                if len(begun) == self._count and min(begun.values()) >= 0:
                    self._save_before = max(begun.values())
            self._changed.notify_all()
            return self._halted, self._save_before

    def _hear(self, states: Mapping[int, State]) -> None:
        told = self._signal.arrived or any(state.halted >= 0 for state in states.values())
        if told and self._halted < 0:
            self._halted = self._begun

    def close(self) -> None:
        """Leave SIGTERM to whom it was left before."""
        self._signal.restore()


class _Sigterm:
    """Notes SIGTERM, any number of times: engines may send it to a task twice.

    A handler that was set in Python is called too. Only the main thread may set one; elsewhere a
    trap notes the signal once, and the second ends the process.
    """

    def __init__(self) -> None:
        self._arrived, self._pid = False, os.getpid()
        self._trap: SignalTrap | None = None
        if threading.current_thread() is threading.main_thread():
            self._put_back = keep_action(signal.SIGTERM)
            self._before: Any = signal.signal(signal.SIGTERM, self._note)
        else:
            self._trap = SignalTrap(signal.SIGTERM, "abs")

    @property
    def arrived(self) -> bool:
        return self._arrived or (self._trap is not None and self._trap.triggered)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child ends as it would have
            self.restore()
            os.kill(os.getpid(), number)
            return
        self._arrived = True
        if callable(self._before):
            self._before(number, frame)

    def restore(self) -> None:
        if self._trap is not None:
            self._trap.restore()
        elif signal.getsignal(signal.SIGTERM) == self._note:
            self._put_back()
