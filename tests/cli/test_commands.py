"""The command line, as a person and a script meet it. The pages' examples are goldens too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from terminals import on_a_terminal

HERE = Path(__file__).parent


def _run(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *words],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def test_devices_golden():
    done = _run("devices", "--on", "gb200:72x4")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        (HERE / "devices.golden").read_text(),
        "",
    )


def test_mesh_golden():
    done = _run("mesh", "dp:2, fsdp:-1, tp:4", "--on", "v5e:4x4", "--slices", "2")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        (HERE / "mesh.golden").read_text(),
        "",
    )


def test_devices_without_a_name_are_the_live_ones():
    done = _run("devices")
    assert done.returncode == 0
    assert done.stdout.startswith("cpu:1: 1 device on 1 host")


def test_devices_as_json():
    found = json.loads(_run("devices", "--on", "v5p:4x4x4", "--json").stdout)
    assert (found["devices"], found["hosts"], found["axes"][0]["wraps"]) == (64, 16, True)


def test_mesh_as_json():
    found = json.loads(_run("mesh", "fsdp:-1, tp:8", "--on", "v5p:4x4x4", "--json").stdout)
    assert found["spec"] == "fsdp:8, tp:8"
    assert [axis["size"] for axis in found["axes"]] == [8, 8]
    assert found["cost_s"] < found["runner_up_cost_s"]


def test_html_is_one_page_that_fetches_nothing(tmp_path):
    page = tmp_path / "mesh.html"
    assert _run("mesh", "fsdp:-1, tp:4", "--on", "v5e:4x4", "--html", str(page)).returncode == 0
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert text.count('role="img"') == 4  # two axes, as placed and by a plain reshape
    assert "src=" not in text and "<script" not in text and "<link" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mesh", "fsdp:-1, tp:3", "--on", "v5e:4x4"], "does not divide 16 devices"),
        (["mesh", "", "--on", "v5e:4x4"], "the spec is empty"),
        (["mesh", "dp:2", "--on", "v5q:4x4"], "Did you mean 'v5p'?"),
        (["mesh", "dp:99", "--on", "cpu:8"], "Not enough devices"),
        (["mesh", "dp:-1", "--on", "v5e:3x3"], "v5e does not come in 3x3"),
        (["mesh", "dp:-1", "--on", "v5e:4x4", "--slices", "0"], "slices: 0 is not a positive"),
        (["mesh", "dp:-1", "--slices", "2"], "slices goes with a hardware name"),
        (["mesh", "dp:-1, tp:4", "--on", "v5e:4x4", "--dcn", "dp:2"], "there is 1"),
        (["mesh", "dp:-1", "--on", "cpu:8", "--html", "no/such/folder/x"], "No such file"),
        (["devices", "--on", "h100"], "is not a chip and a shape"),
    ],
)
def test_bad_input_exits_with_2_and_says_why(words, message):
    done = _run(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("meshwright: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [[], ["mesh"], ["banana"], ["mesh", "dp:2", "--banana"]])
def test_words_that_are_no_command_exit_with_2(words):
    done = _run(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout


def test_idle_devices_are_noted_on_the_side():
    done = _run("mesh", "tp:4", "--on", "h100:8x2")
    assert done.returncode == 0
    assert done.stderr.startswith("note: 'tp:4' uses 4 of 16 devices; 12 stay idle, 1 whole host")


def test_no_colours_when_piped_and_colours_on_a_terminal():
    words = ["mesh", "fsdp:-1, tp:4", "--on", "v5e:4x4"]
    assert "\x1b[" not in _run(*words).stdout
    assert b"\x1b[" in on_a_terminal(*words)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["mesh", "dp:-1", "--on", "v5e:4x4", "--slices", "0"], "--slices"),
        (["schedule", "gpipe", "--groups", "0", "--microbatches", "4"], "--groups"),
        (["schedule", "gpipe", "--groups", "2", "--microbatches", "0"], "--microbatches"),
        (["schedule", "gpipe", "--groups", "2", "--microbatches", "4", "--latency", "-1"], "--lat"),
        (["rehearse", "tiny", "--mesh", "dp:-1", "--on", "cpu:8", "--batch", "0"], "--batch"),
    ],
)
def test_an_error_names_its_flag(words, flag):
    done = _run(*words)
    assert done.returncode == 2
    assert f"On the command line this is {flag}" in done.stderr


def test_a_slip_in_an_axis_name_is_noted_on_the_side():
    done = _run("mesh", "fdsp:-1", "--on", "v5e-16")
    assert done.returncode == 0
    assert done.stderr.startswith("note: axis 'fdsp' is taken for one of your own")
    assert "v5e:4x4" in done.stdout


@pytest.mark.slow
def test_no_flag_is_denied_twice():
    for command in ("devices", "mesh", "partition", "rehearse", "schedule"):
        assert "--no-no-" not in _run(command, "--help").stdout
