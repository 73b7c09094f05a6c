"""A vision transformer: an image as a sequence of patches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from meshwright.models.attention import attention_weights, self_attention
from meshwright.models.feedforward import gelu, gelu_weights
from meshwright.models.images import ImageConfig, ImageModel, classify
from meshwright.models.layouts import constrain
from meshwright.models.norms import layer_norm
from meshwright.models.stages import cast, run_stages
from meshwright.models.weights import Weight, constant, in_stages, matrix


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig(ImageConfig):
    """Sizes of a vision transformer; `patch` is the side of a patch in pixels."""

    layers: int
    embed: int
    heads: int
    mlp: int
    patch: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_parts("layers", "stages", "every stage has the same number of layers")
        self.check_parts("embed", "heads", "every head has the same number of dims")
        self.check_parts("image", "patch", "patches cover the image")

    @property
    def seq(self) -> int:
        """How many patches there are."""
        return (self.image // self.patch) ** 2


@dataclasses.dataclass(frozen=True)
class VisionTransformer(ImageModel):
    """Patches, attention among all of them, and the mean of what they became."""

    config: VisionConfig

    def weights(self) -> Any:
        config = self.config
        pixels, embed = 3 * config.patch**2, config.embed
        heads = (embed, config.heads, config.heads, embed // config.heads)
        layer = {
            "attention": _norm_weights(embed) | attention_weights(*heads, biased=True),
            "mlp": _norm_weights(embed) | gelu_weights(embed, config.mlp),
        }
        places = dataclasses.replace(matrix(1, places=config.seq, embed=embed), std=0.02)
        return {
            "patches": {
                "kernel": matrix(pixels, pixels=pixels, embed=embed),
                "bias": constant(0.0, norm=embed),
                "places": places,
            },
            "stages": in_stages(layer, config.layers, config.stages),
            "head": _norm_weights(embed)
            | {
                "kernel": matrix(embed, embed=embed, classes=config.classes),
                "bias": constant(0.0, classes=config.classes),
            },
        }

    def logits(self, params: Any, images: jax.Array) -> jax.Array:
        config = self.config
        patches = cast(params["patches"], config.compute)
        x = constrain(cut(images.astype(config.compute), config.patch), "batch", "seq", None)
        x = constrain(x @ constrain(patches["kernel"], None, None), "batch", "seq", "embed")
        x += patches["bias"] + constrain(patches["places"], "seq", None)
        x, _ = run_stages(self._block, params["stages"], x, remat=config.remat)
        head = cast(params["head"], config.compute)
        return classify(head, _norm(head, x).mean(axis=1))

    def _block(self, x: jax.Array, layer: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        layer = cast(layer, self.config.compute)
        attention, mlp = layer["attention"], layer["mlp"]
        x = constrain(x + self_attention(attention, _norm(attention, x)), "batch", "seq", "embed")
        return constrain(x + gelu(mlp, _norm(mlp, x)), "batch", "seq", "embed"), {}

    def flops(self, size: int, seq: int | None = None) -> int:
        self._check(size, seq)
        config = self.config
        classes = config.embed * config.classes
        products = 2 * (self.parameters - config.seq * config.embed - classes)
        attention = 4 * config.layers * config.seq * config.embed
        return 3 * size * (config.seq * (products + attention) + 2 * classes)


def cut(images: jax.Array, side: int) -> jax.Array:
    """Images as sequences of patches, (batch, patches, pixels), row after row.

    >>> cut(jax.numpy.zeros((2, 8, 8, 3)), 4).shape
    (2, 4, 48)
    """
    batch, height, width, colours = images.shape
    grid = images.reshape(batch, height // side, side, width // side, side, colours)
    return grid.swapaxes(2, 3).reshape(batch, -1, side * side * colours)


def _norm_weights(embed: int) -> dict[str, Weight]:
    return {"scale": constant(1.0, norm=embed), "shift": constant(0.0, norm=embed)}


def _norm(params: Any, x: jax.Array) -> jax.Array:
    return layer_norm(x, params["scale"], params["shift"])
