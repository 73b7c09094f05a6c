"""Real processes over loopback: arrays move between meshes of any of them, bit for bit."""

from pathlib import Path

import pytest
from launching import launch

WORKER = Path(__file__).with_name("reshard_worker.py")
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


def reports():
    """What each of two processes with four devices printed."""
    return launch(WORKER, 2, 4)


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
