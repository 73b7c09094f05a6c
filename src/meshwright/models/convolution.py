"""A convolutional net in the manner of ResNet-50, with group norm."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import ModelError
from meshwright.models.images import ImageConfig, ImageModel, classify
from meshwright.models.layouts import constrain
from meshwright.models.norms import group_norm
from meshwright.models.stages import REMAT, cast
from meshwright.models.weights import Weight, constant, matrix, stacked
from meshwright.mpmd import stage

# A block's channels go in and out this many times as wide as they are inside.
_EXPANSION = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvConfig(ImageConfig):
    """Sizes of a convolutional net.

    Level `n` has `depths[n]` blocks of `width * 2**n` channels, and half the pixels a side of the
    level before. `stem` is the side of the first kernel; with `pool` it takes every second pixel,
    and a maximum every second of those. `groups` share a norm. A stage is one level or several.
    """

    depths: tuple[int, ...]
    width: int
    groups: int
    stem: int
    pool: int = dataclasses.field(default=1, metadata={"least": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.depths) % self.stages:
            raise ModelError(
                f"depths={self.depths}: {len(self.depths)} levels are not divisible by "
                f"stages={self.stages}: a stage is one level or several."
            )
        self.check_parts("width", "groups", "every group has the same number of channels")


@dataclasses.dataclass(frozen=True)
class Level:
    """Blocks at one resolution: pixels a side, channels in and inside, the step of the first."""

    depth: int
    side: int
    inputs: int
    width: int
    stride: int

    @property
    def outputs(self) -> int:
        return self.width * _EXPANSION


@dataclasses.dataclass(frozen=True)
class ConvNet(ImageModel):
    """Levels of residual blocks, each level smaller and deeper than the last."""

    config: ConvConfig

    def levels(self) -> list[Level]:
        """The levels' sizes, in order."""
        config = self.config
        side = -(-config.image // 4) if config.pool else config.image
        inputs, found = config.width, []
        for number, depth in enumerate(config.depths):
            stride = 2 if number else 1
            side = -(-side // stride)
            found.append(Level(depth, side, inputs, config.width << number, stride))
            inputs = found[-1].outputs
        return found

    def weights(self) -> Any:
        config, levels = self.config, self.levels()
        last = levels[-1].outputs
        return {
            "stem": {
                "kernel": _kernel(config.stem, 3, config.width),
                "norm": _norm_weights(config.width),
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
        each = len(config.depths) // config.stages
        for number, (level, sizes) in enumerate(zip(params["levels"], self.levels(), strict=True)):
            if number and number % each == 0:
                x = stage(x)
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
        def first(x: jax.Array, block: Any) -> tuple[jax.Array, None]:
            return self._block(block, x, stride), None

        def rest(x: jax.Array, block: Any) -> tuple[jax.Array, None]:
            return self._block(block, x, 1), None

        remat = REMAT[self.config.remat]
        x, _ = remat(first)(x, params["first"])
        if "rest" in params:
            x, _ = jax.lax.scan(remat(rest), x, params["rest"])
        return x

    def _block(self, params: Any, x: jax.Array, stride: int) -> jax.Array:
        """Into fewer channels, over the pixels, out again; beside it a shortcut."""
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
    """Multiplications in one pass through a level."""
    before, after = (level.side * level.stride) ** 2, level.side**2
    inside = 9 * level.width**2 + level.width * level.outputs
    first = before * level.inputs * level.width + after * (inside + level.inputs * level.outputs)
    return first + (level.depth - 1) * after * (inside + level.outputs * level.width)


def _level_weights(level: Level) -> dict[str, Any]:
    first = _block_weights(level.inputs, level)
    first["shortcut"] = _kernel(1, level.inputs, level.outputs)
    first["norms"]["shortcut"] = _norm_weights(level.outputs)
    if level.depth == 1:
        return {"first": first}
    rest = stacked(_block_weights(level.outputs, level), range(1, level.depth))
    return {"first": first, "rest": rest}


def _block_weights(inputs: int, level: Level) -> dict[str, Any]:
    width, outputs = level.width, level.outputs
    return {
        "reduce": _kernel(1, inputs, width),
        "spread": _kernel(3, width, width),
        "expand": _kernel(1, width, outputs),
        "norms": {
            "reduce": _norm_weights(width),
            "spread": _norm_weights(width),
            "expand": _norm_weights(outputs),
        },
    }


def _kernel(side: int, inputs: int, outputs: int) -> Weight:
    sizes = {"rows": side, "columns": side, f"in:{inputs}": inputs, f"out:{outputs}": outputs}
    weight = matrix(side * side * inputs, **sizes)
    return dataclasses.replace(weight, std=weight.std * 2**0.5)  # ReLU halves the spread


def _norm_weights(channels: int) -> dict[str, Weight]:
    return {"scale": constant(1.0, norm=channels), "shift": constant(0.0, norm=channels)}


def _convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
