"""`MpmdMesh`: one mesh, cut along an axis into groups that each run their own program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from meshwright.errors import GroupError, listing, near, short
from meshwright.mpmd.groups.base import Groups
from meshwright.mpmd.groups.checks import axes_text, check_ids, check_mesh
from meshwright.mpmd.groups.cutting import without_axis


@dataclasses.dataclass(frozen=True, repr=False)
class MpmdMesh(Groups):
    """A mesh cut along one axis: as many groups as the axis is long, all of one shape.

    A group's mesh keeps all axis names and types, with size 1 along the axis that was cut. In
    several processes every process belongs to exactly one group. Entered with `with`, it is the
    last of `MpmdMesh.mesh_stack` inside.

    >>> import meshwright as mw
    >>> groups = mw.MpmdMesh(mw.mesh("pp:2, fsdp:4"), "pp")
    >>> groups.mpmd_dim, dict(groups.unstack[1].shape)
    (2, {'pp': 1, 'fsdp': 4})
    >>> print(groups)
    2 groups of 4 devices, pp:2, fsdp:4 cut along pp
    group  mesh          devices  process
        0  pp:1, fsdp:4  0-3      0
        1  pp:1, fsdp:4  4-7      0
    """

    jax_mesh: Mesh
    mpmd_axis_name: str

    mesh_stack: ClassVar[list[MpmdMesh]] = []

    def __post_init__(self) -> None:
        mesh, axis = check_mesh("jax_mesh", self.jax_mesh), self.mpmd_axis_name
        if axis not in mesh.axis_names:
            hint = near(axis, map(str, mesh.axis_names)) if isinstance(axis, str) else ""
            raise GroupError(
                f"mpmd_axis_name: no axis {short(axis)} in this mesh: "
                f"{listing(mesh.axis_names)}.{hint}"
            )
        self.check()

    def __enter__(self) -> MpmdMesh:
        MpmdMesh.mesh_stack.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        MpmdMesh.mesh_stack.pop()

    @functools.cached_property
    def mpmd_axis(self) -> int:
        """The place of the axis that is cut."""
        return self.jax_mesh.axis_names.index(self.mpmd_axis_name)

    @functools.cached_property
    def meshes(self) -> tuple[Mesh, ...]:  # type: ignore[override]
        """The groups' meshes, as in `unstack`."""
        return tuple(
            self._part([group]) for group in range(self.jax_mesh.devices.shape[self.mpmd_axis])
        )

    @functools.cached_property
    def device_coords(self) -> dict[Any, tuple[int, ...]]:
        """`{device: its coordinates in the whole mesh}`."""
        return {device: place for place, device in np.ndenumerate(self.jax_mesh.devices)}

    def mpmd_submesh(self, indices: Sequence[int]) -> MpmdMesh:
        """An `MpmdMesh` of the chosen groups, in the order given.

        >>> import meshwright as mw
        >>> groups = mw.MpmdMesh(mw.mesh("pp:4, fsdp:2"), "pp")
        >>> [device.id for device in groups.mpmd_submesh([3, 0]).jax_mesh.devices.flat]
        [6, 7, 0, 1]
        """
        chosen = check_ids("mpmd_submesh", indices, self.mpmd_dim)
        return MpmdMesh(self._part(chosen), self.mpmd_axis_name)

    def local_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """A spec as it holds inside a group: without the axis that was cut."""
        return without_axis(spec, self.mpmd_axis_name)

    def __repr__(self) -> str:
        return f"MpmdMesh('{axes_text(self.jax_mesh)}', {self.mpmd_axis_name!r})"

    def _part(self, groups: Sequence[int]) -> Mesh:
        mesh = self.jax_mesh
        devices = np.take(mesh.devices, list(groups), axis=self.mpmd_axis)
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
