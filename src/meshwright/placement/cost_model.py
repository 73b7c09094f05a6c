"""The stated model: how long a collective over one axis takes.

All times are for an all-gather that leaves 1 GiB on every device of a group, all groups of
the axis at work at once. An all-reduce takes twice as long.

A group lies in up to three levels: cores of a chip, chips of a slice (or GPUs of a domain),
slices of the machine. It gathers level by level, the slowest first while its pieces are
still small. Over a level of `n` members, with `m` members of the group inside each,

    seconds = bytes * (n - 1) / n / (m * bandwidth per device)

The bandwidth of a switch, a network or a chip is a number. That of a torus depends on what
the group covers, as the TPU compiler's own strategies do (docs/model.md shows the evidence):

- whole directions only: it drives all of them at once. Each gives `2 * link` where it wraps
  around (a ring, both ways), `link` where it does not (a line);
- a piece of a single direction: a line, `link`; at stride `s`, the `s` groups in between
  share its links, so `link / s`, doubled where the direction wraps;
- pieces of several directions: one ring through all of them, `2 * link / largest stride`,
  or a line when their product is odd.

A twisted side alone is not a ring: its wraparound leads elsewhere. Latency (1 us a torus
hop, 2 us a switch, 20 us a slow network) only breaks ties at this size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from meshwright.axes import role
from meshwright.hardware.topology import Topology

PAYLOAD = 2**30
LATENCY = {"torus": 1e-6, "switch": 2e-6, "network": 20e-6, "core": 0.5e-6}


@dataclasses.dataclass(frozen=True)
class AxisCost:
    """What an axis costs.

    GB/s per device inside the slice and over the slow network (0 when unused), the most links
    between two neighbours, the shape its devices form, and seconds for 1 GiB.
    """

    bandwidth: float
    network: float
    hops: int
    shape: str
    all_gather: float

    @property
    def all_reduce(self) -> float:
        return 2 * self.all_gather


def axis_cost(topology: Topology, parts: Parts) -> AxisCost:
    """The model's verdict on one axis."""
    levels = _levels(topology, parts)
    bandwidth, shape, hops = _inside(topology, levels["inside"])
    cores = math.prod(p.factor for p in levels["core"])
    inside = math.prod(p.factor for p in levels["inside"])
    slices = math.prod(p.factor for p in levels["network"])
    core_speed = _speed(topology, levels["core"])
    network_speed = _speed(topology, levels["network"])
    seconds = sum(LATENCY[topology.axes[p.dim].kind] * (p.factor - 1) for p in parts)
    # Devices that share a chip share its links, unless they are in the group together.
    per_device = bandwidth / topology.chip.cores * cores
    for members, speed in (
        (cores, core_speed),
        (inside, per_device),
        (slices, network_speed * inside * cores),
    ):
        if members > 1:
            seconds += PAYLOAD * (members - 1) / members / (speed * 1e9)
    if inside == 1 and cores > 1:
        per_device, shape = core_speed, "chip"
    return AxisCost(per_device, network_speed, hops, shape, seconds)


def _levels(topology: Topology, parts: Parts) -> dict[str, Parts]:
    inside = ("torus", "switch")
    return {
        "core": tuple(p for p in parts if topology.axes[p.dim].kind == "core"),
        "inside": tuple(p for p in parts if topology.axes[p.dim].kind in inside),
        "network": tuple(p for p in parts if topology.axes[p.dim].kind == "network"),
    }


def _speed(topology: Topology, parts: Parts) -> float:
    return min((topology.axes[p.dim].speed for p in parts), default=0.0)


def _inside(topology: Topology, parts: Parts) -> tuple[float, str, int]:
    """Bandwidth, shape and hops within a slice or domain."""
    if not parts:
        return 0.0, "", 0
    axes = [topology.axes[p.dim] for p in parts]
    if axes[0].kind == "switch":
        return axes[0].speed, "scattered" if topology.scattered else "switch", 1
    hops = max(p.stride for p in parts)
    if covers_whole(topology, parts):
        rings = [axis.wraps and _closes(topology, parts, axis.twisted) for axis in axes]
        total = sum(axis.speed * (2 if ring else 1) for axis, ring in zip(axes, rings, strict=True))
        return (
            total,
            f"{len(axes)}d {'torus' if all(rings) else 'grid'}"
            if len(axes) > 1
            else ("ring" if rings[0] else "line"),
            hops,
        )
    link = axes[0].speed
    if len(parts) == 1:
        at_top = parts[0].factor * parts[0].stride == axes[0].size
        ring = axes[0].wraps and not axes[0].twisted and at_top
        return link * (2 if ring else 1) / hops, "ring" if ring else "line", hops
    even = math.prod(p.factor for p in parts) % 2 == 0
    return link * (2 if even else 1) / hops, "ring" if even else "line", hops


def covers_whole(topology: Topology, parts: Parts) -> bool:
    """Whether the group is made of whole torus directions."""
    torus = [p for p in parts if topology.axes[p.dim].kind == "torus"]
    return bool(torus) and all(p.factor == topology.axes[p.dim].size for p in torus)


def _closes(topology: Topology, parts: Parts, twisted: bool) -> bool:
    """A twisted side closes only together with a long one."""
    if not twisted:
        return True
    return any(not topology.axes[p.dim].twisted and topology.axes[p.dim].wraps for p in parts)


# The cost of an axis whose groups are no boxes: the ring they stand in, link by link.


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


# The order along an axis: neighbours on the mesh are neighbours on the wire.


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


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of one physical direction: `factor` devices, `stride` apart."""

    dim: int
    factor: int
    stride: int


Parts = tuple[Part, ...]
