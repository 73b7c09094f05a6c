"""`Groups`: what every kind of groups can tell, whether cut from a mesh or given as a list."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from meshwright import _compat
from meshwright.errors import GroupError, listing
from meshwright.mpmd.groups.checks import (
    check_one_kind,
    group_of_each,
    group_of_processes,
)


class Groups(abc.ABC):
    """Meshes with devices of their own, each to run its own program. They are numbered from 0.

    Either an `MpmdMesh`, one mesh cut along an axis, or `MeshGroups`, meshes of any shapes. What
    is derived from them is worked out once; the dicts are shared, so nobody may write to them.
    """

    meshes: tuple[Mesh, ...]

    def check(self) -> None:
        """Refuse groups that overlap, differ in platform, or tear a process apart."""
        check_one_kind(list(self.device_mpmd_idx))
        _ = self.process_mpmd_idx

    @property
    def unstack(self) -> list[Mesh]:
        """The groups' meshes."""
        return list(self.meshes)

    @property
    def mpmd_dim(self) -> int:
        """The number of groups."""
        return len(self.meshes)

    @functools.cached_property
    def device_mpmd_idx(self) -> dict[Any, int]:
        """`{device: its group}`."""
        return group_of_each(self.meshes)

    @functools.cached_property
    def mpmd_idx_for_mesh(self) -> dict[Mesh, int]:
        """`{group mesh: its number}`."""
        return {mesh: group for group, mesh in enumerate(self.meshes)}

    @functools.cached_property
    def compile_only(self) -> bool:
        """Whether the devices exist only for the compiler; they belong to no process then."""
        return bool(_compat.is_compile_only(self.meshes[0].devices.flat[0]))

    @functools.cached_property
    def process_mpmd_idx(self) -> dict[int, int]:
        """`{process: its group}`, of a single process the first one."""
        return {} if self.compile_only else group_of_processes(self.device_mpmd_idx)

    @property
    def spans_processes(self) -> bool:
        """Whether the devices are those of more than one process."""
        return len(self.process_mpmd_idx) > 1

    @property
    def my_mpmd_axis_index(self) -> int:
        """This process's group; refused unless the groups span processes."""
        if not self.spans_processes:
            why = "exist only for the compiler" if self.compile_only else "are all in one process"
            raise GroupError(
                f"no group is this process's own: the devices {why}. Name a group by its number, "
                "or compile against lowering_mesh()."
            )
        me = jax.process_index()
        if me not in self.process_mpmd_idx:
            raise GroupError(
                f"process {me} has no devices in {self!r}; processes "
                f"{listing(self.process_mpmd_idx)} have. Leave what is theirs to them."
            )
        return self.process_mpmd_idx[me]

    @property
    def my_mpmd_group_mesh(self) -> Mesh:
        """The mesh of this process's group; refused unless the groups span processes."""
        return self.meshes[self.my_mpmd_axis_index]

    def lowering_mesh(self) -> Mesh:
        """The mesh to compile against: this process's group, or group 0 in a single process."""
        return self.my_mpmd_group_mesh if self.spans_processes else self.meshes[0]

    @abc.abstractmethod
    def mpmd_submesh(self, indices: Sequence[int]) -> Groups:
        """The chosen groups, in the order given."""

    def local_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """A spec as it holds inside a group."""
        return spec

    def __str__(self) -> str:
        from meshwright.mpmd.groups.show import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from meshwright.mpmd.groups.show import as_html

        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        """The same facts as plain data."""
        from meshwright.mpmd.groups.show import as_json

        return as_json(self)
