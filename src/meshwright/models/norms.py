"""Norms: activations brought back to unit size, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
