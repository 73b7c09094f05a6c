"""Our tables against what the TPU compiler's library reports."""

import numpy as np
import pytest

import meshwright as mw
from meshwright._compat import compile_only_devices

pytestmark = pytest.mark.compilers

MEGACORE = {"chip_config_name": "megacore"}
SHAPES = [
    ("v4:2x2x1", 1, MEGACORE),
    ("v4:2x2x4", 1, MEGACORE),
    ("v4:4x4x8", 1, MEGACORE),
    ("v5e:2x2", 1, {}),
    ("v5e:2x4", 1, {"chips_per_host_bounds": (2, 4, 1)}),
    ("v5e:4x8", 1, {}),
    ("v5e:16x16", 1, {}),
    ("v5e:4x4", 4, {}),
    ("v5p:2x2x1", 1, {}),
    ("v5p:2x4x4", 1, {}),
    ("v5p:4x4x28", 1, {}),
    ("v5p:16x20x28", 1, {}),
    ("v5p:4x4x4", 3, {}),
    ("v6e:8x16", 1, {}),
    ("v6e:16x16", 2, {}),
    ("tpu7x:2x2x1", 1, {}),
    ("tpu7x:4x4x8", 1, {}),
    ("tpu7x:2x2x2", 2, {}),
]


def _table(topology: mw.Topology) -> set[tuple[int, ...]]:
    """(slice, x, y, z, core, host) of every device."""
    kinds = [axis.kind for axis in topology.axes]
    points = topology.coords
    slices = topology.slices.ravel()
    torus = points[:, [d for d, kind in enumerate(kinds) if kind == "torus"]]
    torus = np.pad(torus, ((0, 0), (0, 3 - torus.shape[1])))
    core = points[:, kinds.index("core")] if "core" in kinds else np.zeros(len(points), int)
    columns = np.column_stack([slices, torus, core, topology.host.ravel()])
    return {tuple(map(int, row)) for row in columns}


@pytest.mark.parametrize(("name", "slices", "options"), SHAPES, ids=lambda v: str(v)[:14])
def test_coordinates_hosts_and_slices_are_the_compilers(name, slices, options):
    more = {"num_slices": slices} if slices > 1 else {}
    devices = compile_only_devices("tpu", name, **options, **more)
    reported = {
        (getattr(d, "slice_index", 0) or 0, *d.coords, d.core_on_chip, d.process_index)
        for d in devices
    }
    assert _table(mw.topology(name, slices=slices)) == reported
    assert _table(mw.topology(devices)) == reported


@pytest.mark.parametrize("name", ["v5e:16x16", "v5e:4x8", "v5p:4x4x8", "v5p:2x4x4", "tpu7x:4x4x4"])
def test_wraparound_is_inferred_from_devices_as_from_the_name(name):
    mesh = mw.mesh("fsdp:-1", on=name)
    found = mw.topology(list(mesh.devices.flat))
    assert [(a.size, a.wraps) for a in found.axes] == [
        (a.size, a.wraps) for a in mw.topology(name).axes
    ]


def test_mixed_kinds_are_refused_by_name():
    one = compile_only_devices("tpu", "v5e:2x2")
    other = compile_only_devices("tpu", "v5p:2x2x1")
    with pytest.raises(mw.errors.TopologyError, match=r"4 of tpu 'TPU v5 lite', 4 of tpu 'TPU v5'"):
        mw.topology([*one, *other])


def test_live_and_compile_only_devices_do_not_mix():
    one = compile_only_devices("tpu", "v5e:2x2")
    other = compile_only_devices("tpu", "v5e:2x2", num_slices=2)
    with pytest.raises(mw.errors.TopologyError, match="2 different runtimes"):
        mw.topology([*one, *other])
