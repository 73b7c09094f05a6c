"""Decoders with a mixture of experts: a router sends each token to a few of many experts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import ModelError
from meshwright.models.decoder import Decoder, DecoderConfig
from meshwright.models.layers import cross_entropy, feed_forward, feed_forward_weights
from meshwright.models.remat import named
from meshwright.models.weights import constrain, matrix


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MixtureConfig(DecoderConfig):
    """Sizes of a decoder with experts; `mlp` is the width of one of them.

    A token goes to `chosen` of the `experts`, and to all `shared` ones. An expert takes at most
    `capacity` times an even share of the tokens; `balance` is the weight of the loss that spreads
    them.
    """

    experts: int
    chosen: int
    shared: int = dataclasses.field(default=0, metadata={"least": 0})
    capacity: float = 1.25
    balance: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gated", "activation", "products", "tiles"):
            if getattr(self, name) != getattr(DecoderConfig, name):
                raise ModelError(
                    f"{name}={getattr(self, name)!r}: mixtures of experts have "
                    f"{name}={getattr(DecoderConfig, name)!r} alone.",
                    option=name,
                )
        if self.chosen > self.experts:
            raise ModelError(
                f"chosen={self.chosen} of experts={self.experts}. Choose fewer.", option="chosen"
            )


@dataclasses.dataclass(frozen=True, repr=False)
class Mixture(Decoder):
    """A decoder whose feed-forward layers are mixtures of experts."""

    config: MixtureConfig

    @property
    def active_parameters(self) -> int:
        config = self.config
        idle = config.layers * (config.experts - config.chosen)
        return self.parameters - idle * 3 * config.embed * config.mlp

    def _feed_forward_weights(self) -> dict[str, Any]:
        config = self.config
        return expert_weights(config.embed, config.mlp, config.experts, config.shared)

    def _feed_forward(self, params: Any, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return mixture_of_experts(
            params, x, chosen=self.config.chosen, capacity=self.config.capacity
        )

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, layers = self.logits(params, batch["inputs"])
        balance = layers["balance"].mean()
        loss = cross_entropy(logits, batch["targets"])
        metrics = {
            "cross_entropy": loss,
            "balance": balance,
            "dropped": layers["dropped"].mean(),
        }
        return loss + self.config.balance * balance, metrics


# A mixture of experts in four steps: route tokens to experts, dispatch them into queues, run the
# experts, combine their results. Shapes are static: each expert has a queue of a fixed length for
# each row of the batch, and tokens that find it full are dropped.


@dataclasses.dataclass(frozen=True)
class Routes:
    """Where the tokens of each row go; both arrays are (batch, seq, chosen).

    `slots` number the places in all queues of a row, those of the first expert first; the number
    behind the last one means that the queue was full. `weights` are those of the experts' results.
    """

    slots: jax.Array
    weights: jax.Array


def expert_weights(embed: int, mlp: int, experts: int, shared: int) -> dict[str, Any]:
    """Describe a router, the experts, and `shared` more experts that every token goes to."""
    up = matrix(embed, experts=experts, expert_embed=embed, mlp=mlp)
    weights: dict[str, Any] = {
        "router": matrix(embed, embed=embed, router=experts),
        "gate": up,
        "up": up,
        "down": matrix(mlp, experts=experts, mlp=mlp, expert_embed=embed),
    }
    if shared:
        weights["shared"] = feed_forward_weights(embed, shared * mlp)
    return weights


def mixture_of_experts(
    params: Any, x: jax.Array, *, chosen: int, capacity: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Send each token through its `chosen` experts; also return the metrics of the router.

    Every expert has a queue per row of the batch, `capacity` times as long as an even spread
    would need; the experts add nothing to tokens that find it full. Where experts and the batch
    are sharded over the same axis, queues are exchanged in an all-to-all before the experts, and
    their results in another one after them.
    """
    experts = params["router"].shape[-1]
    length = math.ceil(capacity * chosen * x.shape[1] / experts)
    x = constrain(x, "batch", None, None)
    scores = jnp.einsum("bsd,de->bse", x, params["router"], preferred_element_type=jnp.float32)
    routes, metrics = route(scores, chosen, length)
    results = _run_experts(params, _dispatch(x, routes.slots, experts * length), experts)
    out = _combine(results, routes)
    if "shared" in params:
        out += feed_forward(params["shared"], x)
    return out, metrics


def route(scores: jax.Array, chosen: int, length: int) -> tuple[Routes, dict[str, jax.Array]]:
    """Assign every token places in the queues of its best experts, by (batch, seq, experts) scores.

    First choices are served before second ones, earlier tokens before later ones. `balance` is
    the auxiliary loss of Switch Transformers: 1 when every expert gets the same share, and its
    gradient pulls towards that. It is a mean over rows, so a batch may be cut into microbatches.
    `dropped` is the fraction of choices that found a full queue.
    """
    batch, seq, experts = scores.shape
    probabilities = jax.nn.softmax(scores, axis=-1)
    # A sort is sharded with the batch; for `top_k` the compiler may gather the whole of it.
    picks = jnp.argsort(jax.lax.stop_gradient(-scores), axis=-1)[..., :chosen]
    is_pick = jax.nn.one_hot(picks, experts, dtype=jnp.int32)
    weights = jnp.sum(probabilities[:, :, None] * is_pick, axis=-1)
    weights /= weights.sum(axis=-1, keepdims=True)

    # All choices of a row in the order they are served; a choice's place in its expert's queue is
    # the number of earlier choices of that expert.
    in_order = is_pick.swapaxes(1, 2).reshape(batch, chosen * seq, experts)
    place = jnp.sum((jnp.cumsum(in_order, axis=1) - 1) * in_order, axis=-1)
    place = place.reshape(batch, chosen, seq).swapaxes(1, 2)
    fits = place < length
    slots = jnp.where(fits, picks * length + place, experts * length)

    routed = in_order.mean(axis=1)  # the fraction of the choices that each expert gets
    balance = experts * jnp.mean(jnp.sum(routed * probabilities.mean(axis=1), axis=-1))
    dropped = 1.0 - jnp.mean(fits, dtype=jnp.float32)
    return Routes(slots, weights), {"balance": balance, "dropped": dropped}


def _dispatch(x: jax.Array, slots: jax.Array, places: int) -> jax.Array:
    """Copy tokens to their places, (batch, places, embed); empty places hold zeros."""
    seq, chosen = slots.shape[1:]
    tokens = jnp.repeat(jnp.arange(seq), chosen)

    def dispatch_row(row: jax.Array, slots: jax.Array) -> jax.Array:
        # Scatter the numbers of the tokens, then gather their vectors: much less is scattered, and
        # the backward pass of the gather is one scatter-add.
        source = jnp.full(places, seq).at[slots.reshape(-1)].set(tokens, mode="drop")
        return row.at[source].get(mode="fill", fill_value=0)

    return jax.vmap(dispatch_row)(x, slots)


def _run_experts(params: Any, queues: jax.Array, experts: int) -> jax.Array:
    """Run every expert on its own queue, (batch, places, embed) in and out."""
    batch, places, embed = queues.shape
    # From sharded rows to sharded experts, and back below: the pairs of constraints around each
    # reshape are what the compiler turns into an all-to-all.
    queues = constrain(queues, "batch", None, None)
    queues = queues.reshape(batch, experts, places // experts, embed)
    queues = constrain(queues, "rows", "experts", None, None)
    gate = named(jnp.einsum("becd,edf->becf", queues, params["gate"]), "mlpwi_0")
    up = named(jnp.einsum("becd,edf->becf", queues, params["up"]), "mlpwi_1")
    wide = constrain(jax.nn.silu(gate) * up, "rows", "experts", None, "mlp")
    results = named(jnp.einsum("becf,efd->becd", wide, params["down"]), "mlpwo")
    results = constrain(results, "rows", "experts", None, None)
    results = constrain(results, "batch", None, None, None)
    return results.reshape(batch, places, embed)


def _combine(results: jax.Array, routes: Routes) -> jax.Array:
    """Sum the experts' results for each token by their weights; a full queue gave zeros."""

    def gather_row(results: jax.Array, slots: jax.Array) -> jax.Array:
        return results.at[slots].get(mode="fill", fill_value=0)

    by_choice = jax.vmap(gather_row)(results, routes.slots)
    return jnp.einsum("bskd,bsk->bsd", by_choice, routes.weights.astype(by_choice.dtype))
