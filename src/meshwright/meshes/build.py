"""`mesh(...)`: build the `jax.sharding.Mesh` of a request; explain any mesh on its hardware.

The order of a call: parse the request, find the topology to build on, take a part of it if the
request is smaller, resolve the open sizes, search a placement, build. Everything up to the last
step is pure, and cached by value.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshwright._checks import is_single_slice
from meshwright.errors import MeshError, listing, option_text, short
from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.topology import Topology
from meshwright.hardware.topology import topology as read_topology
from meshwright.meshes.devices import attach, target_topology
from meshwright.placement.cost_model import Order
from meshwright.placement.placement import Placement
from meshwright.placement.placer import (
    measure,
    place,
    placement_of,
    resolve_on,
    warn_idle,
    warn_names,
)
from meshwright.spec.mesh_spec import MeshSpec, SpecLike

AxisTypeLike: TypeAlias = AxisType | str | None
AxisTypesLike: TypeAlias = AxisTypeLike | Sequence[AxisTypeLike] | Mapping[str, AxisTypeLike]

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
    axis_types: AxisTypesLike = None,
    slices: int = 1,
    intensity: Mapping[str, float] | None = None,
    allow_split: bool = True,
    order: Order = "auto",
    speeds: str | os.PathLike[str] | Calibration | None = None,
) -> Mesh | AbstractMesh:
    """Build the best mesh for a request, on the devices that are here or on hardware that is not.

    A request for fewer devices takes a compact, host-aligned part and warns about what stays idle
    (`IdleDevicesWarning`); an axis name one slip from a known one is warned of (`AxisNameWarning`).
    Equal requests give equal placements in every process.

    Args:
      spec: `"dp:2, fsdp:-1, tp:4"`, a dict, pairs, a `MeshSpec`, or sizes with `names`.
      on: nothing for the live devices, a device list, a `Topology`, or a name such as
        `"v5p:8x8x8"`. A name gives the vendor compiler's devices when it is installed, else an
        `AbstractMesh`.
      devices: another word for a device list.
      names: of the axes, where `spec` is sizes.
      dcn: how much of each axis crosses DCN, e.g. `{"dp": 2}`; searched if left out.
      axis_types: a word (`"auto"`, the default, `"explicit"`, `"manual"`), an `AxisType`, one per
        axis, or a dict by name.
      slices: how many slices of the named hardware are joined by DCN.
      intensity, allow_split, order: those of `place`.
      speeds: a file of `meshwright calibrate`, or what `calibrate` returned: measured speeds in
        place of the table's decide between layouts. A mesh does not keep them: give them to
        `explain` and `rehearse` too.

    Raises:
      CalibrationError: for speeds of another kind of chip, or a damaged file of them.
      SpecError: for a request that is wrong in itself.
      TopologyError: for unknown hardware.
      PlacementError: where no layout exists.
      MeshError: where the mesh and the devices do not fit.

    >>> import meshwright as mw
    >>> print(mw.mesh("dp:2, tp:-1"))
    Mesh('dp': 2, 'tp': 4, axis_types=(Auto, Auto))
    """
    # The request is checked before any device is looked at: that may start a backend.
    parsed = MeshSpec.parse(spec, names).with_types(axis_types)
    warn_names(parsed)
    hardware = read_topology(target_topology(on, devices, slices), speeds=speeds)
    placed = placement_of(parsed, hardware, dcn, intensity, allow_split, order)
    warn_idle(placed.spec, placed.topology, hardware)
    if placed.topology.devices is not None:
        return build_mesh(placed)
    abstract = _abstract(placed.spec)
    _remember(abstract, placed)
    return abstract


def abstract_mesh(
    spec: SpecLike,
    *,
    on: str | Topology | Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    axis_types: AxisTypesLike = None,
    slices: int = 1,
) -> AbstractMesh:
    """Build an `AbstractMesh`: sizes, names and types of axes, no devices.

    `spec`, `names`, `on`, `slices` and `axis_types` are those of `mesh`. Without `on` every size
    must be given. Raises `MeshError` if one is open.

    >>> import meshwright as mw
    >>> mw.abstract_mesh("fsdp:-1, tp:8", on="v5p:8x8x8").axis_sizes
    (64, 8)
    """
    parsed = MeshSpec.parse(spec, names).with_types(axis_types)
    warn_names(parsed)
    if on is not None:
        parsed, _ = resolve_on(parsed, read_topology(on, slices=slices))
    elif not is_single_slice(slices):
        raise MeshError(_slices_without_name(), option="slices")
    elif parsed.size is None:
        raise MeshError(
            f"'{parsed}' is open: say on what hardware, {option_text('on', 'v5p:8x8x8')}, or its "
            "size.",
            option="on",
        )
    return _abstract(parsed)


def _slices_without_name() -> str:
    return f"slices goes with a hardware name: say {option_text('on', 'v5p:8x8x8')}."


@functools.lru_cache(maxsize=128)
def build_mesh(placed: Placement) -> Mesh:
    """Build the mesh that a placement describes, and check it against the request."""
    # Assigned, because np.array(devices) would look into devices that happen to be sequences.
    devices = np.empty(len(placed.topology.devices or ()), object)
    devices[:] = placed.topology.devices
    types = tuple(AXIS_TYPES[kind] for kind in placed.spec.types)
    built = Mesh(devices[placed.positions], placed.spec.names, axis_types=types)
    # The principle of the library: what was asked for is what is built, or nothing is.
    shape = tuple(built.shape.items())
    if shape != tuple(zip(placed.spec.names, placed.spec.sizes, strict=True)):
        raise MeshError(f"asked for '{placed.spec}', got {shape}: please report this.")
    return built


def _abstract(spec: MeshSpec) -> AbstractMesh:
    types = tuple(AXIS_TYPES[kind] for kind in spec.types)
    if math.prod(spec.sizes) < 1:
        raise MeshError(f"'{spec}' is still open.")
    return AbstractMesh(spec.sizes, spec.names, axis_types=types)


# On what hardware an `AbstractMesh` of ours was built; it has no devices that could tell. JAX
# hands out one object for equal abstract meshes, so one mesh may stand for several machines.
# Weak, so that this table keeps no mesh alive.
_placements: weakref.WeakKeyDictionary[AbstractMesh, dict[Any, Placement]]
_placements = weakref.WeakKeyDictionary()


def _remember(mesh: AbstractMesh, placement: Placement) -> None:
    hardware = placement.topology
    # The same layout on the same hardware counts once, however often it is built.
    layout = tuple((axis.weight, axis.parts, axis.order) for axis in placement.axes)
    _placements.setdefault(mesh, {})[hardware.name, hardware.axes, layout] = placement


def _recall(mesh: AbstractMesh) -> Placement:
    """Return the placement of an abstract mesh; raise when none or several fit."""
    candidates = _placements.get(mesh, {})
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    problem = "has no devices"
    if candidates:
        names = listing(dict.fromkeys(name for name, _, _ in candidates))
        problem = (
            f"was built in {len(candidates)} ways, on {names}, and does not say which is meant"
        )
    raise MeshError(
        f"this AbstractMesh {problem}: say on what hardware, explain(mesh, on='v5p:8x8x8').",
        option="on",
    )


# A layout is called better from one per cent on; latency alone makes smaller differences.
_CLEARLY_BETTER = 0.99


def explain_mesh(
    mesh: Mesh | AbstractMesh | SpecLike | Placement,
    *,
    on: str | Topology | Sequence[Any] | None = None,
    slices: int = 1,
    intensity: Mapping[str, float] | None = None,
    speeds: str | os.PathLike[str] | Calibration | None = None,
) -> Placement:
    """Explain a mesh: per axis its links, bandwidth, modelled times, what crosses the network.

    Takes any `jax.sharding.Mesh`, and an `AbstractMesh` that `mesh` made for named hardware. A
    spec, or an `AbstractMesh` from elsewhere, has no devices: say `on` what hardware. `speeds` are
    those of `mesh`. The result prints itself, draws itself in a notebook, and has `to_json()`.

    >>> import meshwright as mw
    >>> print(mw.explain("fsdp:-1, tp:4", on="v5e:16x16").axes[1].cost.shape)
    ring
    """
    if on is None and not is_single_slice(slices):
        raise MeshError(_slices_without_name(), option="slices")
    if isinstance(mesh, Placement):
        if on is not None or intensity is not None or speeds is not None:
            raise MeshError("a Placement is explained as it is; place it anew with other options.")
        return mesh
    if isinstance(mesh, Mesh):
        return _explain_live(mesh, on, slices, intensity, speeds)
    if on is None and isinstance(mesh, AbstractMesh):
        placed = _recall(mesh)
        if speeds is not None:  # the same layout, by other speeds
            hardware = read_topology(placed.topology, speeds=speeds)
            return measure(placed.spec, hardware, placed.positions, intensity=intensity)
        if intensity is None:
            return placed
        return place(placed.spec, placed.topology, intensity=intensity)
    if on is None:
        raise MeshError(
            f"{short(mesh)} has no devices: say on what hardware, explain(..., on='v5p:8x8x8').",
            option="on",
        )
    if isinstance(mesh, AbstractMesh):
        spec = MeshSpec.parse(list(mesh.axis_sizes), names=_printable(mesh.axis_names))
    else:
        spec = MeshSpec.parse(mesh)
    spec, hardware = resolve_on(spec, read_topology(on, slices=slices, speeds=speeds))
    return place(spec, hardware, intensity=intensity)


def _printable(names: Sequence[Any]) -> list[str]:
    """Axis names of any mesh as names a `MeshSpec` allows: JAX allows every hashable value."""
    words: list[str] = []
    for name in names:
        word = re.sub(r"[^\w.-]+", "_", str(name))[:40] or "_"
        words.append(word if word not in words else f"{word}_{len(words)}")
    return words


def _explain_live(
    mesh: Mesh, on: Any, slices: int, intensity: Mapping[str, float] | None, speeds: Any
) -> Placement:
    if mesh.empty:
        raise MeshError("the mesh is empty: it has no devices.")
    devices = list(mesh.devices.flat)
    hardware = read_topology(devices)
    if on is not None:  # the caller knows the wiring better than the devices do, e.g. a twist
        hardware = attach(read_topology(on, slices=slices), devices)
    hardware = read_topology(hardware, speeds=speeds)
    spec = MeshSpec.parse(list(mesh.devices.shape), names=_printable(mesh.axis_names))
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    measured = measure(spec, hardware, positions, intensity=intensity)
    best = place(spec, hardware, intensity=intensity)
    is_better = best.cost < measured.cost * _CLEARLY_BETTER
    return dataclasses.replace(measured, runner_up=best.axes if is_better else best.runner_up)
