"""Processes that calibrate together: one value for all, with the figures of each."""

import json
from pathlib import Path

import pytest
from launching import launch

WORKER = Path(__file__).parent / "calibrate_worker.py"
pytestmark = pytest.mark.slow


def test_four_processes_return_one_value():
    reports = launch(WORKER, 4, deadline=280)
    first = json.loads(reports[0]["same"])
    for each in reports[1:]:
        other = json.loads(each["same"])
        assert {**other, "date": first["date"]} == first
    assert first["processes"] == [0, 1, 2, 3]
    assert {each["links"] for each in first["links"]} == {"network"}
    assert all(len(each["each"]) == 4 for each in first["figures"])
