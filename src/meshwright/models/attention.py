"""Attention with grouped heads: several heads of queries share one of keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.layouts import constrain
from meshwright.models.rotary import rotate
from meshwright.models.weights import Weight, constant, matrix

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
