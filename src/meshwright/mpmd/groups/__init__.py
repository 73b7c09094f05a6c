"""The groups. In: a mesh with an axis to cut, or a list of meshes. Out: groups with numbers."""

from meshwright.mpmd.groups.base import Groups
from meshwright.mpmd.groups.mesh import MpmdMesh
from meshwright.mpmd.groups.several import MeshGroups, as_groups

__all__ = ["Groups", "MeshGroups", "MpmdMesh", "as_groups"]
