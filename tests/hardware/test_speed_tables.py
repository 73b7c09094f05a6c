"""The shipped speeds: a file for each chip, read like any calibration, each value with a source."""

import dataclasses
import json
import subprocess
import sys
from importlib import resources

import jax
import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.hardware.calibration_file import load, shipped_speeds
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.live import UNKNOWN
from meshwright.rehearsal.collectives.costs import group_cost
from meshwright.rehearsal.kernel_speeds import speeds

FOLDER = resources.files("meshwright.hardware") / "speeds"
NAMES = (*CHIPS, "unknown")


def test_every_chip_has_a_file_and_every_file_a_chip():
    assert {each.name for each in FOLDER.iterdir()} == {f"{name}.json" for name in NAMES}
    assert UNKNOWN.speeds.chip == "unknown"


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_file_is_a_calibration_whose_every_value_has_a_source(name, tmp_path):
    table = load(str(FOLDER / f"{name}.json"))
    assert table.chip == name and table.is_table and table.devices == 0
    assert [figure.name for figure in table.figures if len(figure.source) < 10] == []
    # The same format that `save` writes, and the one value that the package goes by.
    again = load(table.save(tmp_path / "copy.json"))
    assert again.to_json() == table.to_json() == shipped_speeds(name).to_json()


def test_the_modelled_speeds_are_the_figures_of_the_file():
    table, h200 = shipped_speeds("h200"), speeds(CHIPS["h200"])
    assert (CHIPS["h200"].tflops, CHIPS["h200"].link, CHIPS["h200"].memory_gb) == (990, 450, 141)
    assert h200.bytes == 4.8e12 * 0.88 == 4.8e12 * table["part memory"]
    assert h200.functions["tanh"] == 1.40e12 == table["function tanh"]
    assert h200.irregular["sorted"] == 31e9 and h200.loop == 0.84e12 and h200.rows == 7.0e12
    assert h200.kernels["cudnn attention forward 128"] == 990e12 * 0.60
    assert (h200.start, h200.gap) == (2.5e-6, 0.5e-6)
    # Nothing of the functions is known of these.
    a100 = speeds(CHIPS["a100"])
    assert a100.functions == {} and a100.loop == float("inf")
    v5e = speeds(CHIPS["v5e"]).tpu
    assert v5e is not None and v5e.cycles == 1.5e9 * 1.035 and v5e.bytes == 0.82e12 * 0.85


@pytest.mark.parametrize("hardware", ["h200:8", "v5p:4x4x4", "gb200:72x2", "cpu:8"])
def test_the_table_given_as_speeds_changes_nothing(hardware):
    plain = mw.topology(hardware)
    given = mw.topology(hardware, speeds=plain.speeds)
    assert given.chip.whose_speeds(8) == plain.chip.whose_speeds(8)
    one, other = speeds(plain.chip), speeds(given.chip)
    for name in ("flops", "bytes", "start", "functions", "irregular", "access", "kernels", "tpu"):
        assert getattr(one, name) == getattr(other, name)
    spec = f"dp:-1, tp:{min(8, plain.num_devices)}"
    assert mw.place(spec, plain).to_json() == mw.place(spec, given).to_json()


def test_a_table_of_ones_own_replaces_single_figures(tmp_path):
    table = shipped_speeds("h200")
    half = tuple(
        dataclasses.replace(each, value=each.value / 2) if each.name == "part ring" else each
        for each in table.figures
    )
    file = dataclasses.replace(table, figures=half).save(tmp_path / "mine.json")
    usual, mine = mw.topology("h200:4"), mw.topology("h200:4", speeds=file)
    axis = mw.place("tp:4", usual).axes[0]
    one, other = (group_cost("all-gather", 2**34, axis, each) for each in (usual, mine))
    assert other.seconds == pytest.approx(2 * one.seconds, rel=0.01)
    assert mine.chip.whose_speeds(4) == "mine.json, a table of 2026-11-16"
    # Figures of the machine are given by name: its links were built from them.
    faster = tuple(
        dataclasses.replace(each, value=1e12) if each.name == "nominal link" else each
        for each in table.figures
    )
    file = dataclasses.replace(table, figures=faster).save(tmp_path / "fast.json")
    with pytest.raises(mw.errors.CalibrationError, match=r"'nominal link' is 1 TB/s, and 450 GB/s"):
        mw.topology("h200:4", speeds=file)


def test_what_was_given_is_among_the_speeds_and_said():
    mine = mw.topology("v5p:4x4x4", speeds={"link": 90})
    assert (
        mine.speeds["nominal link"] == 90e9 and "given" in mine.speeds.figure("nominal link").source
    )
    assert mine.speeds["nominal bf16"] == 459e12
    assert mine.to_json()["speeds"] == "meshwright's table of v5p; as given: link"
    # What the name of a machine says is the table's own.
    cloud = mw.topology("p5.48xlarge")
    assert cloud.to_json()["speeds"] == "meshwright's table of h100"
    assert cloud.speeds["nominal network"] == cloud.chip.network * 1e9


def test_the_command_shows_every_figure_with_its_source(capsys):
    assert main(["hardware", "h200", "--figures"]) == 0
    shown = capsys.readouterr().out
    assert "part memory" in shown and "0.88 of nominal" in shown and "7%" in shown
    assert "measured on one H200: copies, reductions and updates" in shown
    assert main(["hardware", "a3-highgpu-8g", "--figures", "--json"]) == 0
    figures = {each["name"]: each for each in json.loads(capsys.readouterr().out)["figures"]}
    assert figures["nominal network"]["value"] == 12.5e9  # of the machine type


def test_no_table_is_read_by_importing_the_package():
    code = (
        "import sys, meshwright\n"
        "print(any('calibration_file' in name or 'chips' in name for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_a_rehearsal_by_the_table_given_is_the_same():
    x = jax.ShapeDtypeStruct((256, 256), "float32")
    options = {"mesh": "fsdp:8", "on": "cpu:8"}
    one = mw.rehearse(lambda w, x: x @ w, x, x, **options)
    table = mw.topology("cpu:8").speeds
    other = mw.rehearse(lambda w, x: x @ w, x, x, speeds=table, **options)
    assert one.time.to_json() == other.time.to_json()
