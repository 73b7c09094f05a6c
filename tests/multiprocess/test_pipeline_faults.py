"""When one process of a pipeline fails, all end soon, and say why in one line."""

import contextlib
import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import in_time
from ports import free_port

WORKER = Path(__file__).with_name("pipeline_fault_worker.py")
OTHERS, USER_ERROR, DEADLINE = 81, 83, 120
WAITED = "; process 0 waited for 1BW0 of group 1 (process 1). All end."


@dataclasses.dataclass
class Ended:
    code: int
    said: str
    after: float  # seconds since the fault

    @property
    def line(self) -> str:
        return "".join(self.said.splitlines(keepends=True)[-1:])


def run(fault) -> list[Ended]:
    """Two processes, of which process 1 goes wrong."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        running = []
        for me in range(2):
            command = [sys.executable, str(WORKER), str(port), str(me), "2", fault]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append(process)
        began = float(running[1].stdout.readline() or 0)
        ended = []
        for process in running:
            _, said = process.communicate(timeout=DEADLINE)
            ended.append(Ended(process.returncode, said, time.time() - began))
    return ended


OUTSIDE = " outside of a task (step 2)"
FAULTS = {
    # what process 1 does: seconds to the end, how it is said
    "kill": (2, f"died, last seen{OUTSIDE}"),
    "raise": (2, f"raised ValueError: the data loader broke{OUTSIDE}"),
    "bare raise": (2, f"raised ValueError: the data loader broke{OUTSIDE}"),
    "stop": (2, f"is stopped (SIGSTOP), last seen{OUTSIDE}"),
    "hang": (2 + 5, f"hangs, no progress for 2 s,{OUTSIDE}"),
    "leave": (2, f"left before the others, last seen{OUTSIDE}"),
    "bare leave": (2, f"left before the others, last seen{OUTSIDE}"),
    "timeline": (
        2,
        "came with plan 0 (its timeline) and process 0 with plan 0, "
        "waiting for a timeline's begin of process 0 (step 3)",
    ),
    "order": (  # two pipelines, called in another order
        2,
        "came with plan 0 of pipeline 1 and process 0 with plan 0, in the compiler (step 3)",
    ),
    "shape": (
        2,  # before it is compiled
        "came with plan 1 (argument 1: float32[8,4]) and process 0 with plan 0, "
        "in the compiler (step 3)",  # or soon after, waiting
    ),
}


QUICK = ("kill", "raise", "hang")


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in FAULTS],
)
def test_the_other_process_ends_in_time_and_says_one_line(fault):
    limit, how = FAULTS[fault]
    line = f"meshwright: process 1 {how}{WAITED}\n"
    later = line.replace("in the compiler", "waiting for the plan of process 0")
    ended = in_time(
        lambda: run(fault), lambda ended: ended[0].line in (line, later) and ended[0].after < limit
    )
    assert ended[0].line in (line, later)
    # A hang shows the stack of process 1 first.
    assert (ended[0].said == ended[0].line) == (" in go_wrong\n" not in ended[0].said)
    assert (ended[0].said == ended[0].line) == (fault != "hang")
    assert ended[0].code == OTHERS
    assert ended[0].after < limit
    if fault != "kill":
        assert ended[1].said.endswith(ended[0].said)
        # JAX may log first that process 0, where its service runs, is gone.
        said = re.sub(r"(?s)^[WE]\d{4} .*?(?=^meshwright: )", "", ended[1].said, flags=re.M)
        assert (said == ended[0].said) == ("raise" not in fault)


def test_another_program_is_refused_by_every_process():
    ended = run("program")
    for end in ended:
        assert "PipelineError: the processes do not run the same step: task " in end.said
        assert " sin, " in end.said and " tanh, " in end.said
        assert end.said.splitlines()[-1].startswith("meshwright: process ")
    assert sorted(end.code for end in ended) == [OTHERS, USER_ERROR]


def test_data_that_differ_are_refused_by_every_process():
    for end in run("values"):
        assert "do not run the same step: values of argument 1 (all pass the same): " in end.said


def test_what_is_no_fault_goes_on():
    assert [(end.code, end.said) for end in run("goes on")] == [(0, ""), (0, "")]


@pytest.mark.slow
def test_a_step_that_nobody_closes_ends_quietly():
    assert [(end.code, end.said) for end in run("bare")] == [(0, ""), (0, "")]
