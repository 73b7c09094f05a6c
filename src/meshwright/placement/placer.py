"""`place(spec, topology)`: find the best layout and write down where every device goes.

`placement_of` places a request on the part of the hardware that it fills. `measure` does the
reverse: it reads the layout of any mesh that exists, ours or not, off its devices, and costs it by
the same model. Nothing here needs JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright._checks import check_flag
from meshwright._text import plural_noun
from meshwright.axes import axis_weights, meant_name, role
from meshwright.errors import (
    AxisNameWarning,
    IdleDevicesWarning,
    PlacementError,
    SpecError,
    option_text,
    short,
    warn,
)
from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.topology import Topology, compact_part
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
    parts_of_kind,
    scattered_cost,
    total_factor,
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
    speeds: str | os.PathLike[str] | Calibration | None = None,
) -> Placement:
    """Find the best layout of a mesh on the hardware, by search under a stated model.

    The search is complete over the ways to compose every axis from prime factors of the
    physical directions. The mesh fills the whole topology: open sizes of `spec` are filled from it.

    Args:
      spec: the mesh, as for `mesh`; `"fsdp:2*8"` fixes what crosses DCN.
      topology: the hardware, or its name.
      intensity: how much axes communicate, by name, in place of what their roles say: `{"tp": 20}`.
      allow_split: False keeps every torus direction in one piece.
      order: how an axis made of several directions is strung together: `"ring"` (neighbours only),
        `"grid"` (digits), or `"auto"` for what the compiler does best.
      speeds: a file of `meshwright calibrate`, or what `calibrate` returned, as for `topology`.

    Raises:
      PlacementError: when no layout exists, with near shapes that do.

    >>> print(place("fsdp:64, tp:4", "v5e:16x16").axes[1].parts)
    (Part(direction=0, factor=2, stride=1), Part(direction=1, factor=2, stride=1))
    """
    topology = read_topology(topology, speeds=speeds)
    resolved = MeshSpec.parse(spec).resolve(topology.num_devices, topology.num_slices)
    if not isinstance(allow_split, bool):
        raise PlacementError(
            f"allow_split: {short(allow_split)} is not True or False.", option="allow_split"
        )
    if not isinstance(order, str) or order not in ("auto", "ring", "grid"):
        raise PlacementError(
            f"order: {short(order)} is not one of auto, ring, grid.", option="order"
        )
    weights = axis_weights(resolved.names, resolved.sizes, intensity)
    slow = tuple(axis.slow for axis in resolved.axes)
    # From here on no device is looked at: the layout depends on the shapes alone, so every process
    # finds the same one.
    choices = search(topology, resolved.sizes, weights, slow, allow_split)
    if not choices:
        raise PlacementError(_no_layout(resolved, topology, allow_split))
    layouts = [
        tuple(
            _axis_plan(topology, name, size, weight, parts, order)
            for name, size, weight, parts in zip(
                resolved.names,
                resolved.sizes,
                weights,
                _with_strides(topology, choice.parts),
                strict=True,
            )
        )
        for choice in choices
    ]
    runner_up = layouts[1] if len(layouts) > 1 else None
    return Placement(resolved, topology, _positions(topology, layouts[0]), layouts[0], runner_up)


def _axis_plan(
    topology: Topology, name: str, size: int, weight: float, parts: Parts, order: Order
) -> AxisPlan:
    slow = total_factor(parts_of_kind(topology, parts, "network"))
    chosen = choose_order(topology, parts, name, order)
    hops = neighbour_hops(topology, parts, chosen)
    cost = dataclasses.replace(axis_cost(topology, parts), hops=hops)
    return AxisPlan(name, size, weight, parts, chosen, cost, slow)


def _with_strides(topology: Topology, choice: tuple[Parts, ...]) -> tuple[Parts, ...]:
    """Set the strides that the search left open: those of switches and networks.

    They cost the same in any order; the last mesh axis goes innermost, as in a reshape.
    """
    strides = [1] * len(topology.axes)
    layout: list[Parts] = []
    for parts in reversed(choice):
        with_strides = []
        for part in parts:
            if topology.axes[part.direction].kind != "torus":
                part = dataclasses.replace(part, stride=strides[part.direction])
                strides[part.direction] *= part.factor
            with_strides.append(part)
        layout.append(tuple(with_strides))
    return tuple(reversed(layout))


def _positions(topology: Topology, axes: tuple[AxisPlan, ...]) -> np.ndarray:
    """Return the place in the device list of every mesh position.

    Grid points add up axis by axis, so a broadcast sum (`np.ix_`) places any number of devices.
    """
    along = np.ix_(*(offsets(topology, axis.parts or (), axis.order) for axis in axes))
    points: np.ndarray = functools.reduce(np.add, along)
    positions: np.ndarray = topology.index.ravel()[points]
    return positions


def _no_layout(spec: MeshSpec, topology: Topology, allow_split: bool) -> str:
    """Say why no layout exists: DCN parts that do not fit, or directions that must be split."""
    network = [axis.slow for axis in spec.axes]
    if any(part is not None for part in network):
        fixed = math.prod(part for part in network if part is not None)
        rest = "" if None in network else f" (they must multiply to {topology.num_slices})"
        where = f"'{spec}' does not fit {topology.name}: its DCN parts multiply to {fixed}"
        where += f", DCN joins {topology.num_slices} parts{rest}."
        # With the right product and splitting forbidden, the torus is to blame: fall through.
        if fixed != topology.num_slices or allow_split:
            return f"{where} Change dcn, or leave it out to have it worked out."
    near = near_shapes(topology, spec.sizes)
    shapes = "; ".join(
        ", ".join(f"{name}:{size}" for name, size in zip(spec.names, shape, strict=True))
        for shape in near
    )
    fix = f"Near shapes that do: {shapes}. Or pass" if near else "Pass"
    return (
        f"'{spec}' needs a direction of {topology.name} to be split, and splitting is forbidden. "
        f"{fix} allow_split=True (allow_split_physical_axes=True in create_mesh)."
    )


def near_shapes(topology: Topology, sizes: Sequence[int], most: int = 3) -> list[tuple[int, ...]]:
    """Return up to `most` mesh shapes made of whole directions, the nearest to `sizes` first."""
    sides = [axis.size for axis in topology.axes if axis.size > 1]
    if len(sizes) ** len(sides) > 100_000:  # a hint in a message must not take seconds
        return []
    shapes = set()
    for owners in itertools.product(range(len(sizes)), repeat=len(sides)):
        shape = [1] * len(sizes)
        for owner, side in zip(owners, sides, strict=True):
            shape[owner] *= side
        shapes.add(tuple(shape))

    def distance(shape: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        away = sum(abs(math.log(near / wanted)) for near, wanted in zip(shape, sizes, strict=True))
        # Rounded, so that shapes at the same distance are ordered by themselves.
        return (round(away, 9), shape)

    return sorted(shapes, key=distance)[:most]


# A request on hardware: the part that it fills, its open sizes, its placement, what to warn of.


def resolve_on(spec: MeshSpec, hardware: Topology, dcn: Any = None) -> tuple[MeshSpec, Topology]:
    """Fill the open sizes of a spec; also return the part of the hardware that it uses."""
    spec = spec.with_dcn(dcn, hardware.num_slices)
    size = spec.size
    if size is not None and size < hardware.num_devices:
        slow = [axis.slow for axis in spec.axes]
        spans = math.prod(part for part in slow if part is not None)
        # Slow factors of 1 alone ask for nothing: the part may then be whatever is compact.
        hardware = _part(hardware, size, spans if spans > 1 else None)
    try:
        return spec.resolve(hardware.num_devices, hardware.num_slices), hardware
    except SpecError as error:
        hint = more_devices_hint(spec, hardware)
        if not hint:
            raise
        raise SpecError(f"{error}{hint}", option=error.option) from None


# Simulated devices for a try-out; more of them take long to start.
_MOST_SIMULATED = 1024


def more_devices_hint(spec: MeshSpec, hardware: Topology) -> str:
    """Say how to go on where a single machine has too few devices, or nothing elsewhere."""
    needed = math.prod((axis.slow or 1) * max(axis.fast, 1) for axis in spec.axes)
    too_few = hardware.num_devices < needed <= _MOST_SIMULATED
    if not hardware.devices or hardware.num_hosts > 1 or not too_few:
        return ""
    from meshwright import _compat  # in the function: devices are here, and so JAX is loaded

    if _compat.is_compile_only(hardware.devices[0]):
        return ""
    alone = "" if hardware.chip.family == "cpu" else " and JAX_PLATFORMS=cpu"
    return (
        f" To try it without hardware, simulate devices: JAX_NUM_CPU_DEVICES={needed}{alone} in "
        f"the environment, or jax.config.update('jax_num_cpu_devices', {needed}) before JAX's "
        f"first use. To lay it out on hardware that is not here, name it: "
        f"{option_text('on', 'v5e:16x16')}."
    )


# Cached for its identity too: topologies compare by it, and `_placed` below has them as keys.
_part = functools.lru_cache(maxsize=128)(compact_part)


def placement_of(
    spec: MeshSpec,
    hardware: Topology,
    dcn: Any = None,
    intensity: Mapping[str, float] | None = None,
    allow_split: bool = True,
    order: Order = "auto",
) -> Placement:
    """Place a spec on the part of the hardware that it fills; equal calls search once."""
    resolved, part = resolve_on(spec, hardware, dcn)
    allow_split = check_flag("allow_split", allow_split)
    if intensity is not None and not isinstance(intensity, Mapping):
        raise SpecError(
            f"intensity: {short(intensity)} is not a dict such as {{'tp': 12}}.", option="intensity"
        )
    frozen = None if intensity is None else tuple(intensity.items())
    try:
        hash((frozen, order))
    except TypeError:  # no valid option is unhashable; the checks of `place` name the wrong one
        return place(resolved, part, intensity=intensity, allow_split=allow_split, order=order)
    return _placed(resolved, part, frozen, allow_split, order)


@functools.lru_cache(maxsize=128)
def _placed(
    spec: MeshSpec,
    part: Topology,
    intensity: tuple[tuple[str, float], ...] | None,
    allow_split: bool,
    order: Order,
) -> Placement:
    return place(
        spec,
        part,
        intensity=None if intensity is None else dict(intensity),
        allow_split=allow_split,
        order=order,
    )


def warn_idle(spec: MeshSpec, part: Topology, hardware: Topology) -> None:
    """Warn about devices that stay idle."""
    idle = hardware.num_devices - part.num_devices
    if not idle:
        return
    hosts = hardware.num_hosts - part.num_hosts
    whole = f", {hosts} {plural_noun(hosts, 'whole host')} among them" if hosts else ""
    warn(
        f"'{spec}' uses {part.num_devices} of {hardware.num_devices} devices; "
        f"{idle} stay idle{whole}. Put -1 on an axis to use all.",
        IdleDevicesWarning,
    )


def warn_names(spec: MeshSpec) -> None:
    """Warn about axis names that look like slips."""
    for name in spec.names:
        meant = meant_name(name)
        if meant is not None:
            warn(
                f"axis {name!r} is taken for one of your own, not for {meant!r} "
                f"({role(meant).description}). Did you mean {meant!r}?",
                AxisNameWarning,
            )


# A mesh that exists.


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
    # Invert `index`: from a device's place to its grid point. The index of a part of a topology
    # points into the whole one's devices, hence the size.
    point_of = np.empty(int(topology.index.max()) + 1, np.int64)
    point_of[topology.index.ravel()] = np.arange(topology.num_devices)
    points = point_of[positions]
    weights = axis_weights(spec.names, spec.sizes, intensity)
    axes = tuple(
        _measured_axis_plan(topology, np.moveaxis(points, i, -1).reshape(-1, size), name, weight)
        for i, (name, size, weight) in enumerate(zip(spec.names, spec.sizes, weights, strict=True))
    )
    return Placement(spec, topology, positions, axes)


def plain_reshape(placement: Placement) -> Placement:
    """Lay a mesh's devices out in their own order, as `np.reshape(devices, shape)` has it.

    >>> ours = place("fsdp:64, tp:4", "v5e:16x16")
    >>> round(plain_reshape(ours).cost / ours.cost, 2)
    2.0
    """
    in_order = np.sort(placement.topology.index, axis=None).reshape(placement.positions.shape)
    measured = measure(placement.spec, placement.topology, in_order)
    axes = (
        dataclasses.replace(axis, weight=ours.weight)
        for axis, ours in zip(measured.axes, placement.axes, strict=True)
    )
    return dataclasses.replace(measured, axes=tuple(axes))


def _measured_axis_plan(
    topology: Topology, groups: np.ndarray, name: str, weight: float
) -> AxisPlan:
    """Plan of an axis that exists; `groups` has a row of grid points per group, in mesh order."""
    coords = np.stack(np.unravel_index(groups, topology.shape), axis=-1)
    network = [d for d, axis in enumerate(topology.axes) if axis.kind == "network"]
    parts = _common_parts(coords)
    size = groups.shape[1]
    if parts is None:
        # Not a box: follow the ring link by link, in the order the mesh has.
        cost = scattered_cost(topology, coords)
        spans = max(
            (np.unique(group).size for group in coords[:, :, network].reshape(len(groups), -1)),
            default=1,
        )
        return AxisPlan(name, size, weight, None, "scattered", cost, spans if network else 1)
    slow = total_factor(parts_of_kind(topology, parts, "network"))
    order = _order_of(topology, groups, parts, name)
    # An order that is none of ours has no formula: count hops within each slice.
    inside = size // slow
    hops = (
        longest_hop(topology, coords.reshape(-1, inside, coords.shape[-1]))
        if order == "other"
        else neighbour_hops(topology, parts, order)
    )
    cost = dataclasses.replace(axis_cost(topology, parts), hops=hops)
    return AxisPlan(name, size, weight, parts, order, cost, slow)


def _common_parts(coords: np.ndarray) -> Parts | None:
    """Return the parts every group of an axis consists of, or `None` when they differ or have gaps.

    `coords` are grid coordinates `(groups, members, directions)`. The first group proposes the
    parts; every group must then hold each point of such a box exactly once, in any order.
    """
    first = coords[0]
    parts = []
    for direction in range(first.shape[1]):
        values = np.unique(first[:, direction])
        if values.size > 1:
            steps = np.diff(values)
            if (steps != steps[0]).any():
                return None
            parts.append(Part(direction, int(values.size), int(steps[0])))
    if total_factor(tuple(parts)) != first.shape[0]:
        return None
    # Number the points of the box: a group is one exactly if it has all numbers.
    code: np.ndarray = np.zeros(coords.shape[:2], np.int64)
    for direction in range(first.shape[1]):
        part = next((p for p in parts if p.direction == direction), Part(direction, 1, 1))
        along = coords[..., direction]
        digit, rest = np.divmod(along - along.min(axis=1)[:, None], part.stride)
        if rest.any() or (digit >= part.factor).any():
            return None
        code = code * part.factor + digit
    code.sort(axis=1)
    if (code != np.arange(code.shape[1])).any():
        return None
    return tuple(parts)


def _order_of(topology: Topology, groups: np.ndarray, parts: Parts, name: str) -> str:
    """Which of our orders the devices stand in, or `other`."""
    # Without two torus directions there is nothing to string together; ring and grid are then
    # only other words for it.
    is_line = choose_order(topology, parts, name, "auto") == "line"
    from_first = groups - groups[:, :1]
    for order in ("line", "ring", "grid") if is_line else ("ring", "grid"):
        if (from_first == offsets(topology, parts, order)).all():
            return order
    return "other"
