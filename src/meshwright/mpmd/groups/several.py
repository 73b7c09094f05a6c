"""`MeshGroups`: groups that need not be alike, from meshes of any shapes and axis names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from meshwright.errors import GroupError, short
from meshwright.mpmd.groups.base import Groups
from meshwright.mpmd.groups.checks import axes_text, check_ids, check_mesh


@dataclasses.dataclass(frozen=True, repr=False)
class MeshGroups(Groups):
    """Meshes as groups, each with devices of its own; shapes and axis names may differ.

    >>> import jax, meshwright as mw
    >>> devices = jax.devices()
    >>> wide = mw.mesh("fsdp:3, tp:2", devices=devices[:6])
    >>> groups = mw.MeshGroups([wide, mw.mesh("tp:2", devices=devices[6:])])
    >>> print(groups)
    2 groups, 8 devices
    group  mesh          devices  process
        0  fsdp:3, tp:2  0-5      0
        1  tp:2          6-7      0
    """

    meshes: tuple[Mesh, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.meshes, (list, tuple)):
            raise GroupError(f"meshes: {short(self.meshes)} is not a list of meshes.")
        if not self.meshes:
            raise GroupError("meshes: the list is empty. Give at least one mesh.")
        for group, mesh in enumerate(self.meshes):
            check_mesh(f"group {group}", mesh)
        object.__setattr__(self, "meshes", tuple(self.meshes))
        self.check()

    def mpmd_submesh(self, indices: Sequence[int]) -> MeshGroups:
        """The chosen groups, in the order given."""
        chosen = check_ids("mpmd_submesh", indices, self.mpmd_dim)
        return MeshGroups(tuple(self.meshes[group] for group in chosen))

    def __repr__(self) -> str:
        shown = [f"'{axes_text(mesh)}'" for mesh in self.meshes[:8]]
        more = len(self.meshes) - len(shown)
        return f"MeshGroups([{', '.join(shown + [f'and {more} more'] * (more > 0))}])"


def as_groups(groups: Groups | Sequence[Mesh]) -> Groups:
    """Groups as they are, or made of a list of meshes."""
    if isinstance(groups, Groups):
        return groups
    if isinstance(groups, Mesh):
        raise GroupError(
            f"groups: {short(groups)} is one mesh. Cut it with MpmdMesh(mesh, 'pp'), or pass a "
            "list of meshes."
        )
    if not isinstance(groups, (list, tuple)):
        raise GroupError(f"groups: {short(groups)} is not an MpmdMesh or a list of meshes.")
    return MeshGroups(tuple(groups))
