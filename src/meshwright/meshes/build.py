"""`mesh(...)`: from a request to a `jax.sharding.Mesh` that is exactly what was asked for."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshwright.errors import IdleDevicesWarning, MeshError, SpecError, short
from meshwright.hardware import Topology, compact_part
from meshwright.meshes.memory import remember
from meshwright.meshes.targets import one_slice, target
from meshwright.placement import Placement, place
from meshwright.placement.order import Order
from meshwright.spec import MeshSpec, SpecLike
from meshwright.spec.checks import check_flag

AXIS_TYPES = {
    None: AxisType.Auto,
    "auto": AxisType.Auto,
    "explicit": AxisType.Explicit,
    "manual": AxisType.Manual,
}


def mesh(
    spec: SpecLike,
    *,
    on: str | Topology | Sequence[Any] | None = None,
    devices: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    dcn: Mapping[str, int] | Sequence[int] | str | None = None,
    axis_types: Any = None,
    slices: int = 1,
    intensity: Mapping[str, float] | None = None,
    allow_split: bool = True,
    order: Order = "auto",
) -> Mesh | AbstractMesh:
    """The best mesh for a request, on the devices that are here or on hardware that is not.

    `on`: nothing for the live devices, a device list, a `Topology`, or a name such as
    `"v5p:8x8x8"` (with `slices`). A name gives the vendor compiler's devices when it is
    installed, else an `AbstractMesh`. `dcn` fixes how much of each axis crosses the slow
    network; `axis_types` is a word (`"auto"`, `"explicit"`, `"manual"`), an `AxisType`, one per
    axis, or a dict. The other options are those of `place`. A request for fewer devices takes a
    compact, host-aligned part and warns about what stays idle.

    >>> import meshwright as mw
    >>> print(mw.mesh("dp:2, tp:-1"))
    Mesh('dp': 2, 'tp': 4, axis_types=(Auto, Auto))
    """
    asked = MeshSpec.parse(spec, names).with_types(axis_types)
    hardware = target(on, devices, slices)
    placed = placement_of(asked, hardware, dcn, intensity, allow_split, order)
    warn_idle(placed.spec, placed.topology, hardware)
    return _build(placed)


def abstract_mesh(
    spec: SpecLike,
    *,
    on: str | Topology | Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    axis_types: Any = None,
    slices: int = 1,
) -> AbstractMesh:
    """The same request as an `AbstractMesh`: shapes and names, no devices.

    Without `on` every size must be given.

    >>> import meshwright as mw
    >>> mw.abstract_mesh("fsdp:-1, tp:8", on="v5p:8x8x8").axis_sizes
    (64, 8)
    """
    from meshwright.hardware import topology as read_topology

    asked = MeshSpec.parse(spec, names).with_types(axis_types)
    if on is not None:
        asked, _ = prepare(asked, read_topology(on, slices=slices))
    elif not one_slice(slices):
        raise MeshError("slices goes with a hardware name: say on='v5p:8x8x8'.")
    elif asked.size is None:
        raise MeshError(f"'{asked}' is open: say on what hardware, on='v5p:8x8x8', or its size.")
    return _abstract(asked)


def prepare(asked: MeshSpec, hardware: Topology, dcn: Any = None) -> tuple[MeshSpec, Topology]:
    """The request with every size known, and the part of the hardware it fills."""
    asked = asked.with_slow(dcn, hardware.num_slices)
    size = asked.size
    if size is not None and size < hardware.num_devices:
        slow = [axis.slow for axis in asked.axes]
        spans = math.prod(part for part in slow if part is not None)
        hardware = _part(hardware, size, spans if spans > 1 else None)
    return asked.resolve(hardware.num_devices, hardware.num_slices), hardware


_part = functools.lru_cache(maxsize=128)(compact_part)


def placement_of(
    asked: MeshSpec,
    hardware: Topology,
    dcn: Any = None,
    intensity: Mapping[str, float] | None = None,
    allow_split: bool = True,
    order: Order = "auto",
) -> Placement:
    """`place`, after the parts of the hardware have been chosen."""
    spec, part = prepare(asked, hardware, dcn)
    allow_split = check_flag("allow_split", allow_split)
    if intensity is not None and not isinstance(intensity, Mapping):
        raise SpecError(f"intensity: {short(intensity)} is not a dict such as {{'tp': 12}}.")
    frozen = None if intensity is None else tuple(intensity.items())
    try:
        hash((frozen, order))
    except TypeError:  # nothing good is unhashable; the checks of `place` say what it is
        return place(spec, part, intensity=intensity, allow_split=allow_split, order=order)
    return _placed(spec, part, frozen, allow_split, order)


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


def _build(placed: Placement) -> Mesh | AbstractMesh:
    if placed.topology.devices is not None:
        return from_placement(placed)
    abstract = _abstract(placed.spec)
    remember(abstract, placed)
    return abstract


@functools.lru_cache(maxsize=128)
def from_placement(placed: Placement) -> Mesh:
    """The mesh a placement describes, checked against the request."""
    devices = np.empty(len(placed.topology.devices or ()), object)
    devices[:] = placed.topology.devices
    types = tuple(AXIS_TYPES[kind] for kind in placed.spec.types)
    built = Mesh(devices[placed.positions], placed.spec.names, axis_types=types)
    got = tuple(built.shape.items())
    if got != tuple(zip(placed.spec.names, placed.spec.sizes, strict=True)):
        raise MeshError(f"asked for '{placed.spec}', got {got}: please report this.")
    return built


def warn_idle(spec: MeshSpec, part: Topology, hardware: Topology) -> None:
    """Say what stays idle, pointing at the line that called our caller."""
    idle = hardware.num_devices - part.num_devices
    if not idle:
        return
    hosts = hardware.num_hosts - part.num_hosts
    whole = f", {hosts} whole host{'s' if hosts > 1 else ''} among them" if hosts else ""
    warnings.warn(
        f"'{spec}' uses {part.num_devices} of {hardware.num_devices} devices; "
        f"{idle} stay idle{whole}. Put -1 on an axis to use all.",
        IdleDevicesWarning,
        stacklevel=3,
    )


def _abstract(spec: MeshSpec) -> AbstractMesh:
    types = tuple(AXIS_TYPES[kind] for kind in spec.types)
    if math.prod(spec.sizes) < 1:
        raise MeshError(f"'{spec}' is still open.")
    return AbstractMesh(spec.sizes, spec.names, axis_types=types)
