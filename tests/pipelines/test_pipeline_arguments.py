"""Which arguments are differentiated, cut along which dim, passed by name, carried or given up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_helpers import assert_close, batch, chain_loss, groups, layers, normal

import meshwright as mw

DATA_PARALLEL = "pp:2, dp:4"


def pairs_of_devices():
    return mw.MpmdMesh(mw.mesh(DATA_PARALLEL), "pp")


def two_trees(first, second, x, y):
    h = mw.stage_end(jnp.tanh(x @ first["w"]) + second["shared"])
    return jnp.mean((h @ second["w"] + second["shared"] - y) ** 2)


@pytest.mark.parametrize("argnums", [(0, 1), (1, 0), [1], (0, 1, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_of_several_arguments(argnums, schedule):
    trees = ({"w": normal(0, 4, 4)}, {"w": normal(1, 4, 4), "shared": normal(2, 4)})
    if 2 in argnums:

        def loss(first, second, scale, x, y):
            return two_trees(first, second, x * scale, y)

        arguments = (*trees, jnp.float32(0.5), *batch())
    else:
        loss, arguments = two_trees, (*trees, *batch())
    options = {"schedule": schedule, "argnums": argnums, "whole": () if 0 in argnums else 0}
    step = mw.pipeline(loss, groups(2), microbatches=4, **options)
    expected = jax.value_and_grad(loss, argnums=tuple(argnums))(*arguments)
    for _ in range(2):
        value, grads = step(*arguments)
        assert isinstance(grads, tuple)
        assert_close((value, grads), expected)


def test_several_arguments_in_a_training_step_and_outside_of_a_pipeline():
    def train(first, second, x, y):
        value, (one, two) = mw.value_and_grad(two_trees, (0, 1))(first, second, x, y)
        update = lambda p, g: p - 0.1 * g  # noqa: E731
        return jax.tree.map(update, first, one), jax.tree.map(update, second, two), value

    trees = ({"w": normal(0, 4, 4)}, {"w": normal(1, 4, 4), "shared": normal(2, 4)})
    step = mw.pipeline(train, groups(2), microbatches=2)
    assert_close(step(*trees, *batch()), jax.jit(train)(*trees, *batch()))


def columns_loss(params, x, y):
    """Examples are columns: a microbatch is some of them."""
    h = mw.stage_end(jnp.tanh(params["w0"] @ x))
    return jnp.mean((params["w1"] @ h - y) ** 2)


@pytest.mark.parametrize("at", [lambda: groups(2), pairs_of_devices])
def test_microbatches_along_another_dim(at):
    params, (x, y) = layers(2), (normal(5, 4, 16), normal(6, 4, 16))
    step = mw.pipeline(columns_loss, at(), microbatches=4, cut={1: 1, "y": 1})
    assert_close(step(params, x, y), jax.value_and_grad(columns_loss)(params, x, y))
    assert step.explain().cut == ("argument 1", "argument 2")


def test_a_dim_for_each_argument():
    def loss(params, x, y):
        return columns_loss(params, x.T, y)

    params, (x, y) = layers(2), (normal(5, 16, 4), normal(6, 4, 16))
    step = mw.pipeline(loss, groups(2), microbatches=4, cut={2: 1})
    assert_close(step(params, x, y), jax.value_and_grad(loss)(params, x, y))


def test_dims_that_are_not_there_or_do_not_divide():
    step = mw.pipeline(chain_loss, groups(2), microbatches=4, cut={1: 2})
    with pytest.raises(
        mw.errors.PipelineError,
        match=r"argument 1: cut along dim 2, but its shape is \(8, 4\).*cut=\{1: 1\}",
    ):
        step(layers(2), *batch())
    step = mw.pipeline(columns_loss, groups(2), microbatches=4, cut={1: 1, 2: 1})
    with pytest.raises(
        mw.errors.PipelineError, match=r"argument 1: 6 rows \(dim 1\) cannot be cut"
    ):
        step(layers(2), normal(5, 4, 6), normal(6, 4, 6))


def named_loss(params, x, *, y, mask, scale=1.0):
    return chain_loss(params, x @ mask * scale, y)


def any_loss(params, x, **more):
    return named_loss(params, x, **more)


@pytest.mark.parametrize("loss", [named_loss, any_loss])
@pytest.mark.parametrize("schedule", ["1f1b", "forward"])
def test_arguments_that_have_only_a_name(loss, schedule):
    params, (x, y), mask = layers(2), batch(), normal(7, 4, 4)
    options = {"outputs": "mean"} if schedule == "forward" else {}
    step = mw.pipeline(loss, groups(2), microbatches=4, whole="mask", schedule=schedule, **options)
    plain = loss if schedule == "forward" else jax.value_and_grad(loss)
    for more in ({}, {"scale": 0.5}, {"scale": 0.25}):
        given = {"y": y, "mask": mask, **more}
        assert_close(step(params, x, **given), plain(params, x, **given))
    assert len(step._plans) == 2  # with and without a scale
    assert step.explain(params, x, y=y, mask=mask).whole[-1] == "argument 'mask'"


def test_arguments_that_have_only_a_name_in_a_training_step():
    def train(params, x, **more):
        value, grads = mw.value_and_grad(any_loss, whole="mask")(params, x, **more)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    given = {"y": batch()[1], "mask": normal(7, 4, 4)}
    step = mw.pipeline(train, groups(2), microbatches=4)
    expected = jax.jit(train)(layers(2), batch()[0], **given)
    assert_close(step(layers(2), batch()[0], **given), expected)


def test_a_mask_by_name_that_nothing_says_is_whole_is_refused_by_its_name():
    step = mw.pipeline(named_loss, groups(2), microbatches=4)
    match = "argument 'mask' has 4 rows.* Pass whole='mask' if every .* or cut='mask'"
    with pytest.raises(mw.errors.PipelineError, match=match):
        step(layers(2), batch()[0], y=batch()[1], mask=normal(7, 4, 4))


def test_counters_of_a_carried_state_count_microbatches():
    def loss(params, state, x, y):
        h = mw.stage_end(jnp.tanh(x @ params["w0"]) / (1 + state["count"]))
        state = {"count": state["count"] + 1, "width": state["width"]}
        return jnp.mean((h @ params["w1"] - y) ** 2), state

    step = mw.pipeline(loss, groups(2), microbatches=4, carry="state")
    params, (x, y) = layers(2), batch()
    (value, state), grads = step(params, {"count": 0, "width": 4}, x, y)
    assert int(state["count"]) == 4 and state["width"] == 4
    assert type(state["width"]) is int
    values, gradients = [], []
    count = {"count": 0, "width": 4}
    for n in range(4):
        rows = slice(2 * n, 2 * n + 2)
        (one, count), grad = jax.value_and_grad(loss, has_aux=True)(params, count, x[rows], y[rows])
        values, gradients = [*values, one], [*gradients, grad]
    mean = lambda *leaves: jnp.mean(jnp.stack(leaves), 0)  # noqa: E731
    assert_close((value, grads), jax.tree.map(mean, *zip(values, gradients, strict=True)))


# Without gradients.


def cached_model(params, cache, x):
    """Attend to what was there before: the cache has rows of the batch, and grows by one entry."""
    h = mw.stage_end(jnp.tanh(x @ params["w0"]))
    cache = jnp.concatenate([cache[:, 1:], h[:, None]], axis=1)
    return h @ params["w1"] + jnp.mean(cache, axis=1), cache


@pytest.mark.parametrize("at", [lambda: groups(2), pairs_of_devices])
def test_a_donated_cache_is_freed(at):
    params, x, cache = layers(2), normal(1, 16, 4), normal(2, 16, 3, 4)
    expected = cached_model(params, cache, x)
    step = mw.pipeline(
        cached_model,
        at(),
        schedule="forward",
        microbatches=4,
        outputs="concat",
        donate_argnums=1,
    )
    y, new = step(params, cache, x)
    assert cache.is_deleted() and not params["w0"].is_deleted() and not x.is_deleted()
    assert_close((y, new), expected)
    kept = new
    expected = cached_model(params, np.asarray(kept), x)
    y, new = step(params, kept, x)
    assert kept.is_deleted()
    assert_close((y, new), expected)
    assert len(step._plans) == 1


def test_what_is_donated_and_returned_or_used_elsewhere_lives():
    def model(params, cache, x):
        return mw.stage_end(x @ params["w0"]) @ params["w1"] + jnp.sum(cache)

    def run(params, cache, x):
        return cache, mw.value_and_grad(lambda *a: jnp.mean(model(*a)))(params, cache, x)

    step = mw.pipeline(run, groups(2), microbatches=2, donate_argnums=1)
    cache, _ = step(layers(2), normal(2, 8, 4), normal(1, 8, 4))
    np.testing.assert_array_equal(cache, normal(2, 8, 4))
    forward = mw.pipeline(
        model, groups(2), microbatches=2, schedule="forward", donate_argnums=1, outputs="concat"
    )
    cache = normal(2, 8, 4)
    same = jax.device_put(cache, cache.sharding)
    forward(layers(2), cache, normal(1, 8, 4))
    np.testing.assert_array_equal(same, normal(2, 8, 4))


def test_state_is_carried_without_gradients():
    def model(params, state, x):
        h = mw.stage_end(jnp.tanh(x @ params["w0"]) + state["mean"])
        state = {"mean": 0.5 * state["mean"] + jnp.mean(x, 0), "seen": state["seen"] + len(x)}
        return {"y": h @ params["w1"]}, (state, jnp.sum(h))

    params, x, state = layers(2), batch()[0], {"mean": jnp.zeros(4), "seen": 0}
    options = {"carry": 1, "has_aux": True, "aux": "sum", "outputs": "concat"}
    step = mw.pipeline(model, groups(2), schedule="forward", microbatches=4, **options)
    got, (after, total) = step(params, state, x)
    outs, sums = [], []
    for n in range(4):
        out, (state, one) = model(params, state, x[2 * n : 2 * n + 2])
        outs, sums = [*outs, out["y"]], [*sums, one]
    assert int(after["seen"]) == state["seen"] == 8
    expected = ({"y": jnp.concatenate(outs)}, state["mean"], sum(sums))
    assert_close((got, after["mean"], total), expected)


def test_parameters_in_another_place_without_gradients():
    def model(x, params):
        return mw.stage_end(jnp.tanh(x @ params["w0"])) @ params["w1"]

    step = mw.pipeline(
        model, groups(2), schedule="forward", microbatches=4, argnums=1, outputs="concat"
    )
    x, params = batch()[0], layers(2)
    assert_close(step(x, params), model(x, params))
