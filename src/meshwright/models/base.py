"""`Model`: what every model offers; the families fill in weights, loss and data."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshwright._checks import check_integer
from meshwright._html import fold, tag
from meshwright._show import Sheet, Table, short_repr
from meshwright.errors import ModelError
from meshwright.models.training import Config, make_optimizer, make_state, train_step
from meshwright.models.weights import count_parameters, draw, logical_rules, sharding_rules
from meshwright.trees.specs import AnyMesh


@dataclasses.dataclass(frozen=True, repr=False)
class Model(abc.ABC):
    """A model to train, to shard, to cut into stages or only to look at.

    Holds sizes and no arrays: `init`, `state` and `example` make them, everything else computes
    with shapes. Parameters are a tree of dicts; the layers of a stage are stacked, for a scan to
    run over.

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
        """Describe the parameters as a tree of `Weight`s: shapes, logical names, initial values."""

    @abc.abstractmethod
    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the mean loss over a batch, and metrics."""

    @abc.abstractmethod
    def batch(self, size: int, seq: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a batch: `size` rows, of `seq` tokens each or of one image."""

    @abc.abstractmethod
    def example(self, size: int, seq: int | None = None, *, seed: int = 0) -> dict[str, np.ndarray]:
        """Make a batch of synthetic data, by a rule to learn that is the same for every seed."""

    @abc.abstractmethod
    def flops(self, size: int, seq: int | None = None) -> int:
        """Count the useful floating-point operations of a train step, by a formula.

        Three times those of the forward pass; what is computed again (`remat`) and what the
        optimizer does are not counted.
        """

    @abc.abstractmethod
    def batch_spec(self, mesh: AnyMesh) -> PartitionSpec:
        """Return the spec of every array of a batch on this mesh."""

    # Cached: sizes, shapes and rules all start from it, and it depends on the config alone.
    @functools.cached_property
    def _weights(self) -> Any:
        return self.weights()

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return count_parameters(self._weights)

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token meets; fewer where experts are chosen."""
        return self.parameters

    def init(self, key: jax.Array) -> Any:
        """Draw initial parameters."""
        return draw(self._weights, key, self.config.params)

    def optimizer(self) -> Any:
        """Return AdamW with clipped gradients and a warmup, as an Optax transformation."""
        return make_optimizer(
            self.config, jax.tree.map(lambda weight: weight.decays, self._weights)
        )

    def state(self, key: jax.Array) -> dict[str, Any]:
        """Make the initial state, `{"params", "opt", "step"}`: what a step takes and returns."""
        return make_state(self.init(key), self.optimizer())

    def train_step(self, state: Any, batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Take one step of training; return the next state and metrics. Pure: `jit` it."""
        parts = self.config.accumulation
        return train_step(self.loss, self.optimizer(), state, batch, parts)

    def shapes(self) -> dict[str, Any]:
        """Return the shapes of the state; nothing is computed."""
        # Optax makes the state of its transformations, so the shapes come from tracing `state`.
        shapes: dict[str, Any] = jax.eval_shape(self.state, jax.random.key(0))
        return shapes

    def logical(self) -> Any:
        """Return the tree of parameters with a tuple of logical names, one per dim, for each."""
        return jax.tree.map(lambda weight: weight.names, self._weights)

    def logical_rules(self, mesh: AnyMesh) -> dict[str, Any]:
        """Return the mesh axes of each logical name, for `partition(..., logical=)`."""
        return logical_rules(self._weights, mesh)

    def rules(self, mesh: AnyMesh) -> list[tuple[str, PartitionSpec]]:
        """Return rules for `partition(..., rules=)`, for the parameters or the whole state."""
        return sharding_rules(self._weights, mesh)

    def __repr__(self) -> str:
        return short_repr(self, f"{self.name}, {self.parameters:,} parameters")

    def _repr_html_(self) -> str:
        active = ""
        if self.active_parameters != self.parameters:
            active = f", {self.active_parameters:,} of them for a token"
        settings = dataclasses.fields(self.config)
        rows = [[each.name, str(getattr(self.config, each.name))] for each in settings]
        table = Table(["setting", "value"], rows, [False, True]).html()
        words = tag("span", f"{len(rows)} settings, for models.model(name, setting=...)")
        return Sheet(
            f"{self.name}: {self.parameters:,} parameters{active}", [fold(words, table)]
        ).html()

    def _check_size(self, what: str, size: object) -> None:
        check_integer(f"{self.name}: {what}", size, error=ModelError)
