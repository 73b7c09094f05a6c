"""Processes that plan together find one plan, whatever Python's hashes are, and run it."""

from pathlib import Path

import pytest
from launching import launch

WORKER = Path(__file__).parent / "plan_worker.py"
pytestmark = pytest.mark.slow


def test_two_processes_find_and_run_the_plan_of_one(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    first, second = launch(WORKER, 2, deadline=240)
    assert first == second
    (alone,) = launch(WORKER, 1, deadline=240)
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-4)


def test_a_plan_does_not_depend_on_the_hashes_of_texts(monkeypatch):
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found += launch(WORKER, 1, f"seed{seed}", deadline=240)
    assert found[0] == found[1]
