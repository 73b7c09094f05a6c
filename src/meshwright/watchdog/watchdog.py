"""`Watchdog`: this process's place among the others, while they work together."""

from __future__ import annotations

import atexit
import collections
import math
import sys
import types

from meshwright import _compat
from meshwright._processes import Combine, combine_texts
from meshwright.errors import PipelineError, short
from meshwright.watchdog.failure_detector import State
from meshwright.watchdog.monitor import Guard

# How often a watch of this name began: the n-th of one process meets the n-th of the others.
_begun: collections.Counter[str] = collections.Counter()


class Watchdog:
    """Ends every process within 2 s when one of them dies, raises, is stopped or told to stop.

    Used with `with` around what the processes do together, in each of them; in a single process
    it does nothing. The main thread says what it is about by setting `doing`, `waiting` and
    `step`; that costs well under a microsecond. Setting `doing` ends a wait.

    All print one line on stderr that names the process at fault, its task, and what the others
    waited for, and leave without Python's or JAX's exit, which would wait for minutes: with
    status 82, the process at fault with 81 (143 after SIGTERM, 130 after Ctrl-C, 134 after an
    abort). A process that raised shows its error first.

    `limit`: seconds without any progress, of any process, after which a task or a wait counts as
    a hang. It may be set anew at any time, to `math.inf` too; the largest that a process has set
    is used. Where `doing` and `waiting` are empty, no time is too long.
    `silence`: seconds without a sign of life after which a process of another machine is given
    up. Let it be longer than a process may block its interpreter; on one machine that is told
    apart. `sigterm=False` leaves SIGTERM to JAX's preemption service; a handler set in Python is
    left alone anyway. The end of the `with`, and that of Python, waits until all have come there.

    >>> with Watchdog(limit=30) as watch:
    ...     watch.step = 17
    ...     watch.waiting = "1F5 of process 0"
    ...     watch.doing = "2F5"
    >>> watch
    <Watchdog 'run': idle (step 17), closed>
    """

    def __init__(
        self,
        limit: float = 60.0,
        *,
        name: str = "run",
        silence: float = 1.0,
        sigterm: bool = True,
    ) -> None:
        for what, seconds in (("limit", limit), ("silence", silence)):
            if not isinstance(seconds, (int, float)) or math.isnan(seconds) or seconds <= 0:
                raise PipelineError(f"Watchdog: {what} {short(seconds)}: use a number of seconds.")
        if not isinstance(name, str) or not name or "/" in name:
            raise PipelineError(f"Watchdog: name {short(name)}: use a word without '/'.")
        self.limit, self.name, self.silence, self.sigterm = limit, name, silence, sigterm
        self.closed = False
        self._doing = self._waiting = ""
        self._at: tuple[int | None, str] = (None, "")  # told together: step and plan
        self._moves = 0
        self._guard: Guard | None = None

    @property
    def doing(self) -> str:
        """The task that the main thread is in, or nothing."""
        return self._doing

    @doing.setter
    def doing(self, task: str) -> None:
        self._doing, self._waiting = task, ""
        self._moves += 1

    @property
    def waiting(self) -> str:
        """What the main thread waits for, best with the process it comes from, or nothing."""
        return self._waiting

    @waiting.setter
    def waiting(self, task: str) -> None:
        self._waiting = task
        self._moves += 1

    @property
    def step(self) -> int | None:
        """The number of the step, for the line."""
        return self._at[0]

    @step.setter
    def step(self, number: int | None) -> None:
        self.enter(number)

    def enter(self, step: int | None, plan: str = "") -> None:
        """Begin a step. Steps that have a plan need every process, with the same plan: one that
        comes with another, or has left, is at fault at once."""
        self._at = (step, plan)
        self._moves += 1

    def confer(self, about: str, text: str, combine: Combine) -> str:
        """What process 0 makes of the texts of all processes, each of which must call this."""
        if self._guard is None:
            return combine([text])

        def waits(other: int) -> None:
            self.waiting = f"{about} of process {other}"

        # No timeout: if a process does not come, this watch ends the others.
        answer = combine_texts(f"conferring/{self._guard.room}", text, combine, on_wait=waits)
        self.waiting = ""
        return str(answer)

    def start(self) -> Watchdog:
        """Begin; once. The others may do so later."""
        if self.closed or self._guard is not None:
            raise PipelineError("this Watchdog was started before. Make another.")
        process, count = _compat.coordination_place()
        client = _compat.coordination_client()
        if client is not None and count > 1:
            turn, _begun[self.name] = _begun[self.name], _begun[self.name] + 1
            self._guard = Guard(
                client,
                f"{self.name}/{turn}",
                process,
                count,
                tell=lambda: self._state(process),
                silence=self.silence,
                sigterm=self.sigterm,
            )
            atexit.register(self._leave)
        return self

    def close(self) -> None:
        """Wait until all others are done too, then stop watching."""
        guard, self._guard = self._guard, None
        self.closed, self.doing = True, ""
        if guard is not None:
            atexit.unregister(self._leave)
            guard.close()

    def _leave(self) -> None:
        """At the end of Python, where nobody has closed the watch."""
        error = getattr(sys, "last_value", None)  # which Python has shown
        if error is not None and self._guard is not None:
            self._guard.fail(error, shown=True)
        self.close()

    def __enter__(self) -> Watchdog:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        orderly = isinstance(error, SystemExit) and not error.code
        if error is not None and not orderly and self._guard is not None:
            self._guard.fail(error)
        self.close()

    def _state(self, process: int) -> State:
        at = self._at
        return State(
            process,
            moves=self._moves,
            doing=str(self._doing),
            waiting=str(self._waiting),
            step=at[0],
            plan=at[1],
            limit=self.limit,
        )

    def __repr__(self) -> str:
        where = self._waiting and f"waiting for {self._waiting}"
        about = ", ".join(part for part in (self._doing, where) if part) or "idle"
        step = "" if self.step is None else f" (step {self.step})"
        return f"<Watchdog {self.name!r}: {about}{step}{', closed' if self.closed else ''}>"
