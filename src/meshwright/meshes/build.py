"""`mesh(...)`: from a request to a `jax.sharding.Mesh` that is exactly what was asked for."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshwright._checks import check_flag
from meshwright.errors import IdleDevicesWarning, MeshError, SpecError, listing, short
from meshwright.hardware.topology import Topology, compact_part
from meshwright.hardware.topology import topology as read_topology
from meshwright.meshes.devices import attach, one_slice, target
from meshwright.placement.cost_model import Order
from meshwright.placement.placement import Placement
from meshwright.placement.placer import measure, place
from meshwright.spec.mesh_spec import MeshSpec, SpecLike

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
    from meshwright.hardware.topology import topology as read_topology

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
    asked = asked.with_dcn(dcn, hardware.num_slices)
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


# On what hardware an `AbstractMesh` of ours was built; it has no devices that could tell.


# JAX hands out one object for equal abstract meshes, so one mesh may stand for several machines.
_built: weakref.WeakKeyDictionary[AbstractMesh, dict[Any, Placement]] = weakref.WeakKeyDictionary()


def remember(mesh: AbstractMesh, placement: Placement) -> None:
    hardware = placement.topology
    how = tuple((axis.weight, axis.parts, axis.order) for axis in placement.axes)
    _built.setdefault(mesh, {})[hardware.name, hardware.axes, how] = placement


def recall(mesh: AbstractMesh) -> Placement:
    """The placement behind an abstract mesh; refused when none or several fit."""
    found = _built.get(mesh, {})
    if len(found) == 1:
        return next(iter(found.values()))
    problem = "has no devices"
    if found:
        names = listing(dict.fromkeys(name for name, _, _ in found))
        problem = f"was built in {len(found)} ways, on {names}, and does not say which is meant"
    raise MeshError(
        f"this AbstractMesh {problem}: say on what hardware, explain(mesh, on='v5p:8x8x8')."
    )


# `explain_mesh`: what any mesh, ours or not, means on its hardware.


# A layout is called better from one per cent on; latency alone makes smaller differences.
_CLEARLY = 0.99


def explain_mesh(
    mesh: Mesh | AbstractMesh | SpecLike | Placement,
    *,
    on: str | Topology | Sequence[Any] | None = None,
    slices: int = 1,
    intensity: Mapping[str, float] | None = None,
) -> Placement:
    """Per axis: the links it uses, their bandwidth, modelled times, what crosses the network.

    Takes any `jax.sharding.Mesh`, and an `AbstractMesh` that `mesh` made for named hardware. A
    spec, or an `AbstractMesh` from elsewhere, has no devices: say `on` what hardware. The result
    prints itself, draws itself in a notebook, and has `to_json()`.

    >>> import meshwright as mw
    >>> print(mw.explain("fsdp:-1, tp:4", on="v5e:16x16").axes[1].cost.shape)
    ring
    """
    if on is None and not one_slice(slices):
        raise MeshError("slices goes with a hardware name: say on='v5p:8x8x8'.")
    if isinstance(mesh, Placement):
        if on is not None or intensity is not None:
            raise MeshError("a Placement is explained as it is; place it anew with other options.")
        return mesh
    if isinstance(mesh, Mesh):
        return _explain_live(mesh, on, slices, intensity)
    if on is None and isinstance(mesh, AbstractMesh):
        found = recall(mesh)
        if intensity is None:
            return found
        return place(found.spec, found.topology, intensity=intensity)
    if on is None:
        raise MeshError(
            f"{short(mesh)} has no devices: say on what hardware, explain(..., on='v5p:8x8x8')."
        )
    if isinstance(mesh, AbstractMesh):
        spec = MeshSpec.parse(list(mesh.axis_sizes), names=_printable(mesh.axis_names))
    else:
        spec = MeshSpec.parse(mesh)
    spec, hardware = prepare(spec, read_topology(on, slices=slices))
    return place(spec, hardware, intensity=intensity)


def _printable(names: Sequence[Any]) -> list[str]:
    """Axis names of any mesh as words of ours: JAX allows every hashable value."""
    words: list[str] = []
    for name in names:
        word = re.sub(r"[^\w.-]+", "_", str(name))[:40] or "_"
        words.append(word if word not in words else f"{word}_{len(words)}")
    return words


def _explain_live(
    mesh: Mesh, on: Any, slices: int, intensity: Mapping[str, float] | None
) -> Placement:
    if mesh.empty:
        raise MeshError("the mesh is empty: it has no devices.")
    devices = list(mesh.devices.flat)
    hardware = read_topology(devices)
    if on is not None:
        hardware = attach(read_topology(on, slices=slices), devices)
    spec = MeshSpec.parse(list(mesh.devices.shape), names=_printable(mesh.axis_names))
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    found = measure(spec, hardware, positions, intensity=intensity)
    best = place(spec, hardware, intensity=intensity)
    other = best.axes if best.cost < found.cost * _CLEARLY else best.runner_up
    return dataclasses.replace(found, runner_up=other)
