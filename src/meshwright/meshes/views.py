"""Views of a mesh: split, merge and rename its axes without moving any array.

A view keeps the flat order of the devices, so an array on one mesh has the same bytes on the same
devices under the other. `check_same_order` tells whether two meshes agree in that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshwright._checks import check_distinct, check_list, check_name
from meshwright.errors import MeshError, MeshOrderWarning, listing, near, short, warn
from meshwright.meshes.build import AXIS_TYPES
from meshwright.spec.mesh_spec import MeshSpec, SpecLike

AnyMesh = TypeVar("AnyMesh", Mesh, AbstractMesh)


def split_axis(mesh: AnyMesh, axis: str, into: SpecLike) -> AnyMesh:
    """Split one axis into several; at most one of the new sizes may be -1.

    The new axes keep its axis type, unless `into` says another. Raises `MeshError` when the sizes
    do not multiply to the axis's.

    >>> import meshwright as mw
    >>> dict(mw.split_axis(mw.mesh("fsdp:8"), "fsdp", "outer:2, inner:-1").shape)
    {'outer': 2, 'inner': 4}
    """
    index = _index(mesh, axis)
    names, sizes, types = _axes(mesh)
    parts = MeshSpec.parse(into)
    # A slow factor asks for a placement, and a view moves nothing.
    if any(part.slow is not None for part in parts.axes):
        raise MeshError(
            f"'{parts}': a view keeps the devices where they are; leave slow* out.", option="into"
        )
    # Checked here, because `resolve` would speak of devices where an axis is meant.
    known = math.prod(size for size in parts.sizes if size != -1)
    size = sizes[index]
    if size % known or (parts.size is not None and parts.size != size):
        raise MeshError(
            f"axis {axis!r} of size {size} does not split into '{parts}'. "
            f"Make the sizes multiply to {size}.",
            option="into",
        )
    parts = parts.resolve(size)
    replaced = slice(index, index + 1)
    names[replaced], sizes[replaced] = list(parts.names), list(parts.sizes)
    types[replaced] = [AXIS_TYPES[word] if word else types[index] for word in parts.types]
    return _view(mesh, names, sizes, types)


def merge_axes(mesh: AnyMesh, axes: Sequence[str], name: str) -> AnyMesh:
    """Merge neighbouring axes into one; `axes` lists them in the order they stand in the mesh.

    `name` is that of the new axis. Raises `MeshError` unless the axes are neighbours in this order
    and have the same axis type.

    >>> import meshwright as mw
    >>> dict(mw.merge_axes(mw.mesh("dp:2, fsdp:4"), ["dp", "fsdp"], "data").shape)
    {'data': 8}
    """
    axes = check_list("axes", axes)
    if not axes:
        raise MeshError("merge_axes takes a list of at least one axis name.", option="axes")
    indices = [_index(mesh, axis) for axis in axes]
    if indices != list(range(indices[0], indices[0] + len(indices))):
        raise MeshError(
            f"axes {listing(axes)} are not neighbours in this order in {listing(mesh.axis_names)}; "
            "merging them would reorder the devices.",
            option="axes",
        )
    names, sizes, types = _axes(mesh)
    replaced = slice(indices[0], indices[-1] + 1)
    if len(set(types[replaced])) > 1:
        raise MeshError(
            f"axes {listing(axes)} have different axis types; they cannot be merged.", option="axes"
        )
    names[replaced], sizes[replaced] = [name], [math.prod(sizes[replaced])]
    types[replaced] = [types[indices[0]]]
    return _view(mesh, names, sizes, types)


def rename_axes(mesh: AnyMesh, names: Mapping[str, str]) -> AnyMesh:
    """Rename axes of a mesh: `names` maps old to new, axes it does not name keep theirs.

    Raises `MeshError` for an axis that the mesh does not have.

    >>> import meshwright as mw
    >>> mw.rename_axes(mw.mesh("dp:8"), {"dp": "data"}).axis_names
    ('data',)
    """
    if not isinstance(names, Mapping):
        raise MeshError(
            f"names: {short(names)} is not a dict such as {{'dp': 'data'}}.", option="names"
        )
    for old in names:
        _index(mesh, old)  # refuses unknown names, and what is no mesh
    old_names, sizes, types = _axes(mesh)
    return _view(mesh, [names.get(name, name) for name in old_names], sizes, types)


def check_same_order(
    first: Mesh, second: Mesh, *, on_mismatch: Literal["error", "warn"] = "error"
) -> bool:
    """Check that two meshes list their devices in one order, so that arrays need no reshuffle.

    Returns `True` if `first` and `second` do. When they do not, raises `MeshError`, or with
    `on_mismatch="warn"` warns (`MeshOrderWarning`) and returns `False`.

    >>> import meshwright as mw
    >>> mw.check_same_order(mw.mesh("dp:8"), mw.mesh("a:2, b:4"))
    True
    """
    if not isinstance(on_mismatch, str) or on_mismatch not in ("error", "warn"):
        raise MeshError(
            f"on_mismatch: {short(on_mismatch)} is not 'error' or 'warn'.", option="on_mismatch"
        )
    for mesh in (first, second):
        if not isinstance(mesh, Mesh):
            raise MeshError(f"{short(mesh)} is not a mesh with devices.")
    left, right = list(first.devices.flat), list(second.devices.flat)
    if left == right:
        return True
    # Other devices need a transfer, another order a reshuffle: the message says which.
    if set(left) != set(right):
        problem = (
            f"the meshes hold different devices: {len(set(left) - set(right))} only in the "
            f"first, {len(set(right) - set(left))} only in the second"
        )
    else:
        where = next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
        problem = (
            f"the meshes hold the same {len(left)} devices in a different order, "
            f"first at flat position {where} (device {left[where].id} and {right[where].id})"
        )
    message = (
        f"{problem}. Arrays moved between them are reshuffled: make one mesh a view of the other "
        "(split_axis, merge_axes, rename_axes)."
    )
    if on_mismatch == "error":
        raise MeshError(message)
    warn(message, MeshOrderWarning)
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
    # JAX allows every hashable value as an axis name; those that were there may stay.
    kept = [name for name in mesh.axis_names if not isinstance(name, str)]
    for name in names:
        if not any(name is other for other in kept):
            check_name(name)
    check_distinct(names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(tuple(sizes), tuple(names), axis_types=tuple(types))
    devices = np.asarray(mesh.devices).reshape(sizes)
    return Mesh(devices, tuple(names), axis_types=tuple(types))
