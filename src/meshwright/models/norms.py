"""Norms: activations brought back to unit size, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Divide by the root of the mean square.

    >>> rms_norm(jnp.array([3.0, 4.0]), jnp.ones(2)) * 12.5**0.5
    Array([2.9999988, 3.9999983], dtype=float32)
    """
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale.astype(x.dtype)
