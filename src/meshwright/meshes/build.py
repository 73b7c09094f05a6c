"""`mesh(...)`: build the `jax.sharding.Mesh` of a request; explain any mesh on its hardware.

The order of a call: parse the request, find the topology to build on, take a part of it if the
request is smaller, resolve the open sizes, search a placement, build. Everything up to the last
step is pure, and cached by value.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshwright import _compat
from meshwright._checks import check_flag, is_single_slice
from meshwright._text import plural_noun
from meshwright.axes import meant_name, role
from meshwright.errors import (
    AxisNameWarning,
    IdleDevicesWarning,
    MeshError,
    SpecError,
    listing,
    option_text,
    short,
    warn,
)
from meshwright.hardware.topology import Topology, compact_part
from meshwright.hardware.topology import topology as read_topology
from meshwright.meshes.devices import attach, target_topology
from meshwright.placement.cost_model import Order
from meshwright.placement.placement import Placement
from meshwright.placement.placer import measure, place
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

    Raises:
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
    hardware = target_topology(on, devices, slices)
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
        raise MeshError(_SLICES_WITHOUT_NAME, option="slices")
    elif parsed.size is None:
        raise MeshError(
            f"'{parsed}' is open: say on what hardware, on='v5p:8x8x8', or its size.", option="on"
        )
    return _abstract(parsed)


_SLICES_WITHOUT_NAME = "slices goes with a hardware name: say on='v5p:8x8x8'."


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
    first = hardware.devices[0] if hardware.devices else None
    live = first is not None and not _compat.is_compile_only(first)
    if not live or hardware.num_hosts > 1 or not hardware.num_devices < needed <= _MOST_SIMULATED:
        return ""
    alone = "" if hardware.chip.family == "cpu" else " and JAX_PLATFORMS=cpu"
    return (
        f" To try it without hardware, simulate devices: JAX_NUM_CPU_DEVICES={needed}{alone} in "
        f"the environment, or jax.config.update('jax_num_cpu_devices', {needed}) before JAX's "
        f"first use. To lay it out on hardware that is not here, pass meshwright.mesh a name, "
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
) -> Placement:
    """Explain a mesh: per axis its links, bandwidth, modelled times, what crosses the network.

    Takes any `jax.sharding.Mesh`, and an `AbstractMesh` that `mesh` made for named hardware. A
    spec, or an `AbstractMesh` from elsewhere, has no devices: say `on` what hardware. The result
    prints itself, draws itself in a notebook, and has `to_json()`.

    >>> import meshwright as mw
    >>> print(mw.explain("fsdp:-1, tp:4", on="v5e:16x16").axes[1].cost.shape)
    ring
    """
    if on is None and not is_single_slice(slices):
        raise MeshError(_SLICES_WITHOUT_NAME, option="slices")
    if isinstance(mesh, Placement):
        if on is not None or intensity is not None:
            raise MeshError("a Placement is explained as it is; place it anew with other options.")
        return mesh
    if isinstance(mesh, Mesh):
        return _explain_live(mesh, on, slices, intensity)
    if on is None and isinstance(mesh, AbstractMesh):
        placed = _recall(mesh)
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
    spec, hardware = resolve_on(spec, read_topology(on, slices=slices))
    return place(spec, hardware, intensity=intensity)


def _printable(names: Sequence[Any]) -> list[str]:
    """Axis names of any mesh as names a `MeshSpec` allows: JAX allows every hashable value."""
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
    if on is not None:  # the caller knows the wiring better than the devices do, e.g. a twist
        hardware = attach(read_topology(on, slices=slices), devices)
    spec = MeshSpec.parse(list(mesh.devices.shape), names=_printable(mesh.axis_names))
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    measured = measure(spec, hardware, positions, intensity=intensity)
    best = place(spec, hardware, intensity=intensity)
    is_better = best.cost < measured.cost * _CLEARLY_BETTER
    return dataclasses.replace(measured, runner_up=best.axes if is_better else best.runner_up)
