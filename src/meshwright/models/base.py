"""What every model offers; the families fill in the rest."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.errors import ModelError, short
from meshwright.models.training import Config, make_optimizer, make_state, train_step
from meshwright.models.weights import count, draw, logical_table, rules
from meshwright.trees.specs import AnyMesh


@dataclasses.dataclass(frozen=True)
class Model(abc.ABC):
    """A model to train, shard, cut into stages or only to look at: no array until you ask.

    Parameters are a tree of dicts; the layers of a stage are stacked, for a scan to run over.

    >>> import jax, meshwright as mw
    >>> tiny = mw.models.model("tiny")
    >>> state = tiny.state(jax.random.key(0))
    >>> state, metrics = jax.jit(tiny.train_step, donate_argnums=0)(state, tiny.example(8))
    >>> sorted(metrics), int(state["step"])
    (['grad_norm', 'loss'], 1)
    """

    name: str
    config: Config

    @abc.abstractmethod
    def weights(self) -> Any:
        """The parameters as a tree of `Weight`s: shapes, logical names, how they begin."""

    @abc.abstractmethod
    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The mean loss over a batch, and numbers to watch."""

    @abc.abstractmethod
    def batch(self, size: int, seq: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a batch."""

    @abc.abstractmethod
    def example(self, size: int, seq: int | None = None, *, seed: int = 0) -> dict[str, np.ndarray]:
        """A batch of made-up data with something in it to learn, the same in every batch."""

    @abc.abstractmethod
    def flops(self, size: int, seq: int | None = None) -> int:
        """The useful floating-point operations of a train step, counted by hand.

        Three times those of the forward pass: what is computed again (`remat`) and what the
        optimizer does are not counted.
        """

    @abc.abstractmethod
    def batch_spec(self, mesh: AnyMesh) -> PartitionSpec:
        """How every array of a batch is split over this mesh."""

    @functools.cached_property
    def _weights(self) -> Any:
        return self.weights()

    @property
    def parameters(self) -> int:
        """How many parameters there are."""
        return count(self._weights)

    @property
    def active_parameters(self) -> int:
        """How many of them work on one token; fewer where experts are chosen."""
        return self.parameters

    def init(self, key: jax.Array) -> Any:
        """Fresh parameters."""
        return draw(self._weights, key, self.config.params)

    def optimizer(self) -> Any:
        """AdamW with clipped gradients and a warmup, as an Optax transformation."""
        return make_optimizer(
            self.config, jax.tree.map(lambda weight: weight.decays, self._weights)
        )

    def state(self, key: jax.Array) -> dict[str, Any]:
        """`{"params", "opt", "step"}`: what a step takes and gives back."""
        return make_state(self.init(key), self.optimizer())

    def train_step(self, state: Any, batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Learn from one batch: the next state, and numbers to watch. Pure: `jit` it."""
        return train_step(self.loss, self.optimizer(), state, batch)

    def shapes(self) -> dict[str, Any]:
        """The shapes of the state; nothing is computed."""
        shapes: dict[str, Any] = jax.eval_shape(self.state, jax.random.key(0))
        return shapes

    def logical(self) -> Any:
        """The parameters' tree with a logical name per dim in each place."""
        return jax.tree.map(lambda weight: weight.names, self._weights)

    def logical_rules(self, mesh: AnyMesh) -> dict[str, Any]:
        """The mesh axes that each logical name gets: `partition`'s `logical=`."""
        return logical_table(self._weights, mesh)

    def rules(self, mesh: AnyMesh) -> list[tuple[str, PartitionSpec]]:
        """`partition`'s `rules=`, good for the parameters and for the whole state."""
        return rules(self._weights, mesh)

    def _check_size(self, what: str, size: object) -> None:
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ModelError(f"{self.name}: {what} {short(size)} is not a whole number above 0.")
