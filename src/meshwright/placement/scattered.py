"""The cost of an axis whose groups are no boxes: the ring they stand in, link by link."""

from __future__ import annotations

import numpy as np

from meshwright.hardware import Topology
from meshwright.placement.model import LATENCY, PAYLOAD, AxisCost


def scattered_cost(topology: Topology, coords: np.ndarray) -> AxisCost:
    """A ring in the given order, both ways, held up by its busiest link and by the slow network.

    `coords`: `(groups, members, directions)`. Messages travel direction by direction, the
    shorter way round where a direction wraps.
    """
    members = coords.shape[1]
    share = PAYLOAD * (members - 1) / members / 1e9
    kinds = [axis.kind for axis in topology.axes]
    links = [dim for dim, kind in enumerate(kinds) if kind == "torus"]
    load = max((busiest_link(topology, coords, dim) for dim in links), default=0)
    outside = _neighbours_outside(topology, coords)
    bandwidth = network = 0.0
    if load:
        bandwidth = 2 * topology.axes[links[0]].speed / load
    elif "switch" in kinds and (outside < 2).any():
        bandwidth = topology.axes[kinds.index("switch")].speed
    seconds = share / bandwidth if bandwidth else 0.0
    slowest = "torus" if load else kinds[-1]
    if outside.any():
        network, slowest = topology.axes[kinds.index("network")].speed, "network"
        # Half of the data goes each way round, all of it through the one adapter of a device
        # whose neighbours are both outside.
        seconds += share * int(outside.max()) / 2 / network
    seconds += LATENCY[slowest] * (members - 1)
    return AxisCost(bandwidth, network, longest_hop(topology, coords), "scattered", seconds)


def _neighbours_outside(topology: Topology, coords: np.ndarray) -> np.ndarray:
    """How many of each member's two neighbours on the ring are behind the slow network."""
    network = [dim for dim, axis in enumerate(topology.axes) if axis.kind == "network"]
    there = coords[..., network]
    crossing = (np.roll(there, -1, axis=1) != there).any(axis=-1)
    outside: np.ndarray = crossing.astype(np.int64) + np.roll(crossing, 1, axis=1)
    return outside


def steps(topology: Topology, coords: np.ndarray, dim: int) -> np.ndarray:
    """Signed hops along one direction from each member to the next, around the ring."""
    axis, size = topology.axes[dim], topology.axes[dim].size
    there: np.ndarray = np.roll(coords[..., dim], -1, axis=1) - coords[..., dim]
    if axis.wraps and not axis.twisted:  # a twisted side's wraparound leads elsewhere
        there = (there + size // 2) % size - size // 2
    return there


def longest_hop(topology: Topology, coords: np.ndarray) -> int:
    """The most links between two neighbours on the axis, the way home not counted."""
    dims = [d for d, axis in enumerate(topology.axes) if axis.kind == "torus"]
    total = sum((abs(steps(topology, coords, d)[:, :-1]) for d in dims), np.zeros(1))
    return int(np.max(total, initial=0))


def busiest_link(topology: Topology, coords: np.ndarray, dim: int) -> int:
    """How many messages share the busiest link of a direction, per step of the rings.

    The data go round in both senses, half each: a link that the ring uses once, either way,
    counts 1; one it uses there and back counts 2.
    """
    axis = topology.axes[dim]
    hops = steps(topology, coords, dim)
    moving = hops != 0
    if not moving.any():
        return 0
    # A message first moves along the directions before `dim`, so it runs on the line where
    # those already have their new value and the later ones still the old.
    lines = coords.copy()
    for before in range(dim):
        lines[..., before] = np.roll(coords[..., before], -1, axis=1)
    lines[..., dim] = 0
    line = np.ravel_multi_index(tuple(np.moveaxis(lines, -1, 0)), topology.shape)
    if topology.axes[-1].kind == "core":  # cores of a chip share its links
        line = line // topology.axes[-1].size
    _, where = np.unique(line[moving], return_inverse=True)
    length = np.abs(hops[moving])
    low = (coords[..., dim][moving] + np.minimum(hops[moving], 0)) % axis.size
    load = np.zeros((where.max() + 1, 2 * axis.size + 1), np.int64)
    np.add.at(load, (where, low), 1)
    np.add.at(load, (where, low + length), -1)
    along = np.cumsum(load, axis=1)
    return int((along[:, : axis.size] + along[:, axis.size : 2 * axis.size]).max())
