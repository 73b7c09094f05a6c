"""Real processes over loopback: arrays move between meshes of any of them, bit for bit."""

import contextlib
import functools
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("reshard_worker.py")
DEADLINE = 120
MOVES = (
    "1 same split",
    "2 other names",
    "3 other order",
    "4 all, 4x2 to 2x4",
    "5 transposed split",
    "6 four shards to two",
    "7 sharded to replicated",
    "8 all to process 1",
    "9 process 0 to all",
    "10 one of each to another",
    "11 one of each, swapped",
    "12 back again",
    "13 one to one",
    "14 replicated to split",
    "15 uneven crowd",
    "16 other grid",
    "5 transposed split, donated",
    "9 process 0 to all, donated",
    "14 replicated to split, donated",
    "large",
    "from hosts",
    "stand-ins",
    "alone",
    "under a mesh",
    "after",
)


@functools.cache
def reports():
    """What each of two processes with four devices printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    end = time.monotonic() + DEADLINE
    with contextlib.ExitStack() as stack:
        running = []
        for me in range(2):
            command = [sys.executable, str(WORKER), *map(str, (port, me, 2, 4))]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append(process)
        done = [process.communicate(timeout=end - time.monotonic()) for process in running]
    errors = "\n".join(error[-4000:] for _, error in done)
    assert [process.returncode for process in running] == [0, 0], errors
    return [json.loads(output.splitlines()[-1]) for output, _ in done]


@pytest.mark.parametrize("move", MOVES)
def test_every_shard_arrives_bit_for_bit(move):
    assert [report[move] for report in reports()] == [[], []]


def test_every_move_is_looked_at():
    for report in reports():
        assert set(report) == {*MOVES, "refusals"}


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        ("spec", "good: dim 0: no mesh axis 'b' in a."),
        ("deleted", "gone: the array was deleted or donated. Use the one it went into."),
        ("other spec", "w: process 1 passed another shape, split, spec or other values"),
        ("other count", "process 1 passed 2 arrays, process 0 passed 1."),
        ("other values", "w: process 1 passed another shape, split, spec or other values"),
        ("own arrays", "a process that holds none of it passes jax.ShapeDtypeStruct("),
    ],
)
def test_both_processes_refuse_with_the_same_words(refusal, text):
    first, second = (report["refusals"][refusal] for report in reports())
    assert first == second
    assert first.startswith("PartitionError: reshard: ")
    assert text in first
