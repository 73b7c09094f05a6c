"""`Watchdog`: end all processes of a job, with one line that says why, as soon as one fails."""

from __future__ import annotations

import atexit
import collections
import sys
import types

from meshwright import _compat
from meshwright._checks import check_flag, check_seconds
from meshwright._processes import Combine, combine_texts
from meshwright._show import short_repr
from meshwright.errors import PipelineError, short
from meshwright.watchdog.failure_detector import State
from meshwright.watchdog.monitor import Monitor

# How many watchdogs of a name were started: the n-th of one process meets the n-th of the others.
_started: collections.Counter[str] = collections.Counter()


class Watchdog:
    """Ends every process within 2 s when one of them dies, raises, is stopped or told to stop.

    Enter it with `with` around what the processes do together, in each of them; in a single
    process it does nothing. The main thread says what it is doing by setting `doing`, `waiting`
    and `step`, which costs well under a microsecond. Setting `doing` ends a wait.

    All print one line on stderr that names the process at fault, its task, and what the others
    waited for, and exit without Python's or JAX's own exit, which would wait for minutes: with
    status 82, the process at fault with 81 (143 after SIGTERM, 130 after Ctrl-C, 134 after an
    abort). A process that raised shows its error first.

    Args:
      timeout: seconds without progress of any process after which a task or a wait counts as a
        hang. It may be set anew at any time, also to `math.inf`; the largest that any process has
        set is used. While `doing` and `waiting` are empty there is no timeout.
      name: tells watchdogs apart that are open at the same time; the same in all processes.
      heartbeat_timeout: seconds without a heartbeat after which a process of another machine is
        given up. Make it longer than a process may block its interpreter; on the same machine a
        blocked process is told from a dead one.
      sigterm: `False` leaves SIGTERM to JAX's preemption service. A handler that was set in Python
        is left alone in any case.

    The end of the `with`, and that of Python, waits until all processes have come there. Raises
    `PipelineError` for an option that makes no sense, and when it is started twice.

    >>> with Watchdog(timeout=30) as watch:
    ...     watch.step = 17
    ...     watch.waiting = "1F5 of process 0"
    ...     watch.doing = "2F5"
    >>> watch
    <Watchdog 'run': idle (step 17), closed>
    """

    def __init__(
        self,
        timeout: float = 60.0,
        *,
        name: str = "run",
        heartbeat_timeout: float = 1.0,
        sigterm: bool = True,
    ) -> None:
        self.timeout = timeout
        self.heartbeat_timeout = check_seconds(
            "Watchdog: heartbeat_timeout", heartbeat_timeout, error=PipelineError
        )
        # The name becomes part of the keys in the store, whose parts end at a slash.
        if not isinstance(name, str) or not name or "/" in name:
            raise PipelineError(
                f"Watchdog: name {short(name)}: use a word without '/'.", option="name"
            )
        self.name = name
        self.sigterm = check_flag("Watchdog: sigterm", sigterm, error=PipelineError)
        self.closed = False
        self._doing = self._waiting = ""
        # One tuple, so that the monitor's thread never reads a step with the plan of another.
        self._step_and_plan: tuple[int | None, str] = (None, "")
        self._progress = 0
        self._monitor: Monitor | None = None

    @property
    def timeout(self) -> float:
        """Seconds without progress after which a task or a wait counts as a hang."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        # Checked here too: a value that cannot be compared would end the monitor's thread.
        self._timeout = check_seconds("Watchdog: timeout", seconds, error=PipelineError)

    @property
    def doing(self) -> str:
        """The task that the main thread is in, or an empty string."""
        return self._doing

    @doing.setter
    def doing(self, task: str) -> None:
        self._doing, self._waiting = task, ""
        self._progress += 1

    @property
    def waiting(self) -> str:
        """What the main thread waits for, best with the process it comes from, or empty."""
        return self._waiting

    @waiting.setter
    def waiting(self, task: str) -> None:
        self._waiting = task
        self._progress += 1

    @property
    def step(self) -> int | None:
        """The number of the step, which the line names."""
        return self._step_and_plan[0]

    @step.setter
    def step(self, number: int | None) -> None:
        self.enter(number)

    def enter(self, step: int | None, plan: str = "") -> None:
        """Begin a step.

        A step that has a plan needs every process, with the same plan: a process that comes with
        another one, or has left, is at fault at once.
        """
        self._step_and_plan = (step, plan)
        self._progress += 1

    def confer(self, about: str, text: str, combine: Combine) -> str:
        """Return what `combine` makes, in process 0, of the texts of all processes.

        Every process must call it, in the same order. `about` says what is waited for.
        """
        if self._monitor is None:
            return combine([text])

        def on_wait(other: int) -> None:
            self.waiting = f"{about} of process {other}"

        # No timeout here: if a process does not come, this watchdog ends the others.
        answer = combine_texts(f"conferring/{self._monitor.name}", text, combine, on_wait=on_wait)
        self.waiting = ""
        return str(answer)

    def start(self) -> Watchdog:
        """Start watching; only once. The other processes may start later. Returns itself."""
        if self.closed or self._monitor is not None:
            raise PipelineError("this Watchdog was started before. Make another.")
        process, count = _compat.coordination_place()
        client = _compat.coordination_client()
        if client is not None and count > 1:
            turn, _started[self.name] = _started[self.name], _started[self.name] + 1
            self._monitor = Monitor(
                client,
                f"{self.name}/{turn}",
                process,
                count,
                get_state=lambda: self._state(process),
                heartbeat_timeout=self.heartbeat_timeout,
                sigterm=self.sigterm,
            )
            atexit.register(self._at_exit)
        return self

    def close(self) -> None:
        """Wait until all other processes are done too, then stop watching."""
        monitor, self._monitor = self._monitor, None
        self.closed, self.doing = True, ""
        if monitor is not None:
            atexit.unregister(self._at_exit)
            monitor.close()

    def _at_exit(self) -> None:
        # Python exits and this watchdog is still open. If an exception ended it, that was shown
        # already and is in sys.last_value.
        error = getattr(sys, "last_value", None)
        if error is not None and self._monitor is not None:
            self._monitor.fail(error, shown=True)
        self.close()

    def __enter__(self) -> Watchdog:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        orderly = isinstance(error, SystemExit) and not error.code  # sys.exit(0)
        if error is not None and not orderly and self._monitor is not None:
            self._monitor.fail(error)
        self.close()

    def _state(self, process: int) -> State:
        step, plan = self._step_and_plan
        return State(
            process,
            progress=self._progress,
            doing=str(self._doing),
            waiting=str(self._waiting),
            step=step,
            plan=plan,
            timeout=self.timeout,
        )

    def __repr__(self) -> str:
        waiting = self._waiting and f"waiting for {self._waiting}"
        doing = ", ".join(part for part in (self._doing, waiting) if part) or "idle"
        step = "" if self.step is None else f" (step {self.step})"
        return short_repr(self, f"{self.name!r}: {doing}{step}{', closed' if self.closed else ''}")
