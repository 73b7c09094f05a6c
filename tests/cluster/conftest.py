"""Figures are printed whatever pytest captures; told to stop, pytest ends what it has started."""

import signal

import pytest


@pytest.fixture(autouse=True, scope="session")
def _end_engines_on_sigterm():
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("told to stop", 143))
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def show(capsys):
    def write(line):
        with capsys.disabled():
            print(f"\n{line}")

    return write
