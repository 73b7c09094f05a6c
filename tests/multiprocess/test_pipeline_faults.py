"""When one process of a pipeline fails, all end soon, and say why in one line."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import free_port

WORKER = Path(__file__).with_name("pipeline_fault_worker.py")


def fail(fault):
    """What process 0 said, and how long after the fault of process 1 it ended."""
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
        for line in running[1].stdout:
            if line.startswith("now"):
                break
        began = float(line.split()[1])
        _, said = running[0].communicate(timeout=30)
        took = time.time() - began
    return running[0].returncode, said, took


@pytest.mark.parametrize(
    ("fault", "limit", "word"),
    [("kill", 2, "died"), ("raise", 2, "the data loader broke"), ("stop", 2, "stopped"),
     ("hang", 2 + 5, "")],
)  # fmt: skip
def test_the_other_process_ends_and_names_the_culprit(fault, limit, word):
    code, said, took = fail(fault)
    line = next(line for line in said.splitlines() if line.startswith("meshwright:"))
    assert code == 82
    assert "process 1" in line and word in line
    assert took < limit + 1, took  # a second for the parent, on a busy machine
