"""A decoder whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from meshwright.errors import ModelError
from meshwright.models.decoder import Decoder, DecoderConfig
from meshwright.models.experts import expert_weights, mixture
from meshwright.models.losses import cross_entropy


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
