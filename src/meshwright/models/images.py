"""What models of images share: their batches, and the loss on classes."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.errors import ModelError
from meshwright.models import layouts, synthetic
from meshwright.models.base import Model
from meshwright.models.config import Config
from meshwright.models.layouts import constrain
from meshwright.models.losses import cross_entropy
from meshwright.partitioning.specs import AnyMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(Config):
    """Square colour images of `image` pixels a side, and the number of `classes`."""

    image: int
    classes: int


@dataclasses.dataclass(frozen=True)
class ImageModel(Model):
    """Images in, a class out."""

    config: ImageConfig

    @abc.abstractmethod
    def logits(self, params: Any, images: jax.Array) -> jax.Array:
        """Scores of every class, (batch, classes)."""

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        scores = constrain(self.logits(params, batch["images"]), "batch", "classes")
        right = jnp.argmax(scores, axis=-1) == batch["labels"]
        accuracy = jnp.mean(right, dtype=jnp.float32)
        return cross_entropy(scores, batch["labels"]), {"accuracy": accuracy}

    def batch(self, size: int, seq: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        self._check(size, seq)
        side = self.config.image
        return {
            "images": jax.ShapeDtypeStruct((size, side, side, 3), jnp.float32),  # type: ignore[no-untyped-call]
            "labels": jax.ShapeDtypeStruct((size,), jnp.int32),  # type: ignore[no-untyped-call]
        }

    def example(self, size: int, seq: int | None = None, *, seed: int = 0) -> dict[str, np.ndarray]:
        self._check(size, seq)
        images, labels = synthetic.images(size, self.config.image, self.config.classes, seed)
        return {"images": images, "labels": labels}

    def batch_spec(self, mesh: AnyMesh) -> PartitionSpec:
        return layouts.batch_spec(mesh, "batch")

    def _check(self, size: int, seq: int | None) -> None:
        self._check_size("batch of", size)
        if seq is not None:
            raise ModelError(
                f"{self.name}: takes images, which have no seq. Drop it, or give another size of "
                f"images: model({self.name!r}, image={self.config.image})."
            )


def classify(params: Any, x: jax.Array) -> jax.Array:
    """Scores of the classes from one vector per image."""
    return jnp.add(jnp.dot(constrain(x, "batch", "embed"), params["kernel"]), params["bias"])
