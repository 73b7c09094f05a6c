"""Remat, scans, jitted functions around stage ends, and what is traced again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_helpers import (
    assert_close,
    assert_same_step,
    batch,
    chain_loss,
    groups,
    layers,
    looped,
    normal,
)

import meshwright as mw

both = pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])


@both
def test_remat_within_stages_and_around_stage_ends(schedule):
    def loss(params, x, y):
        @jax.checkpoint
        def block(w, x):
            return jnp.sin(jnp.tanh(x @ w) @ w)

        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        def two(params, x):
            x = mw.stage_end(jnp.tanh(jnp.sin(x) @ params["w1"]))
            return jnp.sin(jnp.tanh(x @ params["w2"]))

        x = mw.stage_end(block(params["w0"], x))
        x = two(params, x)
        return jnp.mean((block(params["w0"], x) - y) ** 2)

    assert_same_step(loss, layers(3), *batch(), at=groups(3), schedule=schedule)


def test_scan_inside_a_stage():
    def loss(params, x, y):
        def layer(x, w):
            return jnp.tanh(x @ w), jnp.sum(x)

        x, _ = jax.lax.scan(layer, x, params["a"])
        x = mw.stage_end(x)
        x, sums = jax.lax.scan(jax.checkpoint(layer), x, params["b"])
        return jnp.mean((x - y) ** 2) + 0.01 * jnp.sum(sums)

    params = {"a": normal(0, 3, 4, 4) / 2, "b": normal(1, 2, 4, 4) / 2}
    assert_same_step(loss, params, *batch(), at=groups(2), schedule="zb-h1")


def test_one_stack_of_layers_scanned_in_pieces():
    def loss(params, x, y):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, x, params[:1])
        x, _ = jax.lax.scan(layer, mw.stage_end(x), params[1:3])
        x, _ = jax.lax.scan(layer, mw.stage_end(x), params[3:])
        return jnp.mean((x - y) ** 2)

    assert_same_step(loss, normal(0, 4, 4, 4) / 2, *batch(), at=groups(3), schedule="zb-h1")


def test_stage_ends_inside_jitted_and_vmapped_functions():
    @jax.jit
    def two(params, x):
        return mw.stage_end(jnp.tanh(mw.stage_end(jnp.tanh(x @ params["w0"])) @ params["w1"]))

    def loss(params, x, y):
        def row(x, y):
            return jnp.mean((mw.stage_end(two(params, x)) @ params["w2"] - y) ** 2)

        return jnp.mean(jax.vmap(row)(x, y))

    assert_same_step(loss, layers(3), *batch(), at=groups(4))


def test_one_function_with_a_stage_end_called_for_every_layer():
    @jax.jit
    def layer(w, x):
        return mw.stage_end(jnp.tanh(x @ w))

    def loss(params, x, y):
        for name in ("w0", "w1", "w2"):
            x = layer(params[name], x)
        return jnp.mean((x - y) ** 2)

    assert_same_step(loss, layers(3), *batch(), at=groups(4), schedule="zb-h1")


def test_another_batch_shape_is_traced_again():
    traced = []

    def loss(params, x, y):
        traced.append(x.shape)
        return chain_loss(params, x, y)

    step = mw.pipeline(loss, groups(2), microbatches=2)
    by_loop = jax.jit(looped(chain_loss, 2))
    for rows in (4, 8, 4):
        assert_close(step(layers(2), *batch(rows)), by_loop(layers(2), *batch(rows)))
    assert {shape[0] for shape in traced} >= {2, 4}
    count = len(traced)
    step(layers(2), *batch(8))
    assert len(traced) == count


def test_new_values_of_the_same_shape_are_not_traced_again():
    traced = []

    def loss(params, x, y):
        traced.append(1)
        return chain_loss(params, x, y)

    step = mw.pipeline(loss, groups(2), microbatches=2)
    _, grads = step(layers(2), *batch())
    count = len(traced)
    new = jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), *map(_on_host, (layers(2), grads)))
    assert_close(step(new, *batch()), jax.jit(looped(chain_loss, 2))(new, *batch()))
    assert len(traced) == count


def test_a_loss_made_for_the_rows_of_a_microbatch():
    def loss(params, x, y):
        return chain_loss(params, x.reshape(2, 4), y)

    assert_same_step(loss, layers(2), *batch(), at=groups(2))


def test_remat_around_the_whole_loss():
    loss = jax.checkpoint(chain_loss)
    step = assert_same_step(loss, layers(3), *batch(), at=groups(3), schedule="zb-h1")
    _, grads = step(layers(3), *batch())
    assert [g.sharding.device_set for g in grads.values()] == [{d} for d in jax.devices()[:3]]


def test_remat_around_one_function_with_stage_ends_called_for_every_layer():
    @jax.checkpoint
    def layer(params, x):
        x = mw.stage_end(jnp.sin(x @ params["a"]))
        return jnp.sin(x @ params["b"])

    def loss(params, x, y):
        for own in params:
            x = layer(own, x)
        return jnp.mean((x - y) ** 2)

    params = [{"a": normal(n, 4, 4), "b": normal(n + 5, 4, 4)} for n in range(2)]
    assert_same_step(loss, params, *batch(), at=groups(3), schedule="zb-h1")


def _on_host(tree):
    return jax.tree.map(np.asarray, tree)
