"""`Watchdog`: end all processes of a job, with one line that says why, as soon as one fails."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import hashlib
import math
import numbers
import sys
import threading
import time
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar

import jax

from meshwright import _compat
from meshwright._checks import check_flag, check_seconds
from meshwright._processes import Combine, LocalStore, combine_texts
from meshwright._show import short_repr
from meshwright.errors import PipelineError, listing, short
from meshwright.watchdog.failure_detector import State
from meshwright.watchdog.monitor import Monitor
from meshwright.watchdog.os_process import (
    ExitStatus,
    Standing,
    context_switches,
    standing,
)
from meshwright.watchdog.preemption import Preemption

P = ParamSpec("P")
R = TypeVar("R")

# How many watchdogs of a name were started: the n-th of one process meets the n-th of the others.
_started: collections.Counter[str] = collections.Counter()
# Seconds without progress after which a process says where it stands.
_STILL = 1.0
_END_TIMEOUT = 10.0
_MOST_KINDS = 4  # arguments that a plan names


class Watchdog:
    """Ends every process within 2 s when one of them dies, raises, is stopped or told to stop, and
    when none goes on for `timeout` seconds.

    Enter it with `with` around a loop, in each process; `step = watch.wrap(step)`, or `watch.step =
    i` in each round, is all that the loop needs. A process alone is watched for hangs only.

    All print one line on stderr that names the process at fault, its task or step and since when,
    and where it hangs, its Python stack; then they exit without Python's or JAX's own exit, which
    would wait for minutes. The exit status is 81, that of the process at fault is greater: 82 for
    a machine's fault, a hang too, 83 for one of the program (143 after SIGTERM, 130 after Ctrl-C,
    134 after an abort). A process that raised shows its error first.

    Args:
      timeout: seconds without progress of any process after which a step, a task or a wait counts
        as a hang. It may be set anew at any time, also to `math.inf`; the largest that any process
        has set is used. XLA's compiler does not count, nor what all do outside of the step.
      name: tells watchdogs apart that are open at the same time; the same in all processes.
      heartbeat_timeout: seconds without a heartbeat after which a process of another machine is
        given up. Make it longer than a process may block its interpreter; on the same machine a
        blocked process is told from a dead one.
      sigterm: `False` leaves SIGTERM to JAX's preemption service. A handler that was set in Python
        is left alone in any case.
      on_preemption: `"exit"` ends all processes when one gets SIGTERM; `"save"` has all of them
        call `save` before the same step, and leave with status 75. All must count the same steps.
      save: called without arguments for `"save"`; `watch.step` is the step that comes next.
      check_steps: `True` compares the shapes of the wrapped step's arguments, and its program,
        between all processes before it runs with new ones.

    The end of the `with`, and that of Python, waits until all processes have come there. Raises
    `PipelineError` for an option that makes no sense, and when it is started twice.

    >>> with Watchdog(timeout=30) as watch:
    ...     step = watch.wrap(lambda x: x + 1)
    ...     for i in range(18):
    ...         watch.step = i
    ...         result = step(i)
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
        on_preemption: Literal["exit", "save"] = "exit",
        save: Callable[[], object] | None = None,
        check_steps: bool = False,
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
        self.check_steps = check_flag("Watchdog: check_steps", check_steps, error=PipelineError)
        self._save = _check_save(on_preemption, save)
        self.closed = False
        self._doing = self._waiting = ""
        # One tuple, so that the monitor's thread never reads a step with the plan of another.
        self._step_and_plan: tuple[int | None, str] = (None, "")
        self._progress = 0
        self._by_stacks = True  # until something is said
        # Of a loop whose steps are counted.
        self._in_loop = self._numbered = False
        self._inside = self._wrapped = ""
        self._calls = self._rounds = 0
        self._reached = -1
        self._since = time.time()
        self._thread = threading.main_thread().ident or 0
        # What the monitor's thread saw last.
        self._seen: tuple[int, float] = (-1, 0.0)  # the progress, and since when
        self._stack = ""
        self._sleeps = ""
        self._preemption: Preemption | None = None
        self._saved = False
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
        self._doing, self._waiting, self._by_stacks = task, "", False
        self._progress += 1
        self._since = time.time()

    @property
    def waiting(self) -> str:
        """What the main thread waits for, best with the process it comes from, or empty."""
        return self._waiting

    @waiting.setter
    def waiting(self, task: str) -> None:
        self._waiting, self._by_stacks = task, False
        self._progress += 1
        self._since = time.time()

    @property
    def step(self) -> int | None:
        """The number of the step, which the line names; `None` outside of the loop.

        With `on_preemption="save"` setting it may save and raise `SystemExit`.
        """
        return self._step_and_plan[0]

    @step.setter
    def step(self, number: int | None) -> None:
        if type(number) is not int and number is not None:  # the usual case is quick
            if isinstance(number, bool) or not isinstance(number, numbers.Integral):
                # An array would have to be waited for, and the monitor compares numbers.
                raise PipelineError(
                    f"Watchdog: step {short(number)} is a {type(number).__name__}. Use an integer, "
                    "e.g. the loop's counter, or None outside of the loop.",
                    option="step",
                )
            number = int(number)
        self._numbered = self._in_loop = True
        self._begin_step(number)

    def wrap(self, step: Callable[P, R]) -> Callable[P, R]:
        """Return a function that calls `step` and tells the watchdog when it begins and ends.

        Its calls are counted as steps, unless `watch.step` is set. Wrap what all processes call
        together, e.g. the jitted function: who has not come there is at fault when the others wait
        in it. Calls inside of a call are part of it.

        >>> watch = Watchdog()
        >>> double = watch.wrap(lambda x: 2 * x)
        >>> double(4), double(5), watch.step
        (8, 10, 1)
        """
        if not callable(step):
            raise PipelineError(f"Watchdog.wrap: {short(step)} is not a function.", option="step")
        name = getattr(step, "__name__", type(step).__name__)
        check = StepCheck(self, name, step) if self.check_steps else None

        @functools.wraps(step)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._inside:
                return step(*args, **kwargs)
            self._enter_call(name)
            try:
                if check is not None:
                    check.begin(args, kwargs)
                return step(*args, **kwargs)
            finally:
                self._inside = ""
                self._calls += 1
                self._progress += 1
                self._since = time.time()

        return call

    def _enter_call(self, name: str) -> None:
        self._wrapped, self._in_loop = name, True
        if not self._numbered:
            self._begin_step(self._rounds)
            self._rounds += 1
        self._inside = name
        self._calls += 1
        self._progress += 1
        self._since = time.time()
        self._thread = threading.get_ident()

    def _begin_step(self, number: int | None) -> None:
        self._calls = 0
        self.enter(number)
        self._thread = threading.get_ident()
        if self._preemption is not None and number is not None:
            if self._preemption.reached(on_wait=self._wait_for_halt):
                self._save_and_leave()
            self._waiting = ""

    def _wait_for_halt(self) -> None:
        self.waiting = "all to say which step they are at"

    def _save_and_leave(self) -> None:
        self.timeout, self.doing = math.inf, "save"
        if self._save is not None:
            self._save()
        self.doing, self._saved = "", True
        sys.stderr.write(
            "meshwright: all processes were told to stop (SIGTERM) and have saved before step "
            f"{self.step}. Run the job again.\n"
        )
        raise SystemExit(int(ExitStatus.SAVED))

    def enter(self, step: int | None, plan: str = "") -> None:
        """Begin a step.

        A step that has a plan needs every process, with the same plan: a process that comes with
        another one, or has left, is at fault at once.
        """
        self._step_and_plan, self._by_stacks = (step, plan), False
        self._reached = self._reached if step is None else step
        self._progress += 1
        self._since = time.time()

    def _agree(self, plan: str, *, wait: bool) -> None:
        """Say which plan the step runs; with `wait`, return once all processes have said the same.

        If they differ, the watchdog ends all of them: plans of one step are compared.
        """
        self._step_and_plan = (self.step, plan)
        if wait and self.confer("the shapes", plan, lambda texts: "".join({*texts} - {plan})):
            self.waiting = "the end"
            time.sleep(_END_TIMEOUT)
            raise PipelineError(f"the processes do not run the same step: here {plan}.")

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
        if client is None or count == 1:
            client, process, count = LocalStore(), 0, 1
        if self._save is not None:
            self._preemption = Preemption(process, count)
        turn, _started[self.name] = _started[self.name], _started[self.name] + 1
        self._monitor = Monitor(
            client,
            f"{self.name}/{turn}",
            process,
            count,
            get_state=lambda: self._state(process),
            heartbeat_timeout=self.heartbeat_timeout,
            sigterm=self.sigterm and self._save is None,
            preemption=self._preemption,
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
        if self._preemption is not None:
            self._preemption.close()

    def _at_exit(self) -> None:
        # Python exits and this watchdog is still open. If an exception ended it, that was shown
        # already and is in sys.last_value.
        error = getattr(sys, "last_value", None)
        if error is not None and self._monitor is not None and self._monitor.count > 1:
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
        orderly = isinstance(error, SystemExit) and (self._saved or not error.code)  # sys.exit(0)
        if error is not None and not orderly and self._monitor is not None:
            if self._monitor.count > 1:  # a process alone raises as usual
                self._monitor.fail(error)
        self.close()

    def _state(self, process: int) -> State:
        place, moving = self._stand()
        step, plan = self._step_and_plan
        return State(
            process,
            progress=self._progress,
            doing=str(self._doing or self._inside),
            waiting=str(self._waiting),
            step=step,
            plan=plan,
            timeout=self.timeout,
            by_stacks=self._by_stacks,
            in_loop=self._in_loop,
            calls=self._calls,
            outside="" if self._inside else self._wrapped,
            reached=self._reached,
            since=self._since,
            stack=place.stack,
            stands=place.stands,
            compiling=place.compiling,
            moving=moving,
            thread=self._thread,
        )

    def _stand(self) -> tuple[Standing, bool]:
        """Return where the training thread stands, once it has made no progress for a while, and
        whether it goes on nevertheless: its stack changes, or it goes to sleep again.

        That counts where nothing better is known: outside of a wrapped step, in an evaluation for
        example, and if nothing was ever said to this watchdog.
        """
        now = time.monotonic()
        if self._progress != self._seen[0]:
            self._seen = (self._progress, now)
        if now - self._seen[1] < min(_STILL, self.timeout / 3):
            return Standing(), False
        place, sleeps = standing(self._thread), context_switches(self._thread)
        changed = place.stack != self._stack
        moved = changed or sleeps != self._sleeps
        self._stack, self._sleeps = place.stack, sleeps
        if place.tracing and changed:
            place = dataclasses.replace(place, compiling=True)
        return place, moved and (self._by_stacks or bool(self._wrapped and not self._inside))

    def __repr__(self) -> str:
        waiting = self._waiting and f"waiting for {self._waiting}"
        doing = ", ".join(part for part in (self._doing, waiting) if part) or "idle"
        step = "" if self.step is None else f" (step {self.step})"
        return short_repr(self, f"{self.name!r}: {doing}{step}{', closed' if self.closed else ''}")


def _check_save(
    on_preemption: object, save: Callable[[], object] | None
) -> Callable[[], object] | None:
    """Return the function that saves, if one is to be called."""
    if on_preemption not in ("exit", "save"):
        raise PipelineError(
            f"Watchdog: on_preemption {short(on_preemption)}: use 'exit' or 'save'.",
            option="on_preemption",
        )
    if (on_preemption == "save") != callable(save):
        raise PipelineError(
            f"Watchdog: save {short(save)} with on_preemption={on_preemption!r}: give a function "
            "without arguments for 'save', and none for 'exit'.",
            option="save",
        )
    return save


class StepCheck:
    """Has all processes agree on what a wrapped step runs, before it runs with something new.

    A step that is called as the last one was equals the others' too, since that one did: only a
    change waits for all. A process that changes alone waits, and the watchdog sees that its plan
    for this step is not that of the others.
    """

    def __init__(self, watchdog: Watchdog, name: str, step: Callable[..., Any]) -> None:
        self._watchdog, self._name, self._step = watchdog, name[:40], step
        self._plans: dict[Hashable, str] = {}
        self._last: Hashable = None

    def begin(self, args: Any, kwargs: Any) -> None:
        """Publish what this call runs; if it is new, return once all have come with the same."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = (tree, *[(getattr(x, "shape", None), getattr(x, "dtype", type(x))) for x in leaves])
        if key not in self._plans:
            names = list(_primitives(_traced(self._step, args, kwargs)))
            kinds = [_kind(leaf) for leaf in leaves]
            checksum = hashlib.sha256(repr((str(tree), kinds, names)).encode()).hexdigest()
            program = f", {len(names)} operations" if names else ""
            listed = listing(kinds, _MOST_KINDS)
            self._plans[key] = f"{self._name}({listed}){program}, checksum {checksum[:8]}"
        self._watchdog._agree(self._plans[key], wait=key != self._last)
        self._last = key


def _kind(leaf: Any) -> str:
    shape = getattr(leaf, "shape", None)
    return type(leaf).__name__ if shape is None else f"{leaf.dtype}{[*shape]}".replace(" ", "")


def _traced(step: Any, args: Any, kwargs: Any) -> Any:
    """Return the jaxpr of a jitted step. Other functions are not run for this: None."""
    return step.trace(*args, **kwargs).jaxpr if hasattr(step, "trace") else None


def _primitives(program: Any) -> Iterator[str]:
    """Yield the names of a program's primitives. Their parameters may hold addresses."""
    for eqn in getattr(getattr(program, "jaxpr", program), "eqns", ()):
        yield str(eqn.primitive.name)
        for value in jax.tree.leaves(list(eqn.params.values())):
            yield from _primitives(value)
