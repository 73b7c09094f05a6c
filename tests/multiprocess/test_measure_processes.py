"""`measure` in a job of two processes: the first one shows all devices and names the slow one."""

from pathlib import Path

import pytest
from launching import launch

WORKER = Path(__file__).with_name("measure_worker.py")


@pytest.mark.slow
def test_process_0_shows_all_devices_and_names_the_late_one():
    first, second = launch(WORKER, 2, 2)
    assert first["devices"] == [0, 0, 1, 1] and second["devices"] == [1, 1]
    assert first["runs"] == second["runs"] == [1]
    assert first["late"] == [3, 1]
