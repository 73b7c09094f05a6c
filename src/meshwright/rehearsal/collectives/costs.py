"""`Cost` of a collective: the placement's model applied to the devices it joins.

An all-gather of `b` bytes takes the model's time for 1 GiB, its part for bandwidth scaled by `b`.
A reduce-scatter takes as long, an all-reduce twice as long. An all-to-all takes as long over a
switch or a network; over a ring of `n` chips its messages travel a quarter of the ring on average,
so it takes `n / 4` times as long (over `k` whole directions, `k * longest / 4` times).

A permutation is routed pair by pair, direction by direction, and takes as long as its busiest link.
GPUs have a model of their own, with what NCCL is known to reach (`collective_seconds`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from meshwright.hardware.calibration_file import Calibration, shipped_speeds
from meshwright.hardware.topology import Topology
from meshwright.placement.cost_model import (
    INSIDE,
    PAYLOAD,
    covers_whole,
    links_text,
)
from meshwright.placement.placement import AxisPlan, Placement
from meshwright.placement.placer import measure
from meshwright.rehearsal.collectives.types import AxisPart
from meshwright.spec.mesh_spec import MeshSpec


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of one run, and the links it uses, such as `ICI ring` or `NVLink, network`."""

    links: str
    seconds: float


NOTHING = Cost("-", 0.0)


def group_cost(kind: str, size: int, plan: AxisPlan, topology: Topology) -> Cost:
    """Model one run of a collective of `size` bytes over groups that lie as planned."""
    if plan.size == 1:
        return NOTHING
    if (measured := topology.chip.measured) is not None:
        line = measured.collective(kind, _links(topology, plan), plan.size)
        if line is not None:
            return Cost(_links(topology, plan), line[0] + size / line[1])
    if topology.chip.family == "gpu":
        group = group_on(topology, plan.size, plan.slow)
        seconds = collective_seconds(kind, size, group, topology.chip.speeds)
        return Cost(_links(topology, plan), seconds)
    # The plan has the time of an all-gather of PAYLOAD bytes: latency apart, time grows with size.
    fixed = _latency(topology, plan)
    moving = (plan.cost.all_gather - fixed) * size / PAYLOAD
    start = 0.0
    if topology.chip.family == "tpu" and plan.slow <= 1:
        table = topology.chip.speeds
        start = table["start torus"]
        moving /= table.value(f"part torus {kind}") or table["part torus"]
    if kind == "all-reduce":
        fixed, moving = 2 * fixed, 2 * moving
    elif kind in ("all-to-all", "ragged-all-to-all"):
        moving *= _detour(topology, plan)
    return Cost(_links(topology, plan), start + fixed + moving)


def pairs_cost(size: int, pairs: np.ndarray, placement: Placement) -> Cost:
    """Model a permutation of `size` bytes; `pairs` hold mesh positions, sender and receiver."""
    topology = placement.topology
    coords = grid_coords(placement)[pairs]
    seconds, kind = permutation_cost(topology, coords, size)
    if not kind:
        return NOTHING
    links = "network" if kind == "network" else INSIDE[topology.chip.family]
    measured = topology.chip.measured
    # On a torus a message takes several links, and shares them: only the model knows which.
    if measured is not None and topology.chip.family != "tpu":
        line = measured.collective("collective-permute", links, 2)
        seconds = seconds if line is None else line[0] + size / line[1]
    return Cost(links, seconds)


def beside_back(pairs: np.ndarray, placement: Placement) -> float:
    """The part of a permutation's time for which the one back can run beside it.

    Links go both ways, yet only a ring that wraps leaves one way free: on a line, what goes from
    the last chip to the first goes back over all links. GPUs take one after the other.
    """
    topology = placement.topology
    if topology.chip.family != "tpu" or not len(pairs):
        return 0.0
    there = grid_coords(placement)[pairs]
    once, _ = permutation_cost(topology, there, PAYLOAD)
    both, _ = permutation_cost(topology, np.concatenate([there, there[:, ::-1]]), PAYLOAD)
    return max(0.0, min(1.0, 2 - both / once)) if once else 0.0


def plan_of(
    placement: Placement, groups: Sequence[np.ndarray], axes: tuple[AxisPart, ...] | None
) -> AxisPlan:
    """How groups lie on the hardware: as an axis of the mesh does, or measured anew."""
    if axes is not None and len(axes) == 1 and axes[0].whole:
        return next(axis for axis in placement.axes if axis.name == axes[0].name)
    members = max(group.size for group in groups)
    largest = np.stack([group for group in groups if group.size == members])
    spec = MeshSpec.parse([("group", members), ("rest", len(largest))])
    places = placement.positions.ravel()[largest.T]
    return measure(spec, placement.topology, places).axes[0]


def grid_coords(placement: Placement) -> np.ndarray:
    """The coordinates of every mesh position on the machine's grid, `(positions, directions)`."""
    topology = placement.topology
    point_of = np.empty(int(topology.index.max()) + 1, np.int64)
    point_of[topology.index.ravel()] = np.arange(topology.num_devices)
    coords: np.ndarray = topology.coords[point_of[placement.positions.ravel()]]
    return coords


def _latency(topology: Topology, plan: AxisPlan) -> float:
    latency = topology.chip.speeds.values("latency")
    if plan.parts is not None:
        return sum(latency[topology.axes[p.direction].kind] * (p.factor - 1) for p in plan.parts)
    slowest = "network" if plan.slow > 1 else topology.axes[-1].kind
    return latency[slowest] * (plan.size - 1)


def _detour(topology: Topology, plan: AxisPlan) -> float:
    """How much longer an all-to-all takes than an all-gather that leaves as many bytes."""
    ring = [p.factor for p in plan.parts or () if topology.axes[p.direction].kind == "torus"]
    if not ring:
        return 1.0
    if covers_whole(topology, plan.parts or ()):
        return max(1.0, len(ring) * max(ring) / 4)
    return max(1.0, math.prod(ring) / 4)


def _links(topology: Topology, plan: AxisPlan) -> str:
    return links_text(topology, plan.cost.shape, plan.size, plan.slow)


# In: senders and receivers on the machine's grid. Out: the time of the slowest direction. Every
# message takes its route direction by direction, and the busiest link of a direction decides.
# Example: on a ring of 4 the shift 0->1, 1->2, 2->3, 3->0 puts one message on each link, the
# reversal 0->3, 1->2, 2->1, 3->0 one each way.
def permutation_cost(topology: Topology, coords: np.ndarray, size: int) -> tuple[float, str]:
    """Model a permutation: seconds, and the slowest kind of link used, empty if nothing moves.

    `coords`: `(pairs, 2, directions)`, sender and receiver on the machine's grid.
    """
    moving = coords[(coords[:, 0] != coords[:, 1]).any(axis=1)]
    if not len(moving):
        return 0.0, ""
    crossed = (moving[:, 0] != moving[:, 1]).any(axis=0)
    table = topology.chip.speeds
    seconds, slowest = 0.0, ""
    for dim, axis in reversed(list(enumerate(topology.axes))):
        if crossed[dim]:
            load, hops = _load(topology, moving, dim) if axis.kind == "torus" else (1, 1)
            if topology.chip.family == "gpu":
                here = copy_seconds(size, axis.speed, axis.kind == "network", table)
            else:
                speed = axis.speed * 1e9 * (table["part torus"] if axis.kind == "torus" else 1.0)
                here = table[f"latency {axis.kind}"] * hops + size * load / speed
            if here > seconds:
                seconds, slowest = here, axis.kind
    return seconds, slowest


def _load(topology: Topology, pairs: np.ndarray, dim: int) -> tuple[int, int]:
    """Messages on the busiest link of a direction, either way, and the most hops of any."""
    axis = topology.axes[dim]
    hops = pairs[:, 1, dim] - pairs[:, 0, dim]
    if axis.wraps and not axis.twisted:  # the shorter way round
        hops = (hops + axis.size // 2) % axis.size - axis.size // 2
    # Messages move direction by direction: earlier ones are done, later ones not begun.
    lines = np.concatenate([pairs[:, 1, :dim], pairs[:, 0, dim:]], axis=1)
    lines[:, dim] = 0
    lines[:, [d for d, a in enumerate(topology.axes) if a.kind == "core"]] = 0
    line = np.ravel_multi_index(tuple(lines.T), topology.shape)
    busiest = 0
    for sign in (1, -1):  # links are full duplex: each way has its own load
        going = hops * sign > 0
        if going.any():
            first = pairs[going, 0 if sign == 1 else 1, dim]
            busiest = max(busiest, _busiest(line[going], first, np.abs(hops[going]), axis.size))
    return busiest, int(np.abs(hops).max())


def _busiest(line: np.ndarray, first: np.ndarray, length: np.ndarray, size: int) -> int:
    """The most messages over one link, each covering `length` links of `line` from `first` on."""
    # +1 where a message enters, -1 where it leaves; the running sum is the load. Twice the size, so
    # that one may run past the end, then folded back.
    _, row = np.unique(line, return_inverse=True)
    changes = np.zeros((row.max() + 1, 2 * size + 1), np.int64)
    np.add.at(changes, (row, first), 1)
    np.add.at(changes, (row, first + length), -1)
    along = np.cumsum(changes, axis=1)
    return int((along[:, :size] + along[:, size : 2 * size]).max())


# Seconds of collectives between GPUs: NCCL over NVLink and the network, by kind, size and wire.
#
#     seconds = start + fill * size / (size + 1.3 MB) + bytes / bandwidth
#
# `start` is what an empty message takes, `fill` what it takes until all wires are busy. NCCL sends
# in rings through all GPUs: each wire then carries `(n - 1) / n` of the bytes, of an all-reduce
# twice that, and NVLink and adapters work at once, so the slower one counts. Two things go faster:
# an all-reduce inside a domain with NVLink SHARP (NVLS), which adds in the switch, and one over
# many nodes, which goes by trees and keeps its speed where rings lose it.
#
# Every figure is published or fitted to published ones: `benchmarks/data/collectives.json` has the
# rows with their sources, `benchmarks/collectives.py` prints this model against each. They are in
# the file of each chip: `part ring`, the part of NVLink's nominal speed that rings reach; `part in
# switch`, what an all-reduce with NVLS does, in bytes of the array, and `part two nodes` of it
# over two, as a tree of such domains; `part adapter`, of the network; `part ring over nodes` and
# `part each doubling`, what rings lose there, and all-reduces do not (365 GB/s on 4, 340 on 32, 350
# on 248 nodes: ml-engineering, NVIDIA/nccl#1218, NVIDIA/nccl-tests#283); `start` and `fill` for
# each GPU of a domain and for each doubling of the nodes.

# NCCL takes NVLS from five GPUs on (ml-engineering: 4 H200 reach 363 GB/s, 5 reach 414).
_IN_SWITCH_FROM = 5


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of GPUs: `inside` in each of `nodes` NVLink domains; nominal GB/s of their links."""

    chip: str
    inside: int
    nodes: int
    link: float
    network: float

    @property
    def size(self) -> int:
        return self.inside * self.nodes


def group_on(topology: Topology, members: int, nodes: int) -> Group:
    """Describe a group of `members` GPUs that spans `nodes` domains of a machine."""
    speeds = {axis.kind: axis.speed for axis in topology.axes}
    network = speeds.get("network", topology.chip.network)
    inside = max(1, members // nodes)
    return Group(topology.chip.name, inside, nodes, speeds.get("switch", network), network)


def collective_seconds(
    kind: str, size: int, group: Group, table: Calibration | None = None
) -> float:
    """Model a collective; `size` are the bytes that an all-gather leaves on every GPU.

    `table`: other figures than those of the chip's own.

    >>> whole = Group("h200", 8, 1, 450, 50)
    >>> round(collective_seconds("all-reduce", 2**30, whole) * 1e3, 2)  # published: 4.05 ms
    4.05
    """
    doublings = math.log2(group.nodes)
    table = table or shipped_speeds(group.chip)
    start = table["start GPU"] * group.inside + table["start doubling"] * doublings
    fill = table["fill GPU"] * group.inside + table["fill doubling"] * doublings
    moving = size / 1e9 / _bandwidth(kind, group, table)
    return start + fill * size / (size + table["bytes to fill"]) + moving


def _bandwidth(kind: str, group: Group, table: Calibration) -> float:
    """GB of the array that a collective is done with in a second."""
    n = group.size
    ring, adapter = table["part ring"] * group.link, table["part adapter"]
    if kind in ("all-to-all", "ragged-all-to-all"):
        inside = ring * n / max(1, group.inside - 1)
        if group.nodes == 1:
            return inside
        # What goes to other nodes leaves by the GPU's own adapter.
        return min(inside, adapter * group.network * group.nodes / (group.nodes - 1))
    in_switch = table.value("part in switch")
    if kind == "all-reduce" and in_switch and group.inside >= _IN_SWITCH_FROM and group.nodes <= 2:
        return in_switch * group.link * (table["part two nodes"] if group.nodes == 2 else 1.0)
    bus = ring if group.inside > 1 else math.inf
    if group.nodes > 1:
        doublings = math.log2(group.nodes)
        falling = table["part ring over nodes"] * table["part each doubling"] ** doublings
        reached = adapter if kind == "all-reduce" else min(adapter, falling)
        bus = min(bus, reached * group.network * group.inside)
    passes = 2 if kind == "all-reduce" else 1
    return bus * n / (n - 1) / passes


def copy_seconds(
    size: float, speed: float, network: bool, table: Calibration | None = None
) -> float:
    """Model a copy from one GPU to another over a link of this nominal speed.

    `table`: other figures than those of the H100, which all GPUs have.
    """
    table = table or shipped_speeds("h100")
    start = 2 * table["start GPU"] + (table["start doubling"] if network else 0.0)
    return start + size / (speed * 1e9 * table["part adapter" if network else "part copy"])
