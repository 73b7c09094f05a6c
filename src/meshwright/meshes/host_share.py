"""This host's share of a global mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax

from meshwright.errors import MeshError
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
    local = jax.local_device_count() if total_devices is None else total_devices
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
    split = _split(sizes, processes)
    if split is None:
        raise MeshError(
            f"mesh {sizes}: no split over {processes} hosts uses exactly {local} devices on each. "
            f"Let sizes contain the factors of {processes} on separate axes."
        )
    return tuple(size // hosts for size, hosts in zip(sizes, split, strict=True))


def _split(sizes: tuple[int, ...], hosts: int) -> tuple[int, ...] | None:
    """How many hosts each axis is spread over, as many as possible on the leading axes."""
    if not sizes:
        return () if hosts == 1 else None
    most = math.gcd(sizes[0], hosts)
    for here in (d for d in range(most, 0, -1) if most % d == 0):
        rest = _split(sizes[1:], hosts // here)
        if rest is not None:
            return (here, *rest)
    return None
