"""Real processes over loopback: a group each, or several processes to a group."""

from pathlib import Path

import pytest
from launching import launch

WORKER = Path(__file__).with_name("mpmd_worker.py")
FAULTS = (
    "arrays",
    "there and back",
    "donated",
    "unlike groups",
    "key without shards",
    "after",
)

WORLDS = [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)]
worlds = pytest.mark.parametrize(("processes", "devices"), WORLDS, ids=str)


def reports(processes, devices):
    """What each process printed; the first half of them is group 0, the others group 1."""
    return launch(WORKER, processes, devices)


def group_of(process, processes):
    return process * 2 // processes


@worlds
def test_each_process_knows_its_group(processes, devices):
    for me, report in enumerate(reports(processes, devices)):
        told = report["told"]
        assert told["mine"] == group_of(me, processes)
        assert told["same mesh"] is True
        assert told["processes"] == [
            [p for p in range(processes) if group_of(p, processes) == group] for group in (0, 1)
        ]


@worlds
def test_each_group_runs_a_program_of_its_own(processes, devices):
    for me, report in enumerate(reports(processes, devices)):
        assert report["told"]["sum"] == 28 + 8 * group_of(me, processes)


@worlds
def test_every_process_shows_the_same_groups(processes, devices):
    shown = [report["told"]["shown"] for report in reports(processes, devices)]
    assert all(lines == shown[0] for lines in shown)
    last = {2: "1", 4: "2-3"}[processes]
    assert shown[0][-1].endswith(last)


@worlds
def test_a_mesh_inside_one_process_may_have_many_groups(processes, devices):
    assert {report["alone"] for report in reports(processes, devices)} == {devices}


@worlds
def test_groups_of_different_shapes_span_processes(processes, devices):
    for me, report in enumerate(reports(processes, devices)):
        group = group_of(me, processes)
        assert report["unlike"] == [group, [{"pp": 1, "a": 2, "b": 2}, {"b": 4}][group]]


@worlds
@pytest.mark.parametrize("what", FAULTS)
def test_every_bit_is_where_it_shall_be(processes, devices, what):
    found = [report["faults"][what] for report in reports(processes, devices)]
    assert found == [[]] * processes


@worlds
def test_everything_is_looked_at(processes, devices):
    for report in reports(processes, devices):
        assert set(report["faults"]) == set(FAULTS)


@worlds
@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        ("torn", "GroupError: process 0 is in groups 0, 1"),
        ("torn list", "GroupError: process 0 is in groups 0, 1"),
        ("deleted", "PartitionError: to_groups: 1 problem, nothing was placed.\n  gone: the array"),
        ("group", "PartitionError: to_groups: 1 problem, nothing was placed.\n  w: group 5 is not"),
        ("one bad", "w: group 5 is not there. Use 0 to 1."),
        ("other group", "passed another shape, split, spec or other values than process 0"),
    ],
)
def test_all_processes_refuse_with_the_same_words(processes, devices, refusal, text):
    found = [report["refusals"][refusal] for report in reports(processes, devices)]
    assert all(message == found[0] for message in found)
    assert text in found[0]


@worlds
def test_each_process_is_told_what_it_lacks(processes, devices):
    for me, report in enumerate(reports(processes, devices)):
        found = report["refusals"]
        group = group_of(me, processes)
        assert (
            f"group {group} has devices of this process, but its array was not given"
            in found["missing"]
        )
        assert "this process holds no part of the array: say its shape= and" in found["unsaid"]
        if processes == 2:
            assert "the devices are all in one process" in found["outside"]
        else:
            assert f"process {me} has no devices in MpmdMesh('pp:1, " in found["outside"]
