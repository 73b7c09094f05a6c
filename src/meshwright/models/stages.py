"""Layers in stages: a scan over the layers of each, a mark between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.mpmd import stage

Block = Callable[[jax.Array, Any], tuple[jax.Array, Any]]

# What the backward pass finds in memory, by name: everything; what each layer began with; the
# results of matrix products with weights as well.
REMAT: dict[str, Callable[[Block], Block]] = {
    "none": lambda block: block,
    "full": lambda block: jax.checkpoint(block, prevent_cse=False),
    "dots": lambda block: jax.checkpoint(
        block,
        prevent_cse=False,
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    ),
}


def run_stages(
    block: Block, stages: Sequence[Any], x: jax.Array, *, remat: str
) -> tuple[jax.Array, Any]:
    """`block(x, layer) -> (x, notes)` through all layers; the notes come stacked."""
    notes = []
    for number, layers in enumerate(stages):
        if number:
            x = stage(x)
        x, found = jax.lax.scan(REMAT[remat](block), x, layers)
        notes.append(found)
    return x, jax.tree.map(lambda *each: jnp.concatenate(each), *notes)


def cast(layer: Any, dtype: str) -> Any:
    """A layer's parameters as its computation wants them."""
    return jax.tree.map(lambda weight: weight.astype(dtype), layer)
