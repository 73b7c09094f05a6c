"""Working on the CPU, whatever accelerator is present."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from meshwright.errors import MeshError
from meshwright.meshes.build import from_placement, placement_of, warn_idle
from meshwright.meshes.contract import DEFAULT_DIMS, DEFAULT_NAMES
from meshwright.meshes.targets import target
from meshwright.spec import MeshSpec
from meshwright.spec.checks import check_list


def create_cpu_mesh(
    axis_dims: Sequence[int] = DEFAULT_DIMS, axis_names: Sequence[str] = DEFAULT_NAMES
) -> Mesh:
    """A mesh over all CPU devices of this host.

    >>> import meshwright as mw
    >>> mw.create_cpu_mesh().shape["fsdp"]
    8
    """
    dims, names = check_list("axis_dims", axis_dims), check_list("axis_names", axis_names)
    spec = MeshSpec.parse(dims, names=names)
    hardware = target(None, _cpu_devices(), 1)
    placed = placement_of(spec, hardware)
    warn_idle(placed.spec, placed.topology, hardware)
    return from_placement(placed)


@contextlib.contextmanager
def force_cpu() -> Iterator[Any]:
    """Make the CPU the default device inside; yields it. Restored on exit, errors included.

    >>> import meshwright as mw
    >>> with mw.force_cpu() as device:
    ...     device.platform
    'cpu'
    """
    device = _cpu_devices()[0]
    with jax.default_device(device):
        yield device


@contextlib.contextmanager
def cpu_context() -> Iterator[Mesh]:
    """`force_cpu` with the CPU mesh as the current mesh; yields the mesh.

    Enter it around jitted calls: inside one, JAX no longer lets the mesh change.

    >>> import jax
    >>> import meshwright as mw
    >>> with mw.cpu_context() as mesh:
    ...     jax.sharding.get_abstract_mesh().axis_names
    ('dp', 'fsdp', 'ep', 'tp', 'sp')
    """
    built = create_cpu_mesh()
    with force_cpu():
        try:
            current = jax.set_mesh(built)
        except ValueError as error:
            raise MeshError(
                f"cpu_context cannot make its mesh the current one here ({error}) "
                "Enter it around the jitted call."
            ) from error
        with current:
            yield built


def _cpu_devices() -> list[Any]:
    try:
        return list(jax.local_devices(backend="cpu"))
    except RuntimeError as error:
        raise MeshError(
            "JAX runs without its CPU backend here. Add cpu to JAX_PLATFORMS, e.g. 'tpu,cpu', "
            "or leave it unset."
        ) from error
