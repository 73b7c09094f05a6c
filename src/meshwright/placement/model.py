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

from meshwright.hardware import Topology
from meshwright.placement.factors import Parts

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
