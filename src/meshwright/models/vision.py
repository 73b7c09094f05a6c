"""Models that classify images: a vision transformer (ViT), and a convolutional net (ResNet)."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.errors import ModelError, setting_text
from meshwright.models.base import Model
from meshwright.models.layers import (
    attention_weights,
    cross_entropy,
    gelu,
    gelu_weights,
    group_norm,
    layer_norm,
    self_attention,
)
from meshwright.models.remat import named
from meshwright.models.training import Config, cast, run_stages, synthetic_images
from meshwright.models.weights import (
    Weight,
    batch_spec,
    constant,
    constrain,
    matrix,
    stack_by_stage,
    stack_layers,
)
from meshwright.pipelines.trace_marks import stage_end
from meshwright.trees.specs import AnyMesh


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ImageConfig(Config):
    """Sizes of the data: RGB images of `image` pixels a side, and the number of `classes`."""

    image: int
    classes: int


@dataclasses.dataclass(frozen=True, repr=False)
class ImageModel(Model):
    """A model that classifies images: what its families share, which is the data and the loss."""

    config: ImageConfig

    @abc.abstractmethod
    def logits(self, params: Any, images: jax.Array) -> jax.Array:
        """Return the logits of the classes, (batch, classes)."""

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = constrain(self.logits(params, batch["images"]), "batch", "classes")
        correct = jnp.argmax(logits, axis=-1) == batch["labels"]
        accuracy = jnp.mean(correct, dtype=jnp.float32)
        return cross_entropy(logits, batch["labels"]), {"accuracy": accuracy}

    def batch(self, size: int, seq: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        self._check(size, seq)
        side = self.config.image
        return {
            "images": jax.ShapeDtypeStruct((size, side, side, 3), jnp.float32),  # type: ignore[no-untyped-call]
            "labels": jax.ShapeDtypeStruct((size,), jnp.int32),  # type: ignore[no-untyped-call]
        }

    def example(self, size: int, seq: int | None = None, *, seed: int = 0) -> dict[str, np.ndarray]:
        self._check(size, seq)
        images, labels = synthetic_images(size, self.config.image, self.config.classes, seed)
        return {"images": images, "labels": labels}

    def batch_spec(self, mesh: AnyMesh) -> PartitionSpec:
        return batch_spec(mesh, "batch")

    def _check(self, size: int, seq: int | None) -> None:
        self._check_size("batch", size)
        if seq is not None:
            raise ModelError(
                f"{self.name}: takes images, which have no seq. Drop it, or give another size of "
                f"images: {setting_text(self.name, 'image', self.config.image)}.",
                option="seq",
            )


def classify(params: Any, x: jax.Array) -> jax.Array:
    """Return the logits of the classes, from one vector per image."""
    return jnp.add(jnp.dot(constrain(x, "batch", "embed"), params["kernel"]), params["bias"])


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class VisionConfig(ImageConfig):
    """Sizes of a vision transformer; `patch` is the side of a patch in pixels."""

    layers: int
    embed: int
    heads: int
    mlp: int
    patch: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_divides("layers", "stages", "every stage has the same number of layers")
        self.check_divides("embed", "heads", "every head has the same number of dims")
        self.check_divides("image", "patch", "patches cover the image")

    @property
    def seq(self) -> int:
        """The number of patches."""
        return (self.image // self.patch) ** 2


@dataclasses.dataclass(frozen=True, repr=False)
class VisionTransformer(ImageModel):
    """A transformer over the patches of an image; the mean of its outputs is classified.

    Without a class token: a mean over a sharded sequence is one reduction, and the sequence keeps
    a length that axes divide.
    """

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
            "stages": stack_by_stage(layer, config.layers, config.stages),
            "head": _norm_weights(embed)
            | {
                "kernel": matrix(embed, embed=embed, classes=config.classes),
                "bias": constant(0.0, classes=config.classes),
            },
        }

    def logits(self, params: Any, images: jax.Array) -> jax.Array:
        config = self.config
        patches = cast(params["patches"], config.compute)
        x = constrain(to_patches(images.astype(config.compute), config.patch), "batch", "seq", None)
        # The axes that shard the kernel's `embed` dim also shard the batch: gather it, it is small.
        x = constrain(x @ constrain(patches["kernel"], None, None), "batch", "seq", "embed")
        x += patches["bias"] + constrain(patches["places"], "seq", None)
        x, _ = run_stages(self._block, params["stages"], x, config)
        head = cast(params["head"], config.compute)
        return classify(head, _norm(head, x).mean(axis=1))

    def _block(self, x: jax.Array, layer: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        x, layer = named(x, "decoder_layer_input"), cast(layer, self.config.compute)
        attention, mlp = layer["attention"], layer["mlp"]
        x = constrain(x + self_attention(attention, _norm(attention, x)), "batch", "seq", "embed")
        return constrain(x + gelu(mlp, _norm(mlp, x)), "batch", "seq", "embed"), {}

    def flops(self, size: int, seq: int | None = None) -> int:
        self._check(size, seq)
        config = self.config
        # Per patch, but for the table of positions, which is added, and the head, once per image.
        classes = config.embed * config.classes
        products = 2 * (self.parameters - config.seq * config.embed - classes)
        attention = 4 * config.layers * config.seq * config.embed
        return 3 * size * (config.seq * (products + attention) + 2 * classes)


def to_patches(images: jax.Array, side: int) -> jax.Array:
    """Cut images into sequences of patches, (batch, patches, pixels), row after row.

    >>> to_patches(jax.numpy.zeros((2, 8, 8, 3)), 4).shape
    (2, 4, 48)
    """
    batch, height, width, colours = images.shape
    grid = images.reshape(batch, height // side, side, width // side, side, colours)
    return grid.swapaxes(2, 3).reshape(batch, -1, side * side * colours)


def _norm_weights(embed: int) -> dict[str, Weight]:
    return {"scale": constant(1.0, norm=embed), "shift": constant(0.0, norm=embed)}


def _norm(params: Any, x: jax.Array) -> jax.Array:
    return layer_norm(x, params["scale"], params["shift"])


# A convolutional net like ResNet-50, but with group norm: batch norm's statistics would tie the
# microbatches of a step together.

_EXPANSION = 4  # channels into and out of a block, relative to those inside


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ConvConfig(ImageConfig):
    """Sizes of a convolutional net.

    Level `n` has `depths[n]` blocks of `width * 2**n` channels, and half the pixels a side of the
    level before. `stem` is the side of the first kernel; with `pool` its stride is 2, and a max
    pool of stride 2 follows. `groups` are those of the group norms. A pipeline stage is one level
    or several.
    """

    depths: tuple[int, ...]
    width: int
    groups: int
    stem: int
    pool: int = dataclasses.field(default=1, metadata={"least": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remat not in ("none", "full", "dots"):
            raise ModelError(
                f"remat={self.remat!r} keeps values of transformer layers, which convolutions do "
                "not have. Use none, full or dots.",
                option="remat",
            )
        if len(self.depths) % self.stages:
            raise ModelError(
                f"depths={self.depths}: {len(self.depths)} levels are not divisible by "
                f"stages={self.stages}: a stage is one level or several.",
                option="stages",
            )
        self.check_divides("width", "groups", "every group has the same number of channels")


@dataclasses.dataclass(frozen=True)
class Level:
    """Sizes of the blocks at one resolution; `side` is in pixels, `stride` is the first one's."""

    depth: int
    side: int
    inputs: int
    width: int
    stride: int

    @property
    def outputs(self) -> int:
        """The channels that leave every block."""
        return self.width * _EXPANSION


@dataclasses.dataclass(frozen=True, repr=False)
class ConvNet(ImageModel):
    """Levels of residual blocks, each with fewer pixels and more channels than the one before."""

    config: ConvConfig

    def levels(self) -> list[Level]:
        """Return the sizes of the levels, in order."""
        config = self.config
        side = -(-config.image // 4) if config.pool else config.image
        inputs, levels = config.width, []
        for number, depth in enumerate(config.depths):
            stride = 2 if number else 1
            side = -(-side // stride)
            levels.append(Level(depth, side, inputs, config.width << number, stride))
            inputs = levels[-1].outputs
        return levels

    def weights(self) -> Any:
        config, levels = self.config, self.levels()
        last = levels[-1].outputs
        return {
            "stem": {
                "kernel": _kernel(config.stem, 3, config.width),
                "norm": _group_norm_weights(config.width),
            },
            "levels": [_level_weights(level) for level in levels],
            "head": {
                "kernel": matrix(last, **{f"in:{last}": last, "classes": config.classes}),
                "bias": constant(0.0, classes=config.classes),
            },
        }

    def logits(self, params: Any, images: jax.Array) -> jax.Array:
        config = self.config
        x = self._stem(cast(params["stem"], config.compute), images.astype(config.compute))
        per_stage = len(config.depths) // config.stages
        for number, (level, sizes) in enumerate(zip(params["levels"], self.levels(), strict=True)):
            if number and number % per_stage == 0:
                x = stage_end(x)
            x = self._level(level, x, sizes.stride)
        return classify(cast(params["head"], config.compute), x.mean(axis=(1, 2)))

    def _stem(self, params: Any, x: jax.Array) -> jax.Array:
        stride = 2 if self.config.pool else 1
        x = jax.nn.relu(self._norm(params["norm"], _convolve(x, params["kernel"], stride)))
        if self.config.pool:
            window, step = (1, 3, 3, 1), (1, 2, 2, 1)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, step, "SAME")
        return constrain(x, "batch", None, None, None)

    def _level(self, params: Any, x: jax.Array, stride: int) -> jax.Array:
        # The first block changes shapes; the others are alike and scanned over.
        def first(x: jax.Array, block: Any) -> tuple[jax.Array, None]:
            return self._block(block, x, stride), None

        def rest(x: jax.Array, block: Any) -> tuple[jax.Array, None]:
            return self._block(block, x, 1), None

        x, _ = self.config.rematerialized(first)(x, params["first"])
        if "rest" in params:
            x, _ = jax.lax.scan(self.config.rematerialized(rest), x, params["rest"])
        return x

    def _block(self, params: Any, x: jax.Array, stride: int) -> jax.Array:
        """Apply a bottleneck block: 1x1 to fewer channels, 3x3, 1x1 back, and add the shortcut."""
        params = cast(params, self.config.compute)
        norms = params["norms"]
        y = jax.nn.relu(self._norm(norms["reduce"], _convolve(x, params["reduce"])))
        y = jax.nn.relu(self._norm(norms["spread"], _convolve(y, params["spread"], stride)))
        y = self._norm(norms["expand"], _convolve(y, params["expand"]))
        if "shortcut" in params:
            x = self._norm(norms["shortcut"], _convolve(x, params["shortcut"], stride))
        return constrain(jax.nn.relu(x + y), "batch", None, None, None)

    def _norm(self, params: Any, x: jax.Array) -> jax.Array:
        return group_norm(x, params["scale"], params["shift"], self.config.groups)

    def flops(self, size: int, seq: int | None = None) -> int:
        self._check(size, seq)
        config, levels = self.config, self.levels()
        wide = -(-config.image // 2) if config.pool else config.image
        products = wide**2 * config.stem**2 * 3 * config.width
        products += levels[-1].outputs * config.classes
        products += sum(map(_level_products, levels))
        return 3 * 2 * size * products


def _level_products(level: Level) -> int:
    """Count the multiplications of one image in a forward pass through a level."""
    # The first block's 1x1 convolution still sees the pixels of the level before.
    before, after = (level.side * level.stride) ** 2, level.side**2
    inside = 9 * level.width**2 + level.width * level.outputs
    first = before * level.inputs * level.width + after * (inside + level.inputs * level.outputs)
    return first + (level.depth - 1) * after * (inside + level.outputs * level.width)


def _level_weights(level: Level) -> dict[str, Any]:
    first = _block_weights(level.inputs, level)
    first["shortcut"] = _kernel(1, level.inputs, level.outputs)
    first["norms"]["shortcut"] = _group_norm_weights(level.outputs)
    if level.depth == 1:
        return {"first": first}
    rest = stack_layers(_block_weights(level.outputs, level), range(1, level.depth))
    return {"first": first, "rest": rest}


def _block_weights(inputs: int, level: Level) -> dict[str, Any]:
    width, outputs = level.width, level.outputs
    return {
        "reduce": _kernel(1, inputs, width),
        "spread": _kernel(3, width, width),
        "expand": _kernel(1, width, outputs),
        "norms": {
            "reduce": _group_norm_weights(width),
            "spread": _group_norm_weights(width),
            "expand": _group_norm_weights(outputs),
        },
    }


def _kernel(side: int, inputs: int, outputs: int) -> Weight:
    sizes = {"rows": side, "columns": side, f"in:{inputs}": inputs, f"out:{outputs}": outputs}
    weight = matrix(side * side * inputs, **sizes)
    return dataclasses.replace(weight, std=weight.std * 2**0.5)  # He: ReLU halves the variance


def _group_norm_weights(channels: int) -> dict[str, Weight]:
    return {"scale": constant(1.0, norm=channels), "shift": constant(0.0, norm=channels)}


def _convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
