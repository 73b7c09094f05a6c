"""What a call of `plan` asks for, read and checked: hardware, mesh, options, groups to keep."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from meshwright._checks import check_flag, check_integer
from meshwright.errors import MeshError, PlanningError, near, option_text, short
from meshwright.hardware.topology import Topology
from meshwright.hardware.topology import topology as read_topology
from meshwright.meshes.build import explain_mesh
from meshwright.meshes.devices import target_topology
from meshwright.placement.placement import Placement
from meshwright.planning.remat_choice import Variant
from meshwright.spec.mesh_spec import MeshSpec, SpecLike


def hardware_of(
    mesh: Any, on: Any, slices: int, speeds: Any
) -> tuple[Topology, Any, Placement | None]:
    """Return the hardware, the devices to build a mesh on if they are here, and the user's mesh."""
    if isinstance(mesh, Mesh):
        try:
            placed = explain_mesh(mesh, on=on, slices=slices, speeds=speeds)
        except MeshError as error:
            raise PlanningError(
                f"mesh: {error} Leave on= out to plan for the mesh's own devices, or pass "
                "mesh.abstract_mesh: its axes, on the hardware of on=.",
                option="mesh",
            ) from error
        return placed.topology, mesh, placed
    if isinstance(mesh, AbstractMesh) and on is None:
        try:
            return explain_mesh(mesh, slices=slices, speeds=speeds).topology, None, None
        except MeshError as error:
            raise PlanningError(
                "mesh: an AbstractMesh does not say on what hardware: pass on='v5e:4x4', or "
                "on=jax.devices().",
                option="on",
            ) from error
    if isinstance(on, (str, Topology)):
        named = read_topology(on, slices=slices, speeds=speeds)
        here = named.chip.family == "cpu" or named.devices is not None
        return named, on if here else None, None
    live = target_topology(on, None, slices)
    return (live if speeds is None else read_topology(live, speeds=speeds)), live, None


def requested_mesh(mesh: SpecLike | Mesh | AbstractMesh) -> MeshSpec:
    """Read the mesh to plan for; constraints can be written for axes of type Auto alone."""
    types: Sequence[str | None]
    if isinstance(mesh, (Mesh, AbstractMesh)):
        types = [kind.name.lower() for kind in mesh.axis_types]
        spec = MeshSpec.parse(list(zip(mesh.axis_names, mesh.axis_sizes, strict=True)))
    else:
        spec = MeshSpec.parse(mesh)
        types = spec.types
    for name, kind in zip(spec.names, types, strict=True):
        if kind not in (None, "auto"):
            made_so = ""
            if isinstance(mesh, (Mesh, AbstractMesh)):
                auto = f"axis_types=(jax.sharding.AxisType.Auto,) * {len(types)}"
                made_so = f", jax.make_mesh(..., {auto})"
            raise PlanningError(
                f"mesh: axis {name!r} is of type {kind}, and a plan's constraints are for axes of "
                f"type auto. Pass a mesh of these{made_so}, or sizes: "
                f"{option_text('mesh', 'dp:-1, tp:4')}.",
                option="mesh",
            )
    if any(axis.slow is not None for axis in spec.axes):
        sizes = ", ".join(f"{axis.name}:{axis.size}" for axis in spec.axes)
        raise PlanningError(
            f"mesh: {spec}: a plan decides itself what crosses DCN. Leave the parts out: "
            f"{option_text('mesh', sizes)}.",
            option="mesh",
        )
    return spec


def check_options(
    check: int, memory: float, max_axes: int, compiler: str, *, progress: bool, pipelines: bool
) -> None:
    """Check the options that are plain values."""
    if compiler not in ("vendor", "cpu"):
        raise PlanningError(
            f"compiler: {short(compiler)} is neither 'vendor' nor 'cpu'.", option="compiler"
        )
    check_integer("check", check, least=0, error=PlanningError)
    check_integer("max_axes", max_axes, error=PlanningError)
    check_flag("progress", progress, error=PlanningError)
    check_flag("pipelines", pipelines, error=PlanningError)
    if isinstance(memory, bool) or not isinstance(memory, numbers.Real) or not 0 < memory <= 1:
        raise PlanningError(
            f"memory: {short(memory)} is not a part of a device's memory, such as 0.9.",
            option="memory",
        )


def check_speeds(hardware: Topology) -> None:
    """Refuse hardware whose speeds are not known."""
    chip = hardware.chip
    missing = [
        name
        for name, figure in (
            ("tflops", chip.tflops),
            ("memory_tbps", chip.memory_tbps),
            ("memory_gb", chip.memory_gb),
        )
        if not figure
    ]
    if missing:
        raise PlanningError(
            f"on: {hardware.name} has no speeds ({', '.join(missing)}), so plans cannot be "
            "compared. Measure them with `meshwright calibrate` and pass speeds=, or name the "
            "hardware, on='h100:8'.",
            option="on",
        )


def kept_kinds(
    keep: Mapping[str, str] | None, variant: Variant, fixed: MeshSpec | None
) -> dict[int, int]:
    """Read `keep` as kinds of dims and the numbers of their axes."""
    names, sizes = variant.names, variant.groups.sizes
    kept: dict[int, int] = {}
    if keep is not None and not isinstance(keep, Mapping):
        raise PlanningError(
            f"keep: {short(keep)} is no mapping of groups to axes, such as {{'batch': 'dp'}}.",
            option="keep",
        )
    for group, axis in (keep or {}).items():
        if not (isinstance(group, str) and isinstance(axis, str)):
            raise PlanningError(
                f"keep: {short(group)}: {short(axis)} is no name of a group and name of an axis, "
                "such as {'batch': 'dp'}.",
                option="keep",
            )
        if group not in names:
            listed = ", ".join(repr(each) for each in names)
            raise PlanningError(
                f"keep: the step has no group of dims {group!r}.{near(group, names)} It has "
                f"{listed}.",
                option="keep",
            )
        if fixed is None:
            raise PlanningError(
                f"keep: {group!r} shall take {axis!r}, so say the mesh too: "
                f"{option_text('mesh', f'{axis}:-1, ...')}.",
                option="keep",
            )
        if axis not in fixed.names:
            raise PlanningError(
                f"keep: the mesh {fixed} has no axis {axis!r}.{near(axis, fixed.names)}",
                option="keep",
            )
        kind, length = list(names).index(group), fixed.sizes[list(fixed.names).index(axis)]
        if not any(size % length == 0 for size in sizes[kind]):
            raise PlanningError(
                f"keep: {axis}:{length} divides no dim of {group!r}, which has "
                f"{' or '.join(f'{size:,}' for size in sizes[kind])}. Take another size for "
                f"{axis!r}, or pad {group!r}.",
                option="keep",
            )
        kept[kind] = list(fixed.names).index(axis)
    return kept
