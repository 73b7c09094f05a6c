"""Losses that leave the classes split over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
