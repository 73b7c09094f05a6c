"""Pipelines rehearsed by the vendors' real compilers."""

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.rehearsal.tpu_slices import slice_for, stand_in_name

pytestmark = pytest.mark.compilers


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def loss(params, x):
    x = mw.stage_end(jnp.tanh(x @ params["a"]))
    return jnp.mean((x @ params["b"]) ** 2)


def rehearsed(on, spec, cache, width=256):
    step = mw.pipeline(loss, mw.MpmdMesh(mw.mesh(spec, on=on), "pp"), microbatches=4)
    weight = jax.ShapeDtypeStruct((width, width), "float32")
    batch = jax.ShapeDtypeStruct((64, width), "float32")
    return mw.rehearse_pipeline(step, {"a": weight, "b": weight}, batch, cache=cache)


WORLDS = [
    ("v5e:2x4", "pp:2, dp:4"),
    ("h100:8", "pp:2, dp:4"),
    # libtpu aborts the process, or fails, for these groups as parts of their slice.
    ("v5e:4x4", "pp:2, fsdp:8"),
    ("v5e:4x2", "pp:2, dp:4"),
    ("v5e:4x4", "pp:2, dp:8"),
]


@pytest.mark.parametrize(("on", "spec"), WORLDS)
def test_a_pipeline_on_groups_that_are_not_here(on, spec, cache):
    found = rehearsed(on, spec, cache)
    assert found.fits
    assert [task.name for group in found.groups for task in group.tasks] == [
        *("0F", "0BW"),
        *("1F", "1BW"),
    ]
    parts = 8 if "fsdp" in spec else 1
    for group in found.groups:
        assert group.memory.limit > 10 * 2**30
        assert group.memory.arguments >= 4 * 256 * 256 // parts
        assert any(task.collectives.moved for task in group.tasks)


def test_what_was_compiled_before_is_kept(cache, monkeypatch):
    first = rehearsed("v5e:2x4", "pp:2, dp:4", cache)
    monkeypatch.setattr("meshwright.rehearsal.compiler.Compiler.run", None)
    again = rehearsed("v5e:2x4", "pp:2, dp:4", cache)
    assert again.to_json() == first.to_json()


def test_a_group_that_does_not_fit_is_told(cache):
    found = rehearsed("v5e:2x4", "pp:2, dp:4", cache, width=2**16)
    assert not found.fits
    assert found.refused.startswith("group 0: ")
    assert "group 0: does NOT fit: " in str(found)
    assert "ran out of memory at group 0" in str(found) and "<p>" in found._repr_html_()
    assert found.to_json()["timeline"] is None


@pytest.mark.parametrize(
    ("on", "spec", "name", "positions", "odd"),
    [
        ("v5e:4x4", "pp:2, fsdp:8", "v5e:2x4", [0, 1, 2, 3, 7, 6, 5, 4], False),
        ("v5e:4x2", "pp:2, dp:4", "v5e:2x2", [0, 1, 3, 2], False),
        ("v5e:4x4", "pp:4, dp:4", "v5e:2x2", [0, 1, 3, 2], True),  # a chip of each host
        ("v5e:4x4", "pp:8, dp:2", "v5e:2x2", [0, 1], True),
        ("v5p:2x2x4", "pp:2, dp:8", "v5p:2x2x2", [0, 1, 3, 2, 6, 7, 5, 4], True),
        ("h100:8x2", "pp:2, dp:8", "h100:4x2", [0, 1, 2, 3, 4, 5, 6, 7], False),
    ],
)
def test_groups_are_compiled_for_hardware_that_can_be_had(on, spec, name, positions, odd):
    groups = mw.MpmdMesh(mw.mesh(spec, on=on), "pp")
    for mesh in groups.meshes:
        hardware, places = slice_for(mesh)
        assert hardware.name == name
        assert places.tolist() == positions
        assert stand_in_name(mesh) == (name if odd else "")
