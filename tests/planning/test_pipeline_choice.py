"""Pipelines in plans: where they win and where not, and the real thing on simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.errors import PlanningError
from meshwright.planning import layer_parts, pipeline_choice, stage_costs
from meshwright.planning.exchange_costs import AxisSpeed, axis_speed

# Eight A100s on a host, 100 Gb/s of network for all of them: 1.6 GB/s each.
THIN = "a2-ultragpu-8g"


def plan_llama(batch, on, slices=1, layers=8):
    model = mw.models.model("llama3-8b", layers=layers)
    return mw.plan(
        model.train_step, model.shapes(), model.batch(batch, 2048),
        on=mw.topology(on, slices=slices), donate_argnums=0, progress=False, max_axes=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def on_thin_network():
    return plan_llama(32, THIN, slices=4)


def test_between_hosts_with_a_thin_network_a_pipeline_wins(on_thin_network):
    choice = on_thin_network.pipeline
    assert choice.wins and choice.fits
    assert choice.seconds < 0.97 * choice.without
    assert choice.groups == 4, "a stage for each host"
    assert sum(row.layers for row in choice.rows) == 8
    assert str(choice.spec).startswith("pp:4")
    text = str(on_thin_network)
    assert "It wins." in text and "plan.pipeline.build() makes it" in text


def test_the_schedule_of_a_choice_runs(on_thin_network):
    choice = on_thin_network.pipeline
    made = choice.timeline.schedule
    assert made.microbatches == choice.microbatches and made.groups == choice.groups
    again = mw.schedules.simulate(made, choice.timeline.costs, choice.timeline.latency)
    assert again.makespan == choice.timeline.makespan < choice.seconds
    assert choice.timeline.latency > choice.hand_over / 2e9, "it crosses the network"
    assert choice.to_json()["groups"][0]["layers"] == choice.rows[0].layers


def test_inside_a_slice_with_much_work_a_pipeline_does_not_win():
    choice = plan_llama(64, "v5e:4x4").pipeline
    assert choice is None or not choice.wins


def test_pipelines_can_be_left_out():
    model = mw.models.model("llama3-8b", layers=2)
    plan = mw.plan(
        model.train_step, model.shapes(), model.batch(32, 2048), pipelines=False,
        on=mw.topology(THIN, slices=4), donate_argnums=0, progress=False, max_axes=1,
    )  # fmt: skip
    assert plan.pipeline is None and "Pipeline" not in str(plan)


def test_the_parts_of_a_step_add_up_to_it(on_thin_network):
    plan = on_thin_network
    variant = stage_costs.Variant(
        plan.step, plan.costs.program, plan.costs.groups, plan.groups, plan.costs
    )
    cut = layer_parts.cut_program(variant)
    assert (cut.layers, cut.rows) == (8, 32)
    assert {label.split()[0] for label in cut.part} == {"layer", "first", "last", "once"}
    # One axis, which lies in one way only.
    works = stage_costs.fold_parts(variant, cut)
    stage = stage_costs.StageCosts(variant, cut, works, 1)
    placed = pipeline_choice._placed(["axis0"], [32], plan.topology, None)
    stage.costs.on(tuple(axis_speed(axis, plan.topology) for axis in placed.axes))
    parts = stage_costs.whole_step(stage.seconds(plan.lists), cut)
    # The plan leaves out what computes little, and some of that waits for the network.
    assert plan.predicted.seconds * 0.98 < parts < plan.predicted.seconds * 1.5


def test_microbatches_repeat_what_is_gathered_and_divide_what_is_computed(on_thin_network):
    plan = on_thin_network
    variant = stage_costs.Variant(
        plan.step, plan.costs.program, plan.costs.groups, plan.groups, plan.costs
    )
    cut = layer_parts.cut_program(variant)
    works = stage_costs.fold_parts(variant, cut)
    whole, parts = (stage_costs.StageCosts(variant, cut, works, count) for count in (1, 8))
    alone = [each.costs.on(()) and each.seconds(()) for each in (whole, parts)]
    assert alone[0]["layer F"] * 0.99 < 8 * alone[1]["layer F"] < alone[0]["layer F"] * 1.2
    placed = pipeline_choice._placed(["axis0"], [32], plan.topology, None)
    lines = axis_speed(placed.axes[0], plan.topology).lines
    # Four devices on that network: a microbatch has a row for each.
    waits = [
        each.costs.on([AxisSpeed(4, lines)]) and each.seconds(((cut.batch,),))
        for each in (whole, parts)
    ]
    assert 8 * waits[1]["layer W"] > 2 * waits[0]["layer W"], "gradients are summed every time"


@pytest.mark.slow
def test_the_pipeline_of_a_model_is_built_rehearsed_and_right():
    model = mw.models.model("tiny")
    plan = mw.plan(
        model.train_step, model.shapes(), model.batch(32), on="cpu:8", donate_argnums=0,
        progress=False, max_axes=1,
    )  # fmt: skip
    choice = plan.pipeline
    assert choice is not None and choice.model is model
    staged, step = choice.build(progress=False)
    assert staged.config.stages == choice.stages
    batch = staged.example(32)
    rehearsal = mw.rehearse_pipeline(step, staged.shapes(), batch, progress=False)
    assert rehearsal.fits and len(rehearsal.groups) == choice.groups
    state = staged.state(jax.random.key(0))
    expected, metrics = jax.jit(staged.train_step)(state, batch)
    new, found = step(staged.state(jax.random.key(0)), batch)
    np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-3, atol=2e-5)


def scanned_step(params, tokens):
    def loss(params):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), tokens, params["layers"])
        return jnp.mean(jax.nn.logsumexp(x @ params["head"], axis=-1))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def test_any_scanned_step_gets_stages_with_fewer_layers_beside_a_heavy_head():
    shape = jax.ShapeDtypeStruct
    params = {
        "layers": shape((16, 8192, 8192), jnp.float32),
        "head": shape((8192, 65536), jnp.float32),
    }
    plan = mw.plan(
        scanned_step, params, shape((8192, 8192), jnp.float32),
        on=mw.topology(THIN, slices=4), donate_argnums=0, progress=False, max_axes=1,
    )  # fmt: skip
    choice = plan.pipeline
    assert choice.wins and choice.model is None
    layers = [row.layers for row in choice.rows]
    assert sum(layers) == 16 and layers[-1] < layers[0]
    assert "mw.stage_end(x)" in choice.how()
    assert f"over 16 layers into 4 loops of {', '.join(map(str, layers))}," in choice.how()
    with pytest.raises(PlanningError, match=r"only models of mw\.models are cut by it"):
        choice.build()


def test_a_step_without_a_loop_over_layers_has_no_stages():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    plan = mw.plan(step, shape, shape, on=mw.topology(THIN, slices=4), progress=False, max_axes=1)
    assert plan.pipeline is None
