"""What is wrong here: signals and errors of this process, a store that is lost, peers that fail."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from meshwright.mpmd.watching import vital, wording
from meshwright.mpmd.watching.judging import Judge
from meshwright.mpmd.watching.states import ABORTED, TOLD, Fault, State, fault_of
from meshwright.mpmd.watching.store import POLL, Reading, Store
from meshwright.mpmd.watching.traps import Trap, unhandled

_ROLL_CALL = 0.7  # for the peers to show that they live, when this process fails


class Signs:
    """Looked at ten times a second; answers with a fault, once there is one."""

    def __init__(
        self, store: Store, judge: Judge, state: Callable[[], State], sigterm: bool
    ) -> None:
        self.error: BaseException | None = None
        self.aborted = False
        self._store, self._judge, self._state = store, judge, state
        self._process, self._silence = judge.process, judge.silence
        self._abort = Trap(signal.SIGABRT, "sleep")
        self._term = Trap(signal.SIGTERM, "abs") if sigterm and unhandled(signal.SIGTERM) else None
        self._number = 0  # of the last reading
        self._unread = 0.0  # seconds since
        self._failed = 0.0  # seconds since this process failed
        self._present: Mapping[int, State] | None = None  # the peers at that time,
        self._called = 0  # in this reading

    def restore(self) -> None:
        for trap in (self._abort, self._term):
            if trap is not None:
                trap.restore()

    @property
    def answered(self) -> bool:
        """Whether the store can be told something."""
        return not self._store.failures and self._unread < self._silence

    def can_hear(self, peer: State, fault: Fault) -> bool:
        """Whether it may still be told of a fault, as far as is known."""
        condition = self._judge.condition(peer.place)
        return condition == vital.ALIVE or (
            condition == vital.UNKNOWN and peer.process != fault.process
        )

    def look(self, elapsed: float) -> Fault | None:
        reading = self._store.reading
        if reading.fault is not None:
            return reading.fault
        self.aborted = self._abort.sprung
        if self._term is not None and self._term.sprung:
            return fault_of(self._state(), TOLD)
        lost = self._lost(reading) if self._process else None
        if lost is not None:
            return lost
        since = self._unread = self._unread + elapsed
        new = reading.number != self._number
        if new:
            self._unread, self._number = 0.0, reading.number
        if self.aborted or self.error is not None:
            return self._roll_call(reading, elapsed)
        return self._judge.look(reading.states, since) if new else None

    def _lost(self, reading: Reading) -> Fault | None:
        """The store lives in process 0: does it answer?"""
        # JAX's client aborts when it loses the service: then one failure says enough.
        broken = self._store.failures > (0 if self.aborted else 1)
        if not (broken or self._unread >= self._silence):
            return None
        host = reading.states.get(0, State(0))
        condition = self._judge.condition(host.place)
        if condition == vital.ALIVE and self._unread < host.limit and not broken:
            return None
        if condition in (vital.DEAD, vital.STOPPED):
            return fault_of(host, self._judge.word(condition))
        how = "cannot be reached" if broken else f"did not answer for {self._unread:.1f} s"
        return fault_of(host, f"{how}, though it hosts the coordination service, last seen")

    def _roll_call(self, reading: Reading, elapsed: float) -> Fault | None:
        """This process failed: of itself, or because a peer is gone? Whoever lives, is heard."""
        if self._present is None:
            called = self._store.refresh(POLL)
            self._present, self._called = called.states, called.number
            return None
        self._failed += elapsed
        late = self._failed >= _ROLL_CALL
        for state in reading.states.values():
            gone = state.process != self._process and state.present
            if gone and self._judge.condition(state.place) == vital.DEAD:
                return fault_of(state, self._judge.word(vital.DEAD))
        silent = self._judge.unheard(self._present, reading.states)
        if reading.number == self._called:  # nobody could be heard: the store is silent
            if not late:
                return None
            silent = [state for state in silent if state.process == 0]
        for state in silent:
            condition = self._judge.condition(state.place)
            if condition == vital.DEAD or (late and condition != vital.ALIVE):
                return fault_of(state, self._judge.word(condition))
        if silent and not late:
            return None
        what = ABORTED if self.error is None else wording.raised(self.error)
        return fault_of(self._state(), what)
