"""Rotary position embedding: a query and a key meet at an angle that tells their distance."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
