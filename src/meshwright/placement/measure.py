"""The cost of an arrangement that already exists, ours or anybody's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from meshwright.axes import weights
from meshwright.hardware import Topology
from meshwright.placement.factors import Part, Parts
from meshwright.placement.model import axis_cost
from meshwright.placement.order import choose_order, neighbour_hops, offsets
from meshwright.placement.plan import AxisPlan, Placement
from meshwright.placement.scattered import longest_hop, scattered_cost
from meshwright.spec import MeshSpec


def measure(
    spec: MeshSpec,
    topology: Topology,
    positions: np.ndarray,
    *,
    intensity: Mapping[str, float] | None = None,
) -> Placement:
    """Read the layout of each axis off the devices, and cost it by the same model as `place`.

    `positions` holds places in the topology's device list, one per mesh position.
    """
    # The index of a part of a topology points into the whole one's devices.
    point_of = np.empty(int(topology.index.max()) + 1, np.int64)
    point_of[topology.index.ravel()] = np.arange(topology.num_devices)
    points = point_of[positions]
    axes = tuple(
        _axis_plan(topology, np.moveaxis(points, dim, -1).reshape(-1, size), name, weight)
        for dim, (name, size, weight) in enumerate(
            zip(spec.names, spec.sizes, weights(spec.names, spec.sizes, intensity), strict=True)
        )
    )
    return Placement(spec, topology, positions, axes)


def _axis_plan(topology: Topology, groups: np.ndarray, name: str, weight: float) -> AxisPlan:
    """`groups`: one row of grid points per group of the axis, in mesh order."""
    coords = np.stack(np.unravel_index(groups, topology.shape), axis=-1)
    network = [d for d, axis in enumerate(topology.axes) if axis.kind == "network"]
    parts = _as_box(topology, coords)
    size = groups.shape[1]
    if parts is None:
        cost = scattered_cost(topology, coords)
        spans = max(
            (np.unique(group).size for group in coords[:, :, network].reshape(len(groups), -1)),
            default=1,
        )
        return AxisPlan(name, size, weight, None, "scattered", cost, spans if network else 1)
    slow = math.prod(p.factor for p in parts if p.dim in network)
    order = _order(topology, groups, parts, name)
    inside = size // slow
    hops = (
        longest_hop(topology, coords.reshape(-1, inside, coords.shape[-1]))
        if order == "other"
        else neighbour_hops(topology, parts, order)
    )
    cost = dataclasses.replace(axis_cost(topology, parts), hops=hops)
    return AxisPlan(name, size, weight, parts, order, cost, slow)


def _as_box(topology: Topology, coords: np.ndarray) -> Parts | None:
    """The pieces every group of an axis consists of, or `None` when they differ or have gaps."""
    first = coords[0]
    parts = []
    for dim in range(first.shape[1]):
        values = np.unique(first[:, dim])
        if values.size > 1:
            steps = np.diff(values)
            if (steps != steps[0]).any():
                return None
            parts.append(Part(dim, int(values.size), int(steps[0])))
    if math.prod(p.factor for p in parts) != first.shape[0]:
        return None
    code: np.ndarray = np.zeros(coords.shape[:2], np.int64)
    for dim in range(first.shape[1]):
        part = next((p for p in parts if p.dim == dim), Part(dim, 1, 1))
        digit, rest = np.divmod(
            coords[..., dim] - coords[..., dim].min(axis=1)[:, None], part.stride
        )
        if rest.any() or (digit >= part.factor).any():
            return None
        code = code * part.factor + digit
    code.sort(axis=1)
    if (code != np.arange(code.shape[1])).any():
        return None
    return tuple(parts)


def _order(topology: Topology, groups: np.ndarray, parts: Parts, name: str) -> str:
    """Which of our orders the devices stand in, if any."""
    away = groups - groups[:, :1]
    for order in ("line", "ring", "grid"):
        ours = choose_order(topology, parts, name, "auto") if order == "line" else order
        if order == "line" and ours != "line":
            continue
        if (away == offsets(topology, parts, ours)).all():
            return ours
    return "other"
