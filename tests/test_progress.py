"""The pulse: on a terminal, after two seconds, and gone when the work is; in a notebook likewise;
elsewhere lines."""

import subprocess
import sys

import numpy as np
import pytest
from terminals import run_on_a_terminal

import meshwright as mw
from meshwright import _progress

SCRIPT = """
import time
from meshwright import _progress
_progress._QUIET = {quiet}
_progress._BEAT = _progress._NOTEBOOK_BEAT = _progress._LINES = 0.05
with _progress.showing({progress}), _progress.Pulse("llama on a pod") as pulse:
    pulse.now("compiling", usual=70.0)
    time.sleep(0.3)
print("done")
"""
LINE = "llama on a pod: compiling, 0 s; the last like it took 1 min 10 s"


def test_longer_work_shows_a_pulse_that_goes_away():
    script = SCRIPT.format(quiet=0.0, progress=True)
    seen = run_on_a_terminal("-c", script, errors=True).decode()
    shown = seen.split("\r")
    assert len({line[0] for line in shown if LINE in line}) > 1  # it moves
    assert shown[-2].startswith("\x1b[K") and "done" in shown[-2]


def test_short_work_and_who_wants_no_progress_see_nothing():
    for script in (SCRIPT.format(quiet=2.0, progress=True), SCRIPT.format(quiet=0, progress=False)):
        assert run_on_a_terminal("-c", script, errors=True).strip() == b"done"
    assert run_apart(SCRIPT.format(quiet=0.0, progress=False)) == ("done\n", "")


def test_lines_are_written_where_there_is_no_terminal():
    out, err = run_apart(SCRIPT.format(quiet=0.0, progress=True))
    assert out == "done\n"
    assert set(err.splitlines()) == {LINE}


def test_a_notebook_has_one_line_that_goes_away():
    pytest.importorskip("ipykernel")
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        messages = []
        code = SCRIPT.format(quiet=0.1, progress=True)
        reply = client.execute_interactive(code, output_hook=messages.append, timeout=60)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok"
    shown = [m for m in messages if m["msg_type"].endswith("display_data")]
    kinds = [m["msg_type"] for m in shown]
    assert kinds[0] == "display_data" and set(kinds[1:]) == {"update_display_data"}
    assert len({m["content"]["transient"]["display_id"] for m in shown}) == 1
    texts = [m["content"]["data"]["text/plain"] for m in shown]
    assert set(texts[:-1]) == {LINE} and texts[-1] == ""
    streams = [m["content"]["text"] for m in messages if m["msg_type"] == "stream"]
    assert "".join(streams) == "done\n"


@pytest.mark.parametrize("progress", [True, False])
def test_rehearsals_and_pipelines_are_silent_on_demand(progress, monkeypatch, capfd):
    monkeypatch.setattr(_progress, "_LINES", 0.001)
    mw.rehearse_model("tiny", batch=8, mesh="fsdp:8", on="cpu:8", progress=progress)
    groups = mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp")
    stages = [lambda w, x: x * w, lambda w, x: (x * w).sum()]
    step = mw.pipeline(stages, groups, microbatches=2, progress=progress)
    step.plan_of((1.0, 2.0), np.ones((8,), "float32"))
    err = capfd.readouterr().err
    assert ("tiny on cpu:8: " in err, "pipeline: compiling" in err) == (progress, progress)


def run_apart(script):
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


BAR_SCRIPT = """
import jax, jax.numpy as jnp
import meshwright as mw
from meshwright import _progress
_progress._QUIET, _progress._BEAT, _progress._LINES = 0.0, 0.01, 0.01
mw.calibrate(quick=True, only=["functions"])
mw.measure(lambda x: jnp.tanh(x @ x), jnp.ones((512, 512)), steps=20, name="mine")
"""


@pytest.mark.slow
def test_calibrate_and_measure_show_a_bar_on_a_terminal_and_lines_elsewhere():
    seen = run_on_a_terminal("-c", BAR_SCRIPT, errors=True).decode()
    bars = [line.split("\x1b")[0] for line in seen.split("\r") if "\u2588" in line]
    for words in ("calibrating cpu:1: functions, ", "measuring mine: 20 steps, round "):
        assert any(words in line and line.endswith("% done") for line in bars), words
    # It grows, and never shrinks.
    full = [line.count("\u2588") for line in bars if "calibrating" in line]
    assert full == sorted(full) and len(set(full)) > 2
    out, err = run_apart(BAR_SCRIPT)
    assert out == "" and "\u2588" not in err and "\r" not in err
    assert "calibrating cpu:1: functions, " in err and "% done" in err
