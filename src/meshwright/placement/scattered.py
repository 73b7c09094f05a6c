"""The cost of an axis whose groups are no boxes: the ring they stand in, link by link."""

from __future__ import annotations

import numpy as np

from meshwright.hardware import Topology
from meshwright.placement.model import PAYLOAD, AxisCost


def scattered_cost(topology: Topology, coords: np.ndarray) -> AxisCost:
    """A ring in the given order, both ways, held up by its busiest link or its slowest network.

    `coords`: `(groups, members, directions)`. Messages travel direction by direction, the
    shorter way round where a direction wraps.
    """
    members = coords.shape[1]
    share = PAYLOAD * (members - 1) / members / 1e9
    kinds = [axis.kind for axis in topology.axes]
    links = [dim for dim, kind in enumerate(kinds) if kind == "torus"]
    load = max((busiest_link(topology, coords, dim) for dim in links), default=0)
    bandwidth, shape = 0.0, "scattered"
    if load:
        bandwidth = 2 * topology.axes[links[0]].speed / load
    elif "switch" in kinds:
        bandwidth = topology.axes[kinds.index("switch")].speed
    network = 0.0
    seconds = share / bandwidth if bandwidth else 0.0
    for dim, axis in enumerate(topology.axes):
        if axis.kind != "network":
            continue
        crossings = (np.diff(coords[..., dim], axis=1, append=coords[:, :1, dim]) != 0).any(axis=1)
        if crossings.any():
            network = axis.speed
            seconds = max(seconds, share / (2 * network))
    return AxisCost(bandwidth, network, longest_hop(topology, coords), shape, seconds)


def steps(topology: Topology, coords: np.ndarray, dim: int) -> np.ndarray:
    """Signed hops along one direction from each member to the next, around the ring."""
    size = topology.axes[dim].size
    there: np.ndarray = np.roll(coords[..., dim], -1, axis=1) - coords[..., dim]
    if topology.axes[dim].wraps:
        there = (there + size // 2) % size - size // 2
    return there


def longest_hop(topology: Topology, coords: np.ndarray) -> int:
    """The most links between two neighbours on the axis, the way home not counted."""
    dims = [d for d, axis in enumerate(topology.axes) if axis.kind == "torus"]
    total = sum((abs(steps(topology, coords, d)[:, :-1]) for d in dims), np.zeros(1))
    return int(np.max(total, initial=0))


def busiest_link(topology: Topology, coords: np.ndarray, dim: int) -> int:
    """How many messages cross the busiest link of a direction, in one sense, per ring step."""
    axis = topology.axes[dim]
    hops = steps(topology, coords, dim)
    worst = 0
    # A message first moves along the directions before `dim`, so it runs on the line where
    # those already have their new value and the later ones still the old.
    lines = coords.copy()
    for before in range(dim):
        lines[..., before] = np.roll(coords[..., before], -1, axis=1)
    lines[..., dim] = 0
    shape = tuple(a.size for a in topology.axes)
    line = np.ravel_multi_index(tuple(np.moveaxis(lines, -1, 0)), shape)
    # Cores of a chip share its links.
    if topology.axes[-1].kind == "core":
        line = line // topology.axes[-1].size
    for sense in (1, -1):
        moving = hops * sense > 0
        if not moving.any():
            continue
        start = coords[..., dim][moving]
        length = np.abs(hops[moving])
        low = start if sense > 0 else start - length
        _, where = np.unique(line[moving], return_inverse=True)
        load = np.zeros((where.max() + 1, 2 * axis.size + 1), np.int64)
        np.add.at(load, (where, low % axis.size), 1)
        np.add.at(load, (where, low % axis.size + length), -1)
        along = np.cumsum(load, axis=1)
        along = along[:, : axis.size] + along[:, axis.size : 2 * axis.size]
        worst = max(worst, int(along.max()))
    return worst
