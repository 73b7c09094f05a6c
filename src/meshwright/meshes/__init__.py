"""The meshes. In: a request and hardware. Out: `jax.sharding.Mesh`es, CPU contexts, views."""

from meshwright.meshes.build import abstract_mesh, mesh
from meshwright.meshes.contract import create_mesh, parse_mesh_from_string
from meshwright.meshes.cpu import cpu_context, create_cpu_mesh, force_cpu
from meshwright.meshes.explaining import explain
from meshwright.meshes.host_share import calculate_host_mesh_shape
from meshwright.meshes.manager import DeviceMeshManager
from meshwright.meshes.views import check_same_order, merge_axes, rename_axes, split_axis

__all__ = [
    "DeviceMeshManager",
    "abstract_mesh",
    "calculate_host_mesh_shape",
    "check_same_order",
    "cpu_context",
    "create_cpu_mesh",
    "create_mesh",
    "explain",
    "force_cpu",
    "merge_axes",
    "mesh",
    "parse_mesh_from_string",
    "rename_axes",
    "split_axis",
]
