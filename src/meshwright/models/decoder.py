"""Decoders that predict the next token: dense ones like Llama 3, and mixtures of experts.

Layers are stacked and scanned over, one stack per pipeline stage. A mixture replaces the
feed-forward layer: a router sends each token to a few of many experts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.errors import ModelError
from meshwright.models.base import Model
from meshwright.models.layers import (
    attention_weights,
    cross_entropy,
    rms_norm,
    self_attention,
    swiglu,
    swiglu_weights,
)
from meshwright.models.training import Config, cast, run_stages, synthetic_tokens
from meshwright.models.weights import batch_spec, constant, constrain, matrix, stack_by_stage
from meshwright.trees.specs import AnyMesh


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DecoderConfig(Config):
    """Sizes of a decoder. `seq` is the longest sequence, and the length of a batch's rows.

    `embed` is the width of the residual stream, `head` that of one attention head, `mlp` that of
    the feed-forward layer. `theta` is the base of the rotary embedding.
    """

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    vocab: int
    seq: int
    theta: float = 500_000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_divides("layers", "stages", "every stage has the same number of layers")
        self.check_divides("heads", "kv_heads", "heads of queries share those of keys and values")
        if self.head % 2:
            raise ModelError(
                f"head={self.head} is odd: positions turn pairs of dims. Use an even one.",
                option="head",
            )


@dataclasses.dataclass(frozen=True, repr=False)
class Decoder(Model):
    """A decoder of `layers` blocks, each of causal attention and a SwiGLU feed-forward layer."""

    config: DecoderConfig

    def weights(self) -> Any:
        config = self.config
        # Rows are looked up, not summed over: a small spread, whatever the sizes.
        table = dataclasses.replace(matrix(1, vocab=config.vocab, embed=config.embed), std=0.02)
        return {
            "embed": {"table": table},
            "stages": stack_by_stage(self._layer_weights(), config.layers, config.stages),
            "head": {
                "norm": constant(1.0, norm=config.embed),
                "kernel": matrix(config.embed, embed=config.embed, vocab=config.vocab),
            },
        }

    def _layer_weights(self) -> dict[str, Any]:
        config = self.config
        norm = {"norm": constant(1.0, norm=config.embed)}
        sizes = (config.embed, config.heads, config.kv_heads, config.head)
        return {
            "attention": norm | attention_weights(*sizes),
            "mlp": norm | self._feed_forward_weights(),
        }

    def _feed_forward_weights(self) -> dict[str, Any]:
        return swiglu_weights(self.config.embed, self.config.mlp)

    def _feed_forward(self, params: Any, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Apply the second half of a layer; also return its metrics."""
        return swiglu(params, x), {}

    def _block(self, x: jax.Array, layer: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Apply one layer; also return its metrics."""
        config = self.config
        layer = cast(layer, config.compute)
        attention, mlp = layer["attention"], layer["mlp"]
        normed = rms_norm(x, attention["norm"], config.eps)
        x += self_attention(attention, normed, theta=config.theta, causal=True)
        x = constrain(x, "batch", "seq", "embed")
        update, metrics = self._feed_forward(mlp, rms_norm(x, mlp["norm"], config.eps))
        return constrain(x + update, "batch", "seq", "embed"), metrics

    def logits(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the logits, (batch, seq, vocab), and the metrics of the layers, stacked."""
        config = self.config
        self._check_seq(tokens.shape[1])
        # Gather the table over `embed` before the lookup: only `vocab` stays sharded, and a token's
        # row arrives whole on the devices of its batch.
        table = constrain(params["embed"]["table"].astype(config.compute), "vocab", None)
        x = constrain(table[tokens], "batch", "seq", "embed")
        x, metrics = run_stages(self._block, params["stages"], x, remat=config.remat)
        head = cast(params["head"], config.compute)
        x = rms_norm(x, head["norm"], config.eps)
        return constrain(x @ head["kernel"], "batch", "seq", "vocab"), metrics

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, _ = self.logits(params, batch["inputs"])
        return cross_entropy(logits, batch["targets"]), {}

    def batch(self, size: int, seq: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        length = self._length(size, seq)
        tokens = jax.ShapeDtypeStruct((size, length), jnp.int32)  # type: ignore[no-untyped-call]
        return {"inputs": tokens, "targets": tokens}

    def example(self, size: int, seq: int | None = None, *, seed: int = 0) -> dict[str, np.ndarray]:
        tokens = synthetic_tokens(size, self._length(size, seq) + 1, self.config.vocab, seed)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def flops(self, size: int, seq: int | None = None) -> int:
        config = self.config
        length = self._length(size, seq)
        # Per token: two operations for each parameter it is multiplied with (rows of the table are
        # only looked up), and two products of scores for each position, masked or not.
        looked_up = config.vocab * config.embed
        products = 2 * (self.active_parameters - looked_up)
        attention = 4 * config.layers * length * config.heads * config.head
        return 3 * size * length * (products + attention)

    def batch_spec(self, mesh: AnyMesh) -> PartitionSpec:
        return batch_spec(mesh, "batch", "seq")

    def _length(self, size: int, seq: int | None) -> int:
        length = self.config.seq if seq is None else seq
        self._check_size("batch", size)
        self._check_size("seq", length)
        self._check_seq(length)
        return length

    def _check_seq(self, length: int) -> None:
        if length > self.config.seq:
            raise ModelError(
                f"{self.name}: a sequence of {length} is longer than {self.config.seq}. "
                f"Use at most {self.config.seq}, or model({self.name!r}, seq={length}).",
                option="seq",
            )


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
        weights["shared"] = swiglu_weights(embed, shared * mlp)
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
        out += swiglu(params["shared"], x)
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
    gate = jnp.einsum("becd,edf->becf", queues, params["gate"])
    up = jnp.einsum("becd,edf->becf", queues, params["up"])
    wide = constrain(jax.nn.silu(gate) * up, "rows", "experts", None, "mlp")
    results = jnp.einsum("becf,efd->becd", wide, params["down"])
    results = constrain(results, "rows", "experts", None, None)
    results = constrain(results, "batch", None, None, None)
    return results.reshape(batch, places, embed)


def _combine(results: jax.Array, routes: Routes) -> jax.Array:
    """Sum the experts' results for each token by their weights; a full queue gave zeros."""

    def gather_row(results: jax.Array, slots: jax.Array) -> jax.Array:
        return results.at[slots].get(mode="fill", fill_value=0)

    by_choice = jax.vmap(gather_row)(results, routes.slots)
    return jnp.einsum("bskd,bsk->bsd", by_choice, routes.weights.astype(by_choice.dtype))
