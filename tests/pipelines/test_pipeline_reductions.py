"""Results of microbatches: joined along a dim, reduced by a function, or kept one by one."""

import functools

import jax
import jax.numpy as jnp
import pytest
from pipeline_helpers import assert_close, batch, chain_loss, groups, layers, normal

import meshwright as mw


def each_microbatch(fn, count, params, *arguments):
    """The results of single microbatches, in a list."""
    rows = [jnp.split(x, count) for x in arguments]
    return [fn(params, *parts) for parts in zip(*rows, strict=True)]


def data_parallel():
    return mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp")


def model(params, x):
    h = mw.stage_end(jnp.tanh(x @ params["w0"]))
    return {"y": h @ params["w1"], "columns": (h @ params["w1"]).T}


@pytest.mark.parametrize("at", [lambda: groups(2), data_parallel])
def test_outputs_are_joined_as_the_batch_was_cut(at):
    params, x = layers(2), normal(1, 16, 4)
    words = {"y": "concat", "columns": "concat:1"}
    step = mw.pipeline(model, at(), schedule="forward", microbatches=4, outputs=words)
    assert_close(step(params, x), model(params, x))


def with_aux(params, x, y):
    h = mw.stage_end(jnp.tanh(x @ params["w0"]))
    out = h @ params["w1"]
    return jnp.mean((out - y) ** 2), {"least": jnp.min(out), "log": jnp.sum(out), "out": out}


def test_outputs_are_reduced_by_a_function():
    params, data = layers(2), batch()
    words = {"least": jnp.minimum, "log": jnp.logaddexp, "out": "concat"}
    step = mw.pipeline(with_aux, groups(2), microbatches=4, has_aux=True, aux=words)
    (_, aux), _ = step(params, *data)
    parts = [beside for _, beside in each_microbatch(with_aux, 4, params, *data)]
    expected = {
        "least": functools.reduce(jnp.minimum, [part["least"] for part in parts]),
        "log": functools.reduce(jnp.logaddexp, [part["log"] for part in parts]),
        "out": jnp.concatenate([part["out"] for part in parts]),
    }
    assert_close(aux, expected)


def tied_loss(params, x, y):
    """One weight is used by both stages, so that its gradient is made in two groups."""
    h = mw.stage_end(jnp.tanh(x @ params["w0"] + params["b"]))
    return jnp.mean((h @ params["w1"] @ params["w0"] + params["b"] - y) ** 2)


@pytest.mark.parametrize("at", [lambda: groups(2), data_parallel])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_of_every_microbatch(at, schedule):
    params, data = layers(2) | {"b": normal(9, 4)}, (normal(1, 16, 4), normal(2, 16, 4))
    step = mw.pipeline(tied_loss, at(), microbatches=4, schedule=schedule, reduce="stack")
    parts = each_microbatch(jax.value_and_grad(tied_loss), 4, params, *data)
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    for _ in range(2):
        assert_close(step(params, *data), expected)


def test_gradients_are_clipped_by_microbatch_in_a_training_step():
    def clipped(grads):
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)

    def train(params, x, y):
        _, grads = mw.value_and_grad(chain_loss, reduce="stack")(params, x, y)
        grads = jax.tree.map(lambda g: jnp.mean(g, 0), jax.vmap(clipped)(grads))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params, data = layers(2), batch()
    parts = [clipped(g) for g in each_microbatch(jax.grad(chain_loss), 4, params, *data)]
    grads = jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves), 0), *parts)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert_close(mw.pipeline(train, groups(2), microbatches=4)(params, *data), expected)


def test_gradients_that_are_the_same_in_every_microbatch_and_unused_parameters():
    def loss(params, x, y):
        decay = sum(jnp.sum(p**2) for p in params.values())
        return chain_loss({"w0": params["w0"], "w1": params["w1"]}, x, y) + 0.1 * decay

    params, data = layers(2) | {"free": normal(8, 3)}, batch()
    step = mw.pipeline(loss, groups(2), microbatches=4, reduce="stack")
    parts = each_microbatch(jax.value_and_grad(loss), 4, params, *data)
    assert_close(step(params, *data), jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts))


def test_what_cannot_be_joined_is_refused():
    options = {"microbatches": 4, "has_aux": True}
    words = {"least": "concat", "log": "sum", "out": "concat"}
    step = mw.pipeline(with_aux, groups(2), aux=words, **options)
    with pytest.raises(mw.errors.PipelineError, match=r"an output of shape \(\) has no dim 0"):
        step(layers(2), *batch())
    options |= {"schedule": "forward", "outputs": "concat"}
    step = mw.pipeline(with_aux, groups(2), aux=words | {"least": "sum"}, **options)
    with pytest.raises(mw.errors.PipelineError, match=r"^outputs='concat': an output") as caught:
        step(layers(2), *batch())
    assert caught.value.option == "outputs"
    options |= {"outputs": "stack"}
    step = mw.pipeline(with_aux, groups(2), aux=lambda a, b: jnp.stack([a, b]), **options)
    with pytest.raises(mw.errors.PipelineError, match=r"aux: <lambda> takes two .*one like them"):
        step(layers(2), *batch())
