"""The parts of models against the same thing written out in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from model_helpers import fresh

from meshwright.models.attention import dot_product_attention
from meshwright.models.layers import (
    attention_weights,
    cross_entropy,
    group_norm,
    layer_norm,
    rms_norm,
    rotary_embedding,
    self_attention,
)
from meshwright.models.mixture import expert_weights, mixture_of_experts, route


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def rotated(x, theta):
    """Pairs of dims as complex numbers, turned one by one."""
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for place in range(x.shape[1]):
        for plane in range(half):
            turn = np.exp(1j * place * theta ** (-2 * plane / x.shape[-1]))
            turned = (x[:, place, :, plane] + 1j * x[:, place, :, plane + half]) * turn
            out[:, place, :, plane] = turned.real
            out[:, place, :, plane + half] = turned.imag
    return out


def attended(query, key, value, causal):
    """Head by head and query by query; head `h` uses key `h // group`."""
    out = np.zeros_like(query)
    group = query.shape[2] // key.shape[2]
    for row, place, head in np.ndindex(query.shape[:3]):
        end = place + 1 if causal else key.shape[1]
        shared = head // group
        scores = key[row, :end, shared] @ query[row, place, head] / query.shape[-1] ** 0.5
        shares = np.exp(scores - scores.max())
        out[row, place, head] = shares / shares.sum() @ value[row, :end, shared]
    return out


@pytest.mark.parametrize("theta", [500_000.0, 100.0])
def test_rotation_turns_pairs_by_position(theta):
    x = normal(2, 9, 3, 8)
    np.testing.assert_allclose(
        rotary_embedding(jnp.asarray(x), theta), rotated(x, theta), atol=1e-5
    )


def test_rotated_vectors_meet_by_their_distance_alone():
    x = jnp.broadcast_to(normal(1, 1, 1, 16), (1, 12, 1, 16))
    turned = rotary_embedding(x, 1000.0)[0, :, 0]
    meets = turned @ turned.T
    np.testing.assert_allclose(meets[0, :6], meets[5, 5:11], rtol=1e-4)
    assert not np.allclose(meets[0, 0], meets[0, 5], rtol=1e-2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_grouped_heads_share_keys_and_values(kv_heads, causal):
    query = normal(2, 7, 6, 4)
    key, value = normal(2, 7, kv_heads, 4, seed=1), normal(2, 7, kv_heads, 4, seed=2)
    ours = dot_product_attention(*map(jnp.asarray, (query, key, value)), causal=causal)
    np.testing.assert_allclose(ours, attended(query, key, value, causal), atol=1e-5)


def test_self_attention_projects_turns_and_mixes():
    params = fresh(attention_weights(12, 4, 2, 6))
    x = normal(2, 5, 12)
    weights = {name: np.asarray(weight) for name, weight in params.items()}
    query, key, value = (
        np.einsum("bsd,dhk->bshk", x, weights[n]) for n in ("query", "key", "value")
    )
    mixed = attended(rotated(query, 50.0), rotated(key, 50.0), value, True)
    wanted = np.einsum("bshk,hkd->bsd", mixed, weights["out"])
    ours = self_attention(params, jnp.asarray(x), theta=50.0, causal=True)
    np.testing.assert_allclose(ours, wanted, atol=1e-5)


def test_later_words_do_not_change_earlier_answers():
    params = fresh(attention_weights(12, 4, 2, 6))
    x = jnp.asarray(normal(1, 6, 12))
    changed = x.at[:, 4:].set(9.0)
    before, after = (self_attention(params, v, theta=50.0, causal=True) for v in (x, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert not np.allclose(before[:, 4:], after[:, 4:])


def test_norms_are_what_they_say():
    x, scale, bias = normal(2, 3, 3, 8), normal(8, seed=1), normal(8, seed=2)
    np.testing.assert_allclose(
        rms_norm(x, scale), x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale, atol=1e-5
    )
    centred = x - x.mean(-1, keepdims=True)
    wanted = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale + bias
    np.testing.assert_allclose(layer_norm(x, scale, bias), wanted, atol=1e-5)
    wanted = np.empty_like(x)
    for row, group in np.ndindex(2, 4):
        part = x[row, ..., 2 * group : 2 * group + 2]
        wanted[row, ..., 2 * group : 2 * group + 2] = (part - part.mean()) / np.sqrt(
            part.var() + 1e-5
        )
    np.testing.assert_allclose(group_norm(x, scale, bias, 4), wanted * scale + bias, atol=1e-5)


def test_half_precision_is_normed_in_full():
    x = jnp.full((1, 4096), 300.0, jnp.bfloat16)  # its squares do not sum in float16
    assert rms_norm(x, jnp.ones(4096)).dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(rms_norm(x, jnp.ones(4096)), "float32"), 1.0, rtol=1e-2)


def test_cross_entropy_is_that_of_optax():
    logits, labels = 10 * normal(4, 5, 32), np.arange(20).reshape(4, 5)
    wanted, slope = jax.value_and_grad(
        lambda z: optax.softmax_cross_entropy_with_integer_labels(z, labels).mean()
    )(logits)
    ours, our_slope = jax.value_and_grad(cross_entropy)(logits, labels)
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)
    np.testing.assert_allclose(our_slope, slope, atol=1e-7)


def experts_one_by_one(params, x, chosen, length):
    """Token by token, first choices before second ones; a full queue takes nobody."""
    silu = lambda z: z / (1 + np.exp(-z))  # noqa: E731
    scores = x @ params["router"]
    odds = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    out = np.zeros_like(x)
    for row in range(x.shape[0]):
        free = [length] * odds.shape[-1]
        ranked = np.argsort(-odds[row], axis=-1)[:, :chosen]
        for choice in range(chosen):
            for token in range(x.shape[1]):
                expert = ranked[token, choice]
                if not free[expert]:
                    continue
                free[expert] -= 1
                share = odds[row, token, expert] / odds[row, token, ranked[token]].sum()
                gate, up, down = (params[name][expert] for name in ("gate", "up", "down"))
                answer = (silu(x[row, token] @ gate) * (x[row, token] @ up)) @ down
                out[row, token] += share * answer
    if "shared" in params:
        shared = params["shared"]
        out += (silu(x @ shared["gate"]) * (x @ shared["up"])) @ shared["down"]
    return out


@pytest.mark.parametrize(("capacity", "length", "shared"), [(4.0, 16, 0), (1.0, 4, 1), (0.3, 2, 0)])
def test_tokens_go_to_their_best_experts_while_there_is_room(capacity, length, shared):
    params = fresh(expert_weights(8, 12, 4, shared))
    x = normal(3, 8, 8)
    ours, notes = jax.jit(functools.partial(mixture_of_experts, chosen=2, capacity=capacity))(
        params, x
    )
    wanted = experts_one_by_one(jax.tree.map(np.asarray, params), x, 2, length)
    np.testing.assert_allclose(ours, wanted, atol=1e-5)
    assert (float(notes["dropped"]) > 0) == (capacity < 4)


def test_balance_is_one_when_even_and_grows_with_favourites():
    even = jnp.log(jnp.eye(4)[jnp.arange(8) % 4] * 0.97 + 0.01)[None]
    one = jnp.log(jnp.eye(4)[jnp.zeros(8, int)] * 0.97 + 0.01)[None]
    assert float(route(even, 1, 8)[1]["balance"]) == pytest.approx(1.0)
    assert float(route(one, 1, 8)[1]["balance"]) > 3


def test_router_learns_from_balance_and_from_its_answers():
    params = fresh(expert_weights(8, 12, 4, 0))
    x = jnp.asarray(normal(2, 8, 8))

    def pull(params, which):
        out, notes = mixture_of_experts(params, x, chosen=2, capacity=2.0)
        return notes["balance"] if which == "balance" else jnp.sum(out**2)

    for which in ("balance", "answers"):
        grads = jax.jit(jax.grad(pull), static_argnums=1)(params, which)
        assert float(jnp.abs(grads["router"]).max()) > 1e-4
