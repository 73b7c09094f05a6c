"""`measure` in a job of two processes: who is slow, and Ctrl-C in one of them."""

from pathlib import Path

import pytest
from launching import launch

WORKER = Path(__file__).with_name("measure_worker.py")
pytestmark = pytest.mark.slow


def test_process_0_shows_all_devices_and_names_the_late_one():
    first, second = launch(WORKER, 2, 2)
    assert first["devices"] == [0, 0, 1, 1] and second["devices"] == [1, 1]
    assert first["runs"] == second["runs"] == [1]
    assert first["late"] == [3, 1]


def test_an_interrupt_in_one_process_ends_all():
    first, second = launch(WORKER, 2, 2, 1)
    assert second["ended"] == ["KeyboardInterrupt", ""]
    kind, message = first["ended"]
    assert kind == "CalibrationError"
    assert message == "process 1 was interrupted (Ctrl-C). All end; nothing was measured."


def test_a_folder_that_one_process_cannot_write_to_ends_all():
    first, second = launch(WORKER, 2, 2, -1, 1)
    words = "trace: no file can be written to /dev/null/here: Not a directory. Name another folder."
    assert second["ended"] == ["CalibrationError", words]
    kind, message = first["ended"]
    assert kind == "CalibrationError" and words.rstrip(".") in message
