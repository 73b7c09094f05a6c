"""A calibration as a file: what it says, what uses it, and what is wrong with a file."""

import dataclasses

import jax
import pytest

import meshwright as mw
from meshwright.errors import CalibrationError
from meshwright.hardware.calibration_file import Calibration, load
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.measured_figures import Figure, LinkFigure
from meshwright.rehearsal.collectives.costs import group_cost
from meshwright.rehearsal.kernel_speeds import speeds


def a_calibration(chip="h200", topology="h200:8", devices=8, **changes):
    figures = (
        Figure("product bf16 1024", 300e12, "FLOP/s", 0.02, (300e12,) * devices),
        Figure("product bf16 4096", 600e12, "FLOP/s", 0.02, (600e12,) * devices),
        Figure("memory copy", 4e12, "B/s", 0.01, (4e12,) * devices),
        Figure("function tanh", 2e12, "elements/s", 0.01, (2e12,) * devices),
        Figure("start iteration", 10e-6, "s", 0.1, (10e-6,) * devices),
        Figure("irregular sorted", 30e9, "elements/s", 0.1, (30e9,) * devices),
        Figure("bus to host", 20e9, "B/s", 0.1, (20e9,) * devices),
    )
    points = ((1024.0, 2e-5, 0.1), (2.0**30, 3e-3, 0.1))
    inside = {"cpu": "memory", "h200": "NVLink"}[chip]
    links = tuple(
        LinkFigure(kind, "inside", inside, devices, 1, 20e-6, 350e9, 0.05, points)
        for kind in ("all-gather", "collective-permute")
    )
    made = Calibration(
        *(chip, "a chip", topology, (0,) * devices, "2026-11-16T12:00:00Z", "580"),
        *({"jax": "0.10.2"}, {"sm": 1980.0}, figures, links),
    )
    return dataclasses.replace(made, **changes)


def test_a_file_reads_back_and_shows_every_figure_with_its_spread(tmp_path):
    made = a_calibration(left_out=("fp8: no time",), interrupted=True)
    read = load(made.save(tmp_path / "cluster.json"))
    assert read.to_json() == made.to_json()
    assert "host" not in (tmp_path / "cluster.json").read_text().replace("to host", "")
    for text in (str(read), read._repr_html_()):
        assert "600 TFLOP/s" in text and "4 TB/s" in text and "20.0 us" in text and "350" in text
        assert "left out: fp8: no time" in text and "interrupted" in text


def test_measured_speeds_go_before_the_table(tmp_path):
    file = a_calibration().save(tmp_path / "cluster.json")
    chip = mw.topology("h200:8", speeds=file).chip
    speed, table = speeds(chip), speeds(CHIPS["h200"])
    assert speed.compute(2 * 4096**3, "bf16") == pytest.approx(2 * 4096**3 / 600e12)
    # Between two sides along the line, below the smallest by the side, f32 by the table's ratio.
    assert speed.compute(2 * 2048**3, "bf16") == pytest.approx(2 * 2048**3 / 450e12)
    assert speed.compute(2 * 512**3, "bf16") == pytest.approx(2 * 512**3 / 150e12)
    assert speed.compute(2 * 4096**3, "f32") == pytest.approx(2 * 4096**3 / 600e12 / 0.49)
    assert speed.bytes == 4e12 and speed.functions["tanh"] == 2e12
    assert speed.access["rows"] / table.access["rows"] == pytest.approx(4e12 / table.bytes)
    assert speed.functions["log"] == table.functions["log"] and speed.bus == table.bus
    assert speed.host(20e9, "to host") == 1.0
    assert speed.next_round(4e-6) == pytest.approx(6e-6) and speed.next_round(1.0) == 0.0


def test_a_collective_is_measured_scaled_by_its_ring_or_the_tables():
    machine = mw.topology("h200:8x4", speeds=a_calibration())
    table = mw.topology("h200:8x4")
    eight = mw.place("dp:4, tp:8", machine)
    cost = group_cost("all-gather", 350_000_000, eight.axes[1], machine)
    assert cost.seconds == pytest.approx(20e-6 + 1e-3) and cost.links == "NVLink"
    assert eight.axes[1].cost.all_gather == pytest.approx(20e-6 + 2**30 / 350e9)
    four = mw.place("dp:8, tp:4", machine).axes[1]
    scaled = 350e9 * (4 / 3) / (8 / 7)
    assert four.cost.all_gather == pytest.approx(10e-6 + 2**30 / scaled)
    # Over the network nothing was measured: the table's, as without a calibration.
    for kind in ("all-gather", "all-reduce"):
        one, other = (
            group_cost(kind, 2**20, mw.place("dp:4, tp:8", each).axes[0], each)
            for each in (machine, table)
        )
        assert one == other
    for shown in (str(machine), str(eight), str(eight.to_json())):
        assert "measured 2026-11-16 on 8 devices of h200:8; collectives of 32 devices" in shown
    assert "meshwright's table of h200" in str(table.to_json())


def test_a_rehearsal_says_whose_speeds_it_used(tmp_path):
    file = a_calibration("cpu", "cpu:8").save(tmp_path / "mine.json")
    w = jax.ShapeDtypeStruct((256, 256), "float32")
    options = {"mesh": "fsdp:8", "on": "cpu:8"}
    table = mw.rehearse(lambda w, x: x @ w, w, w, **options)
    mine = mw.rehearse(lambda w, x: x @ w, w, w, speeds=file, **options)
    [gather] = mine.collectives
    assert gather.seconds == pytest.approx(20e-6 + gather.bytes / 350e9)
    assert mine.time.total < table.time.total
    words = "mine.json, measured 2026-11-16 on 8 devices of cpu:8"
    assert words in str(mine) and words in mine._repr_html_()
    assert "by meshwright&#x27;s table of cpu" in table._repr_html_()
    assert mine.to_json()["speeds"] == mine.time.to_json()["speeds"] == words
    assert "by meshwright's table of cpu" in str(table)
    assert table.to_json()["speeds"] == "meshwright's table of cpu"
    # A mesh of live devices takes them too, and one without.
    abstract = mw.mesh("fsdp:8", on="cpu:8")
    assert mw.rehearse(lambda w, x: x @ w, w, w, mesh=abstract, speeds=file).time.speeds == words
    live = mw.rehearse(lambda w, x: x @ w, w, w, mesh=mw.mesh("fsdp:8"), speeds=str(file))
    assert live.time.speeds == words


def test_meshes_and_explanations_go_by_measured_speeds(tmp_path):
    file = a_calibration("cpu", "cpu:8").save(tmp_path / "mine.json")
    usual = mw.explain(mw.mesh("tp:8"))
    measured = 20e-6 + 2**30 / 350e9
    for placed in (
        mw.explain(mw.mesh("tp:8", speeds=file), speeds=file),
        mw.explain("tp:8", on="cpu:8", speeds=load(file)),
        mw.explain(mw.mesh("tp:8"), on="cpu:8", speeds=str(file)),
        mw.explain(jax.sharding.AbstractMesh((8,), ("tp",)), on="cpu:8", speeds=file),
    ):
        assert placed.axes[0].cost.all_gather == pytest.approx(measured)
        assert "mine.json, measured 2026-11-16 on 8 devices" in str(placed)
    assert usual.axes[0].cost.all_gather != pytest.approx(measured, rel=0.1)
    # An abstract mesh was placed by the table; it is explained where it is, by other speeds.
    h200 = a_calibration().save(tmp_path / "h200.json")
    # Its axes have names of their own: equal meshes of other tests leave their placements behind.
    abstract = mw.mesh("measured_rows:2, measured_cols:4", on="h200:8")
    if isinstance(abstract, jax.sharding.AbstractMesh):
        by_table, by_file = mw.explain(abstract), mw.explain(abstract, speeds=h200)
        assert (by_table.positions == by_file.positions).all()
        assert by_table.axes[1].cost.all_gather != by_file.axes[1].cost.all_gather
    for make in (mw.mesh, mw.explain):
        with pytest.raises(CalibrationError, match=r"was measured on h200 \(a chip\), not on cpu"):
            make("tp:8", on="cpu:8", speeds=h200)
    with pytest.raises(mw.errors.MeshError, match="speeds goes with a mesh alone"):
        mw.explain({"w": jax.ShapeDtypeStruct((8,), "f4")}, mw.mesh("tp:8"), speeds=file)
    with pytest.raises(mw.errors.MeshError, match="a Placement is explained as it is"):
        mw.explain(usual, speeds=file)


def test_a_pipeline_says_whose_speeds_it_used(tmp_path):
    file = a_calibration("cpu", "cpu:8").save(tmp_path / "mine.json")

    def loss(params, x):
        h = mw.stage_end(jax.numpy.tanh(x @ params["a"]))
        return jax.numpy.mean((h @ params["b"]) ** 2)

    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 64), (32, 64)))
    groups = mw.MpmdMesh(mw.mesh("pp:2, fsdp:4"), "pp")
    step = mw.pipeline(loss, groups, microbatches=4)
    args = {"a": w, "b": w}, x
    table = mw.rehearse_pipeline(step, *args)
    mine = mw.rehearse_pipeline(step, *args, speeds=file)
    words = "mine.json, measured 2026-11-16 on 8 devices of cpu:8; collectives of 4 devices"
    assert mine.speeds.startswith(words) and table.speeds == "meshwright's table of cpu"
    for shown in (str(mine), mine._repr_html_(), mine.to_json()["speeds"]):
        assert words in shown
    times = [[task.time.total for task in each.groups[0].tasks] for each in (table, mine)]
    assert times[0] != times[1]
    # From group to group by the measured link, and its latency: two rows on each device.
    assert mine.timeline.latency == pytest.approx(1e3 * (20e-6 + 2 * 64 * 4 / 350e9))
    with pytest.raises(CalibrationError, match="was measured on h200"):
        mw.rehearse_pipeline(step, *args, speeds=a_calibration())


def test_what_a_file_has_not_is_said_to_be_the_tables():
    one = a_calibration(figures=a_calibration().figures[2:3], links=())
    assert one.note(8) == (
        "a calibration, measured 2026-11-16 on 8 devices of h200:8; the table's: products, "
        "launches, functions, sorts, gathers and scatters, collectives"
    )
    assert one.note(1).endswith("functions, sorts, gathers and scatters")


def test_speeds_that_are_no_file_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(CalibrationError, match=r"there is no file .*h200.json. `meshwright cal"):
        mw.place("tp:8", "h200:8", speeds="default")
    a_calibration().save(tmp_path / "meshwright" / "h200.json")
    assert mw.place("tp:8", "h200:8", speeds="default").topology.chip.measured is not None
    with pytest.raises(CalibrationError, match="speeds: 3 is not a file of"):
        mw.rehearse(lambda x: x, jax.ShapeDtypeStruct((8,), "f4"), mesh="dp:8", speeds=3)
    with pytest.raises(CalibrationError, match=r"out: .*/none/x.json: File exists"):
        (tmp_path / "none").write_text("")
        a_calibration().save(tmp_path / "none" / "x.json")
