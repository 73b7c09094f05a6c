"""A whole TPU slice that stands for a part of one, for a compiler that knows whole slices alone.

libtpu crashes, or refuses, for many a part of a slice (0.0.42 to 0.0.50). So a part, such as a
pipeline's group, is compiled for a slice of its shape, or one of its size.
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

_FACTORS = (1, 2, 4)  # how much larger a slice may be than a group of a size that none has


def slice_for(mesh: Mesh) -> tuple[Topology, np.ndarray]:
    """Find a slice for a group's mesh, and the numbers of its devices there.

    It has the shape of the group where slices come in that shape, turned if need be; else it is
    a compact one of its size, or the next larger.
    """
    placed = explain_mesh(mesh)
    chosen = _of_its_shape(placed.topology) or _of_its_size(placed)
    if chosen is None:
        raise RehearsalError(
            f"no {placed.topology.chip.name} slice has the {mesh.size} devices of a group, or a "
            "few more: there is nothing to compile it for. Use groups of another size."
        )
    return chosen


def as_slice(placed: Placement) -> tuple[Topology, np.ndarray] | None:
    """Find a slice with the shape of a placement's part of the machine, and its device numbers.

    The second array has the shape of `placed.positions`. `None` where no slice has that shape.
    """
    part = placed.topology
    turned = _turned(part)
    if turned is None:
        return None
    whole, order = turned
    points = {number: n for n, number in enumerate(part.index.transpose(order).ravel().tolist())}
    chosen = [points[number] for number in placed.positions.ravel().tolist()]
    return whole, whole.index.ravel()[chosen].reshape(placed.positions.shape)


def stand_in_name(mesh: Mesh) -> str:
    """Return the name of the slice that stands for a group where none has its shape; else empty."""
    own = _of_its_shape(explain_mesh(mesh).topology)
    return slice_for(mesh)[0].name if own is None else ""


def _of_its_shape(part: Topology) -> tuple[Topology, np.ndarray] | None:
    turned = _turned(part)
    if turned is None:
        return None
    whole, order = turned
    return whole, np.argsort(part.index.transpose(order).ravel())


# In: a part of a machine. Out: a slice that vendors sell in that shape, and the order in which the
# part's dims are the slice's. Example: a part of 4x2 v5e chips is the slice v5e:2x4 with the order
# [1, 0], since names have the shorter side first.
def _turned(part: Topology) -> tuple[Topology, list[int]] | None:
    torus = [d for d, axis in enumerate(part.axes) if axis.kind == "torus"]
    turns = sorted(itertools.permutations(torus), key=lambda ds: [part.shape[d] for d in ds])
    for dims in turns:
        order = list(range(len(part.shape)))
        for at, dim in zip(torus, dims, strict=True):
            order[at] = dim
        sides = [part.shape[d] for d in dims]
        whole = _named(part, sides, part.num_slices) if torus else _by_name(part.name)
        if whole is not None and whole.shape == tuple(part.shape[d] for d in order):
            return whole, order
    return None


def _of_its_size(placed: Placement) -> tuple[Topology, np.ndarray] | None:
    """The most compact slice with as many devices, or the first devices of the next larger one."""
    part = placed.topology
    devices = part.num_devices
    chips = -(-devices // CHIPS[part.chip.name].cores)
    for factor in _FACTORS:
        for sides in sorted(_boxes(factor * chips, part.chip.torus), key=sum):
            whole = _named(part, sides, 1)
            if whole is not None and whole.num_devices == devices:
                return whole, place(placed.spec, whole).positions.ravel()
            if whole is not None:
                return whole, np.arange(devices)
    return None


def _boxes(chips: int, sides: int) -> Iterator[tuple[int, ...]]:
    """Every shape of this many chips with this many sides."""
    divisors = [d for d in range(1, chips + 1) if chips % d == 0]
    return (box for box in itertools.product(divisors, repeat=sides) if int(np.prod(box)) == chips)


def _named(part: Topology, sides: list[int] | tuple[int, ...], slices: int) -> Topology | None:
    return _by_name(f"{part.chip.name}:{'x'.join(map(str, sides))}", slices)


def _by_name(name: str, slices: int = 1) -> Topology | None:
    try:
        return read_topology(name, slices=slices)
    except TopologyError:
        return None
