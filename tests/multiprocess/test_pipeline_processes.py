"""Real processes over loopback: a pipeline gives what it gives in one process, bit for bit."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from launching import launch

WORKER = Path(__file__).with_name("pipeline_worker.py")
TIMES = ("start", "end")
# Processes, devices in each, groups; schedule and stages.
RUNS = [
    (2, 1, 2, "1f1b", 2),
    pytest.param((4, 1, 4, "zb-h1", 4), marks=pytest.mark.slow),
    pytest.param((4, 1, 2, "1f1b", 2), marks=pytest.mark.slow),
    pytest.param((2, 2, 2, "interleaved-1f1b", 4), marks=pytest.mark.slow),
]


@functools.cache
def outcome(processes, devices, groups, schedule, stages):
    """Every result, by name, and a timeline, from each process that has them."""
    with tempfile.TemporaryDirectory() as folder:
        seen = launch(WORKER, processes, devices, groups, schedule, stages, folder)
        arrays = [dict(np.load(Path(folder) / f"{me}.npz")) for me in range(processes)]
    return arrays, seen


def results(*run):
    return outcome(*run)[0]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_processes_give_what_one_gives(run):
    processes, devices, *rest = run
    (alone,) = results(1, processes * devices, *rest)
    together = results(*run)
    assert set().union(*together) == set(alone)
    for held in together:
        for name, array in held.items():
            assert array.tobytes() == alone[name].tobytes(), name


@pytest.mark.parametrize("run", RUNS[:1], ids=str)
def test_every_process_knows_the_loss(run):
    for held in results(*run):
        assert {"value 0", "value 1", "value 2", "peak 2"} <= set(held)


@pytest.mark.parametrize("run", RUNS[:1], ids=str)
def test_every_process_counts_the_steps(run):
    assert [int(held["state['step']"]) for held in results(*run)] == [3, 3]


@pytest.mark.parametrize("run", RUNS[:1], ids=str)
def test_parameters_stay_in_their_group(run):
    first, last = results(*run)
    assert "params['layers'][0]" in first and "params['layers'][0]" not in last
    assert "params['layers'][3]" in last and "params['layers'][3]" not in first


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_process_has_the_whole_timeline(run):
    (alone,) = outcome(1, run[0] * run[1], *run[2:])[1]
    seen = [dict(each) for each in outcome(*run)[1]]
    begins, ends = zip(*(each.pop("called") for each in seen), strict=True)
    first, *others = seen
    assert all(other == first for other in others)
    measured = first["measured"]["tasks"]
    assert named(measured) == named(alone["measured"]["tasks"])
    assert min(task["start"] for task in measured) == 0
    assert all(task["start"] <= task["end"] for task in measured)
    # One clock for all: the step lies within the calls that measured it.
    assert max(task["end"] for task in measured) <= 1e3 * (max(ends) - min(begins))


def named(tasks):
    return [{key: value for key, value in task.items() if key not in TIMES} for task in tasks]
