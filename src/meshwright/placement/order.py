"""The order along an axis: neighbours on the mesh are neighbours on the wire."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from meshwright.axes import role
from meshwright.hardware import Topology
from meshwright.placement.factors import Parts
from meshwright.placement.model import covers_whole

Order = Literal["auto", "ring", "grid"]


def choose_order(topology: Topology, parts: Parts, name: str, asked: Order) -> str:
    """`ring`, `grid` or `line`: how the pieces of an axis are strung together.

    A ring visits neighbours only. A grid counts the directions like digits: the TPU compiler
    gathers over several whole wrapped directions at once only in that order (v4, v5p, TPU7x;
    see docs/model.md), so it is taken there unless the axis talks to neighbours.
    """
    torus = [p for p in parts if topology.axes[p.dim].kind == "torus"]
    if len(torus) < 2:
        return "line"
    if asked != "auto":
        return asked
    planes = topology.chip.gathers_planes and covers_whole(topology, parts)
    planes = planes and all(topology.axes[p.dim].wraps for p in torus)
    return "grid" if planes and not role(name).neighbours else "ring"


def offsets(topology: Topology, parts: Parts, order: str) -> np.ndarray:
    """For each position along an axis, how far its device lies from the first in grid order."""
    steps = [math.prod(topology.shape[dim + 1 :]) for dim in range(len(topology.shape))]
    torus = [p for p in parts if topology.axes[p.dim].kind == "torus"]
    others = [p for p in parts if topology.axes[p.dim].kind != "torus"]
    outer = [p for p in others if topology.axes[p.dim].kind != "core"]
    inner = [p for p in others if topology.axes[p.dim].kind == "core"]
    digits = ring([p.factor for p in torus]) if order == "ring" else grid([p.factor for p in torus])
    along = digits @ np.array([p.stride * steps[p.dim] for p in torus], np.int64)
    total = np.zeros(1, np.int64)
    for level in (
        *(np.arange(p.factor) * p.stride * steps[p.dim] for p in outer),
        along,
        *(np.arange(p.factor) * p.stride * steps[p.dim] for p in inner),
    ):
        total = (total[:, None] + level[None, :]).ravel()
    return total


def neighbour_hops(topology: Topology, parts: Parts, order: str) -> int:
    """The most links between two neighbours along the axis inside a slice."""
    torus = [p for p in parts if topology.axes[p.dim].kind == "torus"]
    if not torus:
        return 1 if any(topology.axes[p.dim].kind == "switch" for p in parts) else 0
    sizes = [p.factor for p in torus]
    digits = ring(sizes) if order == "ring" else grid(sizes)
    steps = abs(np.diff(digits, axis=0)) * [p.stride for p in torus]
    for column, part in enumerate(torus):
        axis = topology.axes[part.dim]
        if axis.wraps and not axis.twisted:
            steps[:, column] = np.minimum(steps[:, column], axis.size - steps[:, column])
    return int(steps.sum(axis=1).max(initial=0))


def grid(sizes: Sequence[int]) -> np.ndarray:
    """Digits in counting order, `(product, len(sizes))`."""
    if not sizes:
        return np.zeros((1, 0), np.int64)
    return np.stack(np.unravel_index(np.arange(math.prod(sizes)), tuple(sizes)), axis=-1)


def snake(sizes: Sequence[int]) -> np.ndarray:
    """A path through a box that changes one digit by one at every step.

    >>> snake([2, 3]).tolist()
    [[0, 0], [0, 1], [0, 2], [1, 2], [1, 1], [1, 0]]
    """
    path = np.zeros((1, 0), np.int64)
    for size in reversed(sizes):
        there, back = path, path[::-1]
        path = np.concatenate(
            [
                np.column_stack([np.full(len(path), digit), there if digit % 2 == 0 else back])
                for digit in range(size)
            ]
        )
    return path


def ring(sizes: Sequence[int]) -> np.ndarray:
    """A closed tour through a box, one digit by one at every step and back to the start.

    It exists when at least two sides are above one and their product is even; else the
    result is the open path.

    >>> ring([2, 4]).tolist()
    [[0, 0], [0, 1], [0, 2], [0, 3], [1, 3], [1, 2], [1, 1], [1, 0]]
    """
    real = [side for side in sizes if side > 1]
    if len(real) < 2 or math.prod(real) % 2:
        return snake(sizes)
    # One even side against a path through all the others makes a plain rectangle: leave its
    # first column free, run through the rest in rows, and come home along that column.
    even = next(d for d, side in enumerate(sizes) if side % 2 == 0)
    others = snake([side for d, side in enumerate(sizes) if d != even])
    rows, columns = sizes[even], len(others)
    tour = [(0, 0)]
    for row in range(rows):
        across = range(1, columns) if row % 2 == 0 else range(columns - 1, 0, -1)
        tour += [(row, column) for column in across]
    tour += [(row, 0) for row in range(rows - 1, 0, -1)]
    picked = np.array(tour)
    return np.insert(others[picked[:, 1]], even, picked[:, 0], axis=1)
