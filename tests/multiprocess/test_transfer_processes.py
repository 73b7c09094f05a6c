"""Real processes over loopback: arrays go from group to group by every transport, bit for bit."""

from pathlib import Path

import pytest
from launching import launch

WORKER = Path(__file__).with_name("transfer_worker.py")
# Processes, devices in each: groups of one process, and of two.
RUNS = [
    pytest.param(("pull", 2, 4), marks=pytest.mark.slow),
    pytest.param(("pull", 4, 2), marks=pytest.mark.slow),
    pytest.param(("put", 2, 4), marks=pytest.mark.slow),
    pytest.param(("put", 4, 2), marks=pytest.mark.slow),
]
MOVES = (
    "same split",
    "same split, other names",
    "transposed split",
    "four to two",
    "two to four",
    "sharded to replicated",
    "replicated to sharded",
    "replicated to replicated",
    "half replicated",
    "back again",
    "one to one",
    "all to the last",
    "the first to all",
    "overlapping",
    "inside the first",
    "all, transposed",
    "large",
    "under a mesh",
    "after",
)
ONLY = {"pull": {"out of order", "one key", "late", "listening after"}, "put": {"many puts"}}
# 127.0.0.1 as the kernel writes it; the second is the coordinator's, opened by JAX.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


def reports(transport: str, processes: int, devices: int):
    """What each process printed."""
    return launch(WORKER, processes, devices, transport)


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("move", MOVES)
def test_every_shard_arrives_bit_for_bit(move, run):
    assert [report[move] for report in reports(*run)] == [[]] * run[1]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_move_is_looked_at(run):
    for report in reports(*run):
        assert set(report) == {*MOVES, *ONLY[run[0]], "refusals", "listening"}


@pytest.mark.parametrize("run", RUNS[:2], ids=str)
@pytest.mark.parametrize("what", ["out of order", "one key", "late"])
def test_pulls_meet_by_key_whatever_the_order(what, run):
    assert [report[what] for report in reports(*run)] == [[]] * run[1]


@pytest.mark.parametrize("run", RUNS[2:], ids=str)
def test_a_hundred_puts_keep_their_order(run):
    assert [report["many puts"] for report in reports(*run)] == [[]] * run[1]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_nothing_listens_but_on_loopback(run):
    for report in reports(*run):
        assert report["listening"]
        assert set(report["listening"]) <= LOOPBACK
        assert set(report.get("listening after", [])) <= LOOPBACK


@pytest.mark.parametrize("run", RUNS[:2], ids=str)
def test_closing_stops_listening(run):
    for report in reports(*run):
        assert len(report["listening after"]) < len(report["listening"])


def refusals(run, name):
    return {report["refusals"][name] for report in reports(*run) if report["refusals"].get(name)}


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        ("donate", "the arrays may still be on their way when this returns"),
        ("local", "transport='local' stays inside a process, this link is of 0, 1"),
        ("not a member", "Only they call connect."),
        ("no such process", "connect: processes [0, 9]: use numbers from 0 to"),
        ("address", "address '192.0.2.1': this machine has no such interface"),
        ("some put", "processes to take part, not only"),
    ],
)
def test_what_cannot_be_done_is_refused(refusal, text, run):
    said = refusals(run, refusal)
    assert said
    assert all(text in one and one.startswith("TransferError: ") for one in said)


@pytest.mark.parametrize("run", RUNS[:2], ids=str)
@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        ("send", "has no device of the source, which lies in process 0"),
        ("receive", "has no device of the target, which lies in process"),
        ("put", "Call meshwright.transfers.allow_puts() before jax.distributed.initialize."),
        ("strangers", "Connect with these processes too."),
        ("absent", "connect: process 1 did not connect within 0.3 s."),
        ("wrong place", "cannot be reached, or did not answer within 0.3 s."),
    ],
)
def test_what_cannot_be_pulled_is_refused(refusal, text, run):
    said = refusals(run, refusal)
    assert said
    assert all(text in one for one in said)


@pytest.mark.parametrize("run", RUNS[2:], ids=str)
def test_puts_cannot_be_allowed_late(run):
    assert all("JAX has already started" in one for one in refusals(run, "after start"))
    assert len(refusals(run, "after start")) == 1
