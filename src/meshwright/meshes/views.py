"""Views of a mesh that keep the order of its devices, so no array has to move."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshwright._checks import check_distinct, check_list, check_name
from meshwright.errors import MeshError, MeshOrderWarning, listing, near, short
from meshwright.meshes.build import AXIS_TYPES
from meshwright.spec.mesh_spec import MeshSpec, SpecLike

AnyMesh = TypeVar("AnyMesh", Mesh, AbstractMesh)


def split_axis(mesh: AnyMesh, axis: str, into: SpecLike) -> AnyMesh:
    """One axis as several; at most one of the new sizes may be -1.

    They have its axis type, unless `into` says another.

    >>> import meshwright as mw
    >>> dict(mw.split_axis(mw.mesh("fsdp:8"), "fsdp", "outer:2, inner:-1").shape)
    {'outer': 2, 'inner': 4}
    """
    place = _index(mesh, axis)
    names, sizes, types = _axes(mesh)
    parts = MeshSpec.parse(into)
    if any(part.slow is not None for part in parts.axes):
        raise MeshError(f"'{parts}': a view keeps the devices where they are; leave slow* out.")
    known = math.prod(size for size in parts.sizes if size != -1)
    if sizes[place] % known or (parts.size is not None and parts.size != sizes[place]):
        raise MeshError(
            f"axis {axis!r} of size {sizes[place]} does not split into '{parts}'. "
            f"Make the sizes multiply to {sizes[place]}."
        )
    parts = parts.resolve(sizes[place])
    around = slice(place, place + 1)
    names[around], sizes[around] = list(parts.names), list(parts.sizes)
    types[around] = [AXIS_TYPES[kind] if kind else types[place] for kind in parts.types]
    return _view(mesh, names, sizes, types)


def merge_axes(mesh: AnyMesh, axes: Sequence[str], name: str) -> AnyMesh:
    """Neighbouring axes as one, in the order they stand in the mesh.

    >>> import meshwright as mw
    >>> dict(mw.merge_axes(mw.mesh("dp:2, fsdp:4"), ["dp", "fsdp"], "data").shape)
    {'data': 8}
    """
    axes = check_list("axes", axes)
    if not axes:
        raise MeshError("merge_axes takes a list of at least one axis name.")
    places = [_index(mesh, axis) for axis in axes]
    if places != list(range(places[0], places[0] + len(places))):
        raise MeshError(
            f"axes {listing(axes)} are not neighbours in this order in {listing(mesh.axis_names)}; "
            "merging them would reorder the devices."
        )
    names, sizes, types = _axes(mesh)
    around = slice(places[0], places[-1] + 1)
    if len(set(types[around])) > 1:
        raise MeshError(f"axes {listing(axes)} have different axis types; they cannot be merged.")
    names[around], sizes[around] = [name], [math.prod(sizes[around])]
    types[around] = [types[places[0]]]
    return _view(mesh, names, sizes, types)


def rename_axes(mesh: AnyMesh, names: Mapping[str, str]) -> AnyMesh:
    """The same mesh under other names.

    >>> import meshwright as mw
    >>> mw.rename_axes(mw.mesh("dp:8"), {"dp": "data"}).axis_names
    ('data',)
    """
    if not isinstance(names, Mapping):
        raise MeshError(f"names: {short(names)} is not a dict such as {{'dp': 'data'}}.")
    for old in names:
        _index(mesh, old)
    old_names, sizes, types = _axes(mesh)
    return _view(mesh, [names.get(name, name) for name in old_names], sizes, types)


def check_same_order(
    first: Mesh, second: Mesh, *, on_mismatch: Literal["error", "warn"] = "error"
) -> bool:
    """Whether two meshes list their devices in one order, so that arrays need no reshuffle.

    Raises, or warns and returns `False`, when they do not.

    >>> import meshwright as mw
    >>> mw.check_same_order(mw.mesh("dp:8"), mw.mesh("a:2, b:4"))
    True
    """
    if not isinstance(on_mismatch, str) or on_mismatch not in ("error", "warn"):
        raise MeshError(f"on_mismatch: {short(on_mismatch)} is not 'error' or 'warn'.")
    for given in (first, second):
        if not isinstance(given, Mesh):
            raise MeshError(f"{short(given)} is not a mesh with devices.")
    ours, theirs = list(first.devices.flat), list(second.devices.flat)
    if ours == theirs:
        return True
    if set(ours) != set(theirs):
        problem = (
            f"the meshes hold different devices: {len(set(ours) - set(theirs))} only in the "
            f"first, {len(set(theirs) - set(ours))} only in the second"
        )
    else:
        where = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        problem = (
            f"the meshes hold the same {len(ours)} devices in a different order, "
            f"first at flat position {where} (device {ours[where].id} and {theirs[where].id})"
        )
    message = (
        f"{problem}. Arrays moved between them are reshuffled: make one mesh a view of the other "
        "(split_axis, merge_axes, rename_axes)."
    )
    if on_mismatch == "error":
        raise MeshError(message)
    warnings.warn(message, MeshOrderWarning, stacklevel=2)
    return False


def _index(mesh: Mesh | AbstractMesh, axis: str) -> int:
    _check_mesh(mesh)
    if not isinstance(axis, str) or axis not in mesh.axis_names:
        hint = near(axis, map(str, mesh.axis_names)) if isinstance(axis, str) else ""
        raise MeshError(f"no axis {short(axis)} in this mesh: {listing(mesh.axis_names)}.{hint}")
    return mesh.axis_names.index(axis)


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise MeshError(f"{short(mesh)} is not a mesh.")


def _axes(mesh: Mesh | AbstractMesh) -> tuple[list[str], list[int], list[Any]]:
    _check_mesh(mesh)
    return list(mesh.axis_names), list(mesh.shape.values()), list(mesh.axis_types)


def _view(mesh: AnyMesh, names: list[str], sizes: list[int], types: list[Any]) -> AnyMesh:
    kept = [name for name in mesh.axis_names if not isinstance(name, str)]
    for name in names:
        if not any(name is other for other in kept):
            check_name(name)
    check_distinct(names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(tuple(sizes), tuple(names), axis_types=tuple(types))
    devices = np.asarray(mesh.devices).reshape(sizes)
    return Mesh(devices, tuple(names), axis_types=tuple(types))
