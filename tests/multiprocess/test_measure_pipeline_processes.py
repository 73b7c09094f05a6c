"""`step.measure` in real processes: each reads its own trace, and all have the whole."""

from pathlib import Path

import pytest
from launching import launch

WORKER = Path(__file__).with_name("measure_pipeline_worker.py")
# Processes, devices in each, groups: a group is in one process, or in two of them.
RUNS = [(2, 2, 2), pytest.param((4, 1, 2), marks=pytest.mark.slow)]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_process_has_the_tasks_of_all_groups(run):
    processes, devices, groups = run
    [first, *others] = launch(WORKER, processes, devices, groups)
    assert all(other == first for other in others)
    m = first["same"]
    assert [(each["name"], each["runs"]) for each in m["tasks"]] == [
        *(("0F", 4), ("0BW", 4)),
        *(("1F", 4), ("1BW", 4)),
    ]
    for task in m["tasks"]:
        [products] = [each for each in task["parts"] if each["name"] == "matrix products"]
        assert products["runs"] == (2 if task["name"] == "1BW" else 1)
        assert products["measured"] > 0 and task["kernels"] >= products["measured"]
    every = processes // groups
    owners = [[*range(g * every, (g + 1) * every)] for g in range(groups)]
    assert [each["processes"] for each in m["groups"]] == owners
    for group in m["groups"]:
        assert group["busy"] + group["idle"] == pytest.approx(m["makespan"])
    assert set(m["groups"][0]["waiting"]) == {"1"} and set(m["groups"][1]["waiting"]) == {"0"}


def test_what_is_refused_in_one_process_ends_all_before_the_first_call():
    first, second = launch(WORKER, 2, 2, 2, 1)
    words = "trace: no file can be written to /dev/null/here: Not a directory. Name another folder."
    assert second["refused"] == words
    assert first["refused"] == f"process 1: {words} All end; nothing was measured."
