"""The calibration of a TPU without one: its programs compile, and its file is rehearsed by."""

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.calibration.calibrate import _figure
from meshwright.calibration.collective_probes import KINDS, CollectiveProbe, fit_all
from meshwright.calibration.probes import Probe, parts
from meshwright.calibration.timing import Timed
from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.chips import CHIPS

pytestmark = pytest.mark.compilers


@pytest.fixture(scope="module")
def mesh():
    """Four chips of a v5e that libtpu knows and that are not here."""
    return mw.mesh("network:1, inside:4", on="v5e:2x2")


def test_its_programs_are_compiled_by_libtpu(mesh):
    local = jax.sharding.Mesh(mesh.devices.reshape(-1)[:1], ("device",))
    listed = parts(CHIPS["v5e"], quick=True)
    chosen: list[Probe] = [probes[0] for probes, _ in listed.values()]
    for probe in chosen:
        name = f"calibrate_{probe.name}".replace(" ", "_")
        timed = Timed(name, probe.function, probe.inputs, local, traced=not probe.rounds)
        assert timed.program().entry.instructions and timed.module == f"jit_{name}"


@pytest.mark.parametrize("kind", KINDS)
def test_its_collectives_are_found_in_what_libtpu_makes_of_them(mesh, kind):
    probe = CollectiveProbe(kind, "inside", 2**16)
    timed = probe.timed(mesh)
    own, program = probe.is_own(timed), timed.program()
    every = [each for one in program.computations.values() for each in one.instructions]
    names = [each.name for each in every if own(each.name)]
    if kind == "reduce-scatter":
        # An all-reduce inside of a fusion: no instruction of its own, so the whole program counts.
        assert not names and "all-reduce" in {each.opcode for each in every}
    else:
        assert names


def test_the_file_it_would_write_is_rehearsed_by(mesh, tmp_path):
    """The seconds are made up; what becomes of them is what would on a TPU."""
    placement = mw.explain(mesh)
    sizes = (2.0**16, 2.0**20, 2.0**24)
    seconds = {
        CollectiveProbe(kind, "inside", int(size)): dict.fromkeys(
            range(4), [3e-5 + size / 2e10] * 3
        )
        for kind in KINDS
        for size in sizes
    }
    runs = dict.fromkeys(range(4), [2.0**27 * 8 / 0.6e12] * 5)
    figures = (_figure("memory copy", ("B/s", 8.0 * 2**27), runs, 4),)
    device = mesh.devices.flat[0]
    links = fit_all(mesh, placement, seconds)
    written = Calibration(
        *(placement.topology.chip.name, device.device_kind, placement.topology.name, (0,) * 4),
        *("2026-11-16T12:00:00Z", "", {"jax": jax.__version__}, {}, figures, links),
    )
    assert (written.chip, written.topology) == ("v5e", "v5e:2x2") and len(links) == len(KINDS)
    assert {line.links for line in links if line.kind != "collective-permute"} == {"ICI 2d grid"}
    file = written.save(tmp_path / "v5e.json")
    w = jax.ShapeDtypeStruct((2048, 2048), "bfloat16")
    options = {"mesh": "fsdp:4", "on": "v5e:2x2"}
    table = mw.rehearse(lambda w, x: x @ w, w, w, **options)
    mine = mw.rehearse(lambda w, x: x @ w, w, w, speeds=file, **options)
    [gather] = [each for each in mine.collectives if each.kind == "all-gather"]
    assert gather.seconds == pytest.approx(3e-5 + gather.bytes / 2e10, rel=1e-6)
    assert mine.time.speeds.startswith("v5e.json, measured 2026-11-16 on 4 devices of v5e:2x2")
    assert table.time.speeds == "meshwright's table of v5e"
    # Products take the cycles that the compiler expects, whatever was measured.
    assert mine.time.compute == table.time.compute
    assert np.isfinite(mine.time.total) and mine.time.total != table.time.total
