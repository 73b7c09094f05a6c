"""Pipelines in plans: where they win and where not, and the real thing on simulated devices."""

import re

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


def test_a_choice_has_a_short_repr_and_prints_its_lines(on_thin_network):
    choice = on_thin_network.pipeline
    microbatches = f"{choice.microbatches} microbatches"
    assert repr(choice) == f"<PipelineChoice {choice.spec}: {choice.schedule}, {microbatches}>"
    text = str(choice)
    assert text.replace("\n  ", " ").splitlines() == choice.lines()
    assert max(map(len, text.splitlines())) <= 100


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
        scanned_step, params, shape((32768, 8192), jnp.float32),
        on=mw.topology(THIN, slices=4), donate_argnums=0, progress=False, max_axes=1,
    )  # fmt: skip
    choice = plan.pipeline
    assert choice.wins and choice.model is None
    layers = [row.layers for row in choice.rows]
    assert sum(layers) == 16 and layers[-1] < layers[0]
    assert "mw.stage_end(x)" in choice.how()
    assert f"over 16 layers into 4 loops of {', '.join(map(str, layers))}," in choice.how()
    with pytest.raises(
        PlanningError, match=r"only models of mw\.models, and steps whose layers are"
    ):
        choice.build()


# Layers that are written out: calls of a function that is marked, or under `jax.checkpoint`.


def dense_layer(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def written_out(layer, stages=(), differentiate=mw.value_and_grad):
    """A train step whose layers are called one after the other; `stages` end after these."""

    def loss(params, x):
        x = x @ params["embed"]
        for number, w in enumerate(params["layers"], 1):
            x = layer(x, w)
            if number in stages:
                x = mw.stage_end(x)
        return jnp.mean(jax.nn.logsumexp(x @ params["head"], axis=-1))

    def step(params, x):
        value, grads = differentiate(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def scanned_out(layer):
    def loss(params, x):
        x = x @ params["embed"]
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        return jnp.mean(jax.nn.logsumexp(x @ params["head"], axis=-1))

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def dense_params(layers, width, hidden, vocab, of=None, stacked=False):
    of = of or (lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32))
    one = {"up": (width, hidden), "down": (hidden, width)}
    if stacked:
        weights = {name: of(layers, *shape) for name, shape in one.items()}
    else:
        weights = [{name: of(*shape) for name, shape in one.items()} for _ in range(layers)]
    return {"embed": of(width, width), "layers": weights, "head": of(width, vocab)}


def plan_dense(step, layers=8, stacked=False, **options):
    rows = jax.ShapeDtypeStruct((32, 2048, 4096), jnp.float32)
    return mw.plan(
        step, dense_params(layers, 4096, 16384, 32768, stacked=stacked), rows,
        on=mw.topology(THIN, slices=4), donate_argnums=0, progress=False, max_axes=1, **options,
    )  # fmt: skip


def random_params(layers=8, width=32, hidden=64, vocab=128):
    rng = np.random.default_rng(0)
    return dense_params(
        layers, width, hidden, vocab,
        lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def marked_plan():
    return plan_dense(written_out(mw.block(dense_layer)))


def test_layers_that_are_written_out_get_the_pipeline_of_the_same_layers_scanned(marked_plan):
    loop = plan_dense(scanned_out(mw.block(dense_layer)), stacked=True)
    assert marked_plan.remat.policy == loop.remat.policy
    ours, theirs = marked_plan.pipeline, loop.pipeline
    assert ours.wins and theirs.wins
    assert (ours.spec, ours.schedule, ours.microbatches) == (
        theirs.spec, theirs.schedule, theirs.microbatches,
    )  # fmt: skip
    assert ours.seconds == pytest.approx(theirs.seconds, rel=0.03)
    assert ours.hand_over == theirs.hand_over
    assert sum(ours.split) == sum(theirs.split) == 8


def test_functions_under_checkpoint_are_layers_where_none_is_marked():
    found = plan_dense(written_out(jax.checkpoint(dense_layer))).pipeline
    loop = plan_dense(scanned_out(jax.checkpoint(dense_layer)), stacked=True).pipeline
    assert found.seconds == pytest.approx(loop.seconds, rel=0.03)
    for one, other in zip(found.rows, loop.rows, strict=True):
        assert 0.5 < one.bytes / other.bytes < 2
    assert sum(found.split) == 8 and not found.marked and found.source is None
    assert "of the functions under jax.checkpoint" in found.how()
    with pytest.raises(PlanningError, match=r"steps whose layers are marked with mw\.block"):
        found.build()


def variant_of(step, *args):
    """A step as the planner costs it."""
    plan = mw.plan(
        step, *args, on="v5e:2x2", donate_argnums=0, progress=False, max_axes=1, pipelines=False
    )
    return stage_costs.Variant(
        plan.step, plan.costs.program, plan.costs.groups, plan.groups, plan.costs
    )


def test_what_a_layer_owns_is_its_weights_their_gradients_and_its_activations():
    step = written_out(mw.block(dense_layer))
    variant = variant_of(step, random_params(4), jnp.ones((64, 32)))
    cut = layer_parts.cut_program(variant)
    assert (cut.layers, cut.rows, cut.ends, cut.marked) == (4, 64, (0, 1, 2, 3), True)
    assert [variant.program.shapes[value] for value in cut.carried] == [(64, 32)]
    owners = {
        path: cut.owner.get(value)
        for path, value in zip(variant.step.paths, variant.program.arguments, strict=True)
    }
    assert owners.pop("params/embed") == "first" and owners.pop("params/head") == "last"
    assert owners.pop("x") == "first", "no other stage reads the rows"
    assert owners == {f"params/layers/{n}/{name}": n for n in range(4) for name in ("up", "down")}
    new = variant.program.results[: len(variant.step.paths) - 1]
    assert [cut.owner[value] for value in new] == ["first", "last", *(n // 2 for n in range(8))]
    third = set(cut.elsewhere(2, first=False, last=False))
    assert {v for v, owner in cut.owner.items() if owner not in (0, 1)} == third


def test_several_blocks_can_make_a_layer():
    up = mw.block(lambda x, w: jax.nn.gelu(x @ w["up"]))
    down = mw.block(lambda x, w: x @ w["down"])
    step = written_out(lambda x, w: x + down(up(x, w), w))
    cut = layer_parts.cut_program(variant_of(step, random_params(4), jnp.ones((64, 32))))
    assert (cut.layers, cut.ends) == (4, (1, 3, 5, 7))


def test_blocks_in_a_loop_leave_the_layers_to_it():
    params = random_params(4)
    params["layers"] = jax.tree.map(lambda *w: jnp.stack(w), *params["layers"])
    step = scanned_out(mw.block(dense_layer))
    cut = layer_parts.cut_program(variant_of(step, params, jnp.ones((64, 32))))
    assert (cut.layers, cut.ends) == (4, ())


def test_blocks_that_differ_are_no_layers():
    params = random_params(2)
    for name, dims in (("up", (32, 128)), ("down", (128, 32))):
        params["layers"][1][name] = jnp.ones(dims)
    step = written_out(mw.block(dense_layer))
    cut = layer_parts.cut_program(variant_of(step, params, jnp.ones((64, 32))))
    assert cut == layer_parts.NO_EQUAL_LAYERS


def run_both(step, one_device, params, rows):
    """What a pipeline and one device make of a step."""
    new, value = step(jax.tree.map(jnp.copy, params), rows)
    expected, loss = jax.jit(one_device)(params, rows)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-4, atol=1e-5)


def told_numbers(how):
    """After which blocks the text says that stages end."""
    (text,) = re.findall(r"after number ([\d, and]+) of the marked blocks", how)
    return tuple(int(number) for number in re.findall(r"\d+", text))


def test_what_a_choice_says_to_write_gives_the_numbers_of_one_device(marked_plan):
    choice = marked_plan.pipeline
    numbers = told_numbers(choice.how())
    assert numbers == tuple(end + 1 for end in choice.ends) and len(numbers) == 3
    (call,) = re.findall(r"call (mw\.pipeline\(.*\))\.$", choice.how())
    # As it is written, but on eight devices.
    assert f"'{choice.spec}'" in call
    small = call.replace(str(choice.spec), "pp:4, fsdp:2")
    step = written_out(mw.block(dense_layer), numbers)
    pipelined = eval(small, {"mw": mw, "step": step})  # noqa: S307
    params, rows = random_params(), jnp.linspace(-1, 1, 64 * 32).reshape(64, 32)
    run_both(pipelined, written_out(dense_layer, (), jax.value_and_grad), params, rows)


@pytest.mark.slow
def test_a_step_with_marked_blocks_is_built_and_gives_the_numbers_of_one_device():
    params, rows = random_params(4), jnp.linspace(-1, 1, 64 * 32).reshape(64, 32)
    step = written_out(mw.block(dense_layer))
    plan = mw.plan(step, params, rows, on="cpu:8", donate_argnums=0, progress=False, max_axes=1)
    choice = plan.pipeline
    assert choice.ends and "plan.pipeline.build() makes the step" in choice.how()
    staged, pipelined = choice.build(progress=False)
    run_both(pipelined, written_out(dense_layer, (), jax.value_and_grad), params, rows)
    assert f"up to block {choice.ends[0] + 1}" in str(pipelined.explain(params, rows))
    # Alone, the step with stages is the step.
    np.testing.assert_allclose(staged(params, rows)[1], step(params, rows)[1], rtol=1e-6)


def test_a_loss_with_an_optimizer_is_built_and_gives_the_numbers_of_one_device():
    optax = pytest.importorskip("optax")
    params, rows = random_params(4), jnp.linspace(-1, 1, 64 * 32).reshape(64, 32)

    def loss(params, x):
        x = x @ params["embed"]
        for w in params["layers"]:
            x = jax.checkpoint(dense_layer)(x, w)
        logits = x @ params["head"]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1)), logits

    plan = mw.plan(
        loss, params, rows, on="cpu:8", optimizer=optax.sgd(0.1), progress=False, max_axes=1
    )
    _, pipelined = plan.pipeline.build(progress=False)
    state = optax.sgd(0.1).init(params)
    new, _, (value, logits) = pipelined(jax.tree.map(jnp.copy, params), state, rows)
    (expected, logits_), grads = jax.value_and_grad(loss, has_aux=True)(params, rows)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(logits, logits_, rtol=1e-4, atol=1e-5)
    wanted = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
    for ours, theirs in zip(jax.tree.leaves(new), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_equinox_model_is_built_and_gives_the_numbers_of_one_device():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 6)
    model = {
        "embed": eqx.nn.Linear(32, 32, key=keys[0]),
        "layers": [eqx.nn.MLP(32, 32, 64, 1, key=key) for key in keys[1:5]],
        "head": eqx.nn.Linear(32, 128, key=keys[5]),
    }

    @mw.block
    def layer(x, mlp):
        return x + jax.vmap(mlp)(x)

    def loss(model, x):
        x = jax.vmap(model["embed"])(x)
        for mlp in model["layers"]:
            x = layer(x, mlp)
        return jnp.mean(jax.nn.logsumexp(jax.vmap(model["head"])(x), axis=-1))

    def step(model, x):
        value, grads = mw.value_and_grad(loss)(model, x)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value

    rows = jnp.linspace(-1, 1, 64 * 32).reshape(64, 32)
    plan = mw.plan(step, model, rows, on="cpu:8", progress=False, max_axes=1)
    _, pipelined = plan.pipeline.build(progress=False)
    new, value = pipelined(model, rows)
    expected, wanted = step(model, rows)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves(eqx.filter(new, eqx.is_array)),
        jax.tree.leaves(eqx.filter(expected, eqx.is_array)),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-4, atol=1e-5)


def test_a_step_that_takes_jax_gradients_is_not_built_and_is_told_why():
    plan = plan_dense(written_out(mw.block(dense_layer), (), jax.value_and_grad), layers=4)
    with pytest.raises(PlanningError, match=r"Take them with mw\.value_and_grad, which outside"):
        plan.pipeline.build()


def test_a_step_in_which_nothing_is_marked_says_how_to_get_stages():
    plan = plan_dense(written_out(dense_layer), layers=4)
    assert plan.pipeline is None
    assert any("Mark it with mw.block, and plan again." in note for note in plan.notes)


def test_a_step_without_a_loop_over_layers_has_no_stages():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    plan = mw.plan(step, shape, shape, on=mw.topology(THIN, slices=4), progress=False, max_axes=1)
    assert plan.pipeline is None


def test_runs_of_one_cell_over_time_are_no_layers():
    def step(w, xs):
        def loss(w):
            def cell(h, x):
                h = jnp.tanh(x @ w["x"] + h @ w["h"])
                return h, h

            over_time = xs.swapaxes(0, 1)
            return (jax.lax.scan(cell, jnp.zeros_like(over_time[0]), over_time)[1] ** 2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    weights = {name: jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for name in ("x", "h")}
    xs = jax.ShapeDtypeStruct((64, 16, 4096), jnp.float32)
    p = mw.plan(step, weights, xs, on=THIN, progress=False, max_axes=1, pipelines=False)
    variant = stage_costs.Variant(p.step, p.costs.program, p.costs.groups, p.groups, p.costs)
    assert layer_parts.cut_program(variant) == layer_parts.NO_LAYERS
