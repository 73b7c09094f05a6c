"""Feed-forward layers: each position by itself, through a wider space."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.layouts import constrain
from meshwright.models.weights import Weight, matrix


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
