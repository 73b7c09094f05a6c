"""A dense decoder in the manner of Llama 3."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.errors import ModelError
from meshwright.models import layouts, synthetic
from meshwright.models.attention import attention_weights, self_attention
from meshwright.models.base import Model
from meshwright.models.config import Config
from meshwright.models.feedforward import swiglu, swiglu_weights
from meshwright.models.layouts import constrain
from meshwright.models.losses import cross_entropy
from meshwright.models.norms import rms_norm
from meshwright.models.stages import cast, run_stages
from meshwright.models.weights import constant, in_stages, matrix
from meshwright.partitioning.specs import AnyMesh


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
        words = synthetic.words(size, self._length(size, seq) + 1, self.config.vocab, seed)
        return {"inputs": words[:, :-1], "targets": words[:, 1:]}

    def flops(self, size: int, seq: int | None = None) -> int:
        config = self.config
        length = self._length(size, seq)
        looked_up = config.vocab * config.embed
        products = 2 * (self.active_parameters - looked_up)
        attention = 4 * config.layers * length * config.heads * config.head
        return 3 * size * length * (products + attention)

    def batch_spec(self, mesh: AnyMesh) -> PartitionSpec:
        return layouts.batch_spec(mesh, "batch", "seq")

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
