"""`meshwright rehearse`."""

import json
import re

import pytest

from meshwright.cli.main import main


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "rehearsals"))


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """A module of somebody's own steps, in the working directory."""
    (tmp_path / "own_steps.py").write_text(
        "import jax\n"
        "shape = jax.ShapeDtypeStruct((128, 128), 'float32')\n"
        "def plain():\n"
        "    return (lambda w, x: x @ w), shape, shape\n"
        "def full():\n"
        "    own = {'donate_argnums': 0, 'name': 'adding'}\n"
        "    return {'step': lambda w: w + 1, 'args': [shape], **own}\n"
        "def large():\n"
        "    wide = jax.ShapeDtypeStruct((32768, 32768), 'float32')\n"
        "    return (lambda w, x: (w + (x.T @ x), x.sum())), wide, wide\n"
        "def twice():\n"
        "    return {'step': lambda w: w, 'args': [shape], 'mesh': 'fsdp:2', 'on': 'cpu:2'}\n"
        "def wrong():\n"
        "    return 3\n"
        "def broken():\n"
        "    def step(w):\n"
        "        return w @ w[:3]\n"
        "    return step, shape\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_steps", raising=False)


def test_a_model_on_simulated_devices(capsys):
    words = ["tiny", "--mesh", "fsdp:4, tp:2", "--on", "cpu:8", "--batch", "16"]
    assert main(["rehearse", *words]) == 0
    out = capsys.readouterr().out
    assert "tiny as fsdp:4, tp:2 on cpu:8 (8 devices)" in out
    assert "fits: " in out
    assert "parameter gathers" in out
    assert "\n\nWhat to do next\n1. " in out
    # Commands are whole lines, to be copied.
    assert any(line.startswith("   meshwright rehearse tiny --mesh") for line in out.splitlines())


def test_json_and_a_page(tmp_path, capsys):
    page = tmp_path / "report.html"
    words = ["tiny", "--mesh", "fsdp:8", "--on", "cpu:8", "--batch", "16", "--json"]
    assert main(["rehearse", *words, "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["fits"] is True
    assert found["mesh"] == "fsdp:8"
    told = err.splitlines()[-1]  # behind a line for every 15 s on a slow machine
    assert told.startswith(f"wrote {page} (") and told.endswith(" KiB)")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_step_of_ones_own(steps, capsys):
    words = ["--mesh", "fsdp:8", "--on", "cpu:8", "--json"]
    assert main(["rehearse", "own_steps:plain", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["kind"] for entry in found["collectives"]["collectives"]] == ["all-gather"]
    assert main(["rehearse", "own_steps:full", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["name"] == "adding"
    assert found["memory"]["parts"]["aliased"] < 0


@pytest.mark.slow
def test_ways_out_are_tried_when_asked(steps, capsys):
    words = ["own_steps:large", "--mesh", "dp:8", "--on", "cpu:8"]
    assert main(["rehearse", *words, "--try"]) == 3
    out = capsys.readouterr().out
    assert "does NOT fit" in out
    advice = " ".join(out.partition("What to do next")[2].split())
    tried = r"saves [\w. ]+ on a device; tried, (does NOT fit|fits), [\w. ]+\."
    assert re.search(rf"\d\. Shard parameters further: {tried} --mesh fsdp:8 ", advice)
    assert re.search(rf"\d\. Halve the batch: {tried} 16384 rows instead of 32768; ", advice)
    assert out.lower().count("halve the batch") == 1  # ways out are listed once
    assert "Savings are those of the compiled programs. None of these is enough alone." in advice
    assert "What is not marked as tried is an estimate" in advice
    assert main(["rehearse", *words, "--try", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)["remedies"]["remedies"]
    halved = next(row for row in found if row["what"] == "halve the batch")
    assert halved["fits"] is False and halved["tried_peak"] > 2**31


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lama3-8b", "--batch", "8"], "llama3-8b"),
        (["own_steps:plain", "--batch", "8"], "--batch, --seq and --set go with a model"),
        (["own_steps:wrong"], "own_steps:wrong returned 3. Return (step, arguments...)"),
        (["own_steps:broken"], "its step failed: TypeError"),
        (["own_steps:twice"], "own_steps:twice says mesh='fsdp:2' itself"),
        (["tiny", "--batch", "16", "--html", "no/such/place.html"], "there is no folder no/such"),
        (["tiny", "--batch", "16", "--on", "v9:4x4"], "v9"),
        (["tiny", "--batch", "16", "--mesh", "fsdp:3"], "fsdp"),
        (["tiny", "--batch", "16", "--timeout", "0"], "timeout"),
        (["tiny", "--batch", "16", "--set", "layers"], "write NAME=VALUE"),
        (["tiny", "--batch", "16", "--set", "layer=3"], "layers"),
    ],
)
@pytest.mark.filterwarnings("ignore::meshwright.errors.IdleDevicesWarning")
def test_bad_input_is_told_in_a_line(steps, capsys, words, message):
    words = [*words, *([] if "--mesh" in words else ["--mesh", "fsdp:8"])]
    words += [] if "--on" in words else ["--on", "cpu:8"]
    assert main(["rehearse", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert len(error) < 1500


def test_an_interrupt_is_told_in_a_line(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.rehearsal.api.rehearse_model", interrupted)
    assert main(["rehearse", "tiny", "--mesh", "fsdp:8", "--on", "cpu:8", "--batch", "16"]) == 130
    assert capsys.readouterr().err == "meshwright: interrupted\n"


def test_the_verdict_is_coloured_and_tables_fit_the_screen(monkeypatch, capsys):
    words = ["rehearse", "tiny", "--mesh", "fsdp:4, tp:2", "--on", "cpu:8", "--batch", "16"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(words) == 0
    assert "\x1b[1;32mfits: " in capsys.readouterr().out
    monkeypatch.delenv("FORCE_COLOR")
    for columns in (60, 200):
        monkeypatch.setattr("meshwright._text.screen_columns", lambda width=columns: width)
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        table = lines[lines.index("") : lines.index("What to do next")]
        tables = [line for line in table if "  " in line.strip()]
        assert max(map(len, tables)) <= columns
        cut = [
            line for line in lines if ".py:" in line and not re.search(r"\.py:\d+( |$|[:,)])", line)
        ]
        assert cut == []
