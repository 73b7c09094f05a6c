"""Who is at fault: judged from what the processes tell, and from their silence. No clock here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from meshwright.mpmd.watching import vital
from meshwright.mpmd.watching.states import DONE, RUNNING, Fault, State, fault_of

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
        condition: Callable[[str], str] = vital.condition,
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
            vital.DEAD: "died, last seen",
            vital.STOPPED: "is stopped (SIGSTOP), last seen",
            vital.ALIVE: f"hangs, its interpreter blocked{lasting},",
            vital.UNKNOWN: f"gave no sign of life{lasting}, last seen",
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
        missed, heard.missed = heard.missed, condition == vital.DEAD
        if condition == vital.DEAD:
            return self.word(condition) if missed else ""
        patience = state.limit if condition == vital.ALIVE else self.silence
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
