"""A dense decoder in the manner of Llama 3."""

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
from meshwright.models.weights import batch_spec, constant, constrain, in_stages, matrix
from meshwright.trees.specs import AnyMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(Config):
    """Sizes of a decoder. `seq` is the longest sequence, and the length of a batch's rows."""

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
        self.check_parts("layers", "stages", "every stage has the same number of layers")
        self.check_parts("heads", "kv_heads", "heads of queries share those of keys and values")
        if self.head % 2:
            raise ModelError(
                f"head={self.head} is odd: positions turn pairs of dims. Use an even one."
            )


@dataclasses.dataclass(frozen=True)
class Decoder(Model):
    """Tokens in, the next token out: attention and a gated feed-forward, `layers` times."""

    config: DecoderConfig

    def weights(self) -> Any:
        config = self.config
        table = dataclasses.replace(matrix(1, vocab=config.vocab, embed=config.embed), std=0.02)
        return {
            "embed": {"table": table},
            "stages": in_stages(self._layer_weights(), config.layers, config.stages),
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
        """The layer's second half, and numbers to watch."""
        return swiglu(params, x), {}

    def _block(self, x: jax.Array, layer: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        config = self.config
        layer = cast(layer, config.compute)
        attention, mlp = layer["attention"], layer["mlp"]
        seen = rms_norm(x, attention["norm"], config.eps)
        x += self_attention(attention, seen, theta=config.theta, causal=True)
        x = constrain(x, "batch", "seq", "embed")
        change, notes = self._feed_forward(mlp, rms_norm(x, mlp["norm"], config.eps))
        return constrain(x + change, "batch", "seq", "embed"), notes

    def logits(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Scores of every word at every position, and the layers' numbers, stacked."""
        config = self.config
        self._check_seq(tokens.shape[1])
        # Rows of the table go to where they are read: only the words stay split.
        table = constrain(params["embed"]["table"].astype(config.compute), "vocab", None)
        x = constrain(table[tokens], "batch", "seq", "embed")
        x, notes = run_stages(self._block, params["stages"], x, remat=config.remat)
        head = cast(params["head"], config.compute)
        x = rms_norm(x, head["norm"], config.eps)
        return constrain(x @ head["kernel"], "batch", "seq", "vocab"), notes

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, _ = self.logits(params, batch["inputs"])
        return cross_entropy(logits, batch["targets"]), {}

    def batch(self, size: int, seq: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        length = self._length(size, seq)
        words = jax.ShapeDtypeStruct((size, length), jnp.int32)  # type: ignore[no-untyped-call]
        return {"inputs": words, "targets": words}

    def example(self, size: int, seq: int | None = None, *, seed: int = 0) -> dict[str, np.ndarray]:
        words = synthetic_tokens(size, self._length(size, seq) + 1, self.config.vocab, seed)
        return {"inputs": words[:, :-1], "targets": words[:, 1:]}

    def flops(self, size: int, seq: int | None = None) -> int:
        config = self.config
        length = self._length(size, seq)
        looked_up = config.vocab * config.embed
        products = 2 * (self.active_parameters - looked_up)
        attention = 4 * config.layers * length * config.heads * config.head
        return 3 * size * length * (products + attention)

    def batch_spec(self, mesh: AnyMesh) -> PartitionSpec:
        return batch_spec(mesh, "batch", "seq")

    def _length(self, size: int, seq: int | None) -> int:
        length = self.config.seq if seq is None else seq
        self._check_size("batch of", size)
        self._check_size("seq", length)
        self._check_seq(length)
        return length

    def _check_seq(self, length: int) -> None:
        if length > self.config.seq:
            raise ModelError(
                f"{self.name}: a sequence of {length} is longer than {self.config.seq}. "
                f"Use at most {self.config.seq}, or model({self.name!r}, seq={length})."
            )


# A decoder whose feed-forward layers are mixtures of experts.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig(DecoderConfig):
    """Sizes of a decoder with experts; `mlp` is the width of one of them.

    A token goes to `chosen` of the `experts`, and to the `shared` ones; `capacity` is the room in
    their queues, `balance` the weight of the loss that spreads the tokens.
    """

    experts: int
    chosen: int
    shared: int = dataclasses.field(default=0, metadata={"least": 0})
    capacity: float = 1.25
    balance: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chosen > self.experts:
            raise ModelError(f"chosen={self.chosen} of experts={self.experts}. Choose fewer.")


@dataclasses.dataclass(frozen=True)
class Mixture(Decoder):
    """Tokens in, the next token out, through a few of many experts in every layer."""

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
        return mixture(params, x, chosen=self.config.chosen, capacity=self.config.capacity)

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, notes = self.logits(params, batch["inputs"])
        balance = notes["balance"].mean()
        surprise = cross_entropy(logits, batch["targets"])
        metrics = {
            "cross_entropy": surprise,
            "balance": balance,
            "dropped": notes["dropped"].mean(),
        }
        return surprise + self.config.balance * balance, metrics


# A mixture of experts: a router sends each token to a few of many feed-forward layers.


@dataclasses.dataclass(frozen=True)
class Routes:
    """Where the tokens of each row go, all arrays (batch, seq, chosen).

    `slots` are places in the experts' queues, counted through from the first expert's to the
    last's; one behind the end stands for a queue that was full. `shares` weigh the answers.
    """

    slots: jax.Array
    shares: jax.Array


def expert_weights(embed: int, mlp: int, experts: int, shared: int) -> dict[str, Any]:
    """A router, the experts, and `shared` more experts that see every token."""
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


def mixture(
    params: Any, x: jax.Array, *, chosen: int, capacity: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Each token through its `chosen` experts, and what to watch.

    Every expert has a queue per row of the batch, `capacity` times as long as an even spread
    would need; tokens that find it full go without. Where experts and the batch are split over
    the same axis, the queues change sides in an all-to-all before the experts, and in another
    after them.
    """
    experts = params["router"].shape[-1]
    length = math.ceil(capacity * chosen * x.shape[1] / experts)
    x = constrain(x, "batch", None, None)
    scores = jnp.einsum("bsd,de->bse", x, params["router"], preferred_element_type=jnp.float32)
    routes, notes = route(scores, chosen, length)
    answers = _ask(params, _queue(x, routes.slots, experts * length), experts)
    out = _collect(answers, routes)
    if "shared" in params:
        out += swiglu(params["shared"], x)
    return out, notes


def route(scores: jax.Array, chosen: int, length: int) -> tuple[Routes, dict[str, jax.Array]]:
    """Places for every token in the queues of its best experts, from (batch, seq, experts).

    First choices are served before second ones, earlier tokens before later ones. `balance` is 1
    when every expert gets the same share, and its gradient pulls towards that; it is a mean over
    rows, so a batch may be cut into microbatches.
    """
    batch, seq, experts = scores.shape
    odds = jax.nn.softmax(scores, axis=-1)
    # A sort is split with the batch; for `top_k` the compiler may gather the whole of it.
    picks = jnp.argsort(jax.lax.stop_gradient(-scores), axis=-1)[..., :chosen]
    is_pick = jax.nn.one_hot(picks, experts, dtype=jnp.int32)
    shares = jnp.sum(odds[:, :, None] * is_pick, axis=-1)
    shares /= shares.sum(axis=-1, keepdims=True)

    in_line = is_pick.swapaxes(1, 2).reshape(batch, chosen * seq, experts)
    place = jnp.sum((jnp.cumsum(in_line, axis=1) - 1) * in_line, axis=-1)
    place = place.reshape(batch, chosen, seq).swapaxes(1, 2)
    fits = place < length
    slots = jnp.where(fits, picks * length + place, experts * length)

    taken = in_line.mean(axis=1)
    balance = experts * jnp.mean(jnp.sum(taken * odds.mean(axis=1), axis=-1))
    dropped = 1.0 - jnp.mean(fits, dtype=jnp.float32)
    return Routes(slots, shares), {"balance": balance, "dropped": dropped}


def _queue(x: jax.Array, slots: jax.Array, places: int) -> jax.Array:
    """Tokens in their places, (batch, places, embed); empty places hold zeros."""
    seq, chosen = slots.shape[1:]
    tokens = jnp.repeat(jnp.arange(seq), chosen)

    def one(row: jax.Array, slots: jax.Array) -> jax.Array:
        source = jnp.full(places, seq).at[slots.reshape(-1)].set(tokens, mode="drop")
        return row.at[source].get(mode="fill", fill_value=0)

    return jax.vmap(one)(x, slots)


def _ask(params: Any, queues: jax.Array, experts: int) -> jax.Array:
    """Every expert works on its own queue."""
    batch, places, embed = queues.shape
    queues = constrain(queues, "batch", None, None)
    queues = queues.reshape(batch, experts, places // experts, embed)
    queues = constrain(queues, "rows", "experts", None, None)
    gate = jnp.einsum("becd,edf->becf", queues, params["gate"])
    up = jnp.einsum("becd,edf->becf", queues, params["up"])
    wide = constrain(jax.nn.silu(gate) * up, "rows", "experts", None, "mlp")
    answers = jnp.einsum("becf,efd->becd", wide, params["down"])
    answers = constrain(answers, "rows", "experts", None, None)
    answers = constrain(answers, "batch", None, None, None)
    return answers.reshape(batch, places, embed)


def _collect(answers: jax.Array, routes: Routes) -> jax.Array:
    """The answers to each token, weighed and summed."""

    def one(answers: jax.Array, slots: jax.Array) -> jax.Array:
        return answers.at[slots].get(mode="fill", fill_value=0)

    found = jax.vmap(one)(answers, routes.slots)
    return jnp.einsum("bskd,bsk->bsd", found, routes.shares.astype(found.dtype))
