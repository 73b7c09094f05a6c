"""Peaks that plans predict, against those of the vendors' compilers."""

import pytest

import meshwright as mw

pytestmark = pytest.mark.compilers


@pytest.mark.parametrize(
    ("on", "mesh"), [("v5e:4x4", "fsdp:16"), ("v5e:4x4", "fsdp:4, tp:4"), ("h100:8x2", "fsdp:16")]
)
def test_a_predicted_peak_is_near_the_compiled_one(on, mesh):
    model = mw.models.model("llama3-8b", layers=2, vocab=32768, attention="dot")
    args = model.shapes(), model.batch(32, seq=2048)
    options = {"on": on, "mesh": mesh, "donate_argnums": 0, "progress": False}
    plan = mw.plan(model.train_step, *args, check=1, **options)
    assert plan.predicted.bytes == pytest.approx(plan.rehearsal.memory.peak, rel=0.15)
