"""Seconds of collectives between GPUs: NCCL over NVLink and the network, by kind, size and wire.

    seconds = start + fill * size / (size + 1.3 MB) + bytes / bandwidth

`start` is what an empty message takes, `fill` what it takes until all wires are busy. NCCL sends in
rings through all GPUs: each wire then carries `(n - 1) / n` of the bytes, of an all-reduce twice
that, and NVLink and adapters work at once, so the slower one counts. Two things go faster: an
all-reduce inside a domain with NVLink SHARP (NVLS), which adds in the switch, and one over many
nodes, which goes by trees and keeps its speed where rings lose it.

Every figure is published or fitted to published ones: `benchmarks/data/collectives.json` has the
rows with their sources, `benchmarks/collectives.py` prints this model against each.
"""

from __future__ import annotations

import dataclasses
import math

from meshwright.hardware.topology import Topology

# The part of NVLink's nominal speed that rings reach, 16 GiB on 8 GPUs: H200 all-gather 361 and
# reduce-scatter 363 of 450 GB/s, B200 682 of 900, A100 235 of 300 (stas00/ml-engineering,
# network/README); H100 370 (NVIDIA/nccl-tests#212).
_RING = {"a100": 0.78, "h100": 0.80, "h200": 0.80, "b200": 0.76, "gb200": 0.76}
# What an all-reduce with NVLS reaches, bytes of the array a second: H200 270 of 450 GB/s (bus
# bandwidth 473 to 482), H100 274, B200 483 of 900, GB200 430 (72 GPUs) and 463 (8 of two trays);
# coreweave/nccl-tests PR 43, lixueduan.com. NCCL takes it from five GPUs on (ml-engineering: 4
# H200 reach 363, 5 reach 414), over two nodes as a tree of such domains (SkyPilot docs: 456 on 16
# H200; NVIDIA/nccl#1221: no gain beyond two nodes).
_IN_SWITCH = {"h100": 0.60, "h200": 0.60, "b200": 0.535, "gb200": 0.51}
_IN_SWITCH_FROM = 5  # GPUs
_TWO_NODES = 0.93
# A plain copy between two GPUs: 770 of 900 GB/s (Azure/AI-benchmarking-guide#7).
_COPY = 0.855
# Adapters: 46 to 48 of 50 GB/s (NVIDIA/nccl-tests#290). Rings lose 6 % with each doubling of the
# nodes: 360 GB/s on 4 nodes of H100, 345, 320, 300, 280, 260 on 128 (NVIDIA/nccl#1229, each 8
# adapters of 50). All-reduces do not: 365 on 4, 340 on 32, 350 on 248 nodes (ml-engineering,
# NVIDIA/nccl#1218, NVIDIA/nccl-tests#283).
_ADAPTER = 0.94
_RING_OVER_NODES, _PER_DOUBLING = 1.06, 0.937
# Seconds. 12.5 to 16 us for a few bytes on 8 GPUs (DeepEP#303), 47 us on two nodes
# (NVIDIA/nccl#1244). The rest is fitted to the sizes from 32 KiB to 1 GiB on 8 H200 and from 1 MiB
# to 16 GiB on 4 nodes of B200 (ml-engineering), and to those of 72 GB200.
_START, _FILL = 2.0e-6, 7.5e-6  # for each GPU of a domain
_NETWORK_START, _NETWORK_FILL = 31e-6, 155e-6  # for each doubling of the nodes
_FILL_BYTES = 1.35e6
_DEFAULT = "h100"  # for GPUs that no table has


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of GPUs: `inside` in each of `nodes` NVLink domains; nominal GB/s of their wires."""

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


def collective_seconds(kind: str, size: int, group: Group) -> float:
    """Model a collective; `size` are the bytes that an all-gather leaves on every GPU.

    >>> whole = Group("h200", 8, 1, 450, 50)
    >>> round(collective_seconds("all-reduce", 2**30, whole) * 1e3, 2)  # published: 4.05 ms
    4.05
    """
    doublings = math.log2(group.nodes)
    start = _START * group.inside + _NETWORK_START * doublings
    fill = _FILL * group.inside + _NETWORK_FILL * doublings
    moving = size / 1e9 / _bandwidth(kind, group)
    return start + fill * size / (size + _FILL_BYTES) + moving


def _bandwidth(kind: str, group: Group) -> float:
    """GB of the array that a collective is done with in a second."""
    n = group.size
    ring = _RING.get(group.chip, _RING[_DEFAULT]) * group.link
    if kind in ("all-to-all", "ragged-all-to-all"):
        inside = ring * n / max(1, group.inside - 1)
        if group.nodes == 1:
            return inside
        # What goes to other nodes leaves by the GPU's own adapter.
        return min(inside, _ADAPTER * group.network * group.nodes / (group.nodes - 1))
    in_switch = _IN_SWITCH.get(group.chip)
    if kind == "all-reduce" and in_switch and group.inside >= _IN_SWITCH_FROM and group.nodes <= 2:
        return in_switch * group.link * (_TWO_NODES if group.nodes == 2 else 1.0)
    bus = ring if group.inside > 1 else math.inf
    if group.nodes > 1:
        falling = _RING_OVER_NODES * _PER_DOUBLING ** math.log2(group.nodes)
        reached = _ADAPTER if kind == "all-reduce" else min(_ADAPTER, falling)
        bus = min(bus, reached * group.network * group.inside)
    passes = 2 if kind == "all-reduce" else 1
    return bus * n / (n - 1) / passes


def copy_seconds(size: float, speed: float, network: bool) -> float:
    """Model a copy from one GPU to another over a wire of this nominal speed."""
    start = 2 * _START + (_NETWORK_START if network else 0.0)
    return start + size / (speed * 1e9 * (_ADAPTER if network else _COPY))
