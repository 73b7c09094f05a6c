"""Attention with grouped heads: several heads of queries share one of keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.layouts import constrain
from meshwright.models.rotary import rotate
from meshwright.models.weights import Weight, matrix


def attention_weights(embed: int, heads: int, kv_heads: int, head: int) -> dict[str, Weight]:
    """Projections to queries, keys and values, and back."""
    return {
        "query": matrix(embed, embed=embed, heads=heads, head=head),
        "key": matrix(embed, embed=embed, kv_heads=kv_heads, head=head),
        "value": matrix(embed, embed=embed, kv_heads=kv_heads, head=head),
        "out": matrix(heads * head, heads=heads, head=head, embed=embed),
    }


def self_attention(params: Any, x: jax.Array, *, theta: float) -> jax.Array:
    """Causal self-attention with rotary positions, (batch, seq, embed) to the same."""
    query = rotate(jnp.einsum("bsd,dhk->bshk", x, params["query"]), theta)
    key = rotate(jnp.einsum("bsd,dhk->bshk", x, params["key"]), theta)
    value = jnp.einsum("bsd,dhk->bshk", x, params["value"])
    mixed = attend(query, key, value, causal=True)
    return jnp.einsum("bshk,hkd->bsd", mixed, params["out"])


def attend(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool) -> jax.Array:
    """Each query takes a mean of the values, weighted by how well it fits their keys.

    (batch, seq, heads, head) in and out; keys and values may have fewer heads. Where the sequence
    is split, queries stay so and every device sees all keys and values.
    """
    query = constrain(query, "batch", "seq", "heads", None)
    key = constrain(key, "batch", None, "kv_heads", None)
    value = constrain(value, "batch", None, "kv_heads", None)
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
    return constrain(mixed, "batch", "seq", "heads", None)
