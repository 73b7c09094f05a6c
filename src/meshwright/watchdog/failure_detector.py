"""Decide which process is at fault, from the states that all of them publish and from missing
heartbeats. Pure: no clock, no threads; the states are small JSON texts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence

from meshwright.errors import listing
from meshwright.watchdog import os_process

# Seconds after which the operating system is asked about a process. Heartbeats come every 0.2 s, so
# a healthy process never costs the half dozen reads of /proc that this takes.
_STALE = 0.3


@dataclasses.dataclass
class _Heartbeat:
    count: int = -1
    silent: float = 0.0  # seconds since it last changed
    seen_dead: bool = False


class FailureDetector:
    """Remembers since when each process is silent, and since when none has made progress.

    `update` is called with every new snapshot of the states and the time since the one before.
    Time is handed in rather than read, so that a process that was itself stopped or busy does not
    blame the others for the gap. `status` tells how the process with an identity is; tests
    replace it.
    """

    def __init__(
        self,
        process: int,
        count: int,
        heartbeat_timeout: float,
        status: Callable[[str], str] = os_process.status,
    ) -> None:
        self.process, self.count, self.heartbeat_timeout = process, count, heartbeat_timeout
        self.status = status
        self._heartbeats: dict[int, _Heartbeat] = {}
        self._progress: dict[int, int] = {}
        self._stalled = 0.0  # seconds since any process made progress
        self._mismatch: Fault | None = None

    def update(self, states: Mapping[int, State], elapsed: float) -> Fault | None:
        """Return the first fault in a new snapshot, if there is one.

        Process 0 checks all others, and they check process 0: the work grows with the number of
        processes, not with its square. A process that left in order is not checked any more.
        """
        for process, state in sorted(states.items()):
            if process != self.process and state.present and 0 in (process, self.process):
                what = self._check_heartbeat(state, elapsed)
                if what:
                    return fault_of(state, what)
        if self.process:
            return None
        # Reported only when seen twice: by then all have published what they wait for, which the
        # message quotes.
        before = self._mismatch
        self._mismatch = _plan_mismatch([state for _, state in sorted(states.items())])
        if before and self._mismatch:
            return self._mismatch
        return self._check_progress(states, elapsed)

    def silent_since(
        self, earlier: Mapping[int, State], states: Mapping[int, State]
    ) -> list[State]:
        """Return the present processes without a heartbeat since an earlier snapshot."""
        return [
            state
            for process, state in sorted(states.items())
            if process != self.process
            and state.present
            and process in earlier
            and state.heartbeat == earlier[process].heartbeat
        ]

    def describe(self, status: str, silent: float = 0.0) -> str:
        """Say what is wrong with a silent process. What it was last seen doing follows."""
        lasting = f" for {silent:.1f} s" if silent else ""
        return {
            os_process.DEAD: "died, last seen",
            os_process.STOPPED: "is stopped (SIGSTOP), last seen",
            os_process.ALIVE: f"hangs, its interpreter blocked{lasting},",
            os_process.UNKNOWN: f"gave no sign of life{lasting}, last seen",
        }[status]

    def _check_heartbeat(self, state: State, elapsed: float) -> str:
        """Say what is wrong with a process whose heartbeat is overdue, or nothing."""
        heartbeat = self._heartbeats.setdefault(state.process, _Heartbeat())
        if heartbeat.count != state.heartbeat:
            heartbeat.count, heartbeat.silent, heartbeat.seen_dead = state.heartbeat, 0.0, False
            return ""
        heartbeat.silent += elapsed
        if heartbeat.silent < _STALE:
            return ""
        status = self.status(state.identity)
        # A process that just ended may have published why, or that it left in order; that text is
        # in the next snapshot at the latest. So it must be found dead twice.
        seen_dead, heartbeat.seen_dead = heartbeat.seen_dead, status == os_process.DEAD
        if status == os_process.DEAD:
            return self.describe(status) if seen_dead else ""
        # A live process whose interpreter is blocked (a long C call that keeps the GIL) cannot
        # publish; it has as long as any task.
        timeout = state.timeout if status == os_process.ALIVE else self.heartbeat_timeout
        return self.describe(status, heartbeat.silent) if heartbeat.silent >= timeout else ""

    def _check_progress(self, states: Mapping[int, State], elapsed: float) -> Fault | None:
        """Return a fault if processes are busy, but none has made progress within the timeout."""
        progress = {process: state.progress for process, state in states.items()}
        self._stalled = self._stalled + elapsed if progress == self._progress else 0.0
        self._progress = progress
        running = [state for state in states.values() if state.phase == RUNNING]
        if not any(state.busy for state in running):
            return None
        timeout = max(state.timeout for state in running)
        if self._stalled < timeout:
            return None
        return self._process_at_fault(running, states, timeout)

    def _process_at_fault(
        self, running: Sequence[State], known: Collection[int], timeout: float
    ) -> Fault:
        """Choose who caused a hang: a process that does not wait, while others do.

        In this order: one in a task, one outside of any, one that never started its watchdog, one
        that already finished. If all wait, no single process is at fault.
        """
        lasting = f"no progress for {timeout:g} s"
        not_waiting = [state for state in running if not state.waiting]
        for state in sorted(not_waiting, key=lambda state: (not state.doing, state.process)):
            return fault_of(state, f"hangs, {lasting},")
        for process in range(self.count):
            if process not in known:
                return Fault(process, f"did not start its watchdog, {lasting},")
        for process in sorted(set(known) - {state.process for state in running}):
            return Fault(process, f"had finished, {lasting},")
        return Fault(None, f"wait for one another, {lasting}")


def _plan_mismatch(states: Sequence[State]) -> Fault | None:
    """Return the process that left before a step that needs all, or is in it with another plan.

    Processes may be a step apart, since none waits for all others; so plans are compared between
    processes in the same step only.
    """
    steps = [(state.step, state) for state in states if state.plan and state.phase == RUNNING]
    latest = max((step for step, _ in steps if step is not None), default=-1)
    for state in states:
        if state.phase == DONE and (-1 if state.step is None else state.step) < latest:
            return fault_of(state, "left before the others, last seen")
    first_in_step: dict[int | None, State] = {}
    for step, state in steps:
        first = first_in_step.setdefault(step, state)
        if first.plan != state.plan:
            what = f"came with {state.plan} and process {first.process} with {first.plan},"
            return fault_of(state, what)
    return None


# The phases of a process, in order. It runs; it is done, and waits for the others; process 0
# publishes that it is over once all are done; a process that is gone has stopped checking others
# and may end at any time.
RUNNING, DONE, OVER, GONE = "running", "done", "over", "gone"

# Faults that a process reports of itself after a signal.
ABORTED, TERMINATED = "aborted (SIGABRT)", "was told to stop (SIGTERM)"

# Characters of any text that is published: the message that quotes it stays one line.
_LONGEST_TEXT = 200


@dataclasses.dataclass(frozen=True)
class State:
    """What a process is doing, as it publishes it.

    `heartbeat` counts how often it was published, `progress` how often the main thread began
    something. `plan` names the kind of step it is in, where all processes must run the same.
    `timeout` is in seconds; `identity` is that of `os_process.identity()`.
    """

    process: int
    heartbeat: int = 0
    progress: int = 0
    doing: str = ""
    waiting: str = ""
    step: int | None = None
    timeout: float = 60.0
    identity: str = ""
    phase: str = RUNNING
    plan: str = ""

    @property
    def present(self) -> bool:
        """Whether its heartbeat must go on."""
        return self.phase in (RUNNING, DONE)

    @property
    def busy(self) -> bool:
        """Whether it is in a task, or waits for one."""
        return self.phase == RUNNING and bool(self.doing or self.waiting)


@dataclasses.dataclass(frozen=True)
class Fault:
    """Which process failed (`None` if all wait for one another), how, and what it was doing.

    `others` says what the other processes waited for, as the one saw it that reported the fault:
    they go on waiting and working until they end, and all print the same.
    """

    process: int | None
    what: str
    doing: str = ""
    waiting: str = ""
    step: int | None = None
    others: str = ""


def fault_of(state: State, what: str) -> Fault:
    return Fault(state.process, what, state.doing, state.waiting, state.step)


def encode(value: State | Fault) -> str:
    """Write a state or a fault as JSON, each text in it cut to a length that fits on a line.

    `others` quotes several such texts and is not cut again.
    """
    return json.dumps(
        {
            name: short_line(field) if isinstance(field, str) and name != "others" else field
            for name, field in dataclasses.asdict(value).items()
        }
    )


def decode_state(text: str) -> State:
    return State(**json.loads(text))


def decode_fault(text: str) -> Fault:
    return Fault(**json.loads(text))


def short_line(text: str) -> str:
    """Put a text on one line of at most 200 characters.

    >>> short_line("one\\ntwo")
    'one two'
    """
    line = _one_line(text)
    return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 4] + " ..."


def _one_line(text: str) -> str:
    return " ".join(text.split())


# Waiting processes that the message names; with thousands of them it must stay readable.
_MOST_NAMED = 6


def with_others(fault: Fault, states: Mapping[int, State]) -> Fault:
    """Add what the other processes wait for.

    >>> states = {0: State(0, waiting="1B5 of process 1"), 1: State(1, doing="1F6")}
    >>> with_others(Fault(1, "died"), states).others
    'process 0 waited for 1B5 of process 1'
    """
    waiting = [
        f"process {process} waited for {short_line(state.waiting)}"
        for process, state in sorted(states.items())
        if process != fault.process and state.waiting
    ]
    return dataclasses.replace(fault, others=listing(waiting, _MOST_NAMED))


def message(fault: Fault) -> str:
    """Say in one line which process failed, in which task, and what the others waited for.

    >>> message(Fault(1, "died", "1F6", step=17, others="process 0 waited for 1B5 of process 1"))
    'meshwright: process 1 died in 1F6 (step 17); process 0 waited for 1B5 of process 1. All end.'
    """
    who = "all processes" if fault.process is None else f"process {fault.process}"
    others = fault.others or "no other process waited"
    return _one_line(f"meshwright: {who} {fault.what}{_where(fault)}; {others}. All end.")


def _where(fault: Fault) -> str:
    if fault.process is None:
        return ""
    task = f" in {fault.doing}" if fault.doing else ""
    if fault.waiting:
        task += f"{',' if task else ''} waiting for {fault.waiting}"
    step = "" if fault.step is None else f" (step {fault.step})"
    return (task or " outside of a task") + step


def describe_error(error: BaseException) -> str:
    """Say what a process did that raised.

    >>> describe_error(ValueError("no\\nluck")), describe_error(KeyboardInterrupt())
    ('raised ValueError: no luck', 'was interrupted')
    """
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted"
    try:
        text = str(error)
    except Exception as worse:  # a hostile __str__ must not hide the fault
        text = f"<whose text raised {type(worse).__name__}>"
    return short_line(f"raised {type(error).__name__}{': ' if text else ''}{text.rstrip('.')}")
