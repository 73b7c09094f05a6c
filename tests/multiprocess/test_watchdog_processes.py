"""Real processes over loopback: when one fails, all end in time, with a line that says why."""

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest
import watch_worker
from launching import in_time
from ports import free_port

COUNT, DEADLINE, TURN = 3, 60, watch_worker.TURN
OTHERS, MACHINE, USER = 81, 82, 83
KILL, STOP, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
FAR_HOST = ("cannot be reached, though", "did not answer for ", "gave no sign of life, last seen")
FOR_GOOD = "stays until the test ends it"


@pytest.fixture(scope="module")
def start():
    """Starts processes from one that has imported everything, which saves seconds for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "meshwright.watchdog.watchdog"])
    return context.Process


@dataclasses.dataclass
class Ended:
    code: int
    after: float  # seconds since the fault
    errors: str
    word: str = ""

    @property
    def line(self) -> str:
        """Ours, if it is the only one, and the last of all."""
        lines = self.errors.splitlines()
        ours = [line for line in lines if line.startswith("meshwright:")]
        return ours[0] if len(ours) == 1 and lines[-1] == ours[0] else ""


def run(start, what, victim=None, number=0, timeout=60.0) -> list[Ended]:
    """Three processes; one of them fails by itself, or gets a signal. How each ended."""
    port = free_port()
    far = "far" if what.startswith("far") else ""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(me)) for me in range(COUNT)]
        pipes = [multiprocessing.Pipe() for _ in files]
        running = [
            start(
                target=watch_worker.main,
                args=(
                    port,
                    me,
                    COUNT,
                    what if me == victim else far,
                    timeout,
                    str(files[me]),
                    pipes[me][1],
                ),
            )
            for me in range(COUNT)
        ]
        for process in running:
            process.start()
        try:
            if victim is not None:
                assert pipes[victim][0].poll(DEADLINE), files[victim].read_text()
            failed = time.monotonic()
            if number:
                os.kill(running[victim].pid, number)
            lasting = {running[victim]} if what == "blocks" else set()
            times = until_ended(set(running) - lasting)  # a stopped one is made to go on
        finally:
            for process in running:
                process.kill()
                process.join(DEADLINE)
        return [
            Ended(
                process.exitcode,
                times.get(process, time.monotonic()) - failed,
                files[me].read_text(),
                pipes[me][0].recv() if pipes[me][0].poll() else "",
            )
            for me, process in enumerate(running)
        ]


def until_ended(running) -> dict:
    """When each ended."""
    times = {}
    end = time.monotonic() + DEADLINE
    while len(times) < len(running) and time.monotonic() < end:
        waiting = {process.sentinel: process for process in running if process not in times}
        for sentinel in multiprocessing.connection.wait(waiting, end - time.monotonic()):
            times[waiting[sentinel]] = time.monotonic()
    return times


FAULTS = {
    # name: (what it does, who, signal, timeout, how it is said, the victim's exit status)
    "killed": ("sleeps", 1, KILL, 60.0, "died, last seen", -KILL),
    "process 0 killed": ("sleeps", 0, KILL, 60.0, "died, last seen", -KILL),
    "raises": ("raises", 2, 0, 60.0, "raised ValueError: no luck, none at all", USER),
    "process 0 raises": ("raises", 0, 0, 60.0, "raised ValueError: no luck,", USER),
    "stopped": ("sleeps", 1, STOP, 60.0, "is stopped (SIGSTOP), last seen", MACHINE),
    "process 0 stopped": ("sleeps", 0, STOP, 60.0, "is stopped (SIGSTOP), last seen", MACHINE),
    "far, killed": ("far, sleeps", 1, KILL, 60.0, "gave no sign of life for 1.", -KILL),
    "far, process 0 killed": ("far, sleeps", 0, KILL, 60.0, FAR_HOST, -KILL),
    "far, raises": ("far, raises", 2, 0, 60.0, "raised ConnectionError: of its own", MACHINE),
    "hangs": ("sleeps", 1, 0, 3.0, "hangs, no progress for 3 s,", MACHINE),
    "blocks": ("blocks", 1, 0, 3.0, "hangs, its interpreter blocked for ", FOR_GOOD),
    "told": ("sleeps", 1, TERM, 60.0, "was told to stop (SIGTERM)", 128 + TERM),
    "aborts": ("aborts", 2, 0, 60.0, "aborted (SIGABRT)", 134),
    "aborts, blocked": ("aborts, blocked", 2, 0, 60.0, "died, last seen", -signal.SIGABRT),
}


QUICK = ("process 0 killed", "raises", "stopped", "hangs", "told", "aborts")


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in FAULTS],
)
def test_all_end_in_time_and_say_why(start, fault):
    what, victim, number, timeout, _, status = FAULTS[fault]
    ended = in_time(
        lambda: run(start, what, victim, number, timeout), lambda ended: not wrong(fault, ended)
    )
    assert not wrong(fault, ended), "\n".join(end.errors[-3000:] for end in ended)
    if status != FOR_GOOD:
        assert ended[victim].code == status, ended[victim].errors[-3000:]
    if what == "raises":
        assert "Traceback" in ended[victim].errors
        assert "\nValueError: no luck,\nnone at all\n" in ended[victim].errors
        assert ended[victim].line == ended[2 - victim].line


def wrong(fault, ended) -> list[str]:
    """What the others got wrong. On a busy machine one may be late, or miss another, once."""
    _, victim, number, timeout, said, _ = FAULTS[fault]
    found = []
    task = rf" in {victim}F{TURN} since \d\d:\d\d:\d\d \(step {TURN}\); process "
    for me, end in enumerate(ended):
        if me == victim:
            if number == STOP and end.after > 4:
                found.append("the stopped process: time")
            continue
        before = (me - 1) % COUNT
        waited = f"{before}F{TURN + (0 < me < victim)} of process {before}"
        # JAX speaks first where process 0 is gone at once.
        alone = end.errors == f"{end.line}\n" or (number == KILL and victim == 0)
        if timeout != 60:  # a hang: the stack of the victim comes first
            stands = f"Process {victim} stands here on "
            alone = end.errors.startswith(stands) and " in happen\n" in end.errors
        right = {
            "status": end.code == OTHERS,
            "time": end.after < (2 if timeout == 60 else timeout + 5),
            "how": end.line.removeprefix(f"meshwright: process {victim} ").startswith(said),
            "task": bool(re.search(task, end.line)),
            "wait": f"process {me} waited for {waited}" in end.line,
            "only line": alone,
        }
        found += [f"process {me}: {what}" for what, holds in right.items() if not holds]
    return found


def test_nobody_is_missed_after_a_clean_end_and_nothing_is_left_behind(start):
    for end in run(start, ""):
        assert (end.code, end.word, end.errors) == (0, "restored", "")
