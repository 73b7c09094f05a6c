"""Auxiliary outputs by every reduction, and state that is carried on."""

import jax
import jax.numpy as jnp
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


def test_aux_outputs_of_every_reduction_and_of_every_stage():
    def loss(params, x, y):
        h = mw.stage_end(jnp.tanh(x @ params["w0"]))
        early = jnp.sum(h, axis=0)
        h = mw.stage_end(jnp.tanh(h @ params["w1"]))
        out = h @ params["w2"]
        aux = {
            "stack": out,
            "mean": (early, jnp.mean(out)),
            "sum": jnp.sum(out > 0),
            "max": [jnp.max(out), jnp.max(h, axis=0), jnp.argmax(y)],
        }
        return jnp.mean((out - y) ** 2), aux

    words = {k: k for k in ("stack", "mean", "sum", "max")}
    spread = {**words, "mean": ("mean", "mean"), "max": ["max"] * 3}
    params, data = layers(3), batch()
    step = mw.pipeline(loss, groups(3), microbatches=4, has_aux=True, aux=words)
    expected = jax.jit(looped(loss, 4, has_aux=True, aux=spread))(params, *data)
    assert_close(step(params, *data), expected)
    assert step(params, *data)[0][1]["stack"].shape == (4, 2, 4)


@pytest.mark.parametrize("word", ["stack", "mean", "sum", "max"])
def test_truths_and_whole_numbers_are_reduced_as_numpy_does(word):
    def loss(params, x, y):
        h = mw.stage_end(jnp.tanh(x @ params["w0"]))
        out = h @ params["w1"]
        return jnp.mean((out - y) ** 2), (jnp.any(out > 1.5), jnp.argmin(out) - 5)

    assert_same_step(loss, layers(2), *batch(), at=groups(2), has_aux=True, aux=word)


def test_aux_outputs_that_no_stage_computes():
    def loss(params, x, y):
        h = mw.stage_end(jnp.tanh(x @ params["w0"]))
        aux = {
            "input": x,
            "constant": jnp.float32(2.0),
            "count": x.shape[0],
            "norm": jnp.sum(params["w1"] ** 2),
            "weight": params["w0"],
        }
        return jnp.mean((h @ params["w1"] - y) ** 2), aux

    params, data = layers(2), batch()
    expected = jax.jit(looped(loss, 4, has_aux=True))(params, *data)
    got = mw.pipeline(loss, groups(2), microbatches=4, has_aux=True)(params, *data)
    assert_close(got, expected)


def test_values_and_gradients_are_summed_on_request():
    assert_same_step(chain_loss, layers(2), *batch(), at=groups(2), reduce="sum")


def test_batch_statistics_carried_on():
    def loss(params, x, y, stats):
        def normalized(x, stat):
            mean = 0.9 * stat + 0.1 * jnp.mean(x, axis=0)
            return x - mean, mean

        h, first = normalized(x @ params["w0"], stats["first"])
        h = mw.stage_end(jnp.tanh(h))
        h, second = normalized(h @ params["w1"], stats["second"])
        stats = {"first": first, "second": second, "count": stats["count"] + 1}
        return jnp.mean((h - y) ** 2), jax.lax.stop_gradient(stats)

    stats = {"first": jnp.zeros(4), "second": jnp.ones(4), "count": jnp.int32(0)}
    step = assert_same_step(
        loss, layers(2), *batch(), stats, at=groups(2), schedule="zb-h1", carry=3
    )
    ((_, stats), _) = step(layers(2), *batch(), stats)
    assert int(stats["count"]) == 4


def test_carried_state_with_aux_outputs():
    def loss(params, state, x, y):
        h = mw.stage_end(jnp.tanh(x @ params["w0"]) + state)
        out = h @ params["w1"]
        return jnp.mean((out - y) ** 2), (state * 0.5 + jnp.mean(x, axis=0), jnp.sum(out))

    state = normal(5, 4)
    options = {"carry": 1, "has_aux": True, "aux": "sum"}
    assert_same_step(loss, layers(2), state, *batch(), at=groups(2), **options)


def test_settings_of_a_carried_state_stay_settings_and_numbers_beside_it_are_data():
    def loss(params, state, x, y):
        h = mw.stage_end(state["act"](x @ params["w0"]) + state["rate"] * state["mean"])
        out = h @ params["w1"]
        state = state | {"mean": jnp.mean(x, axis=0)}
        return jnp.mean((out - y) ** 2), (state, {"how": state["act"], "rows": len(x), "on": True})

    state = {"act": jnp.tanh, "rate": 0.5, "mean": normal(5, 4)}
    aux = {"how": "sum", "rows": "sum", "on": "stack"}
    step = mw.pipeline(loss, groups(2), microbatches=2, carry=1, has_aux=True, aux=aux)
    params = layers(2)
    ((_, (after, beside)), _) = step(params, state, *batch())
    assert (after["act"], after["rate"], beside["how"]) == (jnp.tanh, 0.5, jnp.tanh)
    assert int(beside["rows"]) == len(batch()[0]) and beside["on"].tolist() == [True, True]
    step(params, after, *batch())
    assert len(step._plans) == 1  # what it hands on is as what it took


@pytest.mark.parametrize(("how", "total"), [("mean", [100.0, 200.0]), ("sum", [400, 800])])
def test_small_integers_do_not_overflow(how, total):
    def loss(params, x, y):
        value = chain_loss(params, x, y)
        late = (value * 0 + 100).astype(jnp.int8)
        return value, [late, jnp.full((), 200, jnp.uint8)]

    step = mw.pipeline(loss, groups(2), microbatches=4, has_aux=True, aux=how)
    (_, aux), _ = step(layers(2), *batch(8))
    assert [float(x) for x in aux] == total
    kinds = ["float32", "float32"] if how == "mean" else ["int32", "uint32"]
    assert [str(x.dtype) for x in aux] == kinds
