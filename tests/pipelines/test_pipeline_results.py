"""What a loss function may do between its stage ends: a pipeline gives what one `jax.jit` gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
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
def test_tied_weights_across_stages(schedule):
    def loss(params, tokens, labels):
        x = mw.stage_end(params["embed"][tokens])
        x = mw.stage_end(jnp.tanh(x @ params["w0"]))
        logits = jax.nn.log_softmax(x @ params["embed"].T)
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))

    params = {"embed": normal(0, 6, 4), "w0": normal(1, 4, 4)}
    tokens = jnp.arange(8, dtype=jnp.int32) % 6
    assert_same_step(loss, params, tokens, tokens[::-1], at=groups(3), schedule=schedule)


def test_one_weight_in_every_stage_and_twice_in_one():
    def loss(params, x, y):
        x = mw.stage_end(jnp.tanh(x @ params["w"]) @ params["w"])
        x = mw.stage_end(jnp.tanh(x @ params["w"].T) + params["b"])
        return jnp.mean((x @ params["w"] * params["b"] - y) ** 2)

    params = {"w": normal(0, 4, 4), "b": normal(1, 4)}
    assert_same_step(loss, params, *batch(), at=groups(3), schedule="zb-h1")


def test_skip_connections_over_several_stages():
    def loss(params, x, y):
        first = jnp.tanh(x @ params["w0"])
        a = mw.stage_end(first)
        b = mw.stage_end(jnp.tanh(a @ params["w1"]))
        c = mw.stage_end(jnp.tanh(b @ params["w2"]) + a)
        return jnp.mean((c @ params["w3"] + first * x - y) ** 2)

    assert_same_step(loss, layers(4), *batch(), at=groups(4), schedule="zb-h1")


def test_skip_carried_along_in_a_tree():
    def loss(params, x, y):
        h = mw.stage_end({"x": jnp.tanh(x @ params["w0"]), "skip": x, "count": jnp.int32(2)})
        h = mw.stage_end({"x": jnp.tanh(h["x"] @ params["w1"]) * h["count"], "skip": h["skip"]})
        return jnp.mean((h["x"] @ params["w2"] + h["skip"] - y) ** 2)

    assert_same_step(loss, layers(3), *batch(), at=groups(3), schedule="zb-h1")


def test_dropout_keys():
    def loss(params, x, y, keys):
        def drop(n, x):
            return x * jax.random.bernoulli(jax.random.fold_in(keys[0], n), 0.7, x.shape)

        x = mw.stage_end(drop(0, jnp.tanh(x @ params["w0"])))
        x = mw.stage_end(drop(1, jnp.tanh(x @ params["w1"])))
        return jnp.mean((drop(2, x @ params["w2"]) - y) ** 2)

    keys = jax.random.split(jax.random.key(0, impl="unsafe_rbg"), 4)  # quick to compile
    assert_same_step(loss, layers(3), *batch(), keys, at=groups(3), schedule="zb-h1")


def test_dropout_keys_of_the_old_kind():
    def loss(params, x, y, keys):
        x = mw.stage_end(jnp.tanh(x @ params["w0"]) * jax.random.bernoulli(keys[0], 0.5, x.shape))
        return jnp.mean((x @ params["w1"] - y) ** 2)

    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    assert_same_step(loss, layers(2), *batch(), keys, at=groups(2))


def test_one_key_for_every_microbatch():
    def loss(params, x, y, key):
        x = mw.stage_end(x @ params["w0"] * jax.random.bernoulli(key, 0.5, x.shape))
        return jnp.mean((x @ params["w1"] - y) ** 2)

    assert_same_step(loss, layers(2), *batch(), jax.random.key(3), at=groups(2))


def test_closure_constants():
    table, shift = normal(7, 4, 4), np.float32(0.3)
    key = jax.random.key(1)

    def loss(params, x, y):
        x = mw.stage_end(jnp.tanh(x @ params["w0"] @ table) + jax.random.normal(key, x.shape))
        x = mw.stage_end(jnp.tanh(x @ params["w1"] @ table) + shift)
        return jnp.mean((x @ params["w2"] - y @ table) ** 2)

    assert_same_step(loss, layers(3), *batch(), at=groups(3))


def test_casts_of_all_parameters_at_the_top_in_bfloat16():
    def loss(params, x, y):
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        x = mw.stage_end(jnp.tanh(x.astype(jnp.bfloat16) @ low["w0"]))
        x = mw.stage_end(jnp.tanh(x @ low["w1"]))
        return jnp.mean((x @ low["w2"]).astype(jnp.float32) - y) ** 2

    # Compilers may keep more digits than bfloat16 has between two operations of one program.
    step = mw.pipeline(loss, groups(3), schedule="zb-h1", microbatches=4)
    value, grads = step(layers(3), *batch())
    expected, by_jit = jax.jit(looped(loss, 4))(layers(3), *batch())
    assert_close(value, expected, 2e-2)
    assert_close(grads, by_jit, 2e-2)


def test_casts_at_the_top_do_not_tie_parameters_to_the_first_stage():
    def loss(params, x, y):
        whole = jax.tree.map(lambda w: 2.0 * w.astype(jnp.float32), params)
        x = mw.stage_end(jnp.tanh(x @ whole["w0"]))
        x = mw.stage_end(jnp.tanh(x @ whole["w1"]))
        return jnp.mean((x @ whole["w2"] - y) ** 2)

    params = {k: w.astype(jnp.float16) for k, w in layers(3).items()}
    step = mw.pipeline(loss, groups(3), microbatches=4)
    value, grads = step(params, *batch())
    expected, by_jit = jax.jit(looped(loss, 4))(params, *batch())
    assert_close(value, expected)
    assert_close(grads, by_jit, 1e-3)  # gradients in float16, added up over microbatches
    assert [g.sharding.device_set for g in grads.values()] == [{d} for d in jax.devices()[:3]]


def test_a_weight_decay_in_the_loss():
    def loss(params, x, y):
        h = mw.stage_end(jnp.tanh(x @ params["w0"]))
        decay = sum(jnp.sum(w**2) for w in params.values())
        return jnp.mean((h @ params["w1"] - y) ** 2) + 0.1 * decay

    assert_same_step(loss, layers(2), *batch(), at=groups(2), schedule="zb-h1")


def test_custom_vjp_and_custom_jvp_inside_a_stage():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))

    @jax.custom_jvp
    def soft(x):
        return jnp.log1p(jnp.exp(x))

    @soft.defjvp
    def soft_jvp(primals, tangents):
        return soft(primals[0]), jax.nn.sigmoid(primals[0]) * tangents[0]

    @jax.custom_vjp
    def dense(x, w):
        return jnp.tanh(x @ w)

    def dense_forward(x, w):
        out = jnp.tanh(x @ w)
        return out, (x, w, out)

    def dense_backward(kept, g):
        x, w, out = kept
        g = g * (1 - out**2)
        return g @ w.T, x.T @ g

    dense.defvjp(dense_forward, dense_backward)

    def loss(params, x, y):
        x = mw.stage_end(soft(clipped(dense(x, params["w0"]))))
        x = mw.stage_end(jax.nn.relu(clipped(soft(x @ params["w1"]))))
        return jnp.mean((jax.nn.silu(dense(x, params["w2"])) - y) ** 2)

    assert_same_step(loss, layers(3), *batch(), at=groups(3), schedule="zb-h1")


def test_integer_inputs_masks_and_scalars():
    def loss(params, tokens, mask, scale, half):
        x = mw.stage_end(params["embed"][tokens] * scale)
        x = mw.stage_end(jnp.where(mask[:, None], x @ params["w"], 0) * half)
        picked = jnp.take_along_axis(x, tokens[:, None] % 4, 1)
        return -jnp.sum(picked * mask[:, None]) / 10

    params = {"embed": normal(0, 6, 4), "w": normal(1, 4, 4)}
    tokens, mask = jnp.arange(8, dtype=jnp.int32) % 6, jnp.arange(8) % 3 > 0
    arguments = (params, tokens, mask, jnp.float32(1.5), 0.5)
    assert_same_step(loss, *arguments, at=groups(3))


def test_uneven_stages():
    def loss(params, x, y):
        x = mw.stage_end(x)  # a stage that does nothing
        for n in range(5):
            x = jnp.tanh(x @ params[f"w{n}"])
        x = mw.stage_end(x)
        x = mw.stage_end(x * 2)  # a stage without parameters
        return jnp.mean((x - y) ** 2)

    assert_same_step(loss, layers(5), *batch(), at=groups(4), schedule="zb-h1")


@both
def test_frozen_and_unused_parameters(schedule):
    def loss(params, x, y):
        frozen = jax.lax.stop_gradient(params["w1"])
        x = mw.stage_end(jnp.tanh(x @ params["w0"]))
        x = mw.stage_end(jnp.tanh(x @ frozen))
        return jnp.mean((x @ params["w2"] - y) ** 2)

    params = {**layers(3), "unused": normal(8, 4), "scalar": jnp.float32(3)}
    assert_same_step(loss, params, *batch(), at=groups(3), schedule=schedule)


def test_gradients_cut_off_in_the_middle():
    def loss(params, x, y):
        x = mw.stage_end(jnp.tanh(x @ params["w0"]))
        x = mw.stage_end(jax.lax.stop_gradient(jnp.tanh(x @ params["w1"])))
        return jnp.mean((mw.stage_end(x @ params["w2"]) @ params["w3"] - y) ** 2)

    assert_same_step(loss, layers(4), *batch(), at=groups(4), schedule="zb-h1")


def test_scalar_parameters_used_in_several_stages():
    def loss(params, x, y):
        x = mw.stage_end(jnp.tanh(x @ params["w0"]) * params["scale"])
        return jnp.mean((x @ params["w1"] * params["scale"] + params["shift"] - y) ** 2)

    params = {**layers(2), "scale": jnp.float32(1.5), "shift": jnp.float32(0.1)}
    assert_same_step(loss, params, *batch(), at=groups(2), schedule="zb-h1")


@both
def test_a_constant_is_a_part_of_a_gradient_that_several_stages_make(schedule):
    def loss(params, x, y):
        scale = -params["scale"]
        x = mw.stage_end(jnp.tanh(x @ params["w0"]) * scale)
        return jnp.mean((x @ params["w1"] * scale - y) ** 2) + params["scale"]

    params = {**layers(2), "scale": jnp.float32(1.5)}
    assert_same_step(loss, params, *batch(), at=groups(2), schedule=schedule)


@both
def test_casts_of_a_constant_part_of_a_gradient(schedule):
    def loss(params, x, y):
        scale = params["scale"].astype(jnp.float32)
        x = mw.stage_end(jnp.tanh(x @ params["w0"]) * scale)
        return jnp.mean((x @ params["w1"] * scale - y) ** 2) + jnp.sum(scale)

    params = {**layers(2), "scale": normal(7, 4).astype(jnp.bfloat16)}
    step = mw.pipeline(loss, groups(2), schedule=schedule, microbatches=4)
    expected = jax.jit(looped(loss, 4))(params, *batch())
    assert_close(step(params, *batch()), expected, rtol=1e-2)  # parts are added in bfloat16


def test_integers_among_parameters_have_no_gradient():
    def loss(params, x, y):
        x = mw.stage_end(jnp.tanh(x @ params["w0"]) * params["times"])
        return jnp.mean((x @ params["w1"] - y) ** 2)

    params = {**layers(2), "times": jnp.int32(2)}
    value, grads = mw.pipeline(loss, groups(2), microbatches=4)(params, *batch())
    floats = layers(2)
    expected, by_jit = looped(lambda p, x, y: loss({**p, "times": 2}, x, y), 4)(floats, *batch())
    assert grads["times"] is None
    assert_close(value, expected)
    assert_close({k: grads[k] for k in floats}, by_jit)


def test_a_tree_of_batches():
    def loss(params, data):
        x = mw.stage_end(jnp.tanh(data["x"] @ params["w0"]))
        return jnp.mean((x @ params["w1"] - data["more"][0]) ** 2)

    x, y = batch()
    assert_same_step(loss, layers(2), {"x": x, "more": (y,)}, at=groups(2))


def test_numpy_arguments():
    params = jax.tree.map(np.asarray, layers(2))
    assert_same_step(chain_loss, params, *map(np.asarray, batch()), at=groups(2))


def test_one_group_alone():
    assert_same_step(chain_loss, layers(1), *batch(), at=groups(1))
    assert_same_step(chain_loss, layers(3), *batch(), at=groups(1), schedule="looped-bfs")


@pytest.mark.parametrize("microbatches", [1, 2])
def test_fewer_microbatches_than_stages(microbatches):
    options = {"at": groups(4), "microbatches": microbatches}
    assert_same_step(chain_loss, layers(4), *batch(), **options)
    assert_same_step(chain_loss, layers(4), *batch(), schedule="zb-h1", **options)


def test_a_constraint_inside_a_stage():
    at = mw.MpmdMesh(mw.mesh("pp:2, dp:2", devices=jax.devices()[:4]), "pp")
    meshes = at.meshes

    def loss(params, x, y):
        h = jnp.tanh(x @ params["w0"])
        h = mw.stage_end(jax.lax.with_sharding_constraint(h, jax.NamedSharding(meshes[0], P("dp"))))
        return jnp.mean((h @ params["w1"] - y) ** 2)

    step = mw.pipeline(loss, at, microbatches=2)
    expected = jax.jit(looped(chain_loss, 2))(layers(2), *batch())
    assert_close(step(layers(2), *batch()), expected)


def test_arguments_by_keyword():
    def train(params, x, y, *, rate=0.1):
        value, grads = mw.value_and_grad(chain_loss)(params, y=y, x=x)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    params, (x, y) = layers(2), batch()
    step = mw.pipeline(train, groups(2), microbatches=4, donate_argnums=0)
    expected = jax.jit(train)(params, x, y=y, rate=0.5)
    given = jax.tree.map(jnp.copy, params)
    assert step.explain(given, y=y, x=x, rate=0.5).stages[1].parameters == ("w1",)
    assert_close(step(given, y=y, x=x, rate=0.5), expected)
    assert given["w0"].is_deleted()
    assert_close(step(params=layers(2), y=y, x=x), jax.jit(train)(params, x, y))
    step(layers(2), x, y, rate=0.25)
    assert len(step._plans) == 2  # with and without a rate, whatever it is


def test_a_loss_function_by_keyword():
    params, (x, y) = layers(2), batch()
    step = mw.pipeline(chain_loss, groups(2), microbatches=4)
    expected = jax.jit(looped(chain_loss, 4))(params, x, y)
    assert_close(step(params, y=y, x=x), expected)
    assert_close(step(params, x, y=y), expected)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        step(params, x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        step(params, x, y, z=y)
