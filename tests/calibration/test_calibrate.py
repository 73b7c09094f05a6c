"""`calibrate` on simulated devices: what it measures, what it refuses, what an interrupt leaves."""

import dataclasses
import json

import jax
import pytest
from test_calibration_file import a_calibration

import meshwright as mw
from meshwright.calibration import calibrate as calibrating
from meshwright.calibration.comparison import compare_calibrations as compare
from meshwright.cli.main import main
from meshwright.errors import CalibrationError


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::meshwright.errors.IdleDevicesWarning")
def test_every_collective_of_every_axis_is_fitted_at_six_sizes(tmp_path, capsys):
    out = tmp_path / "mine.json"
    words = ["calibrate", "--quick", "--out", str(out), "--mesh", "dp:2, tp:2"]
    assert main([*words, "--only", "collectives", "products"]) == 0
    shown = capsys.readouterr()
    assert "all-gather, tp" in shown.out and f"wrote {out}" in shown.err
    mine = json.loads(out.read_text())
    assert mine["topology"] == "cpu:4" and mine["processes"] == [0] * 4
    lines = {(each["kind"], each["axis"]): each for each in mine["links"]}
    assert len(lines) == 2 * 5 and {each["members"] for each in lines.values()} == {2}
    for line in lines.values():
        assert len(line["points"]) == 6 and len(line["each"]) == 4 and line["links"] == "memory"
        assert line["bandwidth"] > 0 and line["latency"] >= 0 and line["error"] >= 0
        assert all(seconds > 0 for _, seconds, _ in line["points"])
    figures = {each["name"]: each for each in mine["figures"]}
    assert set(figures) == {
        f"product {name} {side}" for name in ("bf16", "f32") for side in (128, 256)
    }
    assert all(each["value"] > 0 and len(each["each"]) == 4 for each in figures.values())
    # It is a calibration of these devices: a rehearsal for them goes by it.
    x = jax.ShapeDtypeStruct((256, 256), "float32")
    r = mw.rehearse(lambda w, x: x @ w, x, x, mesh=mw.mesh("fsdp:8"), speeds=out)
    assert "mine.json" in r.time.speeds


def test_an_interrupt_keeps_what_was_measured(monkeypatch):
    real = calibrating.run_all

    def interrupted(programs, *rest):
        if any("function" in each.name for each in programs):
            raise KeyboardInterrupt
        return real(programs, *rest)

    monkeypatch.setattr(calibrating, "run_all", interrupted)
    monkeypatch.setattr(calibrating, "_LINKS_SECONDS", {True: 0.0})
    two = jax.sharding.Mesh(jax.devices()[:2], ("x",))
    some = mw.calibrate(two, quick=True, only=["launches", "functions"], progress=False)
    assert some.interrupted and some.value("start kernel") > 0 and some.devices == 2
    assert some.values("function") == {}
    # A part whose time is over says what it left out.
    none = mw.calibrate(two, quick=True, only=["collectives"], progress=False)
    [words] = none.left_out
    assert words.startswith("collectives: 0 s were over before all_gather_x_4096, ")


def test_what_is_slower_is_named():
    usual = a_calibration(processes=(0, 0, 1, 1, 2, 2, 3, 3))
    [figure, *_] = usual.figures
    each = (300e12,) * 5 + (150e12,) + (300e12,) * 2
    slow = dataclasses.replace(
        usual, figures=(dataclasses.replace(figure, each=each), *usual.figures[1:])
    )
    assert not compare(usual, usual).slower and not compare(slow).processes
    [one] = compare(slow, slow).slower[:1]
    assert (one.where, one.what, one.ratio) == ("device 5 of process 2", figure.name, 2.0)
    # All figures of a process: the process. Against another file, and against the table.
    halved = tuple(
        dataclasses.replace(
            each,
            each=tuple(
                v * (2 if each.unit == "s" else 0.5) if i in (4, 5) else v
                for i, v in enumerate(each.each)
            ),
        )
        for each in usual.figures
    )
    [process] = compare(dataclasses.replace(usual, figures=halved)).processes
    assert str(process).startswith("process 2 (devices 4-5): 7 of 7 figures takes 2.00 times")
    links = tuple(dataclasses.replace(line, bandwidth=100e9) for line in usual.links)
    told = compare(dataclasses.replace(usual, links=links, file="today.json"), usual)
    assert {entry.what for entry in told.slower} == {line.name for line in links}
    assert "today.json" in str(told) and told.to_json()["slower"][0]["ratio"] > 3
    assert any("table of h200" in entry.than for entry in compare(usual).slower)


def test_a_file_is_compared_with_the_table_of_its_chip(tmp_path, capsys):
    usual = a_calibration()
    table = mw.topology("h200:8").speeds
    shipped = table.save(tmp_path / "shipped.json")
    today = usual.save(tmp_path / "today.json")
    # A copy at 4 TB/s is within the spread of the table's own 4.22.
    slow = {entry.what for entry in compare(usual).slower}
    assert slow == {
        *("product bf16 1024", "product bf16 4096", "bus to host"),
        "all-gather over 8 by NVLink, inside",
    }
    for words in ([str(today)], [str(today), "table"], [str(shipped), str(today)]):
        assert main(["calibrate", "--compare", *words]) == 0
        shown = capsys.readouterr().out
        assert "product bf16 4096" in shown and "4 slower figures" in shown
        assert ("shipped.json" in shown) == (len(words) == 2 and "table" not in words)
    assert [e.ratio for e in compare(usual, table).slower] == [
        e.ratio for e in compare(usual).slower
    ]
    # Links: a gather over 8 by NVLink has 411 GB/s in the table.
    lines = tuple(dataclasses.replace(line, bandwidth=200e9) for line in usual.links)
    told = compare(dataclasses.replace(usual, links=lines))
    assert {
        "all-gather over 8 by NVLink, inside",
        "collective-permute over 8 by NVLink, inside",
    } == {entry.what for entry in told.slower if " over " in entry.what}
    gather = next(entry for entry in told.slower if entry.what.startswith("all-gather"))
    assert gather.ratio == pytest.approx(2.05, abs=0.05) and gather.than.endswith("table of h200")
    # Two tables: by name.
    half = tuple(
        dataclasses.replace(each, value=each.value / 2) if each.name == "function tanh" else each
        for each in table.figures
    )
    [one] = compare(dataclasses.replace(table, figures=half), table).slower
    assert (one.what, one.ratio) == ("function tanh", 2.0)


def test_bad_requests_are_refused_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(CalibrationError, match="mesh: 'dp:8' has no devices to measure"):
        mw.calibrate("dp:8")
    with pytest.raises(CalibrationError, match=r"only: there is no part 'product'. Did you mean"):
        mw.calibrate(only=["product"])
    with pytest.raises(CalibrationError, match="only: 'memory' is not a list"):
        mw.calibrate(only="memory")
    with pytest.raises(CalibrationError, match="quick"):
        mw.calibrate(quick="yes")
    h200 = a_calibration().save(tmp_path / "a.json")
    cpu = a_calibration("cpu", "cpu:8").save(tmp_path / "b.json")
    for words, told in (
        (["--compare", str(h200), str(cpu)], "is of h200, "),
        (["x.json"], "x.json: a file goes with --compare"),
        (["--out", "/none/x.json"], "there is no folder /none"),
        (["--compare", str(tmp_path / "c.json")], "c.json: No such file"),
    ):
        assert main(["calibrate", *words]) == 2
        assert told in capsys.readouterr().err
    assert main(["calibrate", "--compare", str(h200), str(h200)]) == 0
    assert "Nothing is slower by more than its spread." in capsys.readouterr().out
