"""Which shapes would work when directions must not be split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from meshwright.hardware import Topology


def near_shapes(topology: Topology, sizes: Sequence[int], most: int = 3) -> list[tuple[int, ...]]:
    """Up to `most` shapes made of whole directions, the nearest to `sizes` first."""
    dims = [axis.size for axis in topology.axes if axis.size > 1]
    if len(sizes) ** len(dims) > 100_000:
        return []
    shapes = set()
    for owners in itertools.product(range(len(sizes)), repeat=len(dims)):
        shape = [1] * len(sizes)
        for owner, dim in zip(owners, dims, strict=True):
            shape[owner] *= dim
        shapes.add(tuple(shape))

    def distance(shape: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        away = sum(abs(math.log(a / b)) for a, b in zip(shape, sizes, strict=True))
        return (round(away, 9), shape)

    return sorted(shapes, key=distance)[:most]
