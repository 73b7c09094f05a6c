"""`DeviceMeshManager`: the interface of an older library, a thin door on the same core."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from meshwright.errors import MeshError, short
from meshwright.meshes.build import from_placement, placement_of
from meshwright.meshes.targets import live_devices, target
from meshwright.spec import MeshSpec
from meshwright.spec.checks import check_list


class DeviceMeshManager:
    """Meshes over a fixed set of devices.

    >>> import meshwright as mw
    >>> manager = mw.DeviceMeshManager()
    >>> manager.get_mesh_info(manager.create_device_mesh({"data": 2, "model": 4}))
    {'total_devices': 8, 'axes': {'data': 2, 'model': 4}}
    """

    def __init__(self, devices: Sequence[Any] | None = None):
        given = live_devices() if devices is None else check_list("devices", devices)
        self.devices: list[Any] = list(given)
        target(None, self.devices, 1)  # refuse bad devices here, not at the first mesh

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def create_device_mesh(
        self,
        mesh_shape: Mapping[str, int] | Sequence[tuple[str, int]],
        devices: Sequence[Any] | None = None,
    ) -> Mesh:
        """A mesh from `{"data": 2, "model": 1}` or pairs; fewer devices than there are is fine."""
        if isinstance(mesh_shape, str) or not isinstance(mesh_shape, (Mapping, list, tuple)):
            raise MeshError(f"mesh_shape: {short(mesh_shape)} is not a dict or a list of pairs.")
        spec = MeshSpec.parse(mesh_shape)
        chosen = self.devices if devices is None else check_list("devices", devices)
        hardware = target(None, chosen, 1)
        if spec.size is not None and spec.size > hardware.num_devices:
            raise MeshError(
                f"Not enough devices: '{spec}' needs {spec.size}, there are {hardware.num_devices}."
            )
        known = math.prod(size for size in spec.sizes if size != -1)
        if spec.size is None and known > hardware.num_devices:
            raise MeshError(
                f"Not enough devices: '{spec}' needs at least {known}, there are "
                f"{hardware.num_devices}."
            )
        return from_placement(placement_of(spec, hardware))

    def create_data_parallel_mesh(
        self, num_devices: int | None = None, axis_name: str = "data"
    ) -> Mesh:
        """One axis over `num_devices`, or all."""
        return self.create_device_mesh([(axis_name, -1 if num_devices is None else num_devices)])

    def create_model_parallel_mesh(
        self, num_devices: int | None = None, axis_name: str = "model"
    ) -> Mesh:
        """One axis over `num_devices`, or all."""
        return self.create_device_mesh([(axis_name, -1 if num_devices is None else num_devices)])

    def create_hybrid_mesh(
        self,
        data_parallel_size: int = 1,
        model_parallel_size: int = 1,
        data_axis: str = "data",
        model_axis: str = "model",
    ) -> Mesh:
        """Two axes, data outside and model inside."""
        return self.create_device_mesh(
            [(data_axis, data_parallel_size), (model_axis, model_parallel_size)]
        )

    def get_mesh_info(self, mesh: Mesh) -> dict[str, Any]:
        """`{"total_devices": n, "axes": {name: size}}`."""
        if not isinstance(mesh, (Mesh, AbstractMesh)):
            raise MeshError(f"{short(mesh)} is not a mesh.")
        return {"total_devices": mesh.size, "axes": dict(mesh.shape)}
