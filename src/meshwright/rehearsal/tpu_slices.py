"""What hardware a part of a machine is, for a compiler that knows whole slices alone.

libtpu crashes, or refuses, for many a part of a slice (0.0.42 to 0.0.50).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from meshwright.errors import RehearsalError, TopologyError
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.topology import Topology
from meshwright.hardware.topology import topology as read_topology
from meshwright.meshes.build import explain_mesh
from meshwright.placement.placement import Placement
from meshwright.placement.placer import place

_TIMES = (1, 2, 4)  # how much larger a slice may be than a group of a size that none has


def hardware_of(mesh: Mesh) -> tuple[Topology, np.ndarray]:
    """Hardware with a name for a group's mesh, and the places of its devices there.

    It has the shape of the group where slices come in that shape, turned if need be; else it is
    a compact one of its size.
    """
    placed = explain_mesh(mesh)
    found = _of_its_shape(placed.topology) or _of_its_size(placed)
    if found is None:
        raise RehearsalError(
            f"no {placed.topology.chip.name} slice has the {mesh.size} devices of a group, or a "
            "few more: there is nothing to compile it for. Use groups of another size."
        )
    return found


def as_slice(placed: Placement) -> tuple[Topology, np.ndarray] | None:
    """A slice of the shape of a placement's part of the machine, if there is one, and the places
    of its devices there."""
    part = placed.topology
    found = _turned(part)
    if found is None:
        return None
    named, order = found
    points = {number: n for n, number in enumerate(part.index.transpose(order).ravel().tolist())}
    places = [points[number] for number in placed.positions.ravel().tolist()]
    return named, named.index.ravel()[places].reshape(placed.positions.shape)


def stand_in(mesh: Mesh) -> str:
    """The slice that stands for a group, where none has its shape; else nothing."""
    own = _of_its_shape(explain_mesh(mesh).topology)
    return hardware_of(mesh)[0].name if own is None else ""


def _of_its_shape(found: Topology) -> tuple[Topology, np.ndarray] | None:
    turned = _turned(found)
    if turned is None:
        return None
    named, order = turned
    return named, np.argsort(found.index.transpose(order).ravel())


def _turned(found: Topology) -> tuple[Topology, list[int]] | None:
    """A slice of this shape, and in which order the dims of this one are its own."""
    torus = [d for d, axis in enumerate(found.axes) if axis.kind == "torus"]
    turned = sorted(itertools.permutations(torus), key=lambda ds: [found.shape[d] for d in ds])
    for dims in turned:
        order = list(range(len(found.shape)))
        for at, dim in zip(torus, dims, strict=True):
            order[at] = dim
        sides = [found.shape[d] for d in dims]
        named = _named(found, sides, found.num_slices) if torus else _by_name(found.name)
        if named is not None and named.shape == tuple(found.shape[d] for d in order):
            return named, order
    return None


def _of_its_size(placed: Placement) -> tuple[Topology, np.ndarray] | None:
    """The most compact slice with as many devices, or the first devices of the next larger one."""
    found = placed.topology
    devices = found.num_devices
    chips = -(-devices // CHIPS[found.chip.name].cores)
    for times in _TIMES:
        for sides in sorted(_boxes(times * chips, found.chip.torus), key=sum):
            named = _named(found, sides, 1)
            if named is not None and named.num_devices == devices:
                return named, place(placed.spec, named).positions.ravel()
            if named is not None:
                return named, np.arange(devices)
    return None


def _boxes(chips: int, sides: int) -> Iterator[tuple[int, ...]]:
    divisors = [d for d in range(1, chips + 1) if chips % d == 0]
    return (box for box in itertools.product(divisors, repeat=sides) if int(np.prod(box)) == chips)


def _named(found: Topology, sides: list[int] | tuple[int, ...], slices: int) -> Topology | None:
    return _by_name(f"{found.chip.name}:{'x'.join(map(str, sides))}", slices)


def _by_name(name: str, slices: int = 1) -> Topology | None:
    try:
        return read_topology(name, slices=slices)
    except TopologyError:
        return None
