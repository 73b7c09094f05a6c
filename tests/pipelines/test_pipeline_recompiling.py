"""When a step is compiled again: never for a counter, and never in silence."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from pipeline_helpers import assert_close, batch, chain_loss, groups, layers, normal

import meshwright as mw
from meshwright.pipelines.plan_cache import MOST_PLANS


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = mw.stage_end(jnp.tanh(nn.Dense(4)(x)))
        return nn.Dense(4)(x)


def train_states():
    net = Net()
    params = net.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    return TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-2))


def train(value_and_grad):
    def step(state, x, y):
        def loss(params, x, y):
            return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

        value, grads = value_and_grad(loss)(state.params, x, y)
        return state.apply_gradients(grads=grads), value

    return step


def test_a_flax_train_state_is_compiled_once():
    ours = theirs = train_states()
    assert type(ours.step) is int
    step = mw.pipeline(train(mw.value_and_grad), groups(2), microbatches=2)
    plain = jax.jit(train(jax.value_and_grad))
    for count in range(1, 6):
        ours, value = step(ours, *batch())
        theirs, wanted = plain(theirs, *batch())
        assert int(ours.step) == count
    assert_close((ours.params, value), (theirs.params, wanted))
    assert len(step._plans) == 1 and step._cache.made == 1
    assert len(step.timeline(ours, *batch()).measured.starts) > 0
    assert step.explain(ours, *batch()).stages[0].parameters
    assert step._cache.made == 1


def test_a_counter_that_decays_the_rate_is_data():
    def step(state, x, y):
        _, grads = mw.value_and_grad(chain_loss)(state["params"], x, y)
        rate = 0.1 / (1 + state["step"])
        params = jax.tree.map(lambda p, g: p - rate * g, state["params"], grads)
        return {**state, "params": params, "step": state["step"] + 1}

    run = mw.pipeline(step, groups(2), microbatches=4)
    ours = theirs = {"params": layers(2), "step": 0, "name": "net", "width": 4}
    for _ in range(3):
        ours, theirs = run(ours, *batch()), step(theirs, *batch())
    assert (ours["name"], ours["width"], int(ours["step"])) == ("net", 4, 3)
    assert type(ours["width"]) is int  # it is returned as it came: still a setting
    assert_close(ours["params"], theirs["params"])
    assert len(run._plans) == 1


def test_a_number_that_python_looks_at_stays_a_setting_and_is_told():
    def step(state, x, y):
        value, grads = mw.value_and_grad(chain_loss)(state["params"], x, y)
        rate = 0.1 if state["step"] % 2 else 0.2
        params = jax.tree.map(lambda p, g: p - rate * g, state["params"], grads)
        return {"params": params, "step": state["step"] + 1}, value

    run = mw.pipeline(step, groups(2), microbatches=4)
    state = {"params": layers(2), "step": 0}
    for _ in range(3):
        state, _ = run(state, *batch())
    with pytest.warns(
        mw.errors.RecompilationWarning,
        match=r"pipeline of step is compiled for the 4th time.* argument 0/step: 0 before, 3 now",
    ) as caught:
        state, _ = run(state, *batch())
    assert caught[0].filename == __file__
    assert state["step"] == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(state, *batch())  # told once


def test_batches_of_many_shapes_are_told_with_both_shapes():
    step = mw.pipeline(chain_loss, groups(2), microbatches=2)
    for rows in (4, 8, 12):
        step(layers(2), *batch(rows))
    with pytest.warns(
        mw.errors.RecompilationWarning,
        match=r"argument 1: float32\[4,4\] before, float32\[16,4\] now",
    ):
        step(layers(2), *batch(16))


def test_other_functions_and_other_structures_are_told():
    def loss(params, options, x, y):
        return chain_loss(params, options["act"](x), y)

    step = mw.pipeline(loss, groups(2), microbatches=4)
    for act in (jnp.sin, jnp.cos, jnp.tanh):
        step(layers(2), {"act": act}, *batch())
    with pytest.warns(mw.errors.RecompilationWarning, match=r"argument 1/other: nothing before, 1"):
        step(layers(2), {"act": jnp.sin, "other": 1}, *batch())


@pytest.mark.filterwarnings("ignore::meshwright.errors.RecompilationWarning")
def test_no_more_than_some_plans_are_kept_those_used_last():
    def loss(params, options, x):
        return jnp.mean(params["w"] * x) * options["scale"]

    step = mw.pipeline(loss, groups(1), microbatches=1)
    params, x = {"w": normal(0, 4)}, normal(1, 4, 4)
    first, second = {"scale": 1.0}, {"scale": 2.0}
    step(params, first, x)
    step(params, second, x)
    for n in range(MOST_PLANS - 1):
        step(params, first, x)
        step(params, {"scale": 3.0 + n}, x)
    made = step._cache.made
    assert len(step._plans) == MOST_PLANS and made == MOST_PLANS + 1
    step(params, first, x)
    assert step._cache.made == made  # it was used all along
    value, _ = step(params, second, x)
    assert step._cache.made == made + 1  # it was not
    np.testing.assert_allclose(value, 2 * jnp.mean(params["w"] * x), rtol=1e-6)


def test_a_number_and_the_array_of_it_are_the_same_argument():
    def step(params, rate, x, y):
        _, grads = mw.value_and_grad(chain_loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), rate * 0.5

    run = mw.pipeline(step, groups(2), microbatches=4)
    params, rate = layers(2), 0.5
    for _ in range(3):
        params, rate = run(params, rate, *batch())
    assert float(rate) == 0.0625 and len(run._plans) == 1
