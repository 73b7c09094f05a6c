"""`step.lower(...)`: the programs of a step, and where its arguments and results lie."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from pipeline_helpers import assert_close, batch, chain_loss, groups, layers, normal

import meshwright as mw

PAIR = "pp:2, dp:2, tp:2"


def trained():
    tx = optax.adamw(1e-2)

    def train(params, state, x, y):
        value, grads = mw.value_and_grad(chain_loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {"loss": value, "rows": len(x)}

    return tx, train


def test_the_programs_by_group_and_stage():
    step = mw.pipeline(chain_loss, groups(2), schedule="zb-h1", microbatches=4)
    lowered = step.lower(layers(2), *batch())
    tasks = {p.name: (p.group, p.stage, p.kind, p.calls) for p in lowered.programs if p.kind}
    assert tasks == {
        "F0": (0, 0, "F", 4),
        "F1": (1, 1, "F", 4),
        "B1": (1, 1, "B", 4),
        "W0": (0, 0, "W", 4),
        "W1": (1, 1, "W", 4),
    }
    # The first stage has its weight's product alone; the last also one for the stage before.
    products = {name: lowered[name].lowered.as_text().count("dot_general") for name in tasks}
    assert products == {"F0": 1, "F1": 1, "B1": 1, "W0": 1, "W1": 1}
    assert lowered.as_text().count("// ") == len(lowered.programs)
    with pytest.raises(mw.errors.PipelineError, match=r"no program is called 'F9'\. Did you"):
        lowered["F9"]


def test_the_compiled_step_is_called_and_has_jax_own_objects():
    step = mw.pipeline(chain_loss, groups(2), microbatches=4)
    arguments = (layers(2), *batch())
    compiled = step.lower(*arguments).compile()
    assert_close(compiled(*arguments), step(*arguments))
    assert step._cache.made == 1
    assert "HloModule" in compiled.as_text() and "HloModule" not in step.lower(*arguments).as_text()
    assert compiled["F1"].compiled.cost_analysis()["flops"] > 0
    with pytest.raises(mw.errors.PipelineError, match=r"another kind than .*float32\[12,4\]"):
        compiled(layers(2), *batch(12))


def test_shardings_are_those_of_the_arrays_and_save_the_copy():
    tx, train = trained()
    at = mw.MpmdMesh(mw.mesh(PAIR), "pp")
    rules = [(r"w\d", P("dp", "tp")), (r".*", P())]
    step = mw.pipeline(train, at, microbatches=2, rules=rules, unused="allow")
    params = layers(2, width=8)
    arguments = (params, tx.init(params), *batch(width=8))
    lowered = step.lower(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments))
    first, second = (lowered.in_shardings[0][name] for name in ("w0", "w1"))
    assert (first.spec, first.mesh) == (P("dp", "tp"), at.unstack[0])
    assert (second.spec, second.mesh) == (P("dp", "tp"), at.unstack[1])
    placed = jax.device_put(arguments, lowered.in_shardings)
    results = step(*placed)
    assert results[2]["rows"] == 8 and lowered.out_shardings[2]["rows"] is None
    for result, sharding in zip(
        jax.tree.leaves(results[:2]), jax.tree.leaves(lowered.out_shardings[:2]), strict=True
    ):
        assert result.sharding.is_equivalent_to(sharding, result.ndim)
    assert step._cache.made == 1


def test_how_it_is_shown():
    step = mw.pipeline(chain_loss, groups(2), microbatches=4)
    lowered = step.lower(layers(2), *batch())
    headline, heading, *rows = str(lowered).splitlines()
    assert headline == f"{len(rows)} programs of 2 groups, 1f1b, 4 microbatches; bytes per device"
    assert heading.split() == "program group stage calls arguments results temporary".split()
    assert any(row.startswith("BW1") for row in rows)
    assert repr(lowered).startswith("<LoweredStep ") and len(repr(lowered)) <= 200
    assert repr(lowered.compile()).startswith("<CompiledStep ")
    assert "<table" in lowered._repr_html_()
    plain = json.loads(json.dumps(lowered.to_json()))
    assert plain["in_shardings"]["0/w1"] == {"spec": [], "devices": [1]}
    assert {p["name"] for p in plain["programs"]} >= {"F0", "F1", "BW0", "BW1"}


def test_a_compiled_step_outlives_the_cache():
    def loss(params, options, x):
        return jnp.mean(params["w"] * x) * options["scale"]

    step = mw.pipeline(loss, groups(1), microbatches=1)
    arguments = ({"w": normal(0, 4)}, {"scale": 2.0}, normal(1, 4, 4))
    compiled = step.lower(*arguments).compile()
    step._plans.clear()
    value, _ = compiled(*arguments)
    np.testing.assert_allclose(value, 2 * jnp.mean(arguments[0]["w"] * arguments[2]), rtol=1e-6)
    assert step._cache.made == 1


def test_without_arguments_there_is_nothing_to_lower():
    with pytest.raises(mw.errors.PipelineError, match="lower\\(\\) compiles a step: pass its"):
        mw.pipeline(chain_loss, groups(2), microbatches=4).lower()
