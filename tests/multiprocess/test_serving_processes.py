"""The example of serving: a process reads prompts, another writes answers, the cache goes over."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import in_time

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving.py"
pytestmark = pytest.mark.slow


def run(*words):
    command = [sys.executable, *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # those that it has started, too
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def test_two_processes_write_the_tokens_of_one_device():
    done = in_time(lambda: run(EXAMPLE, "--processes", 2), lambda done: done.returncode == 0)
    assert (done.returncode, done.stderr) == (0, "")
    assert "384 tokens: equal to one device's without a cache\n" in done.stdout
    assert "\nprocess 0 to 1: 3 MiB\n" in done.stdout
    moved = r"\nthe cache of 8 prompts, 3\.00 MiB, between processes: [\d.]+ ms, [\d.]+ GiB/s "
    assert re.search(moved, done.stdout)


def test_a_cache_that_is_lost_on_the_way_is_noticed():
    code = """
import sys
import jax, jax.numpy as jnp
sys.path.insert(0, sys.argv.pop())
import serving
whole = serving.prefill_step
def lost(params, prompt):
    state = whole(params, prompt)
    return state | {"cache": jax.tree.map(jnp.zeros_like, state["cache"])}
serving.prefill_step = lost
serving.main()
"""
    done = run("-c", code, EXAMPLE.parent)
    assert done.returncode == 1
    assert done.stderr == "the groups' tokens are not those of one device\n"
