"""Who is at fault: judged from what the processes tell, and from their silence. No clock here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence

from meshwright.errors import listing
from meshwright.watchdog import os_process

# A process is asked after when it is silent for longer than a turn of its own may take.
_GLANCE = 0.3


@dataclasses.dataclass
class _Heard:
    beat: int = -1
    silent: float = 0.0
    missed: bool = False


class Judge:
    """Remembers since when each process is silent, and since when nobody moved.

    `look` is called with every new reading of the store and the time since the one before, so
    that a process that was itself stopped or busy accuses nobody.
    """

    def __init__(
        self,
        process: int,
        count: int,
        silence: float,
        condition: Callable[[str], str] = os_process.condition,
    ) -> None:
        self.process, self.count, self.silence = process, count, silence
        self.condition = condition
        self._heard: dict[int, _Heard] = {}
        self._moves: dict[int, int] = {}
        self._still = 0.0
        self._apart: Fault | None = None

    def look(self, states: Mapping[int, State], elapsed: float) -> Fault | None:
        """The first fault there is. Process 0 looks at all, the others at process 0.

        Who leaves in order is no longer looked at.
        """
        for process, state in sorted(states.items()):
            if process != self.process and state.present and 0 in (process, self.process):
                what = self._silent(state, elapsed)
                if what:
                    return fault_of(state, what)
        if self.process:
            return None
        # Seen a second time, they have said what they wait for.
        before, self._apart = self._apart, _apart([state for _, state in sorted(states.items())])
        return self._apart if before and self._apart else self._stuck(states, elapsed)

    def unheard(self, since: Mapping[int, State], states: Mapping[int, State]) -> list[State]:
        """The running processes that said nothing since an earlier reading."""
        return [
            state
            for process, state in sorted(states.items())
            if process != self.process
            and state.present
            and process in since
            and state.beat == since[process].beat
        ]

    def word(self, condition: str, silent: float = 0.0) -> str:
        """What is said of a process that is missed. Its last words may be a moment old."""
        lasting = f" for {silent:.1f} s" if silent else ""
        return {
            os_process.DEAD: "died, last seen",
            os_process.STOPPED: "is stopped (SIGSTOP), last seen",
            os_process.ALIVE: f"hangs, its interpreter blocked{lasting},",
            os_process.UNKNOWN: f"gave no sign of life{lasting}, last seen",
        }[condition]

    def _silent(self, state: State, elapsed: float) -> str:
        heard = self._heard.setdefault(state.process, _Heard())
        if heard.beat != state.beat:
            heard.beat, heard.silent, heard.missed = state.beat, 0.0, False
            return ""
        heard.silent += elapsed
        if heard.silent < _GLANCE:
            return ""
        condition = self.condition(state.place)
        # Its last words may have been on their way: they are in the next reading.
        missed, heard.missed = heard.missed, condition == os_process.DEAD
        if condition == os_process.DEAD:
            return self.word(condition) if missed else ""
        patience = state.limit if condition == os_process.ALIVE else self.silence
        return self.word(condition, heard.silent) if heard.silent >= patience else ""

    def _stuck(self, states: Mapping[int, State], elapsed: float) -> Fault | None:
        moves = {process: state.moves for process, state in states.items()}
        self._still = self._still + elapsed if moves == self._moves else 0.0
        self._moves = moves
        running = [state for state in states.values() if state.phase == RUNNING]
        if not any(state.busy for state in running):
            return None
        limit = max(state.limit for state in running)
        return self._culprit(running, states, limit) if self._still >= limit else None

    def _culprit(self, running: list[State], known: Collection[int], limit: float) -> Fault:
        """Who waits for nobody: in a task, outside of one, never seen, or already done."""
        lasting = f"no progress for {limit:g} s"
        free = [state for state in running if not state.waiting]
        for state in sorted(free, key=lambda state: (not state.doing, state.process)):
            return fault_of(state, f"hangs, {lasting},")
        for process in range(self.count):
            if process not in known:
                return Fault(process, f"did not begin its watch, {lasting},")
        for process in sorted(set(known) - {state.process for state in running}):
            return Fault(process, f"had finished, {lasting},")
        return Fault(None, f"wait for one another, {lasting}")


def _apart(states: Sequence[State]) -> Fault | None:
    """Steps with a plan need everybody: who has left before one, or is at another?"""
    steps = [(state.step, state) for state in states if state.plan and state.phase == RUNNING]
    latest = max((step for step, _ in steps if step is not None), default=-1)
    for state in states:
        if state.phase == DONE and (-1 if state.step is None else state.step) < latest:
            return fault_of(state, "left before the others, last seen")
    first: dict[int | None, State] = {}
    for step, state in steps:
        known = first.setdefault(step, state)
        if known.plan != state.plan:
            what = f"came with {state.plan} and process {known.process} with {known.plan},"
            return fault_of(state, what)
    return None


# What a process tells of itself, and what is told of a fault: small JSON texts in a store.


RUNNING, DONE, OVER, GONE = "running", "done", "over", "gone"
ABORTED, TOLD = "aborted (SIGABRT)", "was told to stop (SIGTERM)"
_LONGEST = 200


@dataclasses.dataclass(frozen=True)
class State:
    """What a process is doing, as it says itself.

    `beat` counts how often it said so, `moves` how often its main thread took up something.
    `plan` says what kind of step it is in, where all processes make the same.
    `phase`: running; done, waiting for the others; over, all are done; gone, it looks no more.
    """

    process: int
    beat: int = 0
    moves: int = 0
    doing: str = ""
    waiting: str = ""
    step: int | None = None
    limit: float = 60.0
    place: str = ""
    phase: str = RUNNING
    plan: str = ""

    @property
    def present(self) -> bool:
        """Whether it must still give signs of life."""
        return self.phase in (RUNNING, DONE)

    @property
    def busy(self) -> bool:
        """Whether it is in a task, or waits for somebody."""
        return self.phase == RUNNING and bool(self.doing or self.waiting)


@dataclasses.dataclass(frozen=True)
class Fault:
    """Which process failed (none when all wait for one another), how, and what it was in."""

    process: int | None
    what: str
    doing: str = ""
    waiting: str = ""
    step: int | None = None


def fault_of(state: State, what: str) -> Fault:
    return Fault(state.process, what, state.doing, state.waiting, state.step)


def write(value: State | Fault) -> str:
    """As text, every part cut to a length that fits on a line."""
    return json.dumps(
        {
            name: short_line(part) if isinstance(part, str) else part
            for name, part in dataclasses.asdict(value).items()
        }
    )


def read_state(text: str) -> State:
    return State(**json.loads(text))


def read_fault(text: str) -> Fault:
    return Fault(**json.loads(text))


def short_line(text: str) -> str:
    """On one line, and not a long one.

    >>> short_line("one\\ntwo")
    'one two'
    """
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 4] + " ..."


# The one line: which process, in which task, and what the others waited for.


_NAMED = 6


def line(fault: Fault, states: Mapping[int, State]) -> str:
    """The fault as all processes print it.

    >>> states = {0: State(0, waiting="1B5 of process 1"), 1: State(1, doing="1F6")}
    >>> line(Fault(1, "died", "1F6", step=17), states)
    'meshwright: process 1 died in 1F6 (step 17); process 0 waited for 1B5 of process 1. All end.'
    """
    who = "all processes" if fault.process is None else f"process {fault.process}"
    others = [
        f"process {process} waited for {state.waiting}"
        for process, state in sorted(states.items())
        if process != fault.process and state.waiting
    ]
    waited = listing(others, _NAMED) or "no other process waited"
    return short_lines(f"meshwright: {who} {fault.what}{_where(fault)}; {waited}. All end.")


def raised(error: BaseException) -> str:
    """What a process did that raised.

    >>> raised(ValueError("no\\nluck")), raised(KeyboardInterrupt())
    ('raised ValueError: no luck', 'was interrupted')
    """
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted"
    try:
        text = str(error)
    except Exception as worse:  # a hostile __str__ must not hide the fault
        text = f"<whose text raised {type(worse).__name__}>"
    return short_line(f"raised {type(error).__name__}{': ' if text else ''}{text.rstrip('.')}")


def short_lines(text: str) -> str:
    return " ".join(text.split())


def _where(fault: Fault) -> str:
    if fault.process is None:
        return ""
    task = f" in {fault.doing}" if fault.doing else ""
    if fault.waiting:
        task += f"{',' if task else ''} waiting for {fault.waiting}"
    step = "" if fault.step is None else f" (step {fault.step})"
    return (task or " outside of a task") + step
