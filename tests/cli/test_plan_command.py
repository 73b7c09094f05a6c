"""`meshwright plan`."""

import json

import pytest

from meshwright.cli.main import main


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "plans"))


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """A module of somebody's own steps, in the working directory."""
    (tmp_path / "planned_steps.py").write_text(
        "import jax\n"
        "shape = jax.ShapeDtypeStruct((1024, 1024), 'float32')\n"
        "def plain():\n"
        "    return (lambda w, x: x @ w), shape, shape\n"
        "def full():\n"
        "    return {'step': lambda w, x: x @ w, 'args': [shape, shape], 'mesh': 'dp:4, tp:2'}\n"
        "def strange():\n"
        "    return {'step': lambda w: w @ w, 'args': [shape], 'timeout': 3}\n"
        "def broken():\n"
        "    def step(w):\n"
        "        return w @ w[:3]\n"
        "    return step, shape\n"
        "def none():\n"
        "    return None\n"
    )
    (tmp_path / "d.json").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "planned_steps", raising=False)


def test_a_model_is_planned_checked_and_written(tmp_path, capsys):
    page, saved = tmp_path / "plan.html", tmp_path / "plan.json"
    words = ["tiny", "--on", "cpu:8", "--batch", "16", "--mesh", "dp:4, tp:2", "--check", "1"]
    words += ["--set", "layers=2", "--html", str(page), "--save", str(saved)]
    assert main(["plan", *words]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("tiny on cpu:8, planned: dp:4, tp:2\nfits, as compiled: ")
    assert "Checked by the compiler" in out
    assert "Planned with attention written as products" in out
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(saved.read_text())["format"] == "meshwright-plan"
    assert f"wrote {page}" in err
    assert f"wrote {saved}" in err


def test_a_step_of_ones_own_as_json_and_as_rules(steps, capsys):
    words = ["--on", "v5e:2x4", "--check", "0"]
    assert main(["plan", "planned_steps:plain", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["topology"] == "v5e:2x4"
    assert found["alternatives"]
    assert main(["plan", "planned_steps:full", *words, "--rules"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("on dp:4, tp:2")


def test_keep_pins_a_group(steps, capsys):
    words = ["planned_steps:plain", "--on", "v5e:2x4", "--check", "0", "--mesh", "dp:4, tp:2"]
    assert main(["plan", *words, "--keep", "batch=tp", "--json"]) == 0
    axes = json.loads(capsys.readouterr().out)["axes"]
    assert "batch" in axes[1]["shards"]
    assert "batch" not in axes[0]["shards"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny", "--on", "v5e:2x4"], "--batch is missing"),
        (["tyni", "--on", "v5e:2x4"], "tiny"),
        (
            ["tiny", "--on", "v5e:2x4", "--batch", "8", "--keep", "dp"],
            "--keep 'dp': write GROUP=AXIS",
        ),
        (["tiny", "--on", "v5e:2x4", "--batch", "8", "--set", "x"], "--set 'x': write NAME=VALUE"),
        (["planned_steps:plain", "--on", "v5e:2x4", "--batch", "8"], "go with a model"),
        (["tiny", "--on", "v5e:2x4", "--batch", "0"], "--batch: 0 is not a positive integer"),
        (["planned_steps:strange", "--on", "v5e:2x4", "--check", "0"], "returned timeout=..."),
        (
            ["planned_steps:full", "--on", "v5e:2x4", "--check", "0", "--mesh", "dp:8"],
            "Say it once",
        ),
        (["planned_steps:broken", "--on", "v5e:2x4", "--check", "0"], "its step failed"),
        (
            ["tiny", "--on", "v5e:2x4", "--batch", "8", "--html", "no/a.html"],
            "there is no folder no",
        ),
        (
            ["tiny", "--on", "v5e:2x4", "--batch", "8", "--save", "plan.txt"],
            "does not end in .json",
        ),
        (["tiny", "--on", "v5e:2x4", "--batch", "8", "--html", ""], "Write --html file.html"),
        (["tiny", "--on", "v5e:2x4", "--batch", "8", "--save", "d.json"], "d.json: is a folder"),
        (["planned_steps:none", "--on", "v5e:2x4"], "more of plan's arguments"),
        (
            ["planned_steps:plain", "--on", "v5e:2x4", "--check", "0", "--keep", "batch=dp"],
            "say the mesh too: --mesh 'dp:-1, ...'",
        ),
        (
            ["tiny", "--on", "v5e:2x4", "--batch", "8", "--check", "0", "--memory", "2"],
            "--memory: 2.0 is not a part",
        ),
    ],
)
def test_mistakes_are_told_in_a_line(steps, capsys, words, said):
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_missing_compiler_says_how_to_get_it_or_to_go_without(capsys, monkeypatch):
    monkeypatch.setattr("meshwright._compat.compiler_installed", lambda family: False)
    assert main(["plan", "tiny", "--on", "v5e:2x4", "--batch", "8"]) == 2
    err = capsys.readouterr().err
    assert "the TPU compiler is not installed" in err
    assert "pip install" in err
    assert "--compiler cpu" in err
