"""The cost model: how long a collective over one mesh axis takes, and the order of its devices.

All times are for an all-gather that leaves 1 GiB on every device of a group, all groups of
the axis at work at once. An all-reduce takes twice as long.

A group lies in up to three levels: cores of a chip, chips of a slice (or GPUs of a domain),
slices of the machine. It gathers level by level, the slowest first while its pieces are
still small. Over a level of `n` members, with `m` members of the group inside each,

    seconds = bytes * (n - 1) / n / (m * bandwidth per device)

The bandwidth of a switch, a network or a chip is a number. That of a torus depends on what
the group covers, as the TPU compiler's own strategies do (docs/cost_model.md shows the evidence):

- whole directions only: it drives all of them at once. Each gives `2 * link` where it wraps
  around (a ring, both ways), `link` where it does not (a line);
- a piece of a single direction: a line, `link`; at stride `s`, the `s` groups in between
  share its links, so `link / s`, doubled where the direction wraps;
- pieces of several directions: one ring through all of them, `2 * link / largest stride`,
  or a line when their product is odd.

A twisted side alone is not a ring: its wraparound leads elsewhere. Latency (1 us a torus
hop, 2 us a switch, 20 us over DCN) only breaks ties at this size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from meshwright.axes import role
from meshwright.hardware.topology import Kind, Topology

PAYLOAD = 2**30

Order = Literal["auto", "ring", "grid"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of one physical direction: `factor` devices, `stride` apart.

    `direction` is an index into `Topology.axes`.
    """

    direction: int
    factor: int
    stride: int


Parts = tuple[Part, ...]  # what one mesh axis is made of; no direction twice


def parts_of_kind(topology: Topology, parts: Parts, *kinds: Kind) -> Parts:
    """Return the parts that lie in directions of these kinds."""
    return tuple(part for part in parts if topology.axes[part.direction].kind in kinds)


def total_factor(parts: Parts) -> int:
    """How many devices the parts span together."""
    return math.prod(part.factor for part in parts)


@dataclasses.dataclass(frozen=True)
class AxisCost:
    """What an axis costs.

    GB/s per device inside the slice and over DCN (0 when unused), the most links
    between two neighbours, the shape its devices form, and seconds for 1 GiB.
    """

    bandwidth: float
    network: float
    hops: int
    shape: str
    all_gather: float

    @property
    def all_reduce(self) -> float:
        """Seconds of an all-reduce of 1 GiB: a reduce-scatter, then an all-gather."""
        return 2 * self.all_gather


def axis_cost(topology: Topology, parts: Parts) -> AxisCost:
    """Cost one axis made of `parts`, by the formula at the top of this file."""
    core_parts = parts_of_kind(topology, parts, "core")
    inside_parts = parts_of_kind(topology, parts, "torus", "switch")
    network_parts = parts_of_kind(topology, parts, "network")
    cores, inside, slices = map(total_factor, (core_parts, inside_parts, network_parts))
    bandwidth, shape, hops = _bandwidth_inside(topology, inside_parts)
    core_speed = _slowest(topology, core_parts)
    network_speed = _slowest(topology, network_parts)
    # Devices that share a chip share its links, unless they are in the group together.
    per_device = bandwidth / topology.chip.cores * cores
    latency = topology.chip.speeds.values("latency")
    seconds = sum(latency[topology.axes[p.direction].kind] * (p.factor - 1) for p in parts)
    for members, speed in (
        (cores, core_speed),
        (inside, per_device),
        (slices, network_speed * inside * cores),  # each device sends its own piece outside
    ):
        if members > 1:
            seconds += PAYLOAD * (members - 1) / members / (speed * 1e9)
    if inside == 1 and cores > 1:
        per_device, shape = core_speed, "chip"
    if topology.chip.measured is not None and (members := cores * inside * slices) > 1:
        links = links_text(topology, shape, members, slices)
        line = topology.chip.measured.collective("all-gather", links, members)
        seconds = seconds if line is None else line[0] + PAYLOAD / line[1]
    return AxisCost(per_device, network_speed, hops, shape, seconds)


INSIDE = {"tpu": "ICI", "gpu": "NVLink", "cpu": "memory"}


def links_text(topology: Topology, shape: str, members: int, slices: int) -> str:
    """The links that join a group of a shape: `ICI ring`, `NVLink`, `NVLink, network`."""
    if slices == members:
        return "network"
    family = topology.chip.family
    inside = f"{INSIDE[family]} {shape}" if family == "tpu" else INSIDE[family]
    return f"{inside}, network" if slices > 1 else inside


def _slowest(topology: Topology, parts: Parts) -> float:
    return min((topology.axes[part.direction].speed for part in parts), default=0.0)


def _bandwidth_inside(topology: Topology, parts: Parts) -> tuple[float, str, int]:
    """Bandwidth (GB/s), shape and hops of a group within a slice or domain."""
    if not parts:
        return 0.0, "", 0
    axes = [topology.axes[part.direction] for part in parts]
    if axes[0].kind == "switch":
        return axes[0].speed, "scattered" if topology.scattered else "switch", 1
    hops = max(part.stride for part in parts)
    link = axes[0].speed
    if covers_whole(topology, parts):
        rings = [axis.wraps and _closes(topology, parts, axis.twisted) for axis in axes]
        total = sum(axis.speed * (2 if ring else 1) for axis, ring in zip(axes, rings, strict=True))
        if len(axes) > 1:
            return total, f"{len(axes)}d {'torus' if all(rings) else 'grid'}", hops
        ring = rings[0]
        return total, "ring" if ring else "line", hops
    if len(parts) == 1:
        # Every s-th chip up to the end of a wrapped direction closes to a ring as well.
        reaches_end = parts[0].factor * parts[0].stride == axes[0].size
        ring = axes[0].wraps and not axes[0].twisted and reaches_end
    else:
        ring = total_factor(parts) % 2 == 0  # a box has a closed tour only if its volume is even
    return link * (2 if ring else 1) / hops, "ring" if ring else "line", hops


def covers_whole(topology: Topology, parts: Parts) -> bool:
    """Whether the group is made of whole torus directions."""
    torus = parts_of_kind(topology, parts, "torus")
    return bool(torus) and all(p.factor == topology.axes[p.direction].size for p in torus)


def _closes(topology: Topology, parts: Parts, twisted: bool) -> bool:
    """Whether a wrapped side is a ring: a twisted one closes only together with a long one."""
    if not twisted:
        return True
    axes = [topology.axes[part.direction] for part in parts]
    return any(axis.wraps and not axis.twisted for axis in axes)


# Groups that are no boxes (a mesh made elsewhere) have no parts. Their cost is that of the ring
# they stand in, followed link by link: input are grid coordinates `(groups, members, directions)`
# in mesh order, and messages travel direction by direction, the shorter way round where a
# direction wraps. Two chips at opposite corners of a 4x4 grid, say, load three links along x and
# then three along y.


def scattered_cost(topology: Topology, coords: np.ndarray) -> AxisCost:
    """Cost a ring in the given order, both ways, held up by its busiest link and the network."""
    members = coords.shape[1]
    share = PAYLOAD * (members - 1) / members / 1e9
    kinds = [axis.kind for axis in topology.axes]
    torus = [direction for direction, kind in enumerate(kinds) if kind == "torus"]
    load = max((busiest_link(topology, coords, direction) for direction in torus), default=0)
    outside = _neighbours_outside(topology, coords)
    bandwidth = network = 0.0
    if load:
        bandwidth = 2 * topology.axes[torus[0]].speed / load
    elif "switch" in kinds and (outside < 2).any():
        bandwidth = topology.axes[kinds.index("switch")].speed
    seconds = share / bandwidth if bandwidth else 0.0
    slowest = "torus" if load else kinds[-1]
    if outside.any():
        network, slowest = topology.axes[kinds.index("network")].speed, "network"
        # Half of the data goes each way round, all of it through the one adapter of a device
        # whose neighbours are both outside.
        seconds += share * int(outside.max()) / 2 / network
    seconds += topology.chip.speeds.values("latency")[slowest] * (members - 1)
    return AxisCost(bandwidth, network, longest_hop(topology, coords), "scattered", seconds)


def _neighbours_outside(topology: Topology, coords: np.ndarray) -> np.ndarray:
    """How many of each member's two neighbours on the ring are behind DCN."""
    network = [d for d, axis in enumerate(topology.axes) if axis.kind == "network"]
    slices = coords[..., network]
    crosses = (np.roll(slices, -1, axis=1) != slices).any(axis=-1)
    outside: np.ndarray = crosses.astype(np.int64) + np.roll(crosses, 1, axis=1)
    return outside


def signed_hops(topology: Topology, coords: np.ndarray, direction: int) -> np.ndarray:
    """Signed hops along one direction from each member to the next, around the ring."""
    axis, size = topology.axes[direction], topology.axes[direction].size
    along = coords[..., direction]
    hops: np.ndarray = np.roll(along, -1, axis=1) - along
    if axis.wraps and not axis.twisted:  # a twisted side's wraparound leads elsewhere
        hops = (hops + size // 2) % size - size // 2
    return hops


def longest_hop(topology: Topology, coords: np.ndarray) -> int:
    """The most links between two neighbours on the axis, the last one's way back not counted."""
    torus = [d for d, axis in enumerate(topology.axes) if axis.kind == "torus"]
    total = sum((abs(signed_hops(topology, coords, d)[:, :-1]) for d in torus), np.zeros(1))
    return int(np.max(total, initial=0))


def busiest_link(topology: Topology, coords: np.ndarray, direction: int) -> int:
    """How many messages share the busiest link of a direction, per step of the rings.

    The data go round in both senses, half each: a link that the ring uses once, either way,
    counts 1; one it uses there and back counts 2.
    """
    axis = topology.axes[direction]
    hops = signed_hops(topology, coords, direction)
    moving = hops != 0
    if not moving.any():
        return 0
    # A message first moves along the directions before this one, so it runs on the line where
    # those already have their new value and the later ones still the old.
    lines = coords.copy()
    for before in range(direction):
        lines[..., before] = np.roll(coords[..., before], -1, axis=1)
    lines[..., direction] = 0
    line = np.ravel_multi_index(tuple(np.moveaxis(lines, -1, 0)), topology.shape)
    if topology.axes[-1].kind == "core":  # cores of a chip share its links
        line = line // topology.axes[-1].size
    _, row = np.unique(line[moving], return_inverse=True)
    length = np.abs(hops[moving])
    low = (coords[..., direction][moving] + np.minimum(hops[moving], 0)) % axis.size
    # Difference arrays: +1 where a message enters the line and -1 where it leaves, summed up.
    # Twice as long as the line, so that a message over the wraparound stays one interval; both
    # halves are the same links.
    changes = np.zeros((row.max() + 1, 2 * axis.size + 1), np.int64)
    np.add.at(changes, (row, low), 1)
    np.add.at(changes, (row, low + length), -1)
    load = np.cumsum(changes, axis=1)
    return int((load[:, : axis.size] + load[:, axis.size : 2 * axis.size]).max())


# The order of devices along an axis. Neighbours on the mesh should be neighbours on the wire: a
# permutation from each device to the next (pipelines, ring attention) then takes one hop.


def choose_order(topology: Topology, parts: Parts, name: str, order: Order) -> str:
    """Return `ring`, `grid` or `line`: how the parts of an axis are strung together.

    A ring visits neighbours only. A grid counts the directions like digits: the TPU compiler
    gathers over several whole wrapped directions at once only in that order (v4, v5p, TPU7x;
    see docs/cost_model.md), so it is taken there unless the axis talks to neighbours.
    """
    torus = parts_of_kind(topology, parts, "torus")
    if len(torus) < 2:
        return "line"
    if order != "auto":
        return order
    planes = topology.chip.gathers_planes and covers_whole(topology, parts)
    planes = planes and all(topology.axes[part.direction].wraps for part in torus)
    return "grid" if planes and not role(name).neighbours else "ring"


def offsets(topology: Topology, parts: Parts, order: str) -> np.ndarray:
    """For each position along an axis, how far its device lies from the first in grid order.

    Slices and switches count slowest and cores fastest, so that positions next to each other
    share a chip, then a slice; in between runs the ring or grid through the torus.
    """
    steps = [math.prod(topology.shape[d + 1 :]) for d in range(len(topology.shape))]
    torus = parts_of_kind(topology, parts, "torus")
    path = _path(torus, order) @ np.array([p.stride * steps[p.direction] for p in torus], np.int64)
    levels = [
        *(_count(part, steps) for part in parts_of_kind(topology, parts, "network", "switch")),
        path,
        *(_count(part, steps) for part in parts_of_kind(topology, parts, "core")),
    ]
    total = np.zeros(1, np.int64)
    for level in levels:
        total = np.add.outer(total, level).ravel()
    return total


def _count(part: Part, steps: Sequence[int]) -> np.ndarray:
    return np.arange(part.factor) * part.stride * steps[part.direction]


def _path(torus: Parts, order: str) -> np.ndarray:
    factors = [part.factor for part in torus]
    return ring_path(factors) if order == "ring" else grid_path(factors)


def neighbour_hops(topology: Topology, parts: Parts, order: str) -> int:
    """Return the most links between two neighbours along the axis inside a slice."""
    torus = parts_of_kind(topology, parts, "torus")
    if not torus:
        return 1 if parts_of_kind(topology, parts, "switch") else 0
    hops = abs(np.diff(_path(torus, order), axis=0)) * [part.stride for part in torus]
    for column, part in enumerate(torus):
        axis = topology.axes[part.direction]
        if axis.wraps and not axis.twisted:
            hops[:, column] = np.minimum(hops[:, column], axis.size - hops[:, column])
    return int(hops.sum(axis=1).max(initial=0))


def grid_path(sizes: Sequence[int]) -> np.ndarray:
    """Return the points of a box in counting order, `(product, len(sizes))`."""
    if not sizes:
        return np.zeros((1, 0), np.int64)
    return np.stack(np.unravel_index(np.arange(math.prod(sizes)), tuple(sizes)), axis=-1)


def snake_path(sizes: Sequence[int]) -> np.ndarray:
    """Return a path through a box that changes one digit by one at every step.

    >>> snake_path([2, 3]).tolist()
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


def ring_path(sizes: Sequence[int]) -> np.ndarray:
    """Return a closed tour through a box, one digit by one at every step and back to the start.

    It exists when at least two sides are above one and their product is even; else the
    result is the open path.

    >>> ring_path([2, 4]).tolist()
    [[0, 0], [0, 1], [0, 2], [0, 3], [1, 3], [1, 2], [1, 1], [1, 0]]
    """
    above_one = [side for side in sizes if side > 1]
    if len(above_one) < 2 or math.prod(above_one) % 2:
        return snake_path(sizes)
    # One even side against a path through all the others makes a plain rectangle: leave its
    # first column free, run through the rest in rows, and return along that column.
    even = next(d for d, side in enumerate(sizes) if side % 2 == 0)
    others = snake_path([side for d, side in enumerate(sizes) if d != even])
    rows, columns = sizes[even], len(others)
    tour = [(0, 0)]
    for row in range(rows):
        across = range(1, columns) if row % 2 == 0 else range(columns - 1, 0, -1)
        tour += [(row, column) for column in across]
    tour += [(row, 0) for row in range(rows - 1, 0, -1)]
    points = np.array(tour)
    return np.insert(others[points[:, 1]], even, points[:, 0], axis=1)
