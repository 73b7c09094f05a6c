"""A whole train step: a plain optimizer around the pipeline, parameters compared after 20 steps."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from pipeline_helpers import assert_close, batch, chain_loss, groups, layers, looped, normal

import meshwright as mw


def tied_loss(params, x, y):
    x = mw.stage_end(jnp.tanh(x @ params["w0"] * params["scale"]))
    x = mw.stage_end(jnp.tanh(x @ params["w1"]) + params["bias"])
    return jnp.mean((x @ params["w0"].T - y) ** 2)


def tied_params():
    return {**layers(2), "scale": jnp.float32(1.2), "bias": normal(3, 4), "unused": normal(4, 3)}


def trainer(tx, value_and_grad):
    def train_step(params, state, x, y):
        value, grads = value_and_grad(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, optax.tree.norm(grads)

    return train_step


def labels(params):
    return {name: "frozen" if name == "w1" else "trained" for name in params}


def clipped_adamw():
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 20)
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(rate))


OPTIMIZERS = {
    "clipped": clipped_adamw,
    "frozen": lambda: optax.multi_transform(
        {"trained": optax.sgd(1e-1, momentum=0.9), "frozen": optax.set_to_zero()}, labels
    ),
    "accumulated": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_after_20_steps(name):
    tx = OPTIMIZERS[name]()
    step = mw.pipeline(
        trainer(tx, mw.value_and_grad(tied_loss)), groups(3), schedule="zb-h1", microbatches=4
    )
    by_jit = jax.jit(trainer(tx, looped(tied_loss, 4)))
    ours = theirs = (tied_params(), tx.init(tied_params()))
    for _ in range(20):
        *ours, value, norm = step(*ours, *batch())
        *theirs, expected, expected_norm = by_jit(*theirs, *batch())
        assert_close((value, norm), (expected, expected_norm))
    assert_close(ours[0], theirs[0])
    assert_close(ours[1], theirs[1], 1e-4)


def test_donated_parameters_are_used_up():
    tx = optax.adamw(1e-2)
    train_step = trainer(tx, mw.value_and_grad(chain_loss))
    step = mw.pipeline(train_step, groups(2), microbatches=4, donate_argnums=(0, 1))
    by_jit = jax.jit(trainer(tx, looped(chain_loss, 4)))
    theirs = (layers(2), tx.init(layers(2)))
    ours = step(layers(2), tx.init(layers(2)), *batch())[:2]  # they lie in their groups now
    theirs = by_jit(*theirs, *batch())[:2]
    for _ in range(19):
        before = ours
        ours = step(*before, *batch())[:2]
        theirs = by_jit(*theirs, *batch())[:2]
        arrays = [x for x in jax.tree.leaves(before) if x.size > 1]
        assert all(x.is_deleted() for x in arrays)
    assert_close(ours[0], theirs[0])


def on_device_7(tree):
    """Where no group of these tests lies."""
    return jax.device_put(tree, jax.devices()[7])


def test_donated_parameters_that_had_to_be_moved_are_used_up_too():
    tx = optax.adamw(1e-2)
    step = mw.pipeline(
        trainer(tx, mw.value_and_grad(chain_loss)), groups(2), microbatches=4, donate_argnums=(0, 1)
    )
    params, rest = on_device_7(layers(2)), on_device_7(batch())
    state = jax.tree.map(jnp.copy, tx.init(params))
    expected = step(layers(2), tx.init(layers(2)), *batch())
    got = step(params, state, *rest)
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)) if x.size > 1)
    assert not any(x.is_deleted() for x in rest)
    assert_close(got, expected, 0)


def test_what_shares_memory_with_a_donated_array_stays():
    x, y = batch(4)
    params = on_device_7(layers(2))
    same = jax.device_put(
        params["w0"], jax.sharding.NamedSharding(mw.mesh("tp:1", devices=jax.devices()[7:]), P())
    )
    assert same.unsafe_buffer_pointer() == params["w0"].unsafe_buffer_pointer()
    step = mw.pipeline(chain_loss, groups(2), microbatches=4, donate_argnums=0)
    step(params, x, y)
    assert params["w1"].is_deleted()
    assert_close(same, layers(2)["w0"], 0)


def test_an_array_that_is_also_an_argument_of_another_kind_stays():
    params = on_device_7(layers(2))
    step = mw.pipeline(chain_loss, groups(2), microbatches=4, donate_argnums=0)
    step(params, params["w0"], params["w0"])
    assert params["w1"].is_deleted() and not params["w0"].is_deleted()


def test_without_donation_arguments_stay():
    params = layers(2)
    x, y = batch()
    step = mw.pipeline(chain_loss, groups(2), microbatches=4)
    placed = jax.tree.map(jnp.copy, step(params, x, y)[1])
    first = step(placed, x, y)
    assert_close(step(placed, x, y), first, 0)


def test_an_average_of_parameters_follows():
    tx = optax.sgd(1e-1)

    def trainer(value_and_grad):
        def train_step(params, average, state, x, y):
            value, grads = value_and_grad(params, x, y)
            updates, state = tx.update(grads, state)
            params = optax.apply_updates(params, updates)
            average = optax.incremental_update(params, average, 0.1)
            return params, average, state, value

        return train_step

    step = mw.pipeline(trainer(mw.value_and_grad(chain_loss)), groups(3), microbatches=4)
    by_jit = jax.jit(trainer(looped(chain_loss, 4)))
    ours = theirs = (layers(3), layers(3), tx.init(layers(3)))
    for _ in range(20):
        *ours, value = step(*ours, *batch())
        *theirs, expected = by_jit(*theirs, *batch())
    assert_close((ours, value), (theirs, expected))


def test_parameters_moments_and_average_lie_with_their_stage():
    tx = optax.adamw(1e-2)
    step = mw.pipeline(trainer(tx, mw.value_and_grad(chain_loss)), groups(3), microbatches=4)
    params, state, *_ = step(layers(3), tx.init(layers(3)), *batch())
    for tree in (params, state[0].mu, state[0].nu):
        homes = [tree[name].sharding.device_set for name in ("w0", "w1", "w2")]
        assert homes == [{device} for device in jax.devices()[:3]]
    again, *_ = step(params, state, *batch())
    assert jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(lambda x: x.sharding, params)


def test_numbers_that_a_step_returns_stay_numbers():
    def train_step(params, x, y):
        value, _ = mw.value_and_grad(chain_loss)(params, x, y)
        return {"value": value, "two": 2, "fine": True}

    returned = mw.pipeline(train_step, groups(2), microbatches=4)(layers(2), *batch())
    assert (type(returned["two"]), returned["two"], returned["fine"]) == (int, 2, True)


def test_work_before_and_after_the_microbatches():
    def trainer(value_and_grad):
        def train_step(params, x, y, key, count):
            x = x + 0.1 * jax.random.normal(key, x.shape)
            scaled = jax.tree.map(lambda w: w * 0.5, params)
            value, grads = value_and_grad(scaled, x, y)
            rate = 0.1 / (1 + count)
            new = jax.tree.map(lambda w, g: w - rate * g, params, grads)
            metrics = {"value": value, "rate": rate, "spread": jnp.std(x)}
            return new, metrics, count + 1

        return train_step

    step = mw.pipeline(trainer(mw.value_and_grad(chain_loss)), groups(2), microbatches=4)
    by_jit = jax.jit(trainer(looped(chain_loss, 4)))
    arguments = (layers(2), *batch(), jax.random.key(0), jnp.int32(3))
    assert_close(step(*arguments), by_jit(*arguments))


def test_aux_outputs_and_carried_statistics_in_a_train_step():
    def loss(params, stats, x, y):
        x = x @ params["w0"]
        mean = 0.9 * stats + 0.1 * jnp.mean(x, axis=0)
        out = mw.stage_end(jnp.tanh(x - mean)) @ params["w1"]
        return jnp.mean((out - y) ** 2), (mean, {"most": jnp.max(out)})

    def trainer(value_and_grad):
        def train_step(params, stats, x, y):
            (value, (stats, aux)), grads = value_and_grad(params, stats, x, y)
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), stats, (value, aux)

        return train_step

    options = {"has_aux": True, "aux": "max", "carry": 1}
    step = mw.pipeline(trainer(mw.value_and_grad(loss, **options)), groups(2), microbatches=4)
    by_jit = jax.jit(trainer(looped(loss, 4, **options)))
    ours = theirs = (layers(2), jnp.zeros(4))
    for _ in range(20):
        *ours, out = step(*ours, *batch())
        *theirs, expected = by_jit(*theirs, *batch())
    assert_close((ours, out), (theirs, expected))


def test_outside_of_a_pipeline_a_train_step_is_an_ordinary_function():
    train_step = trainer(optax.sgd(0.1), mw.value_and_grad(chain_loss))
    by_jax = trainer(optax.sgd(0.1), jax.value_and_grad(chain_loss))
    state = optax.sgd(0.1).init(layers(2))
    got = jax.jit(train_step)(layers(2), state, *batch())
    assert_close(got, jax.jit(by_jax)(layers(2), state, *batch()))


def test_donated_parameters_that_come_back_as_they_are():
    def train_step(params, x, y):
        value, grads = mw.value_and_grad(chain_loss)(params, x, y)
        norm = sum(jnp.sum(w**2) for w in params.values())
        twice = 2 * params["w1"]  # something alike that could lie in its place
        return {**params, "w0": params["w0"] - 0.1 * grads["w0"]}, value, norm, twice

    step = mw.pipeline(train_step, groups(2), microbatches=4, donate_argnums=0)
    params, *_ = step(layers(2), *batch())
    params, *_ = step(params, *batch())
    assert_close({"w1": params["w1"]}, {"w1": layers(2)["w1"]}, 0)
