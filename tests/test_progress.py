"""The pulse: on a terminal, after two seconds, and gone when the work is; elsewhere lines."""

import subprocess
import sys

from terminals import run_on_a_terminal

SCRIPT = """
import time
from meshwright import _progress, errors
_progress._QUIET = {quiet}
_progress._BEAT = _progress._LINES = 0.05
with {where}, _progress.Pulse("llama on a pod") as pulse:
    pulse.now("compiling", usual=70.0)
    time.sleep(0.3)
print("done")
"""
LIBRARY, COMMAND = "errors.contextlib.nullcontext()", "errors.options_as_flags()"
LINE = "llama on a pod: compiling, 0 s; the last like it took 1 min 10 s"


def test_longer_work_shows_a_pulse_that_goes_away():
    script = SCRIPT.format(quiet=0.0, where=LIBRARY)
    seen = run_on_a_terminal("-c", script, errors=True).decode()
    shown = seen.split("\r")
    assert len({line[0] for line in shown if LINE in line}) > 1  # it moves
    assert shown[-2].startswith("\x1b[K") and "done" in shown[-2]


def test_short_work_and_files_see_nothing():
    script = SCRIPT.format(quiet=2.0, where=LIBRARY)
    assert run_on_a_terminal("-c", script, errors=True).strip() == b"done"
    assert run_apart(SCRIPT.format(quiet=0.0, where=LIBRARY)) == ("done\n", "")


def test_the_command_line_writes_lines_where_there_is_no_terminal():
    out, err = run_apart(SCRIPT.format(quiet=0.0, where=COMMAND))
    assert out == "done\n"
    assert set(err.splitlines()) == {LINE}


def run_apart(script):
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr
