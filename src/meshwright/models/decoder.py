"""Decoders that predict the next token, like Llama 3; mixtures of experts are in `mixture`.

Layers are stacked and scanned over, one stack per pipeline stage.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.errors import ModelError, near, setting_text, short
from meshwright.models.attention import Blocks, check_attention
from meshwright.models.base import Model
from meshwright.models.layers import (
    ACTIVATIONS,
    PRODUCTS,
    Einsum,
    attention_weights,
    cross_entropy,
    feed_forward,
    feed_forward_weights,
    quantized_einsum,
    rms_norm,
    self_attention,
)
from meshwright.models.remat import named
from meshwright.models.training import Config, cast, run_stages, synthetic_tokens
from meshwright.models.weights import batch_spec, constant, constrain, matrix, stack_by_stage
from meshwright.trees.specs import AnyMesh


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DecoderConfig(Config):
    """Sizes of a decoder. `seq` is the longest sequence, and the length of a batch's rows.

    `embed` is the width of the residual stream, `head` that of one attention head, `mlp` that of
    the feed-forward layer. `theta` is the base of the rotary embedding.

    Attention is computed as `attention` says, one of `attention.ATTENTION`, on TPUs in `blocks`.
    The feed-forward layer is `gated` or plain, with `activation` "silu", "gelu" or "relu";
    `parallel` runs it beside attention, on the same norm. `tied` takes the table of words for the
    logits, too; `lookup` is "gather", or "one_hot" for a product with the table. `tiles` cuts the
    sequence for the logits and the loss, so that only a part of the logits is in memory.
    `products` with weights may be in "int8" or "fp8", see `quantized.PRODUCTS`. `split_embed`
    splits the residual stream over tensor axes between layers.
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
    attention: str = "auto"
    blocks: Blocks | None = None
    gated: bool = True
    activation: str = "silu"
    parallel: bool = False
    tied: bool = False
    lookup: str = "gather"
    tiles: int = 1
    products: str = "compute"
    split_embed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_divides("layers", "stages", "every stage has the same number of layers")
        self.check_divides("heads", "kv_heads", "heads of queries share those of keys and values")
        if self.head % 2:
            raise ModelError(
                f"head={self.head} is odd: positions turn pairs of dims. Use an even one.",
                option="head",
            )
        check_attention(self.attention)
        if self.blocks is not None and not isinstance(self.blocks, Blocks):
            raise ModelError(
                f"blocks: {short(self.blocks)} is not a Blocks. Import it from "
                "meshwright.models.attention: Blocks(q=1024).",
                option="blocks",
            )
        known = {"activation": ACTIVATIONS, "lookup": ("gather", "one_hot"), "products": PRODUCTS}
        for option, choices in known.items():
            value = getattr(self, option)
            if value not in choices:
                raise ModelError(
                    f"{option}: {short(value)} is not one of {', '.join(choices)}."
                    f"{near(value, choices)}",
                    option=option,
                )
        self.check_divides("seq", "tiles", "every tile has the same number of positions")
        if self.tied and self.stages > 1:
            raise ModelError(
                f"tied=True with stages={self.stages}: the first and the last stage would share "
                "the table. Use one stage, or tied=False.",
                option="tied",
            )


@dataclasses.dataclass(frozen=True, repr=False)
class Decoder(Model):
    """A decoder of `layers` blocks, each of causal attention and a feed-forward layer."""

    config: DecoderConfig

    def weights(self) -> Any:
        config = self.config
        # Rows are looked up, not summed over: a small spread, whatever the sizes.
        table = dataclasses.replace(matrix(1, vocab=config.vocab, embed=config.embed), std=0.02)
        head = {"norm": constant(1.0, norm=config.embed)}
        if not config.tied:
            head["kernel"] = matrix(config.embed, embed=config.embed, vocab=config.vocab)
        return {
            "embed": {"table": table},
            "stages": stack_by_stage(self._layer_weights(), config.layers, config.stages),
            "head": head,
        }

    def _layer_weights(self) -> dict[str, Any]:
        config = self.config
        norm = {"norm": constant(1.0, norm=config.embed)}
        sizes = (config.embed, config.heads, config.kv_heads, config.head)
        mlp = self._feed_forward_weights()
        return {
            "attention": norm | attention_weights(*sizes),
            "mlp": mlp if config.parallel else norm | mlp,
        }

    def _feed_forward_weights(self) -> dict[str, Any]:
        config = self.config
        return feed_forward_weights(config.embed, config.mlp, gated=config.gated)

    def _feed_forward(self, params: Any, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Apply the second half of a layer; also return its metrics."""
        activation = self.config.activation
        return feed_forward(params, x, activation=activation, einsum=self._einsum), {}

    @property
    def _einsum(self) -> Einsum:
        """The products of layers with their weights."""
        if self.config.products == "compute":
            return jnp.einsum
        return functools.partial(_quantized, products=self.config.products)

    def _stream(self, x: jax.Array) -> jax.Array:
        """Constrain the residual stream."""
        return constrain(x, "batch", "seq", "split_embed" if self.config.split_embed else "embed")

    def _block(self, x: jax.Array, layer: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Apply one layer; also return its metrics."""
        config = self.config
        x, layer = named(x, "decoder_layer_input"), cast(layer, config.compute)
        attention, mlp = layer["attention"], layer["mlp"]
        normed = rms_norm(x, attention["norm"], config.eps)
        mixed = self_attention(
            attention,
            normed,
            theta=config.theta,
            causal=True,
            attention=config.attention,
            blocks=config.blocks,
            einsum=self._einsum,
        )
        x = self._stream(x + mixed)
        normed = normed if config.parallel else rms_norm(x, mlp["norm"], config.eps)
        update, metrics = self._feed_forward(mlp, normed)
        return self._stream(x + update), metrics

    def _hidden(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Run the layers; return what they leave, and their metrics, stacked."""
        config = self.config
        self._check_seq(tokens.shape[1])
        # Gather the table over `embed` before the lookup: only `vocab` stays sharded, and a token's
        # row arrives whole on the devices of its batch.
        table = constrain(params["embed"]["table"].astype(config.compute), "vocab", None)
        if config.lookup == "one_hot":
            ones = jax.nn.one_hot(tokens, config.vocab, dtype=table.dtype)
            x = constrain(ones, "batch", "seq", "vocab") @ table
        else:
            x = table[tokens]
        return run_stages(self._block, params["stages"], self._stream(x), config)

    def _head(self, params: Any, x: jax.Array) -> jax.Array:
        """Return the logits of what the layers left."""
        head = cast(params["head"], self.config.compute)
        x = rms_norm(x, head["norm"], self.config.eps)
        if self.config.tied:
            kernel = constrain(params["embed"]["table"].astype(x.dtype), "vocab", None).T
        else:
            kernel = head["kernel"]
        return constrain(x @ kernel, "batch", "seq", "vocab")

    def logits(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the logits, (batch, seq, vocab), and the metrics of the layers, stacked."""
        x, metrics = self._hidden(params, tokens)
        return self._head(params, x), metrics

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        tiles = self.config.tiles
        if tiles == 1:
            logits, _ = self.logits(params, batch["inputs"])
            return cross_entropy(logits, batch["targets"]), {}
        x, _ = self._hidden(params, batch["inputs"])
        self._check_tiles(x.shape[1])

        # The logits of a tile are computed again in the backward pass, not kept.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def add_tile(total: jax.Array, tile: Any) -> tuple[jax.Array, None]:
            part, targets = tile
            return total + cross_entropy(self._head(params, part), targets), None

        parts = (_tiles(x, tiles), _tiles(batch["targets"], tiles))
        total, _ = jax.lax.scan(add_tile, jnp.zeros((), jnp.float32), parts)
        return total / tiles, {}

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
        looked_up = 0 if config.tied else config.vocab * config.embed
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
                f"Use at most {self.config.seq}, or {setting_text(self.name, 'seq', length)}.",
                option="seq",
            )

    def _check_tiles(self, length: int) -> None:
        if length % self.config.tiles:
            raise ModelError(
                f"{self.name}: tiles={self.config.tiles} does not divide a sequence of {length}. "
                "Use a number of tiles that does.",
                option="tiles",
            )


def _quantized(formula: str, x: jax.Array, weight: jax.Array, *, products: str) -> jax.Array:
    product: jax.Array = quantized_einsum(formula, x, weight, products)
    return product


def _tiles(x: jax.Array, tiles: int) -> jax.Array:
    """Cut (batch, seq, ...) into (tiles, batch, seq / tiles, ...)."""
    batch, length = x.shape[:2]
    return x.reshape(batch, tiles, length // tiles, *x.shape[2:]).swapaxes(0, 1)
