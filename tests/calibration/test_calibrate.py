"""`calibrate` on simulated devices: what it measures, what it refuses, what an interrupt leaves."""

import dataclasses
import json

import jax
import pytest
from test_calibration_file import a_calibration

import meshwright as mw
from meshwright.calibration import calibrate as calibrating
from meshwright.calibration.collective_probes import fit_line
from meshwright.calibration.comparison import compare_calibrations as compare
from meshwright.cli.main import main
from meshwright.errors import CalibrationError
from meshwright.hardware.calibration_file import load
from meshwright.hardware.measured_figures import LinkFigure


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


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("attention", "attention: of GPUs, and these devices are CPUs."),
        ("eight-bit", "eight-bit: of GPUs and TPUs, and these devices are CPUs."),
        ("host", "host: of GPUs and TPUs, and these devices work in the host's own memory."),
    ],
)
def test_a_run_that_measures_nothing_is_refused_and_writes_nothing(tmp_path, capsys, part, words):
    out = a_calibration("cpu", "cpu:8").save(tmp_path / "o.json")
    before = out.read_text()
    assert main(["calibrate", "--only", part, "--quick", "--out", str(out)]) == 2
    shown = capsys.readouterr()
    assert f"--only: there is nothing to measure. {words}" in shown.err and not shown.out
    assert out.read_text() == before


def test_a_part_that_is_not_here_is_left_out_beside_others():
    one = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    some = mw.calibrate(one, quick=True, only=["launches", "attention"], progress=False)
    assert some.left_out == ("attention: of GPUs, and these devices are CPUs",)
    with pytest.raises(CalibrationError, match="collectives: of several devices, and there is one"):
        mw.calibrate(one, quick=True, only=["collectives"], progress=False)


def test_an_interrupted_run_does_not_replace_a_whole_file(tmp_path, monkeypatch, capsys):
    whole = a_calibration("cpu", "cpu:8")
    less = dataclasses.replace(whole, figures=whole.figures[:2], links=(), interrupted=True)
    more = dataclasses.replace(less, figures=whole.figures[:3])
    none = dataclasses.replace(less, figures=())
    keep, partial = tmp_path / "keep.json", tmp_path / "keep.partial.json"

    def run(measured):
        monkeypatch.setattr(mw, "calibrate", lambda *_, **__: measured)
        code = main(["calibrate", "--quick", "--out", str(keep)])
        return code, capsys.readouterr().err

    assert run(none) == (
        130,
        f"interrupted before anything was measured: {keep} is not written.\n",
    )
    assert not keep.exists()
    # Without a file there, and in the place of one with no more, it is the file.
    assert run(less)[0] == 130 and load(keep).count == 2
    assert run(more)[0] == 130 and load(keep).count == 3 and not partial.exists()
    assert run(whole)[0] == 0 and load(keep).count == whole.count
    code, told = run(more)
    assert code == 130 and load(keep).count == whole.count and load(partial).count == 3
    assert f"interrupted: {keep} has more, and is kept." in told and f"wrote {partial}" in told
    code, told = run(less)
    assert code == 130 and load(partial).count == 3 and "wrote" not in told
    code, told = run(none)
    assert code == 130 and f"{keep} is as it was" in told and load(keep).count == whole.count
    # What is not a calibration is somebody's, too.
    keep.write_text("notes")
    assert run(more)[0] == 130 and keep.read_text() == "notes"
    # Nor does a run that had no time for anything.
    code, told = run(dataclasses.replace(none, interrupted=False, left_out=("memory: 0 s",)))
    assert code == 2 and "nothing was measured: memory: 0 s. " in told


def test_a_line_has_the_error_of_its_points():
    sizes = [4**power * 1024.0 for power in range(1, 7)]
    straight = [(size, 20e-6 + size / 5e9, 0.0) for size in sizes]
    assert fit_line(straight) == pytest.approx((20e-6, 5e9, 0.0), rel=1e-6, abs=1e-9)
    # Of simulated devices: the large ones are far above what the small ones promise.
    times = (60e-6, 62e-6, 70e-6, 140e-6, 1805e-6, 41676e-6)
    bent = [(size, seconds, 0.0) for size, seconds in zip(sizes, times, strict=True)]
    latency, bandwidth, error = fit_line(bent)
    factors = [
        max(each, 1 / each) for each in ((latency + size / bandwidth) / t for size, t, _ in bent)
    ]
    assert 2 < max(factors) < 6 and 1 < error < max(factors) - 1
    row = LinkFigure("all-gather", "x", "memory", 4, 1, latency, bandwidth, error, tuple(bent))
    assert row.true_error == pytest.approx(error)
    shown = str(a_calibration("cpu", "cpu:8", links=(row,)))
    words = "all-gather, x: its points are not a line; 4 MiB took 41.7 ms, the line has 7.33 ms."
    assert words in shown and f"{error:.0%}" in shown and "rms error" in shown
    # A file of before has the mean of relative errors, which hides it: its points do not.
    old = dataclasses.replace(row, latency=55.7e-6, bandwidth=4.64e9, error=0.46)
    assert old.true_error > 2 and "4 MiB took 41.7 ms, the line has 960 us" in old.problem


def test_times_that_size_makes_no_difference_to_bound_both():
    latency, bandwidth, _ = fit_line([(2.0**power, 1e-5, 0.0) for power in range(10, 20)])
    assert latency == pytest.approx(1e-5) and bandwidth == pytest.approx(2**19 / 1e-5)


def test_files_are_compared_by_their_paths_and_findings_name_the_file(tmp_path, capsys):
    usual = a_calibration()
    [figure, *rest] = usual.figures
    each = (300e12,) * 7 + (150e12,)
    slow = dataclasses.replace(figure, value=200e12, each=each)
    today = dataclasses.replace(usual, figures=(slow, *rest)).save(tmp_path / "today.json")
    monday = usual.save(tmp_path / "monday.json")
    told = compare(str(today), monday)
    assert {entry.where for entry in told.slower} == {
        *(str(today), f"device 7 of process 0 of {today}"),
    }
    assert (told.to_json()["first"], told.to_json()["second"]) == (str(today), str(monday))
    # Both directions, whichever comes first.
    assert {entry.where for entry in compare(monday, today).slower} == {
        entry.where for entry in told.slower
    }
    assert main(["calibrate", "--compare", str(today), str(monday), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(told.to_json()))
    assert compare(mw.Calibration.load(today)).to_json()["second"] is None
    with pytest.raises(CalibrationError, match="compare: 5 is not a file of `meshwright calib"):
        compare(5)
    with pytest.raises(CalibrationError, match=r"compare: there is no file none\.json"):
        compare(usual, "none.json")
    with pytest.raises(CalibrationError, match=r"path: none\.json: No such file"):
        mw.Calibration.load("none.json")


def test_what_is_slower_is_named():
    usual = a_calibration(processes=(0, 0, 1, 1, 2, 2, 3, 3))
    [figure, *_] = usual.figures
    each = (300e12,) * 5 + (150e12,) + (300e12,) * 2
    slow = dataclasses.replace(
        usual, figures=(dataclasses.replace(figure, each=each), *usual.figures[1:])
    )
    assert not compare(usual, usual).slower and not compare(slow).processes
    [one] = compare(slow, slow).slower[:1]
    assert (one.what, one.ratio) == (figure.name, 2.0)
    assert one.where == "device 5 of process 2 of a calibration of h200:8 (the first)"
    assert "device 5 of process 2" in {entry.where for entry in compare(slow).slower}
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
    with pytest.raises(CalibrationError, match="only: an empty list asks for nothing"):
        mw.calibrate(only=[])
    with pytest.raises(CalibrationError, match="quick"):
        mw.calibrate(quick="yes")
    h200 = a_calibration().save(tmp_path / "a.json")
    cpu = a_calibration("cpu", "cpu:8").save(tmp_path / "b.json")
    for words, told in (
        (["--compare", str(h200), str(cpu)], "is of h200, "),
        (["x.json"], "x.json: a file goes with --compare"),
        (["--out", "/none/x.json"], "there is no folder /none"),
        (["--compare", str(tmp_path / "c.json")], "--compare: there is no file /"),
        (["--compare", str(h200), "nope.json"], "--compare: there is no file nope.json"),
        (["--compare", "default"], "--compare: 'default' is a file for each kind of chip. Name"),
        (["--compare", str(h200), "table", "--out", "x.json"], "writes no file: leave out --out."),
        (["--compare", str(h200), "--quick", "--only", "memory"], "leave out --quick, --only."),
        (["--mesh", "dp:8", "--only", "memory"], "--mesh is for collectives, and --only memory"),
    ):
        assert main(["calibrate", *words]) == 2
        assert told in capsys.readouterr().err
    assert main(["calibrate", "--compare", str(h200), str(h200)]) == 0
    assert "Nothing is slower by more than its spread." in capsys.readouterr().out
