"""Models of Flax NNX, Flax Linen and Equinox run as pipelines with marks and nothing else."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
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
            x = mw.stage(nnx.relu(self.norm(self.first(x))))
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
            x = mw.stage(nn.Dropout(0.5, deterministic=False)(nn.relu(x)))
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
            x = mw.stage(self.activation(self.layers[0](x)))
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
    mine, theirs = (model, tx.init(params)), (params, tx.init(params))
    by_jit = jax.jit(by_parts)
    for _ in range(20):
        new, state, value = step(*mine, *batch())
        mine = (eqx.combine(new, static), state)
        *theirs, expected = by_jit(*theirs, *batch())
        assert_close(value, expected)
    assert_close(eqx.filter(mine[0], eqx.is_array), theirs[0])
