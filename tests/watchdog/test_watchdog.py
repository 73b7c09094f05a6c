"""Who is at fault is judged from what is told; in a single process nothing is watched."""

import contextlib
import dataclasses
import errno
import functools
import math
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from meshwright.errors import PipelineError
from meshwright.watchdog import failure_detector, monitor, os_process
from meshwright.watchdog.failure_detector import DONE, GONE, FailureDetector, Fault, State
from meshwright.watchdog.os_process import ExitStatus, Stands
from meshwright.watchdog.watchdog import Watchdog

POLL = 0.2
_, OTHERS_FAULT, MACHINE_ERROR, USER_ERROR, _, ABORTED, _ = ExitStatus


def make_detector(process=0, count=3):
    """A detector to which each identity is its own status."""
    return FailureDetector(process, count, 1.0, status=lambda identity: identity)


def make_states(*changed, turn=0, timeout=60.0, identity=os_process.UNKNOWN):
    """Three processes that beat and move, but for what is changed."""
    states = {
        process: State(process, heartbeat=turn, progress=turn, timeout=timeout, identity=identity)
        for process in range(3)
    }
    return states | {state.process: state for state in changed}


def first_fault(detector, reading, turns=1000):
    """The first fault and the time it took; `reading` gives the states of a turn."""
    for turn in range(turns):
        fault = detector.update(reading(turn), POLL)
        if fault is not None:
            return fault, turn * POLL
    return None, turns * POLL


def test_processes_that_beat_and_move_are_left_alone():
    assert first_fault(make_detector(), lambda turn: make_states(turn=turn))[0] is None


@pytest.mark.parametrize(
    ("identity", "what", "least", "most"),
    [
        (os_process.DEAD, "died, last seen", 0.3, 0.9),
        (os_process.STOPPED, "is stopped (SIGSTOP), last seen", 0.6, 0.8),
        (os_process.UNKNOWN, "gave no sign of life for 1.0 s, last seen", 1.0, 1.2),
        (os_process.ALIVE, "hangs, its interpreter blocked for 60.0 s,", 60.0, 60.3),
    ],
)
def test_silence_is_judged_by_what_the_system_knows(identity, what, least, most):
    silent = State(1, heartbeat=7, doing="1F5", step=17, identity=identity)
    fault, after = first_fault(make_detector(), lambda turn: make_states(silent, turn=turn))
    assert fault == Fault(1, what, "1F5", step=17)
    assert least <= after <= most


def test_last_words_of_a_process_that_is_gone_are_waited_for():
    def reading(turn):
        phase = GONE if turn >= 3 else "running"
        return make_states(State(1, heartbeat=7, identity=os_process.DEAD, phase=phase), turn=turn)

    assert first_fault(make_detector(), reading, 100)[0] is None


def test_a_process_that_is_done_must_still_live():
    done = State(1, heartbeat=7, identity=os_process.DEAD, phase=DONE)
    assert first_fault(make_detector(), lambda turn: make_states(done, turn=turn))[0].process == 1


def test_others_look_only_at_process_0():
    silent = State(1, heartbeat=7, identity=os_process.DEAD)
    assert (
        first_fault(make_detector(2), lambda turn: make_states(silent, turn=turn), 100)[0] is None
    )
    silent = State(0, heartbeat=7, identity=os_process.DEAD)
    assert (
        first_fault(make_detector(2), lambda turn: make_states(silent, turn=turn))[0].process == 0
    )


@pytest.mark.parametrize(
    ("about", "at_fault"),
    [
        (["", "1F5", "1F5 of 1"], Fault(1, "hangs, no progress for 3 s,", "1F5")),
        (["1B5 of 1", "", "1F5 of 1"], Fault(1, "hangs, no progress for 3 s,")),
        (["2F5", "1F5", "1F5 of 1"], Fault(0, "hangs, no progress for 3 s,", "2F5")),
        (["a of 1", None, "b of 1"], Fault(1, "did not start its watchdog, no progress for 3 s,")),
        (["a of 1", DONE, "b of 1"], Fault(1, "had finished, no progress for 3 s,")),
        (["a of 1", "b of 2", "c of 0"], Fault(None, "wait for one another, no progress for 3 s")),
    ],
)
def test_a_hang_is_the_fault_of_who_waits_for_nobody(about, at_fault):
    def reading(turn):
        return {
            process: State(
                process,
                heartbeat=turn,
                timeout=3.0,
                doing=text if "of" not in text and text != DONE else "",
                waiting=text if "of" in text else "",
                phase=DONE if text == DONE else "running",
            )
            for process, text in enumerate(about)
            if text is not None
        }

    fault, after = first_fault(make_detector(), reading)
    assert fault == at_fault
    assert 3 <= after < 3.3


STEP, MAIN = '  File "/me/step.py", line 7 in step', '  File "/me/main.py", line 3 in main'
ELSEWHERE, UNKNOWN, IN_JAX = Stands
HANGS = "hangs, no progress for 3 s,"
SAME = (
    "are in the same place (/me/step.py:7 in step): a device, the network, or a collective that "
    "does not match; no progress for 3 s"
)


def inside(process, **changed):
    """In the fifth step of a loop, waiting in a compiled function."""
    usual = {"doing": "step", "step": 5, "calls": 1, "stack": STEP, "stands": IN_JAX}
    return State(process, in_loop=True, timeout=3.0, **usual | changed)


@pytest.mark.parametrize(
    ("states", "at_fault", "what"),
    [
        # The least progress: a step less, or not yet in this one.
        ([inside(0), inside(1), inside(2, step=4, calls=2)], 2, HANGS),
        ([inside(0), inside(1, doing="", outside="step", calls=0), inside(2)], 1, HANGS),
        ([inside(0, step=6, calls=0), inside(1), inside(2)], 1, HANGS),
        # Code of the program's own, while others wait in JAX, or for something that is said.
        ([inside(0), inside(1, stack=MAIN, stands=ELSEWHERE)], 1, HANGS),
        ([inside(0, stands=UNKNOWN), inside(1)], 0, HANGS),
        ([inside(0, waiting="1F5"), inside(1)], 1, HANGS),
        ([inside(0), inside(1, step=4, doing="", outside="step", moving=True)], 1, HANGS),
        ([inside(0, doing="", outside="step", calls=2), inside(1, stands=ELSEWHERE)], 1, HANGS),
        # Where no other stands.
        ([inside(0), inside(1, stack=MAIN), inside(2)], 1, HANGS),
        ([inside(0), inside(1)], None, SAME),
        ([inside(0), inside(1, stack=MAIN)], None, "hang, each in another place, no progress for"),
        ([inside(0)], 0, HANGS),
        # Nothing was ever said to the watchdogs: by stacks.
        (
            [
                State(0, by_stacks=True, timeout=3.0, stack=STEP, stands=IN_JAX),
                State(1, by_stacks=True, timeout=3.0, stack=MAIN, stands=ELSEWHERE),
            ],
            1,
            HANGS,
        ),
        ([inside(0), None], 1, "did not start its watchdog, no progress"),
    ],
)
def test_a_hang_in_a_loop_is_the_fault_of_who_keeps_the_others(states, at_fault, what):
    def reading(turn):
        return {
            state.process: dataclasses.replace(state, heartbeat=turn) for state in states if state
        }

    fault, after = first_fault(make_detector(count=len(states)), reading)
    assert (fault.process, 3 <= after < 3.5) == (at_fault, True)
    assert fault.what.startswith(what)
    if fault.process is not None and states[at_fault]:
        assert fault.stack == states[at_fault].stack


def test_a_silent_interpreter_comes_before_the_least_progress():
    def reading(turn):
        beats = {0: turn, 1: min(turn, 2), 2: turn}
        states = inside(0), inside(1), inside(2, step=4)
        return {s.process: dataclasses.replace(s, heartbeat=beats[s.process]) for s in states}

    detector = FailureDetector(0, 3, 1.0, status=lambda identity: os_process.ALIVE)
    fault, _ = first_fault(detector, reading)
    assert fault.process == 1
    assert fault.what.startswith("hangs, its interpreter blocked for ")


def test_what_all_do_outside_of_the_step_and_the_compiler_are_no_hang():
    outside = {"doing": "", "outside": "step", "calls": 2}
    for healthy in (
        {**outside, "stands": ELSEWHERE},
        {**outside, "moving": True},
        {"compiling": True},
    ):
        states = [inside(process, **healthy) for process in range(2)]

        def reading(turn, states=states):
            return {s.process: dataclasses.replace(s, heartbeat=turn) for s in states}

        assert first_fault(make_detector(count=2), reading, 100)[0] is None


def test_the_line_names_host_and_time_and_the_stack_comes_with_it():
    states = {0: inside(0, host="a"), 1: inside(1, host="b", since=1.0, stack=MAIN)}
    fault = failure_detector.fault_of(states[1], HANGS, stack=MAIN)
    fault = failure_detector.with_others(fault, states)
    again = failure_detector.decode_fault(failure_detector.encode(fault))
    clock = time.strftime("%H:%M:%S", time.localtime(1.0))
    assert failure_detector.message(again) == (
        f"meshwright: process 1 on b hangs, no progress for 3 s, in step since {clock} (step 5); "
        "process 0 in step. All end."
    )
    assert failure_detector.stack_text(again) == (
        f"Process 1 stands here on b, most recent call first:\n{MAIN}\n"
    )


def test_a_thread_that_waits_in_a_compiled_function_is_told_from_one_of_the_program():
    seen = {}

    def host(x):
        frame = sys._getframe()
        seen["callback"] = os_process._in_callback(frame)
        while frame.f_code is not caller.__code__:
            frame = frame.f_back
        seen["caller"] = os_process._stands(frame)
        seen["kept"] = "x" in frame.f_locals
        return x

    compiled = jax.jit(lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((), "float32"), x))

    def caller(x):
        return compiled(x)

    jax.block_until_ready(caller(jax.numpy.float32(1)))
    assert seen == {"callback": True, "caller": IN_JAX, "kept": True}
    held, released = threading.Lock(), threading.Thread(target=lambda: held.acquire())
    with held:
        released.start()
        assert until(lambda: os_process.standing(released.ident).stands == ELSEWHERE)
    released.join()


def planned(process, step, plan="plan 0", phase="running"):
    return State(process, heartbeat=1, waiting="more", step=step, plan=plan, phase=phase)


@pytest.mark.parametrize(
    ("states", "at_fault"),
    [
        ([(0, 5), (1, 4, "plan 0", DONE)], "left before the others, last seen"),
        ([(0, 4, "plan 0", DONE), (1, 5)], "left before the others, last seen"),
        ([(0, 0), (1, None, "", DONE)], "left before the others, last seen"),
        ([(0, 5), (1, 5, "plan 1 (x)")], "came with plan 1 (x) and process 0 with plan 0,"),
        ([(0, 5), (1, 4), (2, 6)], None),
        ([(0, 5), (1, 5, "plan 0", DONE)], None),
        ([(0, 5), (1, 4, "plan 1")], None),
        ([(0, 5, ""), (1, 4, "", DONE)], None),
        ([(0, 5), (1, 5, "plan 1"), (2, 5, "plan 1")], "came with plan 0 and process 1 with plan"),
    ],
)
def test_steps_with_a_plan_are_made_together(states, at_fault):
    snapshot = {state[0]: planned(*state) for state in states}
    detector = make_detector(count=len(states))
    assert detector.update(snapshot, POLL) is None  # seen once, they may not have said all yet
    fault = detector.update(snapshot, POLL)
    assert (fault and fault.what) == at_fault or fault.what.startswith(at_fault)


def test_who_leaves_a_loop_early_is_told_at_once():
    left = inside(1, step=None, reached=4, phase=DONE)
    done = inside(1, step=None, reached=5, phase=DONE)
    for state, at_fault in ((left, 1), (done, None)):
        fault = failure_detector.step_mismatch({0: inside(0), 1: state})
        assert (fault and (fault.process, fault.status)) == (at_fault and (at_fault, USER_ERROR))


def test_nobody_hangs_while_one_moves_or_all_are_outside_of_tasks():
    waiting = [State(process, heartbeat=1, waiting="more", timeout=3.0) for process in (0, 2)]
    alive = {"timeout": 3.0, "identity": os_process.ALIVE}
    moving = first_fault(
        make_detector(), lambda turn: make_states(waiting[0], turn=turn, **alive), 100
    )
    resting = first_fault(make_detector(), lambda turn: make_states(turn=0, **alive), 14)
    assert (moving[0], resting[0]) == (None, None)


def test_the_largest_timeout_counts():
    def reading(turn):
        return {
            0: State(0, heartbeat=turn, waiting="1F0", timeout=3.0),
            1: State(1, heartbeat=turn, doing="compiling", timeout=math.inf),
        }

    assert first_fault(make_detector(count=2), reading)[0] is None


def test_what_is_told_survives_the_store_on_one_short_line():
    state = State(1, 2, 3, "a\nb", "x" * 1000, 4, math.inf, "here", DONE)
    again = failure_detector.decode_state(failure_detector.encode(state))
    assert (again.doing, again.timeout, len(again.waiting)) == ("a b", math.inf, 200)
    fault = Fault(None, "wait")
    assert failure_detector.decode_fault(failure_detector.encode(fault)) == fault


def test_the_line_does_not_grow_with_the_number_of_processes():
    crowd = {process: State(process, waiting="1F5 of process 1") for process in range(1000)}
    fault = failure_detector.with_others(Fault(1, "died, last seen"), crowd)
    line = failure_detector.message(failure_detector.decode_fault(failure_detector.encode(fault)))
    assert line.startswith("meshwright: process 1 died, last seen outside of a task; process 0 ")
    assert line.endswith("and 993 more. All end.")
    assert len(line) < 500


def test_an_error_whose_text_fails_is_still_named():
    class HostileError(Exception):
        def __str__(self):
            raise RuntimeError

    assert monitor.describe_error(ValueError("No luck.")) == "raised ValueError: No luck"
    assert (
        monitor.describe_error(HostileError())
        == "raised HostileError: <whose text raised RuntimeError>"
    )
    assert monitor.says_more(HostileError(), Fault(1, "died"))
    gloo = ValueError("Gloo all-reduce failed: connection closed by peer")
    assert not monitor.says_more(gloo, Fault(1, "died"))
    assert monitor.says_more(gloo, Fault(0, monitor.describe_error(gloo)))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_system_tells_the_living_from_the_stopped_and_the_dead():
    tell = (
        "import ctypes, threading\n"
        "from meshwright.watchdog import os_process\n"
        "dump = os_process.StackDump()\n"
        "print(os_process.identity(), dump.address, threading.get_ident(), sep='|', flush=True)\n"
        "def block():\n"
        "    while True: ctypes.PyDLL(None).pause()\n"  # it keeps the interpreter to itself
        "block()"
    )
    command = [sys.executable, "-c", tell]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(child.kill)
        identity, address, thread = child.stdout.readline().strip().split("|")
        assert os_process.status(identity) == os_process.ALIVE
        stack_of = functools.partial(os_process.blocked_stack, identity, address, int(thread))
        assert until(lambda: " in block\n" in stack_of())  # it may not have come there yet
        child.send_signal(signal.SIGSTOP)
        assert until(lambda: os_process.status(identity) == os_process.STOPPED)
        child.kill()
        assert until(lambda: os_process.status(identity) == os_process.DEAD)
    assert os_process.status(identity) == os_process.DEAD
    assert os_process.status("") == os_process.status("moon 1 2 3 0") == os_process.UNKNOWN


def until(holds):
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        pass
    return holds()


@pytest.mark.skipif(sys.platform != "linux", reason="needs GNU's libc")
def test_a_trap_springs_once_and_leaves_nothing_behind():
    before = os_process._get_action(signal.SIGTERM).handler
    trap = os_process.SignalTrap(signal.SIGTERM, "abs")
    assert not trap.triggered
    os.kill(os.getpid(), signal.SIGTERM)
    assert until(lambda: trap.triggered)
    trap.restore()
    assert os_process._get_action(signal.SIGTERM).handler == before
    assert not trap.triggered


@pytest.mark.skipif(sys.platform != "linux", reason="needs GNU's libc")
def test_a_trap_gives_way_to_a_handler_that_is_set_later():
    trap = os_process.SignalTrap(signal.SIGTERM, "abs")
    default = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert not trap.triggered
    signal.signal(signal.SIGTERM, noticed)
    assert not os_process.unhandled(signal.SIGTERM)
    trap.restore()
    assert signal.getsignal(signal.SIGTERM) is noticed
    signal.signal(signal.SIGTERM, default)
    assert os_process.unhandled(signal.SIGTERM)


def noticed(number, frame):
    """A handler."""


def test_a_process_alone_keeps_its_signals_and_errors():
    action = os_process._get_action(signal.SIGABRT).handler if sys.platform == "linux" else None
    with Watchdog() as watch:
        watch.step, watch.waiting = 1, "0F0"
        assert repr(watch) == "<Watchdog 'run': waiting for 0F0 (step 1)>"
        watch.doing = "1F0"
        assert (watch.doing, watch.waiting, watch.step) == ("1F0", "", 1)
        if sys.platform == "linux":
            assert os_process._get_action(signal.SIGABRT).handler == action
    with pytest.raises(KeyError, match="as usual"), Watchdog():
        raise KeyError("as usual")
    with pytest.raises(PipelineError, match="started before"):
        watch.start()


def test_a_checked_step_is_named_by_shapes_and_program():
    watch = Watchdog(check_steps=True)

    def plan(function, *args):
        watch.wrap(jax.jit(function))(*args)
        return watch._step_and_plan[1]

    def step(x):
        return jax.numpy.sin(x)

    small, large = jax.numpy.ones(2), jax.numpy.ones(3)
    named = [plan(step, small), plan(step, small), plan(step, large)]
    assert named[0] == named[1] != named[2]
    assert named[2].startswith("step(float32[3]), 1 operations, checksum ")

    def step(x):
        return jax.lax.cond(x[0] > 0, jax.numpy.tanh, jax.numpy.cos, x)

    def other():
        def step(x):
            return jax.lax.cond(x[0] > 0, jax.numpy.tanh, jax.numpy.sinh, x)

        return step

    assert plan(step, small) != plan(other(), small)  # only inside of a branch


def test_a_process_alone_saves_before_the_next_step_though_told_twice():
    saved, before = [], signal.getsignal(signal.SIGTERM)
    with Watchdog(on_preemption="save", save=lambda: saved.append(watch.step)) as watch:

        @watch.wrap
        def step(x):
            for _ in range(2 if x == 3 else 0):
                signal.raise_signal(signal.SIGTERM)

        with pytest.raises(SystemExit) as end:
            for x in range(9):
                step(x)
    assert (saved, end.value.code) == ([4], 75)
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_a_loop_says_is_checked():
    watch = Watchdog()
    with pytest.raises(PipelineError, match=r"Watchdog.wrap: 3 is not a function"):
        watch.wrap(3)
    for number in ("one", 1.0, True, jax.numpy.int32(1)):
        with pytest.raises(PipelineError, match=r"step .* is a .*\. Use an integer") as error:
            watch.step = number
        assert error.value.option == "step"
    watch.step = np.int64(7)
    assert type(watch.step) is int


def test_the_repr_is_short_however_long_the_task():
    watch = Watchdog()
    watch.doing, watch.waiting = "x" * 1000, "y" * 1000
    assert len(repr(watch)) <= 200


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"timeout": 0}, "timeout: 0 is not a number of seconds above 0"),
        ({"timeout": "1"}, "timeout: '1' is not a number"),
        ({"sigterm": "no"}, "sigterm: 'no' is not True or False"),
        ({"heartbeat_timeout": math.nan}, "heartbeat_timeout: nan is not a number"),
        ({"name": "a/b"}, "name 'a/b': use a word without '/'"),
        ({"on_preemption": "stay"}, "on_preemption 'stay': use 'exit' or 'save'"),
        ({"on_preemption": "save", "save": None}, "save None with on_preemption='save': give a"),
        ({"save": print}, "save <built-in function print> with on_preemption='exit': give a"),
        ({"check_steps": 1}, "check_steps: 1 is not True or False"),
    ],
)
def test_options_are_checked(options, text):
    with pytest.raises(PipelineError, match=text) as error:
        Watchdog(**options)
    assert error.value.option in options


def test_the_exit_status_is_the_one_asked_for():
    errors = [ValueError(), KeyboardInterrupt(), SystemExit(3), SystemExit("why")]
    assert [os_process.exit_status(error) for error in errors] == [83, 130, 3, 83]
    # A machine's errors may go well when the job runs again; the program's do not.
    lost = jax.errors.JaxRuntimeError("UNAVAILABLE: a peer")
    wrong = jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shapes")
    errors = [lost, ConnectionResetError(), OSError(errno.EIO, "disk"), wrong, FileNotFoundError()]
    assert [os_process.exit_status(error) for error in errors] == [82, 82, 82, 83, 83]
    assert OTHERS_FAULT < MACHINE_ERROR < USER_ERROR < ABORTED  # schedulers report the greatest


def test_a_timeout_that_is_set_later_is_checked_too():
    watchdog = Watchdog(timeout=5)
    for nonsense in ("x", -1, None):
        with pytest.raises(PipelineError, match=r"timeout: .* is not a number of seconds above 0"):
            watchdog.timeout = nonsense
    assert watchdog.timeout == 5
