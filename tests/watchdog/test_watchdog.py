"""Who is at fault is judged from what is told; in a single process nothing is watched."""

import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from meshwright.errors import PipelineError
from meshwright.watchdog import failure_detector, monitor, os_process
from meshwright.watchdog.failure_detector import DONE, GONE, Fault, Judge, State
from meshwright.watchdog.watchdog import Watchdog

POLL = 0.2


def judge(process=0, count=3, conditions=None):
    """A judge to whom each place is its own condition."""
    return Judge(process, count, 1.0, condition=lambda place: place)


def told(*changed, turn=0, limit=60.0, place=os_process.UNKNOWN):
    """Three processes that beat and move, but for what is changed."""
    found = {
        process: State(process, beat=turn, moves=turn, limit=limit, place=place)
        for process in range(3)
    }
    return found | {state.process: state for state in changed}


def first_fault(judge, reading, turns=1000):
    """The first fault and the time it took; `reading` gives the states of a turn."""
    for turn in range(turns):
        fault = judge.look(reading(turn), POLL)
        if fault is not None:
            return fault, turn * POLL
    return None, turns * POLL


def test_processes_that_beat_and_move_are_left_alone():
    assert first_fault(judge(), lambda turn: told(turn=turn))[0] is None


@pytest.mark.parametrize(
    ("place", "what", "least", "most"),
    [
        (os_process.DEAD, "died, last seen", 0.3, 0.9),
        (os_process.STOPPED, "is stopped (SIGSTOP), last seen", 1.0, 1.2),
        (os_process.UNKNOWN, "gave no sign of life for 1.0 s, last seen", 1.0, 1.2),
        (os_process.ALIVE, "hangs, its interpreter blocked for 60.0 s,", 60.0, 60.3),
    ],
)
def test_silence_is_judged_by_what_the_system_knows(place, what, least, most):
    silent = State(1, beat=7, doing="1F5", step=17, place=place)
    fault, after = first_fault(judge(), lambda turn: told(silent, turn=turn))
    assert fault == Fault(1, what, "1F5", step=17)
    assert least <= after <= most


def test_last_words_of_a_process_that_is_gone_are_waited_for():
    def reading(turn):
        phase = GONE if turn >= 3 else "running"
        return told(State(1, beat=7, place=os_process.DEAD, phase=phase), turn=turn)

    assert first_fault(judge(), reading, 100)[0] is None


def test_a_process_that_is_done_must_still_live():
    done = State(1, beat=7, place=os_process.DEAD, phase=DONE)
    assert first_fault(judge(), lambda turn: told(done, turn=turn))[0].process == 1


def test_others_look_only_at_process_0():
    silent = State(1, beat=7, place=os_process.DEAD)
    assert first_fault(judge(2), lambda turn: told(silent, turn=turn), 100)[0] is None
    silent = State(0, beat=7, place=os_process.DEAD)
    assert first_fault(judge(2), lambda turn: told(silent, turn=turn))[0].process == 0


@pytest.mark.parametrize(
    ("about", "culprit"),
    [
        (["", "1F5", "1F5 of 1"], Fault(1, "hangs, no progress for 3 s,", "1F5")),
        (["1B5 of 1", "", "1F5 of 1"], Fault(1, "hangs, no progress for 3 s,")),
        (["2F5", "1F5", "1F5 of 1"], Fault(0, "hangs, no progress for 3 s,", "2F5")),
        (["a of 1", None, "b of 1"], Fault(1, "did not begin its watch, no progress for 3 s,")),
        (["a of 1", DONE, "b of 1"], Fault(1, "had finished, no progress for 3 s,")),
        (["a of 1", "b of 2", "c of 0"], Fault(None, "wait for one another, no progress for 3 s")),
    ],
)
def test_a_hang_is_the_fault_of_who_waits_for_nobody(about, culprit):
    def reading(turn):
        return {
            process: State(
                process,
                beat=turn,
                limit=3.0,
                doing=text if "of" not in text and text != DONE else "",
                waiting=text if "of" in text else "",
                phase=DONE if text == DONE else "running",
            )
            for process, text in enumerate(about)
            if text is not None
        }

    fault, after = first_fault(judge(), reading)
    assert fault == culprit
    assert 3 <= after < 3.3


def planned(process, step, plan="plan 0", phase="running"):
    return State(process, beat=1, waiting="more", step=step, plan=plan, phase=phase)


@pytest.mark.parametrize(
    ("states", "culprit"),
    [
        ([(0, 5), (1, 4, "plan 0", DONE)], "left before the others, last seen"),
        ([(0, 4, "plan 0", DONE), (1, 5)], "left before the others, last seen"),
        ([(0, 0), (1, None, "", DONE)], "left before the others, last seen"),
        ([(0, 5), (1, 5, "plan 1 (x)")], "came with plan 1 (x) and process 0 with plan 0,"),
        ([(0, 5), (1, 4), (2, 6)], None),
        ([(0, 5), (1, 5, "plan 0", DONE)], None),
        ([(0, 5), (1, 4, "plan 1")], None),
        ([(0, 5, ""), (1, 4, "", DONE)], None),
    ],
)
def test_steps_with_a_plan_are_made_together(states, culprit):
    found = {state[0]: planned(*state) for state in states}
    one = judge(count=len(states))
    assert one.look(found, POLL) is None  # seen once, they may not have said all yet
    fault = one.look(found, POLL)
    assert (fault and fault.what) == culprit


def test_nobody_hangs_while_one_moves_or_all_are_outside_of_tasks():
    waiting = [State(process, beat=1, waiting="more", limit=3.0) for process in (0, 2)]
    alive = {"limit": 3.0, "place": os_process.ALIVE}
    moving = first_fault(judge(), lambda turn: told(waiting[0], turn=turn, **alive), 100)
    resting = first_fault(judge(), lambda turn: told(turn=0, **alive), 14)
    assert (moving[0], resting[0]) == (None, None)


def test_the_largest_limit_counts():
    def reading(turn):
        return {
            0: State(0, beat=turn, waiting="1F0", limit=3.0),
            1: State(1, beat=turn, doing="compiling", limit=math.inf),
        }

    assert first_fault(judge(count=2), reading)[0] is None


def test_what_is_told_survives_the_store_on_one_short_line():
    state = State(1, 2, 3, "a\nb", "x" * 1000, 4, math.inf, "here", DONE)
    again = failure_detector.read_state(failure_detector.write(state))
    assert (again.doing, again.limit, len(again.waiting)) == ("a b", math.inf, 200)
    fault = Fault(None, "wait")
    assert failure_detector.read_fault(failure_detector.write(fault)) == fault


def test_the_line_does_not_grow_with_the_number_of_processes():
    crowd = {process: State(process, waiting="1F5 of process 1") for process in range(1000)}
    line = failure_detector.line(Fault(1, "died, last seen"), crowd)
    assert line.startswith("meshwright: process 1 died, last seen outside of a task; process 0 ")
    assert line.endswith("and 993 more. All end.")
    assert len(line) < 500


def test_an_error_whose_text_fails_is_still_named():
    class HostileError(Exception):
        def __str__(self):
            raise RuntimeError

    assert failure_detector.raised(ValueError("No luck.")) == "raised ValueError: No luck"
    assert (
        failure_detector.raised(HostileError())
        == "raised HostileError: <whose text raised RuntimeError>"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_system_tells_the_living_from_the_stopped_and_the_dead():
    tell = (
        "from meshwright.watchdog import os_process; print(os_process.place(), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", tell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        place = child.stdout.readline().strip()
        assert os_process.condition(place) == os_process.ALIVE
        child.send_signal(signal.SIGSTOP)
        assert until(lambda: os_process.condition(place) == os_process.STOPPED)
        child.kill()
        assert until(lambda: os_process.condition(place) == os_process.DEAD)
    assert os_process.condition(place) == os_process.DEAD
    assert os_process.condition("") == os_process.condition("moon 1 2 3 0") == os_process.UNKNOWN


def until(holds):
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        pass
    return holds()


@pytest.mark.skipif(sys.platform != "linux", reason="needs GNU's libc")
def test_a_trap_springs_once_and_leaves_nothing_behind():
    before = os_process._action(signal.SIGTERM).handler
    trap = os_process.Trap(signal.SIGTERM, "abs")
    assert not trap.sprung
    os.kill(os.getpid(), signal.SIGTERM)
    assert until(lambda: trap.sprung)
    trap.restore()
    assert os_process._action(signal.SIGTERM).handler == before
    assert not trap.sprung


@pytest.mark.skipif(sys.platform != "linux", reason="needs GNU's libc")
def test_a_trap_gives_way_to_a_handler_that_is_set_later():
    trap = os_process.Trap(signal.SIGTERM, "abs")
    default = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert not trap.sprung
    signal.signal(signal.SIGTERM, noticed)
    assert not os_process.unhandled(signal.SIGTERM)
    trap.restore()
    assert signal.getsignal(signal.SIGTERM) is noticed
    signal.signal(signal.SIGTERM, default)
    assert os_process.unhandled(signal.SIGTERM)


def noticed(number, frame):
    """A handler."""


def test_a_single_process_is_not_watched():
    threads = threading.active_count()
    action = os_process._action(signal.SIGABRT).handler if sys.platform == "linux" else None
    with Watchdog(limit=0.01) as watch:
        watch.step, watch.waiting = 1, "0F0"
        assert repr(watch) == "<Watchdog 'run': waiting for 0F0 (step 1)>"
        watch.doing = "1F0"
        assert (watch.doing, watch.waiting, watch.step) == ("1F0", "", 1)
        assert threading.active_count() == threads
        if sys.platform == "linux":
            assert os_process._action(signal.SIGABRT).handler == action
    with pytest.raises(KeyError, match="as usual"), Watchdog():
        raise KeyError("as usual")
    with pytest.raises(PipelineError, match="started before"):
        watch.start()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"limit": 0}, "limit 0: use a number of seconds"),
        ({"limit": "1"}, "limit '1': use a number"),
        ({"silence": math.nan}, "silence nan: use a number"),
        ({"name": "a/b"}, "name 'a/b': use a word without '/'"),
    ],
)
def test_options_are_checked(options, text):
    with pytest.raises(PipelineError, match=text):
        Watchdog(**options)


def test_the_exit_status_is_the_one_asked_for():
    errors = [ValueError(), KeyboardInterrupt(), SystemExit(3), SystemExit("why")]
    assert [monitor.code_of(error) for error in errors] == [81, 130, 3, 81]
