"""Working on the CPU, whatever accelerator is present."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from meshwright.meshes.build import from_placement, placement_of, warn_idle
from meshwright.meshes.contract import DEFAULT_DIMS, DEFAULT_NAMES
from meshwright.meshes.targets import target
from meshwright.spec import MeshSpec


def create_cpu_mesh(
    axis_dims: Sequence[int] = DEFAULT_DIMS, axis_names: Sequence[str] = DEFAULT_NAMES
) -> Mesh:
    """A mesh over all CPU devices of this host.

    >>> import meshwright as mw
    >>> mw.create_cpu_mesh().shape["fsdp"]
    8
    """
    spec = MeshSpec.parse(tuple(axis_dims), names=tuple(axis_names))
    hardware = target(None, jax.local_devices(backend="cpu"), 1)
    placed = placement_of(spec, hardware)
    warn_idle(placed, hardware)
    return from_placement(placed)


@contextlib.contextmanager
def force_cpu() -> Iterator[Any]:
    """Make the CPU the default device inside; yields it. Restored on exit, errors included.

    >>> import meshwright as mw
    >>> with mw.force_cpu() as device:
    ...     device.platform
    'cpu'
    """
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        yield device


@contextlib.contextmanager
def cpu_context() -> Iterator[Mesh]:
    """`force_cpu` with the CPU mesh as the current mesh; yields the mesh.

    >>> import jax
    >>> import meshwright as mw
    >>> with mw.cpu_context() as mesh:
    ...     jax.sharding.get_abstract_mesh().axis_names
    ('dp', 'fsdp', 'ep', 'tp', 'sp')
    """
    built = create_cpu_mesh()
    with force_cpu(), jax.set_mesh(built):
        yield built
