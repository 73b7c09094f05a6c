"""The thread that looks after a process, and ends it when one of them fails."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshwright import _compat
from meshwright.watchdog import os_process
from meshwright.watchdog.failure_detector import (
    ABORTED,
    DONE,
    GONE,
    OVER,
    RUNNING,
    TOLD,
    Fault,
    Judge,
    State,
    fault_of,
    line,
    raised,
    read_fault,
    read_state,
    write,
)
from meshwright.watchdog.os_process import Trap, unhandled

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
        self._place = os_process.place()  # after the traps, which it tells of
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
        leave(code_of(error))

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
        leave_by(_TELL + _LINGER + 0.5, OTHERS_FAULT)
        if self._signs.answered:
            fault = self._store.accuse(fault, _TELL)
        ours = fault.process == self._process
        if ours and fault.what == ABORTED and faulthandler.is_enabled():
            faulthandler.dump_traceback()
        states = {**self._store.reading.states, self._process: self._state()}
        error = self._signs.error
        say(line(fault, states), error if self._tells_more(error, fault) else None)
        if not ours:
            self._wake(states.get(-1 if fault.process is None else fault.process))
        if self._process == 0:
            self._until(_LINGER, lambda: self._left(fault))
            time.sleep(_GRACE)
        code = SIGNALS.get(fault.what) or code_of(error)
        leave(code if ours else OTHERS_FAULT)

    def _wake(self, culprit: State | None) -> None:
        """A stopped process of this machine goes on, and ends like all."""
        if culprit is None or os_process.condition(culprit.place) != os_process.STOPPED:
            return
        if culprit.process == 0:
            # Its store answers again once it goes on: let the others see its silence first.
            time.sleep(_ALL_SEE)
        os_process.wake(culprit.place)

    def _tells_more(self, error: BaseException | None, fault: Fault) -> bool:
        """Whether an error says more than the line: what JAX raises when a peer is gone does not,
        unless it is the fault itself."""
        if error is None or self._shown:
            return False
        of_peers = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
        return not of_peers or fault.what == raised(error)

    def _left(self, fault: Fault) -> bool:
        """Whether all have heard that can."""
        return all(
            state.phase == GONE or not self._signs.can_hear(state, fault)
            for state in self._store.reading.states.values()
            if state.process
        )


# What is wrong here: signals and errors of this process, a store that is lost, peers that fail.


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
        return condition == os_process.ALIVE or (
            condition == os_process.UNKNOWN and peer.process != fault.process
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
        if condition == os_process.ALIVE and self._unread < host.limit and not broken:
            return None
        if condition in (os_process.DEAD, os_process.STOPPED):
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
            if gone and self._judge.condition(state.place) == os_process.DEAD:
                return fault_of(state, self._judge.word(os_process.DEAD))
        silent = self._judge.unheard(self._present, reading.states)
        if reading.number == self._called:  # nobody could be heard: the store is silent
            if not late:
                return None
            silent = [state for state in silent if state.process == 0]
        for state in silent:
            condition = self._judge.condition(state.place)
            if condition == os_process.DEAD or (late and condition != os_process.ALIVE):
                return fault_of(state, self._judge.word(condition))
        if silent and not late:
            return None
        what = ABORTED if self.error is None else raised(self.error)
        return fault_of(self._state(), what)


# The end of a process that cannot go on: what there is to say, and out.
#
# JAX's own exit waits for the other processes, up to 300 s, so this does not pass through it.


AT_FAULT, OTHERS_FAULT = 81, 82
SIGNALS = {ABORTED: 134, TOLD: 143}  # as shells report them
_LATEST = 1.0


def leave_by(seconds: float, code: int) -> None:
    """End the process after a time, whatever else it waits for then."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, name="meshwright end", daemon=True).start()


def say(line: str, error: BaseException | None) -> None:
    """The error as Python shows it, if there is one, then the line, on stderr."""
    if error is not None:
        with contextlib.suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(Exception):  # stderr may be closed
        sys.stderr.write(line + "\n")


def leave(code: int) -> None:
    """End now, with what was printed."""
    leave_by(_LATEST, code)  # a full pipe must not hold it
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def code_of(error: BaseException | None) -> int:
    """The exit status of a process that raised: its own where it asked for one."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return AT_FAULT


# The coordination service's key-value store, in a thread of its own: others never wait for it.
#
# Process 0, which hosts the store, reads what all tell. Of many, the others read only what process
# 0
# tells, so that the traffic grows with the number of processes, not with its square.


POLL = 0.2
_STEP = 0.01
_FEW = 16


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the store held at one time; `number` counts the readings."""

    number: int
    fault: Fault | None
    states: Mapping[int, State]


class Store:
    """Tells and reads, five times a second. `failures` counts the tries in a row that failed."""

    def __init__(
        self, client: Any, room: str, process: int, count: int, tell: Callable[[], State]
    ) -> None:
        self._client, self._room, self._process, self._tell = client, room, process, tell
        self.reading = Reading(0, None, {})
        self.failures = 0
        self.whole = process == 0 or count <= _FEW
        self._fault: Fault | None = None
        self._now, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="meshwright store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, patience: float) -> None:
        self._closing = True
        self._now.set()
        self._thread.join(patience)

    def refresh(self, patience: float) -> Reading:
        """A whole reading that was begun after this call, or the last there is if it fails."""
        self.whole = True
        number = self.reading.number + 1  # one may be under way
        end = time.monotonic() + patience
        while self.reading.number <= number and not self.failures and time.monotonic() < end:
            self._now.set()
            time.sleep(_STEP)
        return self.reading

    def accuse(self, fault: Fault, patience: float) -> Fault:
        """Tell all of a fault. The first that is told stands; it is returned."""
        self._fault = fault
        return self.refresh(patience).fault or fault

    def _run(self) -> None:
        while not self._closing:
            self._now.clear()
            try:
                self._exchange()
                self.failures = 0
            except Exception:
                self.failures += 1
            self._now.wait(POLL)

    def _exchange(self) -> None:
        part = "news" if self._process == 0 else "states"
        if self._fault is not None:
            with contextlib.suppress(Exception):  # there already
                self._client.key_value_set(f"{self._room}/news/fault", write(self._fault))
        self._client.key_value_set(
            f"{self._room}/{part}/{self._process}", write(self._tell()), allow_overwrite=True
        )
        whole = self.whole
        found = self._client.key_value_dir_get(self._room if whole else f"{self._room}/news")
        texts = {key.rpartition("/")[2]: text for key, text in found}
        fault = texts.pop("fault", None)
        states = {int(process): read_state(text) for process, text in texts.items()}
        self.reading = Reading(
            self.reading.number + 1,
            None if fault is None else read_fault(fault),
            states if whole else {**self.reading.states, **states},
        )
