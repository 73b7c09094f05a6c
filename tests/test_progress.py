"""The bar: on a terminal, after two seconds, and gone when the work is."""

import subprocess
import sys

from terminals import run_on_a_terminal

SCRIPT = """
import time
from meshwright import _progress
_progress._QUIET_SECONDS = {patience}
with _progress.Bar("llama on a pod") as bar:
    bar.now("compiling", 3.0, 10.0)
    time.sleep(0.3)
print("done")
"""


def test_longer_work_shows_a_bar_that_goes_away():
    seen = run_on_a_terminal("-c", SCRIPT.format(patience=0.0), errors=True)
    assert b"llama on a pod: compiling" in seen
    after = seen[seen.rindex(b"compiling") :]
    assert b"\x1b[2K" in after
    assert b"done" in after


def test_short_work_and_files_see_nothing():
    assert run_on_a_terminal("-c", SCRIPT.format(patience=2.0), errors=True).strip() == b"done"
    command = [sys.executable, "-c", SCRIPT.format(patience=0.0)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
