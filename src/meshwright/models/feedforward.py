"""Feed-forward layers: each position by itself, through a wider space."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.layouts import constrain
from meshwright.models.weights import Weight, constant, matrix


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
