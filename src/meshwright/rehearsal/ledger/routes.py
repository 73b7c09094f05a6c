"""A permutation on the wires: every message on its route, the busiest link decides."""

from __future__ import annotations

import numpy as np

from meshwright.hardware import Topology
from meshwright.placement.model import LATENCY


def permutation_cost(topology: Topology, coords: np.ndarray, size: int) -> tuple[float, str]:
    """Seconds, and the slowest kind of link used (empty: nobody sends to another).

    `coords`: `(pairs, 2, directions)`, sender and receiver on the machine's grid.
    """
    moving = coords[(coords[:, 0] != coords[:, 1]).any(axis=1)]
    if not len(moving):
        return 0.0, ""
    crossed = (moving[:, 0] != moving[:, 1]).any(axis=0)
    seconds, slowest = 0.0, ""
    for dim, axis in reversed(list(enumerate(topology.axes))):
        if crossed[dim]:
            load, hops = _load(topology, moving, dim) if axis.kind == "torus" else (1, 1)
            here = LATENCY[axis.kind] * hops + size * load / (axis.speed * 1e9)
            if here > seconds:
                seconds, slowest = here, axis.kind
    return seconds, slowest


def _load(topology: Topology, pairs: np.ndarray, dim: int) -> tuple[int, int]:
    """Messages on the busiest link of a direction, one way, and the most hops of any."""
    axis = topology.axes[dim]
    hops = pairs[:, 1, dim] - pairs[:, 0, dim]
    if axis.wraps and not axis.twisted:
        hops = (hops + axis.size // 2) % axis.size - axis.size // 2
    # Messages move direction by direction: earlier ones are done, later ones not begun.
    lines = np.concatenate([pairs[:, 1, :dim], pairs[:, 0, dim:]], axis=1)
    lines[:, dim] = 0
    lines[:, [d for d, a in enumerate(topology.axes) if a.kind == "core"]] = 0
    line = np.ravel_multi_index(tuple(lines.T), topology.shape)
    busiest = 0
    for way in (1, -1):
        going = hops * way > 0
        if going.any():
            first = pairs[going, 0 if way == 1 else 1, dim]
            busiest = max(busiest, _busiest(line[going], first, np.abs(hops[going]), axis.size))
    return busiest, int(np.abs(hops).max())


def _busiest(line: np.ndarray, first: np.ndarray, length: np.ndarray, size: int) -> int:
    _, row = np.unique(line, return_inverse=True)
    changes = np.zeros((row.max() + 1, 2 * size + 1), np.int64)
    np.add.at(changes, (row, first), 1)
    np.add.at(changes, (row, first + length), -1)
    along = np.cumsum(changes, axis=1)
    return int((along[:, :size] + along[:, size : 2 * size]).max())
