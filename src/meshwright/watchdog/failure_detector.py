"""Decide which process is at fault, from the states that all of them publish and from missing
heartbeats. Pure: no clock, no threads; the states are small JSON texts.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.errors import listing
from meshwright.watchdog import os_process
from meshwright.watchdog.os_process import ExitStatus, Stands

# Seconds after which the operating system is asked about a process. Heartbeats come every 0.2 s, so
# a healthy process never costs the half dozen reads of /proc that this takes.
_STALE = 0.3
# Seconds without a heartbeat that are no delay of a busy machine.
_SURELY_SILENT = 1.0
# Seconds after which a process is given up that the operating system calls stopped: it is not
# merely late, and all others shall be out in 2 s on a busy machine too.
STOPPED_AFTER = 0.6
# How a fault begins of a process that lives but whose interpreter does not go on.
BLOCKED = "hangs, its interpreter blocked"
STOPPED = "is stopped (SIGSTOP), last seen"
_MOST_STACKS = 3  # that a message shows, where each process stands elsewhere
_NOT_THE_PROGRAM = ("/jax/_src/", "/meshwright/watchdog/")


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
                fault = self._check_heartbeat(state, elapsed)
                if fault is not None:
                    return fault
        if self.process:
            return None
        # Reported only when seen twice: by then all have published what they wait for, which the
        # message quotes.
        before, self._mismatch = self._mismatch, step_mismatch(states)
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
            os_process.STOPPED: STOPPED,
            os_process.ALIVE: f"{BLOCKED}{lasting},",
            os_process.UNKNOWN: f"gave no sign of life{lasting}, last seen",
        }[status]

    def _check_heartbeat(self, state: State, elapsed: float) -> Fault | None:
        """Return what is wrong with a process whose heartbeat is overdue, or nothing."""
        heartbeat = self._heartbeats.setdefault(state.process, _Heartbeat())
        if heartbeat.count != state.heartbeat:
            heartbeat.count, heartbeat.silent, heartbeat.seen_dead = state.heartbeat, 0.0, False
            return None
        heartbeat.silent += elapsed
        if heartbeat.silent < _STALE:
            return None
        status = self.status(state.identity)
        # A process that just ended may have published why, or that it left in order; that text is
        # in the next snapshot at the latest. So it must be found dead twice.
        seen_dead, heartbeat.seen_dead = heartbeat.seen_dead, status == os_process.DEAD
        if status == os_process.DEAD:
            return fault_of(state, self.describe(status)) if seen_dead else None
        # A live process whose interpreter is blocked (a long C call that keeps the GIL) cannot
        # publish; it has as long as any task.
        timeout = state.timeout if status == os_process.ALIVE else self.heartbeat_timeout
        if heartbeat.silent < (STOPPED_AFTER if status == os_process.STOPPED else timeout):
            return None
        return fault_of(state, self.describe(status, heartbeat.silent))

    def _check_progress(self, states: Mapping[int, State], elapsed: float) -> Fault | None:
        """Return a fault if processes are busy, but none has made progress within the timeout."""
        progress = {process: state.progress for process, state in states.items()}
        running = [state for state in states.values() if state.phase == RUNNING]
        # XLA's compiler makes progress that nobody sees, and the others wait for it. What goes on
        # outside of the step is progress too, but not of one for whom the others wait inside.
        furthest = max((state.position for state in running), default=(0, 0))
        moved = progress != self._progress or any(
            state.compiling or (state.moving and state.position == furthest) for state in running
        )
        self._stalled = 0.0 if moved else self._stalled + elapsed
        self._progress = progress
        if not any(state.busy for state in running):
            return None
        timeout = max(state.timeout for state in running)
        if self._stalled < timeout:
            return None
        return self._process_at_fault(running, states, timeout)

    def _process_at_fault(
        self, running: Sequence[State], known: Mapping[int, State], timeout: float
    ) -> Fault:
        """Choose who caused a hang: one that is silent, or else one that does not wait.

        Of those that do not wait in this order: one in a task, one outside of any, one that never
        started its watchdog, one that already finished. If all wait, no single process is at
        fault. In a loop whose steps are counted the rules of `_suspects` decide instead.
        """
        lasting = f"no progress for {timeout:g} s"
        for state in running:
            silent = self._heartbeats.get(state.process, _Heartbeat()).silent
            if silent >= max(timeout / 2, _SURELY_SILENT):
                return fault_of(state, self.describe(os_process.ALIVE, silent))
        not_waiting = [state for state in running if not state.waiting]
        no_tasks = not any(state.doing or state.waiting for state in running)
        in_loop = bool(not_waiting) and (no_tasks or any(state.in_loop for state in running))
        absent = [process for process in range(self.count) if process not in known]
        finished = sorted(set(known) - {state.process for state in running})
        if in_loop and not absent and not finished:
            return _fault_of_suspects(_suspects(not_waiting), running, lasting)
        if not in_loop:
            for state in sorted(not_waiting, key=lambda state: (not state.doing, state.process)):
                return fault_of(state, f"hangs, {lasting},", stack=state.stack)
        for process in absent:
            return Fault(process, f"did not start its watchdog, {lasting},")
        for process in finished:
            return fault_of(known[process], f"had finished, {lasting},")
        return Fault(None, f"wait for one another, {lasting}")


def _suspects(states: Sequence[State]) -> list[State]:
    """Return who may have caused a hang in a loop: one process, or all if none stands out.

    In this order: those with the least progress, those outside of the step, those that stand in
    other code than JAX's, the one whose thread stands where no other does.
    """
    suspects = _least(states, lambda state: state.position)
    suspects = _least(suspects, lambda state: not state.outside)
    suspects = _least(suspects, lambda state: state.stands)
    stacks = collections.Counter(state.stack for state in states)
    alone = [state for state in suspects if stacks[state.stack] == 1]
    return alone if len(alone) == 1 else suspects


def _least(states: Sequence[State], key: Callable[[State], Any]) -> list[State]:
    least = min(map(key, states))
    return [state for state in states if key(state) == least]


def _fault_of_suspects(suspects: Sequence[State], running: Sequence[State], lasting: str) -> Fault:
    first = suspects[0]
    if len(suspects) < len(running) or len(running) == 1:
        return fault_of(first, f"hangs, {lasting},", stack=first.stack)
    places = list(dict.fromkeys(state.stack for state in suspects))
    if len(places) == 1:
        same = "a device, the network, or a collective that does not match"
        what = f"are in the same place{_place(first.stack)}: {same}; {lasting}"
        return Fault(None, what, stack=first.stack)
    stacks = "\n".join(f"  Process {s.process}:\n{s.stack}" for s in suspects[:_MOST_STACKS])
    return Fault(None, f"hang, each in another place, {lasting}", stack=stacks)


def _place(stack: str) -> str:
    """Return the innermost line of a stack that is not JAX's, in brackets.

    >>> _place('  File "/x/jax/_src/api.py", line 7 in f\\n  File "/me/train.py", line 5 in main')
    ' (/me/train.py:5 in main)'
    """
    for line in stack.splitlines():
        if not any(part in line for part in _NOT_THE_PROGRAM):
            file, _, rest = line.strip().removeprefix('File "').partition('", line ')
            return f" ({file}:{rest})"
    return ""


def step_mismatch(states: Mapping[int, State]) -> Fault | None:
    """Return the process that left before a step that needs all, or is in it with another plan.

    Processes may be a step apart, since none waits for all others; so plans are compared between
    processes in the same step only, and the one is at fault whose plan fewer have.
    """
    ordered = [state for _, state in sorted(states.items())]
    together = [state for state in ordered if state.phase == RUNNING and state.together]
    latest = max((state.step for state in together if state.step is not None), default=-1)
    for state in ordered:
        if state.phase == DONE and state.reached_step < latest:
            return fault_of(state, "left before the others, last seen", retry=False)
    by_step: dict[int | None, list[State]] = {}
    for state in together:
        if state.plan:
            by_step.setdefault(state.step, []).append(state)
    for members in by_step.values():
        plans = collections.Counter(state.plan for state in members)
        usual = next(state for state in members if plans[state.plan] == max(plans.values()))
        for state in members:
            if state.plan != usual.plan:
                what = f"came with {state.plan} and process {usual.process} with {usual.plan},"
                return fault_of(state, what, retry=False)
    return None


# The phases of a process, in order. It runs; it is done, and waits for the others; process 0
# publishes that it is over once all are done; a process that is gone has stopped checking others
# and may end at any time.
RUNNING, DONE, OVER, GONE = "running", "done", "over", "gone"

# Faults that a process reports of itself after a signal.
ABORTED, TERMINATED = "aborted (SIGABRT)", "was told to stop (SIGTERM)"
ALL_TERMINATED = "were told to stop (SIGTERM)"  # as a preemption does

# Characters of any text that is published: the message that quotes it stays one line.
_LONGEST_TEXT = 200
_WHOLE = ("others", "stack")


@dataclasses.dataclass(frozen=True)
class State:
    """What a process is doing, as it publishes it.

    `heartbeat` counts how often it was published, `progress` how often the training thread began
    something. `plan` names the kind of step it is in, where all processes must run the same.
    `timeout` is in seconds; `identity` is that of `os_process.identity()`.

    In a loop whose steps are counted (`in_loop`), `calls` counts how often it came into and out of
    the wrapped step since `step` began, `outside` names that step while it is outside of it, and
    `reached` is the last number that `step` had. Once there was no progress for a while, `stack`
    says where the thread with the number `thread` stands.
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
    by_stacks: bool = False  # nothing was said to its watchdog, which goes by the stack
    in_loop: bool = False
    calls: int = 0
    outside: str = ""
    reached: int = -1
    since: float = 0.0  # Unix time of the last progress
    host: str = ""
    stack: str = ""
    stands: int = Stands.UNKNOWN
    compiling: bool = False
    moving: bool = False  # it goes on, in what is not counted
    told: bool = False  # to stop, by SIGTERM
    halted: int = -1  # see `preemption`
    save_before: int = -1
    thread: int = 0
    dump: str = ""  # see `os_process.StackDump`

    @property
    def present(self) -> bool:
        """Whether its heartbeat must go on."""
        return self.phase in (RUNNING, DONE)

    @property
    def busy(self) -> bool:
        """Whether it is in a task or a step, or waits for one."""
        if self.phase != RUNNING:
            return False
        in_step = self.in_loop and self.step is not None and not self.outside
        # A call of the step may return before it is done: then it is waited for outside.
        in_jax = (self.by_stacks or self.in_loop) and self.stands == Stands.IN_JAX
        return bool(self.doing or self.waiting or in_step or in_jax)

    @property
    def together(self) -> bool:
        """Whether its step needs all processes."""
        return bool(self.plan or self.in_loop)

    @property
    def position(self) -> tuple[int, int]:
        """How far it has come in the loop."""
        return self.reached_step, self.calls

    @property
    def reached_step(self) -> int:
        """The step it is in, or the last one it was in."""
        return self.reached if self.step is None else self.step


@dataclasses.dataclass(frozen=True)
class Fault:
    """Which process failed (`None` if no single one), how, and what it was doing.

    `others` says what the other processes waited for, as the one saw it that reported the fault:
    they go on waiting and working until they end, and all print the same. `hosts` counts the
    machines. `retry` says whether the job may go well if it is run again.
    """

    process: int | None
    what: str
    doing: str = ""
    waiting: str = ""
    step: int | None = None
    others: str = ""
    outside: str = ""
    since: float = 0.0
    host: str = ""
    hosts: int = 1
    stack: str = ""
    retry: bool = True

    @property
    def status(self) -> int:
        """What the process at fault exits with."""
        signals = {ABORTED: ExitStatus.ABORTED, TERMINATED: ExitStatus.TERMINATED}
        ours = ExitStatus.MACHINE_ERROR if self.retry else ExitStatus.USER_ERROR
        return signals.get(self.what, ours)


def fault_of(state: State, what: str, *, stack: str = "", retry: bool = True) -> Fault:
    since = state.since if state.in_loop else 0.0
    return Fault(
        state.process,
        what,
        state.doing,
        state.waiting,
        state.step,
        outside=state.outside,
        since=since,
        host=state.host,
        stack=stack,
        retry=retry,
    )


def encode(value: State | Fault) -> str:
    """Write a state or a fault as JSON, each text in it cut to a length that fits on a line.

    `others` quotes several such texts and is not cut again; a stack has lines of its own.
    """
    return json.dumps(
        {
            name: short_line(field) if isinstance(field, str) and name not in _WHOLE else field
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
    inside: dict[str, list[str]] = {}
    for process, state in sorted(states.items()):
        if process != fault.process and state.in_loop and state.doing and not state.waiting:
            inside.setdefault(short_line(state.doing), []).append(str(process))
    waiting += [
        f"process{'es' * (len(who) > 1)} {listing(who, _MOST_NAMED)} in {doing}"
        for doing, who in inside.items()
        if fault.process is not None
    ]
    hosts = {state.host for state in states.values()}
    return dataclasses.replace(fault, others=listing(waiting, _MOST_NAMED), hosts=len(hosts))


def message(fault: Fault) -> str:
    """Say in one line which process failed, in which task, and what the others waited for.

    >>> message(Fault(1, "died", "1F6", step=17, others="process 0 waited for 1B5 of process 1"))
    'meshwright: process 1 died in 1F6 (step 17); process 0 waited for 1B5 of process 1. All end.'
    """
    who = "all processes" if fault.process is None else f"process {fault.process}"
    if fault.hosts > 1 and fault.host:
        who += f" on {fault.host}"
    others = fault.others or ("" if fault.process is None else "no other process waited")
    end = f"; {others}. All end." if others else ". All end."
    return _one_line(f"meshwright: {who} {fault.what}{_where(fault)}{end}")


def stack_text(fault: Fault) -> str:
    """Show where the process at fault stands, or nothing."""
    if not fault.stack:
        return ""
    who = "All processes stand" if fault.process is None else f"Process {fault.process} stands"
    host = f" on {fault.host}" if fault.host else ""
    return f"{who} here{host}, most recent call first:\n{fault.stack}\n"


def _where(fault: Fault) -> str:
    if fault.process is None:
        return ""
    task = f" in {fault.doing}" if fault.doing else ""
    if fault.waiting:
        task += f"{',' if task else ''} waiting for {fault.waiting}"
    task = task or f" outside of {fault.outside or 'a task'}"
    if fault.since:
        task += time.strftime(" since %H:%M:%S", time.localtime(fault.since))
    return task + ("" if fault.step is None else f" (step {fault.step})")
