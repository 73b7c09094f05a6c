"""Told to stop, all processes save before the same step; who hears SIGTERM besides."""

import subprocess
import sys
import threading

import pytest

from meshwright.watchdog.failure_detector import State
from meshwright.watchdog.preemption import Preemption


class Stopping:
    """Processes that share states as `Exchange` does, one round at a time."""

    def __init__(self, begun, told):
        self.states = {}
        self.all = [Preemption(number, len(begun)) for number in range(len(begun))]
        for each, steps in zip(self.all, begun, strict=True):
            assert not any(each.reached() for _ in range(steps))
        # The signal is this process's: that one of them has heard of it is enough.
        self.all[told]._signal._arrived = True

    def exchange(self, numbers):
        for number in numbers:
            seen = {p: s for p, s in self.states.items() if number == 0 or p == 0}
            halted, save_before = self.all[number].exchange(seen)
            self.states[number] = State(number, halted=halted, save_before=save_before)

    def close(self):
        for each in reversed(self.all):
            each.close()


@pytest.mark.parametrize("told", [0, 1, 2])
def test_all_save_before_the_step_that_the_foremost_has_not_begun(told):
    job = Stopping(begun=[3, 5, 4], told=told)
    try:
        for _ in range(4):
            job.exchange([0, 1, 2])
        assert {state.save_before for state in job.states.values()} == {5}
        for each, steps in zip(job.all, [3, 5, 4], strict=True):
            assert [each.reached() for _ in range(steps, 6)] == [*[False] * (5 - steps), True]
    finally:
        job.close()


def test_while_one_says_nothing_none_saves():
    job = Stopping(begun=[3, 5, 4], told=1)
    try:
        for _ in range(9):
            job.exchange([0, 1])  # the third has died
        assert [(s.halted, s.save_before) for s in job.states.values()] == [(3, -1), (5, -1)]
        waits = threading.Thread(target=job.all[0].reached, daemon=True)
        waits.start()
        waits.join(0.3)
        assert waits.is_alive()
        job.exchange([2, 0])
        waits.join(10)
        assert not waits.is_alive()
    finally:
        job.close()


HANDLERS = """\
import os, signal, time
from meshwright.watchdog.preemption import Preemption

heard = []
preemption = Preemption(0, 1)
read, write = os.pipe()
if not (child := os.fork()):
    os.write(write, b"!")
    time.sleep(20)
    os._exit(0)
os.read(read, 1)  # a signal at the fork itself is lost
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
preemption.close()
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

own = lambda *_: heard.append("own")
signal.signal(signal.SIGTERM, own)
preemption = Preemption(0, 1)
assert preemption.exchange({}) == (-1, -1)
signal.raise_signal(signal.SIGTERM)
assert (heard, preemption.exchange({})) == (["own"], (0, 0))
preemption.close()
assert signal.getsignal(signal.SIGTERM) == own
"""


def test_a_forked_child_ends_and_a_handler_of_python_is_called_too():
    done = subprocess.run(
        [sys.executable, "-c", HANDLERS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
