"""Parameters before they exist: shapes, a logical name per dim, how they begin."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array of parameters to be: normal numbers of this mean and spread.

    `layers` are the numbers of the layers that its first dim counts, if it is a stack of them.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    mean: float = 0.0
    std: float = 0.0
    layers: range | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay pulls at it: at matrices, not at biases and the scales of norms."""
        return len(self.shape) - (self.layers is not None) > 1


def matrix(inputs: int, **dims: int) -> Weight:
    """A weight that sums over `inputs` numbers and keeps their spread.

    >>> matrix(64, embed=64, mlp=256)
    Weight(shape=(64, 256), names=('embed', 'mlp'), mean=0.0, std=0.125, layers=None)
    """
    return Weight(tuple(dims.values()), tuple(dims), std=inputs**-0.5)


def constant(value: float, **dims: int) -> Weight:
    """A bias or the scale of a norm."""
    return Weight(tuple(dims.values()), tuple(dims), mean=value)


def stacked(layer: Any, layers: range) -> Any:
    """The weights of one layer as a stack of several, for a scan to run over."""

    def stack(weight: Weight) -> Weight:
        shape, names = (len(layers), *weight.shape), ("layers", *weight.names)
        return dataclasses.replace(weight, shape=shape, names=names, layers=layers)

    return jax.tree.map(stack, layer)


def in_stages(layer: Any, layers: int, stages: int) -> list[Any]:
    """One stack of layers per stage."""
    each = layers // stages
    return [stacked(layer, range(n * each, (n + 1) * each)) for n in range(stages)]


def draw(weights: Any, key: jax.Array, dtype: str) -> Any:
    """The parameters. A layer begins the same however many stages there are."""
    flat, treedef = jax.tree.flatten_with_path(weights)
    # One number per array and layer, and all keys from them at once: compiled in a moment.
    numbers = [[_number(path, layer) for layer in weight.layers or [0]] for path, weight in flat]
    joined = jnp.array([*itertools.chain.from_iterable(numbers)], jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, joined)
    ends = list(itertools.accumulate(map(len, numbers)))
    arrays = [
        _draw(weight, keys[end - len(own) : end], dtype)
        for (_, weight), own, end in zip(flat, numbers, ends, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)


def _number(path: Any, layer: int) -> int:
    return zlib.crc32(f"{pattern(path)} {layer}".encode())


def _draw(weight: Weight, keys: jax.Array, dtype: str) -> jax.Array:
    if weight.std == 0.0:
        return jnp.full(weight.shape, weight.mean, dtype)
    shape = weight.shape[1:] if weight.layers else weight.shape
    numbers = jax.vmap(lambda key: jax.random.normal(key, shape, dtype))(keys)
    return weight.mean + weight.std * numbers.reshape(weight.shape)


def pattern(path: Any) -> str:
    """A path as rules have it, the same for every stage: `stages/*/mlp/up`."""
    text = jax.tree_util.keystr(path, simple=True, separator="/")
    return re.sub(r"^stages/\d+/", "stages/*/", text)


def count(weights: Any) -> int:
    """How many parameters there are."""
    return sum(weight.size for weight in jax.tree.leaves(weights))
