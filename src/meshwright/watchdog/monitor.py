"""The threads behind `Watchdog`: one exchanges states with the other processes, one looks for
failures and, when there is one, prints who is at fault and exits the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshwright import _compat
from meshwright._processes import EXCHANGE_EVERY, Exchange, Snapshot
from meshwright.watchdog import os_process
from meshwright.watchdog.failure_detector import (
    ABORTED,
    ALL_TERMINATED,
    BLOCKED,
    DONE,
    GONE,
    OVER,
    RUNNING,
    STOPPED,
    STOPPED_AFTER,
    TERMINATED,
    FailureDetector,
    Fault,
    State,
    decode_fault,
    decode_state,
    encode,
    fault_of,
    message,
    short_line,
    stack_text,
    step_mismatch,
    with_others,
)
from meshwright.watchdog.os_process import (
    ExitStatus,
    SignalTrap,
    StackDump,
    exit_after,
    exit_now,
    exit_status,
    unhandled,
)
from meshwright.watchdog.preemption import Preemption

# All times are in seconds. Those between a fault and the exit are short because `Watchdog` promises
# that all processes end within 2 s, half of which may pass before a silent one is given up.
_CHECK_EVERY = 0.1
_REPORT_TIMEOUT = 0.4  # to report a fault, and to read one that was reported earlier
_ACKNOWLEDGE_TIMEOUT = 0.5  # process 0, and with it the store, outlives the others this long
_LAST_READ = 0.15  # and this much longer, for readers that are under way
_ALL_NOTICE = 0.3  # for every process to notice that process 0 is stopped
_CLOSE_TIMEOUT = 300.0  # as long as JAX's own shutdown barrier waits for the others
_JOIN_TIMEOUT = 3.0


class Monitor:
    """Monitors this process and its peers from construction until all have come to `close`.

    `get_state` returns what the main thread is doing; it is called from another thread.
    """

    def __init__(
        self,
        client: Any,
        name: str,
        process: int,
        count: int,
        *,
        get_state: Callable[[], State],
        heartbeat_timeout: float,
        sigterm: bool,
        preemption: Preemption | None = None,
    ) -> None:
        self._preemption = preemption
        self._client, self._process, self.count = client, process, count
        self.name, self._error_shown = name, False
        self._get_state, self._phase, self._heartbeat = get_state, RUNNING, 0
        self._exchange: Exchange[State, Fault] = Exchange(
            client,
            f"meshwright/watch/{name}",
            process,
            count,
            next_state=self._next_state,
            encode=encode,
            decode_state=decode_state,
            decode_final=decode_fault,
        )
        detector = FailureDetector(process, count, heartbeat_timeout)
        self._sources = FailureSources(self._exchange, detector, self._state, sigterm)
        self._dump = StackDump()
        # After the signal traps are set: the identity says whether SIGABRT is caught.
        self._identity, self._host = os_process.identity(), socket.gethostname()
        self._heartbeat_timeout = heartbeat_timeout
        self._pause = (-math.inf, 0.0)  # the last one of this process: its end and its length
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshwright watchdog", daemon=True)
        self._exchange.start()
        self._thread.start()

    def close(self) -> None:
        """Wait until all processes are done, monitoring them meanwhile, then stop.

        Process 0 sees when all are done and tells the others; it stays until they have read that,
        since the store ends with it.
        """
        self._phase = DONE
        self._wait_until(_CLOSE_TIMEOUT, lambda: self._others_in(DONE, GONE))
        self._phase = OVER if self._process == 0 else GONE
        self._exchange.refresh(_REPORT_TIMEOUT)
        if self._process == 0:
            self._wait_until(_ACKNOWLEDGE_TIMEOUT, lambda: self._others_in(GONE))
        self._closing.set()
        self._exchange.close(_JOIN_TIMEOUT)
        self._thread.join(_JOIN_TIMEOUT)
        self._sources.restore_signals()
        self._dump.close()

    def fail(self, error: BaseException, *, shown: bool = False) -> None:
        """Exit this process and all others because of an error here. Does not return.

        `shown` says that the error was printed already.
        """
        self._error_shown = shown
        # The monitor thread sees it at its next check, and exits the process.
        self._sources.error = error
        self._thread.join(_JOIN_TIMEOUT)
        exit_now(exit_status(error))

    def _others_in(self, *phases: str) -> bool:
        """Whether all others are in one of the phases, as process 0 sees it or has published."""
        states = self._exchange.snapshot.states
        if self._process:
            return 0 in states and states[0].phase == OVER
        return all(
            other in states and states[other].phase in phases for other in range(1, self.count)
        )

    def _wait_until(self, timeout: float, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout
        while not holds() and time.monotonic() < deadline:
            self._closing.wait(_CHECK_EVERY / 4)

    def _next_state(self) -> State:
        self._heartbeat += 1
        state = self._state()
        if self._preemption is None:
            return state
        halted, save_before = self._preemption.exchange(self._exchange.snapshot.states)
        return dataclasses.replace(state, halted=halted, save_before=save_before)

    def _state(self) -> State:
        return dataclasses.replace(
            self._get_state(),
            heartbeat=self._heartbeat,
            phase=self._phase,
            identity=self._identity,
            host=self._host,
            told=self._sources.told,
            dump=self._dump.address,
        )

    def _run(self) -> None:
        before = time.monotonic()
        while not self._closing.wait(_CHECK_EVERY):
            # After jax.distributed.shutdown there is no store, and no peer to monitor.
            gone = self.count > 1 and _compat.coordination_client() is not self._client
            if gone or self._phase in (OVER, GONE):
                continue
            now = time.monotonic()
            elapsed, before = now - before, now
            if elapsed > self._heartbeat_timeout:
                self._pause = (now, elapsed)
            # Time in which this process itself was stopped must not count as others' silence.
            fault = self._sources.check(min(elapsed, 2 * _CHECK_EVERY))
            if fault is not None:
                self._exit_all(self._own_pause(fault) or fault)

    def _own_pause(self, fault: Fault) -> Fault | None:
        """Return this process's own pause as the fault, if that is why the others have left.

        After a pause they may be gone with the store, so that their report cannot be read; what
        is seen here then is only their absence. Of a process that is stopped more is seen.
        """
        ended, lasting = self._pause
        reported = self._exchange.snapshot.final is not None or fault.process == self._process
        sure = reported or fault.what == STOPPED
        if sure or time.monotonic() - ended > _JOIN_TIMEOUT:
            return None
        return fault_of(
            self._state(), f"was stopped, or its interpreter blocked, for {lasting:.1f} s"
        )

    def _exit_all(self, fault: Fault) -> None:
        """Report a fault to all processes, print it, and exit this one."""
        self._phase = GONE
        exit_after(_REPORT_TIMEOUT + _ACKNOWLEDGE_TIMEOUT + 1.0, ExitStatus.OTHERS_FAULT)
        if self._process and self._sources.store_answers:
            self._exchange.refresh(EXCHANGE_EVERY)  # only process 0 reads all of them all the time
        states = {**self._exchange.snapshot.states, self._process: self._state()}
        fault = fault if fault.others else with_others(fault, states)
        at_fault = states.get(-1 if fault.process is None else fault.process)
        if at_fault is not None and fault.what.startswith(BLOCKED) and not fault.stack:
            stack = os_process.blocked_stack(at_fault.identity, at_fault.dump, at_fault.thread)
            fault = dataclasses.replace(fault, stack=stack)
        if self._sources.store_answers:
            fault = self._exchange.publish_final(fault, _REPORT_TIMEOUT)
        at_fault = states.get(-1 if fault.process is None else fault.process)
        own = fault.process == self._process
        if own and fault.what == ABORTED and faulthandler.is_enabled():
            # The trap for SIGABRT took the place of faulthandler's own handler.
            faulthandler.dump_traceback()
        error = self._sources.error
        shown = error is None or self._error_shown or not says_more(error, fault)
        print_fault(fault, None if shown else error)
        if not own and self._resume(at_fault) and fault.process == 0:
            # Its store answers again: it shall know why it ends, and so shall who was too late.
            self._exchange.publish_final(fault, _REPORT_TIMEOUT)
        if self._process == 0:
            self._wait_until(_ACKNOWLEDGE_TIMEOUT, lambda: self._acknowledged(fault))
            time.sleep(_LAST_READ)
        exit_now(self._exit_status(fault, error))

    def _exit_status(self, fault: Fault, error: BaseException | None) -> int:
        own = fault.process == self._process
        if own and error is not None and fault.what == describe_error(error):
            return exit_status(error)
        if self._sources.told and fault.what in (TERMINATED, ALL_TERMINATED):
            return ExitStatus.TERMINATED
        return fault.status if own or fault.process is None else ExitStatus.OTHERS_FAULT

    def _resume(self, at_fault: State | None) -> bool:
        """Let a stopped process of this machine go on, so that it ends like all others."""
        if at_fault is None or os_process.status(at_fault.identity) != os_process.STOPPED:
            return False
        if at_fault.process == 0:
            # Its store answers again once it goes on: let the others notice its silence first.
            time.sleep(_ALL_NOTICE)
        os_process.resume(at_fault.identity)
        return True

    def _acknowledged(self, fault: Fault) -> bool:
        """Whether every reachable process has acknowledged the fault."""
        return all(
            state.phase == GONE or not self._sources.can_read(state, fault)
            for state in self._exchange.snapshot.states.values()
            if state.process
        )


# For the peers to show that they live, when this process fails.
_PEERS_TIMEOUT = 0.7


class FailureSources:
    """All that can go wrong, as seen from here: signals and errors of this process, a store that
    is lost, peers that fail. `check` is called ten times a second.
    """

    def __init__(
        self,
        exchange: Exchange[State, Fault],
        detector: FailureDetector,
        get_state: Callable[[], State],
        sigterm: bool,
    ) -> None:
        self.error: BaseException | None = None
        self.aborted = False
        self._exchange, self._detector, self._get_state = exchange, detector, get_state
        self._process, self._heartbeat_timeout = detector.process, detector.heartbeat_timeout
        # A process alone has nobody to tell: an abort and SIGTERM end it as usual.
        several = detector.count > 1
        self._sigabrt = SignalTrap(signal.SIGABRT, "sleep") if several else None
        trap_sigterm = several and sigterm and unhandled(signal.SIGTERM)
        self._sigterm = SignalTrap(signal.SIGTERM, "abs") if trap_sigterm else None
        self._number = 0  # of the last snapshot
        self._unread = 0.0  # seconds since
        self._store_stopped = False
        self._failed = 0.0  # seconds since this process failed
        self._peers: Mapping[int, State] | None = None  # as they were then,
        self._peers_number = 0  # in this snapshot

    def restore_signals(self) -> None:
        for trap in (self._sigabrt, self._sigterm):
            if trap is not None:
                trap.restore()

    @property
    def store_answers(self) -> bool:
        answers = self._unread < self._heartbeat_timeout and not self._store_stopped
        return answers and not self._exchange.failures

    def can_read(self, peer: State, fault: Fault) -> bool:
        """Whether a peer may still read the store, as far as is known."""
        status = self._detector.status(peer.identity)
        return status == os_process.ALIVE or (
            status == os_process.UNKNOWN and peer.process != fault.process
        )

    @property
    def told(self) -> bool:
        """Whether SIGTERM has arrived."""
        return self._sigterm is not None and self._sigterm.triggered

    def check(self, elapsed: float) -> Fault | None:
        """Return the fault, once there is one. The order decides between several.

        A fault that was reported comes first, so that all processes print the same; a lost store
        before the peers whose states are in it; these before an error or SIGTERM here, which a
        lost peer may have caused.
        """
        snapshot = self._exchange.snapshot
        if snapshot.final is not None:
            return snapshot.final
        self.aborted = self._sigabrt is not None and self._sigabrt.triggered
        lost = self._check_store(snapshot) if self._process else None
        if lost is not None:
            return lost
        since_last = self._unread = self._unread + elapsed
        is_new = snapshot.number != self._number
        if is_new:
            self._unread, self._number = 0.0, snapshot.number
            self._store_stopped = False
        if self.aborted or self.told or self.error is not None:
            return self._find_cause(snapshot, elapsed)
        return self._detector.update(snapshot.states, since_last) if is_new else None

    def _check_store(self, snapshot: Snapshot[State, Fault]) -> Fault | None:
        """Return a fault of process 0 if the store, which it hosts, does not answer."""
        # JAX's client aborts this process when it loses the service: then one failed call is
        # enough. Otherwise a single one may be a hiccup of the network.
        broken = self._exchange.failures > (0 if self.aborted else 1)
        if not (broken or self._unread >= min(STOPPED_AFTER, self._heartbeat_timeout)):
            return None
        host = snapshot.states.get(0, State(0))
        status = self._detector.status(host.identity)
        self._store_stopped = status == os_process.STOPPED
        if not (broken or self._store_stopped or self._unread >= self._heartbeat_timeout):
            return None
        if status == os_process.ALIVE and self._unread < host.timeout and not broken:
            return None
        if status in (os_process.DEAD, os_process.STOPPED):
            return fault_of(host, self._detector.describe(status))
        how = "cannot be reached" if broken else f"did not answer for {self._unread:.1f} s"
        return fault_of(host, f"{how}, though it hosts the coordination service, last seen")

    def _find_cause(self, snapshot: Snapshot[State, Fault], elapsed: float) -> Fault | None:
        """After a local failure, wait briefly for peers to report, to find the original cause.

        An error or abort here often only says that a peer is gone, and so does the SIGTERM of an
        engine that saw it go. So a snapshot of the peers is taken, and each must be seen with a
        newer heartbeat; one that is dead, or stays silent, is the cause. If all are well, the
        failure is this process's own.
        """
        if self._peers is None:
            peers = self._exchange.refresh(EXCHANGE_EVERY)
            self._peers, self._peers_number = peers.states, peers.number
            return None
        self._failed += elapsed
        late = self._failed >= _PEERS_TIMEOUT
        for state in snapshot.states.values():
            is_peer = state.process != self._process and state.present
            if is_peer and self._detector.status(state.identity) == os_process.DEAD:
                return fault_of(state, self._detector.describe(os_process.DEAD))
        silent = self._detector.silent_since(self._peers, snapshot.states)
        if snapshot.number == self._peers_number:
            # There was no newer snapshot, so only the store, in process 0, is known to be silent.
            if not late:
                return None
            silent = [state for state in silent if state.process == 0]
        for state in silent:
            status = self._detector.status(state.identity)
            if status == os_process.DEAD or (late and status != os_process.ALIVE):
                return fault_of(state, self._detector.describe(status))
        if silent and not late:
            return None
        if self.told:
            others = [s for s in snapshot.states.values() if s.process != self._process]
            if others and all(state.told for state in others if state.present):
                return Fault(None, ALL_TERMINATED)
            return fault_of(self._get_state(), TERMINATED)
        # Gloo and XLA may refuse what does not match before it hangs.
        if (mismatch := step_mismatch(snapshot.states)) is not None:
            return mismatch
        if self.error is None:
            return fault_of(self._get_state(), ABORTED)
        retry = exit_status(self.error) != ExitStatus.USER_ERROR
        return fault_of(self._get_state(), describe_error(self.error), retry=retry)


def print_fault(fault: Fault, error: BaseException | None) -> None:
    """Print an error as Python does, if there is one, then stack and line of a fault, on stderr."""
    if error is not None:
        with contextlib.suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(Exception):  # stderr may be closed
        sys.stderr.write(f"{stack_text(fault)}{message(fault)}\n")


def says_more(error: BaseException, fault: Fault) -> bool:
    """Whether an error says more than the message of a fault does.

    What JAX or Gloo raise because a peer is gone does not, unless it is the fault itself.
    """
    text = describe_error(error)  # not `str`, which may raise
    of_peers = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in text
    return not of_peers or fault.what == text


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
