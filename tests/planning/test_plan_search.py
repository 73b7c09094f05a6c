"""The search over meshes and lists."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.planning.exchange_costs import axis_speed
from meshwright.planning.plan_search import mesh_sizes, named_intensity, speeds_on


@given(st.integers(1, 512), st.integers(1, 4))
def test_meshes_use_all_devices_and_are_all_different(devices, most):
    found = mesh_sizes(devices, most)
    assert len(found) == len(set(found))
    for sizes in found:
        product = 1
        for size in sizes:
            product *= size
        assert product == devices
        assert len(sizes) <= most
        assert list(sizes) == sorted(sizes, reverse=True)


def test_a_large_batch_is_data_parallel_and_a_large_model_is_not():
    tiny = mw.models.model("tiny")
    small = mw.plan(tiny.train_step, tiny.shapes(), tiny.batch(512), on="v5e:2x4", donate_argnums=0)
    assert [axis.shards[0] for axis in small.axes] == ["batch"]
    large = mw.models.model("llama3-8b", layers=8)
    p = mw.plan(
        large.train_step, large.shapes(), large.batch(8, 2048), on="v5e:4x4", donate_argnums=0
    )
    assert any("embed" in axis.shards for axis in p.axes)
    assert p.predicted.bytes <= p.limit * 0.9


@pytest.mark.parametrize("carried", [None, (1.0, 3.0), (10.0, 3.0), (3.0, 2.0)])
def test_a_mesh_is_placed_as_it_was_costed(carried):
    hardware = mw.topology("v5e:16x16")
    intensity = named_intensity(["fsdp", "tp"], (32, 8), carried)
    placed = mw.place("fsdp:32, tp:8", hardware, intensity=intensity)
    speeds = tuple(axis_speed(axis, hardware) for axis in placed.axes)
    assert speeds == speeds_on((32, 8), hardware, carried)


@pytest.mark.slow
def test_many_experts_are_spread_and_tokens_sent_to_them():
    model = mw.models.model("moe-256", layers=2, attention="dot")
    p = mw.plan(
        model.train_step, model.shapes(), model.batch(32, 1024), on="v5p:2x2x4", donate_argnums=0,
        pipelines=False,
    )  # fmt: skip
    assert p.spec.names[0] == "ep" and p.axes[0].shards[0] == "experts"
    # Tokens are looked up where their rows are, then sent: nothing is summed over the experts.
    kinds = {e.kind for e, work, _ in p.exchanges() if work.looks_up == "rows" and e.bytes > 2**28}
    assert "all-to-all" in kinds and "reduce-scatter" not in kinds
    assert "expert parallel" in str(p)


@pytest.mark.slow
def test_the_search_is_the_same_whatever_python_hashes():
    code = (
        "import meshwright as mw; m = mw.models.model('moe-tiny');"
        "p = mw.plan(m.train_step, m.shapes(), m.batch(32), on='v5e:2x4', donate_argnums=0);"
        "print(p.spec, p.lists, p.groups)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
