"""`place(spec, topology)`: search, then write down where every device goes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.axes import axis_weights
from meshwright.errors import PlacementError, short
from meshwright.hardware.topology import Topology
from meshwright.hardware.topology import topology as read_topology
from meshwright.placement.cost_model import (
    Order,
    Part,
    Parts,
    axis_cost,
    choose_order,
    longest_hop,
    neighbour_hops,
    offsets,
    scattered_cost,
)
from meshwright.placement.placement import AxisPlan, Placement
from meshwright.placement.search import search
from meshwright.spec.mesh_spec import MeshSpec, SpecLike


def place(
    spec: SpecLike,
    topology: Topology | str,
    *,
    intensity: Mapping[str, float] | None = None,
    allow_split: bool = True,
    order: Order = "auto",
) -> Placement:
    """Find the best layout of a mesh on the hardware, by search under a stated model.

    The search is complete over the ways to compose every axis from prime factors of the
    physical directions.

    `intensity` overrides how much an axis communicates. `allow_split=False` keeps every torus
    direction in one piece. `order`: how an axis made of several directions is strung together,
    `"ring"` (neighbours only), `"grid"` (digits), or `"auto"` for what the compiler does best.

    >>> print(place("fsdp:64, tp:4", "v5e:16x16").axes[1].parts)
    (Part(dim=0, factor=2, stride=1), Part(dim=1, factor=2, stride=1))
    """
    topology = read_topology(topology)
    asked = MeshSpec.parse(spec).resolve(topology.num_devices, topology.num_slices)
    if not isinstance(allow_split, bool):
        raise PlacementError(f"allow_split: {short(allow_split)} is not True or False.")
    if not isinstance(order, str) or order not in ("auto", "ring", "grid"):
        raise PlacementError(f"order: {short(order)} is not one of auto, ring, grid.")
    weight = axis_weights(asked.names, asked.sizes, intensity)
    slow = tuple(axis.slow for axis in asked.axes)
    found = search(topology, asked.sizes, weight, slow, allow_split)
    if not found:
        raise PlacementError(_why_not(asked, topology, allow_split))
    plans = [
        tuple(
            _axis_plan(topology, name, size, w, parts, order)
            for name, size, w, parts in zip(
                asked.names, asked.sizes, weight, _with_strides(topology, choice.parts), strict=True
            )
        )
        for choice in found
    ]
    runner_up = plans[1] if len(plans) > 1 else None
    return Placement(asked, topology, _positions(topology, plans[0]), plans[0], runner_up)


def _axis_plan(
    topology: Topology, name: str, size: int, weight: float, parts: Parts, order: Order
) -> AxisPlan:
    slow = math.prod(p.factor for p in parts if topology.axes[p.dim].kind == "network")
    chosen = choose_order(topology, parts, name, order)
    hops = neighbour_hops(topology, parts, chosen)
    cost = dataclasses.replace(axis_cost(topology, parts), hops=hops)
    return AxisPlan(name, size, weight, parts, chosen, cost, slow)


def _with_strides(topology: Topology, choice: tuple[Parts, ...]) -> tuple[Parts, ...]:
    """Nest the shares of switches and networks: the last mesh axis innermost, as in a reshape."""
    strides = [1] * len(topology.axes)
    result: list[Parts] = []
    for parts in reversed(choice):
        filled = []
        for part in parts:
            if topology.axes[part.dim].kind != "torus":
                part, stride = dataclasses.replace(part, stride=strides[part.dim]), part.factor
                strides[part.dim] *= stride
            filled.append(part)
        result.append(tuple(filled))
    return tuple(reversed(result))


def _positions(topology: Topology, axes: tuple[AxisPlan, ...]) -> np.ndarray:
    """Grid points add up axis by axis, so a broadcast sum places any number of devices."""
    along = [
        offsets(topology, axis.parts or (), axis.order).reshape(
            [-1 if d == dim else 1 for d in range(len(axes))]
        )
        for dim, axis in enumerate(axes)
    ]
    points: np.ndarray = functools.reduce(np.add, along)
    placed: np.ndarray = topology.index.ravel()[points]
    return placed


def _why_not(spec: MeshSpec, topology: Topology, allow_split: bool) -> str:
    network = [axis.slow for axis in spec.axes]
    if any(part is not None for part in network):
        fixed = math.prod(part for part in network if part is not None)
        rest = "" if None in network else f" (they must multiply to {topology.num_slices})"
        where = f"'{spec}' does not fit {topology.name}: its slow parts multiply to {fixed}"
        where += f", the slow network joins {topology.num_slices} parts{rest}."
        if fixed != topology.num_slices or allow_split:
            return f"{where} Change dcn, or leave it out to have it worked out."
    near = near_shapes(topology, spec.sizes)
    shapes = "; ".join(
        ", ".join(f"{n}:{s}" for n, s in zip(spec.names, shape, strict=True)) for shape in near
    )
    fix = f"Near shapes that do: {shapes}. Or pass" if near else "Pass"
    return (
        f"'{spec}' needs a direction of {topology.name} to be split, and splitting is forbidden. "
        f"{fix} allow_split=True (allow_split_physical_axes=True in create_mesh)."
    )


# Which shapes would work when directions must not be split.


def near_shapes(topology: Topology, sizes: Sequence[int], most: int = 3) -> list[tuple[int, ...]]:
    """Up to `most` shapes made of whole directions, the nearest to `sizes` first."""
    dims = [axis.size for axis in topology.axes if axis.size > 1]
    if len(sizes) ** len(dims) > 100_000:
        return []
    shapes = set()
    for owners in itertools.product(range(len(sizes)), repeat=len(dims)):
        shape = [1] * len(sizes)
        for owner, dim in zip(owners, dims, strict=True):
            shape[owner] *= dim
        shapes.add(tuple(shape))

    def distance(shape: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        away = sum(abs(math.log(a / b)) for a, b in zip(shape, sizes, strict=True))
        return (round(away, 9), shape)

    return sorted(shapes, key=distance)[:most]


# The cost of an arrangement that already exists, ours or anybody's.


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
        _measured_axis_plan(topology, np.moveaxis(points, dim, -1).reshape(-1, size), name, weight)
        for dim, (name, size, weight) in enumerate(
            zip(
                spec.names, spec.sizes, axis_weights(spec.names, spec.sizes, intensity), strict=True
            )
        )
    )
    return Placement(spec, topology, positions, axes)


def _measured_axis_plan(
    topology: Topology, groups: np.ndarray, name: str, weight: float
) -> AxisPlan:
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
