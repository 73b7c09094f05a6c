"""`meshwright schedule`, as a person and a script meet it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from terminals import on_a_terminal

import meshwright as mw

HERE = Path(__file__).parent
SIZES = ("--groups", "4", "--microbatches", "16")


@pytest.fixture
def run(tmp_path):
    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "meshwright", "schedule", *words],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )

    return run


@pytest.mark.parametrize(
    ("golden", "words"),
    [
        ("schedule", ["zb-h1", *SIZES, "--latency", "0.25", "--memory", "6"]),
        ("schedule_cropped", ["interleaved-1f1b", "--groups", "3", "--microbatches", "24"]),
        ("schedule_compare", ["--compare", *SIZES, "--memory", "6"]),
    ],
)
def test_golden(run, golden, words):
    done = run(*words)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        (HERE / f"{golden}.golden").read_text(),
        "",
    )


def test_files_are_written_beside_the_drawing(run, tmp_path):
    words = ["--svg", "a.svg", "--trace", "a.json", "--html", "a.html", "--save", "a.csv"]
    done = run("zb-v", *SIZES, *words)
    assert done.returncode == 0, done.stderr
    timeline = mw.schedules.simulate(mw.schedules.schedule("zb-v", groups=4, microbatches=16))
    assert done.stdout == f"{timeline}\n"
    assert (tmp_path / "a.svg").read_text() == timeline.svg()
    assert json.loads((tmp_path / "a.json").read_text()) == timeline.trace()
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert mw.schedules.read_schedule(tmp_path / "a.csv").tasks == timeline.schedule.tasks
    assert len(list(tmp_path.iterdir())) == 4


def test_a_file_is_drawn_and_compared(run, tmp_path):
    mw.schedules.write_schedule(
        mw.schedules.schedule("gpipe", groups=2, microbatches=3), tmp_path / "own.csv"
    )
    assert run("own.csv").stdout.startswith("own: 2 groups, 2 stages, 3 microbatches")
    rows = json.loads(run("own.csv", "--compare", "--json").stdout)["schedules"]
    makespans = {row["name"]: row["makespan"] for row in rows}
    assert makespans["own.csv"] == makespans["gpipe"]


def test_torch_letters_are_asked_for(run, tmp_path):
    (tmp_path / "theirs.csv").write_text("0F0,0B0\n")
    assert "0W0 is missing" in run("theirs.csv").stderr
    done = run("theirs.csv", "--notation", "torch", "--json")
    assert [task["task"] for task in json.loads(done.stdout)["tasks"]] == ["0F0", "0BW0"]


def test_auto_keeps_to_the_memory(run):
    found = json.loads(run("auto", *SIZES, "--latency", "0.5", "--memory", "3", "--json").stdout)
    assert max(found["memory"]) <= 3
    assert found["schedule"].startswith("auto")


def test_json_is_the_timeline(run):
    found = json.loads(run("1f1b", *SIZES, "--costs", "F=1,B=2,W=2", "--json").stdout)
    assert found["makespan"] == (16 + 3) * 5
    assert len(found["tasks"]) == 2 * 4 * 16


def test_a_table_as_a_page(run, tmp_path):
    assert run("--compare", *SIZES, "--html", "a.html").returncode == 0
    assert "zb-v" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a schedule, or pass --compare. There are gpipe, 1f1b"),
        (["zb-h1", "--groups", "4"], "--microbatches is missing"),
        (["--compare", "--groups", "4"], "--microbatches is missing"),
        (["zbh1", *SIZES], "Did you mean 'zb-h1'?"),
        (["zb-h1", *SIZES, "--stages", "8"], "zb-h1 has 1 stage per group"),
        (
            ["zb-h1", "--groups", "0", "--microbatches", "4"],
            "--groups: 0 is not a positive integer",
        ),
        (["zb-h1", *SIZES, "--costs", "F=1,X=2"], "'X' is not one of"),
        (["zb-h1", *SIZES, "--costs", "F=-1"], "cost F: a time is a number from 0"),
        (["zb-h1", *SIZES, "--latency", "nan"], "latency: a time is a number from 0"),
        (["zb-h1", *SIZES, "--memory", "-2"], "memory is the most microbatches"),
        (["none.csv"], "none.csv: No such file"),
        (["bad.csv"], "bad.csv, line 1, cell 2: 'x' is no task"),
        (["good.csv", "--groups", "3"], "good.csv has 1 groups, not 3"),
        (["zb-h1", *SIZES, "--save", "a.txt"], "a.txt: a schedule's file ends in .csv or .json"),
        (["zb-h1", *SIZES, "--svg", "no/such/a.svg"], "no/such/a.svg: No such file"),
        (["--compare", *SIZES, "--svg", "a.svg"], "take one schedule: name it"),
        (["dualpipe-v", "--groups", "4", "--microbatches", "4"], "4 groups need 8, not 4"),
    ],
)
def test_bad_input_exits_with_2_and_says_why(run, tmp_path, words, message):
    (tmp_path / "bad.csv").write_text("0F0,x\n")
    (tmp_path / "good.csv").write_text("0F0,0BW0\n")
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("meshwright: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


def test_memory_that_is_exceeded_says_by_how_much_and_what_fits(run, tmp_path):
    done = run("zb-h2", *SIZES, "--memory", "6", "--svg", "a.svg")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "meshwright: zb-h2: group 0 holds 7 microbatches, 1 over the limit of 6. These fit: "
    )
    assert "zb-h1 (makespan 51)" in done.stderr and "gpipe" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert "None fits." in run("zb-h2", *SIZES, "--memory", "0.1").stderr


def test_help_says_what_the_kinds_are(run):
    text = " ".join(run("--help").stdout.split())
    assert "B, the gradient of the input; W, the gradient of the weights" in text
    assert "BW, the whole backward, which costs B + W" in text


def test_colours_on_a_terminal_only(run):
    assert "\x1b[" not in run("zb-h1", *SIZES).stdout
    assert b"\x1b[" in on_a_terminal("schedule", "zb-h1", *SIZES)
