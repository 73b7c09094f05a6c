"""`place(spec, topology)`: search, then write down where every device goes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from meshwright.axes import weights
from meshwright.errors import PlacementError, short
from meshwright.hardware import Topology
from meshwright.hardware import topology as read_topology
from meshwright.placement.factors import Parts
from meshwright.placement.model import axis_cost
from meshwright.placement.nearby import near_shapes
from meshwright.placement.order import Order, choose_order, neighbour_hops, offsets
from meshwright.placement.plan import AxisPlan, Placement
from meshwright.placement.search import search
from meshwright.spec import MeshSpec, SpecLike


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
    weight = weights(asked.names, asked.sizes, intensity)
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
