"""This host's share of a global mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax

from meshwright.errors import MeshError
from meshwright.meshes.targets import live_devices
from meshwright.spec import MeshSpec
from meshwright.spec.checks import check_list, check_positive


def calculate_host_mesh_shape(
    global_mesh_shape: Sequence[int],
    total_devices: int | None = None,
    num_processes: int | None = None,
) -> tuple[int, ...]:
    """The part of a global mesh shape that one host holds; leading axes are split first.

    `total_devices` are the devices of this host, `num_processes` the number of hosts.

    >>> calculate_host_mesh_shape((2, 4), total_devices=4, num_processes=2)
    (1, 4)
    >>> calculate_host_mesh_shape((3, 4), total_devices=6, num_processes=2)
    (3, 2)
    """
    shape = check_list("global_mesh_shape", global_mesh_shape)
    sizes = MeshSpec.parse(shape, names=[f"dim{d}" for d in range(len(shape))]).sizes
    local = _local_devices() if total_devices is None else total_devices
    processes = jax.process_count() if num_processes is None else num_processes
    local = check_positive("total_devices", local)
    processes = check_positive("num_processes", processes)
    if -1 in sizes:
        raise MeshError(f"mesh {sizes}: sizes must be known here, not -1.")
    if math.prod(sizes) != local * processes:
        raise MeshError(
            f"mesh {sizes} has {math.prod(sizes)} devices, but {processes} processes with {local} "
            f"local devices each have {local * processes}. Make the two equal."
        )
    share, left = [], processes
    for (
        size
    ) in sizes:  # leading axes take as many hosts as they can; the products match, so all fit
        hosts = math.gcd(size, left)
        share.append(size // hosts)
        left //= hosts
    return tuple(share)


def _local_devices() -> int:
    me = jax.process_index()
    return sum(device.process_index == me for device in live_devices())
