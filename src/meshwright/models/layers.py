"""Attention with grouped heads: several heads of queries share one of keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.weights import Weight, constant, constrain, matrix

_SPLIT = ("batch", "seq", "heads", None)


def attention_weights(
    embed: int, heads: int, kv_heads: int, head: int, *, biased: bool = False
) -> dict[str, Weight]:
    """Projections to queries, keys and values, and back."""
    weights = {
        "query": matrix(embed, embed=embed, heads=heads, head=head),
        "key": matrix(embed, embed=embed, kv_heads=kv_heads, head=head),
        "value": matrix(embed, embed=embed, kv_heads=kv_heads, head=head),
        "out": matrix(heads * head, heads=heads, head=head, embed=embed),
    }
    if biased:
        weights["query_bias"] = constant(0.0, heads=heads, head=head)
        weights["key_bias"] = constant(0.0, kv_heads=kv_heads, head=head)
        weights["value_bias"] = constant(0.0, kv_heads=kv_heads, head=head)
        weights["out_bias"] = constant(0.0, norm=embed)
    return weights


def self_attention(
    params: Any, x: jax.Array, *, theta: float | None = None, causal: bool = False
) -> jax.Array:
    """Positions look at each other, (batch, seq, embed) to the same.

    With `theta`, queries and keys are turned by their positions.
    """
    query = constrain(_project("bsd,dhk->bshk", x, params, "query"), *_SPLIT)
    key = constrain(_project("bsd,dhk->bshk", x, params, "key"), *_SPLIT)
    value = constrain(_project("bsd,dhk->bshk", x, params, "value"), *_SPLIT)
    if theta is not None:
        query, key = rotate(query, theta), rotate(key, theta)
    mixed = attend(query, key, value, causal=causal)
    return _project("bshk,hkd->bsd", mixed, params, "out")


def _project(formula: str, x: jax.Array, params: Any, name: str) -> jax.Array:
    found = jnp.einsum(formula, x, params[name])
    return found + params[f"{name}_bias"] if f"{name}_bias" in params else found


def attend(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool) -> jax.Array:
    """Each query takes a mean of the values, weighted by how well it fits their keys.

    (batch, seq, heads, head) in and out; keys and values may have fewer heads. Where the sequence
    is split, queries stay so and every device sees all keys and values.
    """
    key = constrain(key, "batch", None, "heads", None)
    value = constrain(value, "batch", None, "heads", None)
    batch, length, heads, head = query.shape
    shared = key.shape[2]
    grouped = query.reshape(batch, length, shared, heads // shared, head)
    scores = jnp.einsum("bqhgk,bthk->bhgqt", grouped, key, preferred_element_type=jnp.float32)
    scores *= head**-0.5
    if causal:
        past = jnp.arange(length)[:, None] >= jnp.arange(length)
        scores = jnp.where(past, scores, -jnp.inf)
    shares = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    mixed = jnp.einsum("bhgqt,bthk->bqhgk", shares, value).reshape(query.shape)
    return constrain(mixed, *_SPLIT)


# Feed-forward layers: each position by itself, through a wider space.


def swiglu_weights(embed: int, mlp: int) -> dict[str, Weight]:
    """Two ways up and one down."""
    return {
        "gate": matrix(embed, embed=embed, mlp=mlp),
        "up": matrix(embed, embed=embed, mlp=mlp),
        "down": matrix(mlp, mlp=mlp, embed=embed),
    }


def swiglu(params: Any, x: jax.Array) -> jax.Array:
    """One way up opens and closes the other, then down again."""
    wide = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
    return jnp.dot(constrain(wide, "batch", "seq", "mlp"), params["down"])


def gelu_weights(embed: int, mlp: int) -> dict[str, Weight]:
    """One way up and one down, with biases."""
    return {
        "up": matrix(embed, embed=embed, mlp=mlp),
        "up_bias": constant(0.0, mlp=mlp),
        "down": matrix(mlp, mlp=mlp, embed=embed),
        "down_bias": constant(0.0, norm=embed),
    }


def gelu(params: Any, x: jax.Array) -> jax.Array:
    """Up, through the bend of GELU, and down."""
    wide = jax.nn.gelu(jnp.dot(x, params["up"]) + params["up_bias"])
    wide = constrain(wide, "batch", "seq", "mlp")
    return jnp.add(jnp.dot(wide, params["down"]), params["down_bias"])


# Norms: activations brought back to unit size, computed in float32.


def rms_norm(x: jax.Array, scale: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Divide by the root of the mean square.

    >>> rms_norm(jnp.array([8.0, 8.0, -8.0]), jnp.ones(3)).round(3)
    Array([ 1.,  1., -1.], dtype=float32)
    """
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Take the mean away, and divide by the spread.

    >>> layer_norm(jnp.array([1.0, 3.0]), jnp.ones(2), jnp.ones(2)).round(3)
    Array([0., 2.], dtype=float32)
    """
    return _standard(x, -1, eps) * scale.astype(x.dtype) + bias.astype(x.dtype)


def group_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, groups: int, eps: float = 1e-5
) -> jax.Array:
    """The same over all pixels and a group of channels, (batch, rows, columns, channels).

    Unlike batch norm it keeps no statistics, and a batch may be cut as one likes.
    """
    split = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    same = _standard(split, (1, 2, 4), eps).reshape(x.shape)
    return same * scale.astype(x.dtype) + bias.astype(x.dtype)


def _standard(x: jax.Array, axis: int | tuple[int, ...], eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide -= wide.mean(axis, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis, keepdims=True) + eps)
    return wide.astype(x.dtype)


# Rotary position embedding: a query and a key meet at an angle that tells their distance.


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Turn the vectors of each head by their position in the sequence.

    `x` is (batch, seq, heads, head). Dim `i` of a head forms a plane with dim `i + head / 2`; in
    it, position `p` turns by `p * theta ** (-2 i / head)`: the first planes fast, the last slowly.
    """
    half = x.shape[-1] // 2
    speeds = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * speeds
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


# Losses that leave the classes split over devices.


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean of `-log p(label)`, in float32.

    The label's logit is picked out by a comparison and a sum, as the normaliser is by a sum: of
    classes split over devices only those sums are exchanged, not the logits.

    >>> cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3])) / jnp.log(4.0)
    Array(1., dtype=float32)
    """
    logits = logits.astype(jnp.float32)
    highest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    total = jnp.log(jnp.sum(jnp.exp(logits - highest), axis=-1)) + highest[..., 0]
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    return jnp.mean(total - jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1))
