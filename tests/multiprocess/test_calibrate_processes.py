"""Processes that calibrate together: one value for all, and who is slow."""

import json
from pathlib import Path

import pytest
from launching import launch

from meshwright.cli.main import main

WORKER = Path(__file__).parent / "calibrate_worker.py"
NONE = 4  # all are compiled alike
pytestmark = pytest.mark.slow


def test_four_processes_return_one_value():
    reports = launch(WORKER, 4, NONE, "products", "functions", "collectives", deadline=280)
    first = json.loads(reports[0]["same"])
    for each in reports[1:]:
        other = json.loads(each["same"])
        assert {**other, "date": first["date"]} == first
    assert first["processes"] == [0, 1, 2, 3]
    assert {each["links"] for each in first["links"]} == {"network"}
    assert all(len(each["each"]) == 4 for each in first["figures"])


def test_the_slow_one_of_four_processes_is_named(tmp_path, capsys):
    reports = launch(WORKER, 4, 2, "functions", "irregular", deadline=280)
    path = tmp_path / "cluster.json"
    path.write_text(reports[0]["same"])
    assert main(["calibrate", "--compare", str(path)]) == 0
    worst = capsys.readouterr().out.splitlines()[1]
    assert worst.startswith("process 2 (device 2): ")
    assert worst.endswith("times as long as in the other processes.")


def test_a_process_whose_devices_are_not_in_the_mesh_ends_all_with_its_message():
    first, second = launch(WORKER, 2, 2, "mesh")
    assert second["refused"].startswith("mesh: none of its 1 devices is in this process.")
    assert first["refused"].startswith("process 1 failed: mesh: none of its 1 devices is in this")


def test_an_interrupt_in_one_process_ends_all_with_what_was_measured():
    for each in launch(WORKER, 2, 2, "interrupt"):
        assert each["interrupted"] is True
        assert each["left_out"][-1].endswith(
            "and what comes after: process 1 was interrupted (Ctrl-C)"
        )
