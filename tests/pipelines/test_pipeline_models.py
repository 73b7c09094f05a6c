"""Models of Flax NNX, Flax Linen and Equinox run as pipelines with stage ends and nothing else."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from pipeline_helpers import assert_close, batch, groups, looped

import meshwright as mw


def test_nnx_modules_with_batch_statistics():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
            self.last = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            x = mw.stage_end(nnx.relu(self.norm(self.first(x))))
            return self.last(x)

    graph, params, stats = nnx.split(Model(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss(params, stats, x, y):
        model = nnx.merge(graph, params, stats, copy=True)
        out = model(x)
        return jnp.mean((out - y) ** 2), nnx.state(model, nnx.BatchStat)

    step = mw.pipeline(loss, groups(2), microbatches=2, carry=1)
    expected = jax.jit(looped(loss, 2, carry=1))(params, stats, *batch())
    assert_close(step(params, stats, *batch()), expected)


def test_linen_modules_with_batch_statistics_and_dropout():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
            x = mw.stage_end(nn.Dropout(0.5, deterministic=False)(nn.relu(x)))
            return nn.remat(nn.Dense)(4)(x)

    model = Model()
    x, y = batch()
    variables = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def loss(params, stats, x, y, keys):
        variables = {"params": params, "batch_stats": stats}
        out, new = model.apply(variables, x, mutable=["batch_stats"], rngs={"dropout": keys[0]})
        return jnp.mean((out - y) ** 2), new["batch_stats"]

    keys = jax.random.split(jax.random.key(2, impl="unsafe_rbg"), 2)
    arguments = (variables["params"], variables["batch_stats"], x, y, keys)
    step = mw.pipeline(loss, groups(2), schedule="zb-h1", microbatches=2, carry=1)
    assert_close(step(*arguments), jax.jit(looped(loss, 2, carry=1))(*arguments))


def test_equinox_modules_with_functions_among_their_leaves():
    class Model(eqx.Module):
        layers: list
        activation: callable

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.layers = [eqx.nn.Linear(4, 8, key=first), eqx.nn.Linear(8, 4, key=second)]
            self.activation = jax.nn.gelu

        def __call__(self, x):
            x = mw.stage_end(self.activation(self.layers[0](x)))
            return self.layers[1](x)

    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    model = Model(jax.random.key(0))
    tx = optax.adamw(1e-2)

    def train_step(model, state, x, y):
        value, grads = mw.value_and_grad(loss)(model, x, y)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.filter(eqx.apply_updates(model, updates), eqx.is_array), state, value

    params, static = eqx.partition(model, eqx.is_array)

    def by_parts(params, state, x, y):
        plain = looped(lambda p, x, y: loss(eqx.combine(p, static), x, y), 2)
        value, grads = plain(params, x, y)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, value

    step = mw.pipeline(train_step, groups(2), microbatches=2)
    ours, theirs = (model, tx.init(params)), (params, tx.init(params))
    by_jit = jax.jit(by_parts)
    for _ in range(20):
        new, state, value = step(*ours, *batch())
        ours = (eqx.combine(new, static), state)
        *theirs, expected = by_jit(*theirs, *batch())
        assert_close(value, expected)
    assert_close(eqx.filter(ours[0], eqx.is_array), theirs[0])


class Scaled(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear
    scale: float = 2.0
    centred: bool = True

    def __call__(self, x):
        x = mw.stage_end(jnp.tanh(jax.vmap(self.first)(x)))
        return jax.vmap(self.last)(x) * self.scale - self.centred


def scaled():
    one, two = jax.random.split(jax.random.key(0))
    return Scaled(eqx.nn.Linear(4, 4, key=one), eqx.nn.Linear(4, 4, key=two))


def error(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def trained(value_and_grad, tx):
    def train(model, state, x, y):
        value, grads = value_and_grad(model, x, y)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    return train


@pytest.mark.parametrize("tx", [optax.sgd(1e-1), optax.adamw(1e-2)])
def test_settings_of_a_module_stay_settings_over_many_steps(tx):
    model = scaled()
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    step = mw.pipeline(trained(mw.value_and_grad(error), tx), groups(2), microbatches=2)
    plain = eqx.filter_jit(trained(eqx.filter_value_and_grad(error), tx))
    ours = theirs = (model, state)
    for _ in range(3):
        *ours, value = step(*ours, *batch())
        *theirs, wanted = plain(*theirs, *batch())
        assert type(ours[0].scale) is float and ours[0].scale == 2.0
        assert ours[0].centred is True
    assert_close(
        (eqx.filter(ours, eqx.is_array), value), (eqx.filter(theirs, eqx.is_array), wanted)
    )
    assert len(step._plans) == 1


def test_a_step_that_returns_a_module_alone_keeps_its_settings():
    def train(model, x, y):
        _, grads = mw.value_and_grad(error)(model, x, y)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    model = mw.pipeline(train, groups(2), microbatches=2)(scaled(), *batch())
    assert type(model.scale) is float


def test_settings_that_are_equal_but_of_another_type_have_their_own_plan():
    step = mw.pipeline(lambda model, x, y: error(model, x, y), groups(2), microbatches=2)
    step(scaled(), *batch())
    step(eqx.tree_at(lambda model: model.centred, scaled(), 1), *batch())
    assert len(step._plans) == 2


def test_functions_in_a_module_are_returned_as_they_came():
    def loss(model, x, y):
        x = mw.stage_end(model.activation(jax.vmap(model.layers[0])(x)))
        return jnp.mean((jax.vmap(model.layers[1])(x) - y) ** 2)

    def train(value_and_grad):
        def step(model, x, y):
            value, grads = value_and_grad(loss)(model, x, y)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value

        return step

    model = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))
    step = mw.pipeline(train(mw.value_and_grad), groups(2), microbatches=2)
    plain = eqx.filter_jit(train(eqx.filter_value_and_grad))
    ours = theirs = model
    for _ in range(2):
        ours, value = step(ours, *batch())
        theirs, wanted = plain(theirs, *batch())
    assert ours.activation is model.activation
    pairs = (
        (eqx.filter(ours, eqx.is_array), value),
        (eqx.filter(theirs, eqx.is_array), wanted),
    )
    assert_close(*pairs)
