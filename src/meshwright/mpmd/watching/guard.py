"""The thread that looks after a process, and ends it when one of them fails."""

from __future__ import annotations

import dataclasses
import faulthandler
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from meshwright import _compat
from meshwright.mpmd.watching import leaving, vital, wording
from meshwright.mpmd.watching.judging import Judge
from meshwright.mpmd.watching.signs import Signs
from meshwright.mpmd.watching.states import (
    ABORTED,
    DONE,
    GONE,
    OVER,
    RUNNING,
    Fault,
    State,
    fault_of,
)
from meshwright.mpmd.watching.store import Store

_TICK = 0.1
_TELL = 0.4  # to tell of a fault, and to hear of an earlier one
_LINGER, _GRACE = 0.5, 0.15  # for the others to hear and tell, before the store goes
_ALL_SEE = 0.3
_TOGETHER = 300.0  # as long as JAX itself waits for the others at exit
_END = 3.0


class Guard:
    """Watches, from `start` until all processes have come to `close`."""

    def __init__(
        self,
        client: Any,
        room: str,
        process: int,
        count: int,
        *,
        tell: Callable[[], State],
        silence: float,
        sigterm: bool,
    ) -> None:
        self._client, self._process, self._count = client, process, count
        self.room, self._shown = room, False
        self._own, self._phase, self._beat = tell, RUNNING, 0
        self._store = Store(client, f"meshwright/watch/{room}", process, count, self._tell)
        judge = Judge(process, count, silence)
        self._signs = Signs(self._store, judge, self._state, sigterm)
        self._place = vital.place()  # after the traps, which it tells of
        self._silence, self._paused = silence, (-math.inf, 0.0)  # when it ended, how long it was
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshwright watch", daemon=True)
        self._store.start()
        self._thread.start()

    def close(self) -> None:
        """Leave together: until all are done, this process stays under watch."""
        self._phase = DONE
        self._until(_TOGETHER, lambda: self._others(DONE, GONE))
        self._phase = OVER if self._process == 0 else GONE
        self._store.refresh(_TELL)
        if self._process == 0:
            self._until(_LINGER, lambda: self._others(GONE))
        self._closing.set()
        self._store.close(_END)
        self._thread.join(_END)
        self._signs.restore()

    def fail(self, error: BaseException, *, shown: bool = False) -> None:
        """End this process and all others because of an error here. Does not return."""
        self._shown = shown
        self._signs.error = error
        self._thread.join(_END)
        leaving.leave(leaving.code_of(error))

    def _others(self, *phases: str) -> bool:
        """Whether all are in one of the phases. Process 0 sees it, and tells the others."""
        states = self._store.reading.states
        if self._process:
            return 0 in states and states[0].phase == OVER
        return all(
            other in states and states[other].phase in phases for other in range(1, self._count)
        )

    def _until(self, patience: float, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + patience
        while not holds() and time.monotonic() < end:
            self._closing.wait(_TICK / 4)

    def _tell(self) -> State:
        self._beat += 1
        return self._state()

    def _state(self) -> State:
        return dataclasses.replace(
            self._own(), beat=self._beat, phase=self._phase, place=self._place
        )

    def _run(self) -> None:
        before = time.monotonic()
        while not self._closing.wait(_TICK):
            if self._phase in (OVER, GONE) or _compat.coordination_client() is not self._client:
                continue
            now = time.monotonic()
            elapsed, before = now - before, now
            if elapsed > self._silence:
                self._paused = (now, elapsed)
            # Time in which this process itself was stopped is nobody's silence.
            fault = self._signs.look(min(elapsed, 2 * _TICK))
            if fault is not None:
                self._end(self._pause(fault) or fault)

    def _pause(self, fault: Fault) -> Fault | None:
        """Whether the others have left because this process was silent; it may not hear of it."""
        since, lasting = self._paused
        told = self._store.reading.fault is not None or fault.process == self._process
        if told or time.monotonic() - since > _END:
            return None
        return fault_of(
            self._state(), f"was stopped, or its interpreter blocked, for {lasting:.1f} s"
        )

    def _end(self, fault: Fault) -> None:
        self._phase = GONE
        leaving.leave_by(_TELL + _LINGER + 0.5, leaving.OTHERS_FAULT)
        if self._signs.answered:
            fault = self._store.accuse(fault, _TELL)
        ours = fault.process == self._process
        if ours and fault.what == ABORTED and faulthandler.is_enabled():
            faulthandler.dump_traceback()
        states = {**self._store.reading.states, self._process: self._state()}
        error = self._signs.error
        leaving.say(wording.line(fault, states), error if self._tells_more(error, fault) else None)
        if not ours:
            self._wake(states.get(-1 if fault.process is None else fault.process))
        if self._process == 0:
            self._until(_LINGER, lambda: self._left(fault))
            time.sleep(_GRACE)
        code = leaving.SIGNALS.get(fault.what) or leaving.code_of(error)
        leaving.leave(code if ours else leaving.OTHERS_FAULT)

    def _wake(self, culprit: State | None) -> None:
        """A stopped process of this machine goes on, and ends like all."""
        if culprit is None or vital.condition(culprit.place) != vital.STOPPED:
            return
        if culprit.process == 0:
            # Its store answers again once it goes on: let the others see its silence first.
            time.sleep(_ALL_SEE)
        vital.wake(culprit.place)

    def _tells_more(self, error: BaseException | None, fault: Fault) -> bool:
        """Whether an error says more than the line: what JAX raises when a peer is gone does not,
        unless it is the fault itself."""
        if error is None or self._shown:
            return False
        of_peers = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
        return not of_peers or fault.what == wording.raised(error)

    def _left(self, fault: Fault) -> bool:
        """Whether all have heard that can."""
        return all(
            state.phase == GONE or not self._signs.can_hear(state, fault)
            for state in self._store.reading.states.values()
            if state.process
        )
