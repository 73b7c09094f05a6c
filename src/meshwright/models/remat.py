"""Rematerialisation: which values of a layer the backward pass keeps, and where.

Layers give names to the values worth keeping (`named`); a policy says which of them stay on the
device, which wait in the host's memory, and which are computed again. The names are MaxText's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from meshwright._text import plural
from meshwright.errors import ModelError, near, short

Block = Callable[[jax.Array, Any], tuple[jax.Array, Any]]

# The values with names, in the order in which a layer computes them: its input; queries and keys
# with their positions, and values; what attention returns, from a kernel with its log-sum-exp;
# attention's projection back; the products of the feed-forward layer (gate and up, or up alone),
# and its last one.
NAMES = (
    "decoder_layer_input",
    "query_proj",
    "key_proj",
    "value_proj",
    "context",
    "out_proj",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwi",
    "mlpwo",
)
_QKV = ("query_proj", "key_proj", "value_proj")

# "none" keeps everything; "full" the input of each layer; "dots" that and the results of products
# that have no batch dims, as JAX finds them; "minimal" every product with weights, by name;
# "save_qkv" queries, keys and values; "custom" the names in `saved` and `offloaded`.
POLICIES = ("none", "full", "minimal", "dots", "save_qkv", "custom")


def named(x: jax.Array, name: str) -> jax.Array:
    """Give a value its name; it changes nothing else."""
    marked: jax.Array = checkpoint_name(x, name)  # type: ignore[no-untyped-call]
    return marked


def rematerialize(
    block: Block, remat: str, saved: Sequence[str] = (), offloaded: Sequence[str] = ()
) -> Block:
    """Return the block with a policy: for the body of a scan over layers.

    >>> import jax.numpy as jnp
    >>> block = rematerialize(lambda x, w: (jnp.sin(x * w), {}), "full")
    >>> jax.grad(lambda x: block(x, 2.0)[0])(0.0)
    Array(2., dtype=float32, weak_type=True)
    """
    if remat == "none":
        return block
    policies = jax.checkpoint_policies
    policy: Any = None
    if remat == "dots":
        policy = policies.dots_with_no_batch_dims_saveable
    elif remat == "minimal":
        kept = [name for name in NAMES if name not in ("decoder_layer_input", "context")]
        policy = policies.save_only_these_names(*kept)
    elif remat == "save_qkv":
        policy = policies.save_only_these_names(*_QKV)
    elif remat == "custom":
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(saved),
            names_which_can_be_offloaded=list(offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    # XLA cannot merge what the body of a scan computes again with the forward pass, so
    # `prevent_cse`, which costs optimizations, is not needed.
    return jax.checkpoint(block, prevent_cse=False, policy=policy)


def check_remat(remat: str, saved: Sequence[str], offloaded: Sequence[str]) -> None:
    """Refuse unknown policies and names, and names without "custom"."""
    if remat not in POLICIES:
        raise ModelError(
            f"remat: {short(remat)} is not one of {', '.join(POLICIES)}.{near(remat, POLICIES)}",
            option="remat",
        )
    for option, given in {"saved": saved, "offloaded": offloaded}.items():
        for name in given:
            if name not in NAMES:
                raise ModelError(
                    f"{option}: no value is called {short(name)}.{near(str(name), NAMES)} "
                    f"Known: {', '.join(NAMES)}.",
                    option=option,
                )
    if both := [name for name in saved if name in offloaded]:
        raise ModelError(
            f"{both[0]} is in saved and in offloaded. Leave it in one of them.", option="saved"
        )
    count = len(saved) + len(offloaded)
    if count and remat != "custom":
        raise ModelError(
            f"{plural(count, 'name')} in saved and offloaded, and remat={remat!r} does not look at "
            "them. Use remat='custom', or drop them.",
            option="remat",
        )
    if not count and remat == "custom":
        raise ModelError(
            "remat='custom' keeps the names in saved and offloaded, and there are none. Give some, "
            f"of {', '.join(NAMES)}, or use remat='full'.",
            option="remat",
        )
