"""Context parallel plans, as the vendors' compilers make them: nothing is exchanged unasked."""

import pytest
from forced_plans import with_lists

import meshwright as mw
from meshwright.planning.made_plans import unasked_part
from meshwright.planning.plan_layouts import SMALLEST
from meshwright.planning.plan_text import axis_role
from meshwright.planning.step_plan import UNASKED

pytestmark = pytest.mark.compilers
LONG = {"layers": 2, "vocab": 32768, "attention": "dot"}


@pytest.mark.parametrize("on", ["v5e:2x4", "h100:8x1"])
def test_compilers_keep_to_a_context_parallel_plan(on):
    model = mw.models.model("llama3-8b", **LONG)
    args = model.shapes(), model.batch(2, seq=8192)
    where = {"on": on, "mesh": "fsdp:2, cp:4", "donate_argnums": 0, "progress": False}
    plan = mw.plan(model.train_step, *args, **where)
    forced = with_lists(plan, [["batch", "embed"], ["seq", "queries"]], SMALLEST)
    r = forced.rehearse(codegen=False) if on.startswith("v") else forced.rehearse()
    assert unasked_part(forced, r) <= UNASKED
    # Scores are nowhere whole along their queries, nor exchanged.
    scores = 4 * 32 * 8192 * 8192 / 4
    assert max(entry.bytes for entry in r.collectives) < scores / 4
    assert r.memory.peak < plan.limit


@pytest.mark.slow
def test_a_long_row_is_context_parallel_once_compiled():
    model = mw.models.model("llama3-8b", seq=32768, **LONG)
    args = model.shapes(), model.batch(1, seq=32768)
    options = {"on": "v5e:4x4", "donate_argnums": 0, "pipelines": False, "progress": False}
    plan = mw.plan(model.train_step, *args, check=2, **options)
    assert any("context parallel" in axis_role(axis.shards) for axis in plan.axes)
    compiled = {each.chosen: each.compiled for each in plan.alternatives if each.compiled}
    assert compiled[True] < 0.95 * compiled[False]
