"""What a collective costs: the placement's model applied to the devices it joins.

An all-gather of `b` bytes takes the model's time for 1 GiB, its part for bandwidth scaled by `b`.
A reduce-scatter takes as long, an all-reduce twice as long. An all-to-all takes as long over a
switch or a network; over a ring of `n` chips its messages travel a quarter of the ring on average,
so it takes `n / 4` times as long (over `k` whole directions, `k * longest / 4` times).

A permutation is routed pair by pair, direction by direction, and takes as long as its busiest link.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from meshwright.hardware import Topology
from meshwright.placement import AxisPlan, Placement, measure
from meshwright.placement.model import LATENCY, PAYLOAD, covers_whole
from meshwright.rehearsal.ledger.axes import AxisPart
from meshwright.rehearsal.ledger.routes import permutation_cost
from meshwright.spec import MeshSpec

_INSIDE = {"tpu": "ICI", "gpu": "NVLink", "cpu": "memory"}


@dataclasses.dataclass(frozen=True)
class Cost:
    links: str
    seconds: float


NOTHING = Cost("-", 0.0)


def group_cost(kind: str, size: int, plan: AxisPlan, topology: Topology) -> Cost:
    """The cost of one run of a collective of `size` bytes over groups that lie as planned."""
    if plan.size == 1:
        return NOTHING
    fixed = _latency(topology, plan)
    moving = (plan.cost.all_gather - fixed) * size / PAYLOAD
    if kind == "all-reduce":
        fixed, moving = 2 * fixed, 2 * moving
    elif kind in ("all-to-all", "ragged-all-to-all"):
        moving *= _detour(topology, plan)
    return Cost(_links(topology, plan), fixed + moving)


def pairs_cost(size: int, pairs: np.ndarray, placement: Placement) -> Cost:
    """The cost of a permutation. `pairs` hold mesh positions of senders and receivers."""
    topology = placement.topology
    coords = grid_coords(placement)[pairs]
    seconds, kind = permutation_cost(topology, coords, size)
    if not kind:
        return NOTHING
    return Cost("network" if kind == "network" else _INSIDE[topology.chip.family], seconds)


def plan_of(
    placement: Placement, groups: Sequence[np.ndarray], axes: tuple[AxisPart, ...] | None
) -> AxisPlan:
    """How the groups lie on the hardware: as an axis of the mesh does, or measured anew."""
    if axes is not None and len(axes) == 1 and axes[0].whole:
        return next(axis for axis in placement.axes if axis.name == axes[0].name)
    members = max(group.size for group in groups)
    largest = np.stack([group for group in groups if group.size == members])
    spec = MeshSpec.parse([("group", members), ("rest", len(largest))])
    places = placement.positions.ravel()[largest.T]
    return measure(spec, placement.topology, places).axes[0]


def grid_coords(placement: Placement) -> np.ndarray:
    """The place of every mesh position on the machine's grid, `(positions, directions)`."""
    topology = placement.topology
    point_of = np.empty(int(topology.index.max()) + 1, np.int64)
    point_of[topology.index.ravel()] = np.arange(topology.num_devices)
    coords: np.ndarray = topology.coords[point_of[placement.positions.ravel()]]
    return coords


def _latency(topology: Topology, plan: AxisPlan) -> float:
    if plan.parts is not None:
        return sum(LATENCY[topology.axes[p.dim].kind] * (p.factor - 1) for p in plan.parts)
    slowest = "network" if plan.slow > 1 else topology.axes[-1].kind
    return LATENCY[slowest] * (plan.size - 1)


def _detour(topology: Topology, plan: AxisPlan) -> float:
    """How much longer an all-to-all takes than an all-gather that leaves as many bytes."""
    ring = [p.factor for p in plan.parts or () if topology.axes[p.dim].kind == "torus"]
    if not ring:
        return 1.0
    if covers_whole(topology, plan.parts or ()):
        return max(1.0, len(ring) * max(ring) / 4)
    return max(1.0, math.prod(ring) / 4)


def _links(topology: Topology, plan: AxisPlan) -> str:
    if plan.slow == plan.size:
        return "network"
    family = topology.chip.family
    inside = f"ICI {plan.cost.shape}" if family == "tpu" else _INSIDE[family]
    return f"{inside}, network" if plan.slow > 1 else inside
