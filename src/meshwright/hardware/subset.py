"""A compact, host-aligned part of a topology."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from meshwright.errors import TopologyError
from meshwright.hardware.grid import PhysicalAxis, Topology


def compact_part(topology: Topology, devices: int, slices: int | None = None) -> Topology:
    """The part with `devices` devices that touches the fewest slices, then the fewest hosts.

    Among those, the box with the shortest sides; where every box is spread over too many
    hosts, simply host after host. `slices` asks for a number of slices. A ring stays one only
    where the part covers a whole side. `index` still points into the whole topology's devices.

    >>> import meshwright as mw
    >>> print(compact_part(mw.topology("v5e:16x16"), 8).shape)
    (2, 4)
    """
    if devices == topology.num_devices:
        return topology
    if devices < 1:
        raise TopologyError(f"{devices} devices of {topology.name}: at least 1 is needed.")
    if devices > topology.num_devices:
        raise TopologyError(
            f"Not enough devices: {devices} asked for, {topology.name} has {topology.num_devices}."
        )
    best = min(
        (
            box
            for box in _boxes(topology.shape, devices)
            if slices in (None, _slices(topology, box))
        ),
        key=lambda box: _badness(topology, box),
        default=None,
    )
    if slices in (None, 1):
        host_by_host = _first(topology, devices)
        if best is None or _badness(topology, best)[1] > 1.5 * host_by_host.num_hosts:
            return host_by_host
    elif best is None:
        raise TopologyError(
            f"no part of {topology.name} has {devices} devices in {slices} equal slices."
        )
    where = tuple(slice(0, side) for side in best)
    axes = tuple(
        dataclasses.replace(
            axis,
            size=side,
            wraps=axis.wraps and side == axis.size,
            twisted=axis.twisted and best == topology.shape,
        )
        for axis, side in zip(topology.axes, best, strict=True)
    )
    keep = [d for d, axis in enumerate(axes) if axis.size > 1 or axis.kind == "torus"]
    keep = keep or [len(axes) - 1]
    shape = tuple(axes[d].size for d in keep)
    return dataclasses.replace(
        topology,
        name=f"{devices} of {topology.name}",
        axes=tuple(axes[d] for d in keep),
        host=topology.host[where].reshape(shape),
        index=topology.index[where].reshape(shape),
    )


def _boxes(shape: tuple[int, ...], volume: int) -> Iterator[tuple[int, ...]]:
    """Every box of this volume that fits."""
    sides = [[d for d in range(1, side + 1) if volume % d == 0] for side in shape[:-1]]
    for box in itertools.product(*sides):
        last, rest = divmod(volume, math.prod(box))
        if not rest and 0 < last <= shape[-1]:
            yield (*box, last)


def _slices(topology: Topology, box: tuple[int, ...]) -> int:
    return math.prod(s for s, a in zip(box, topology.axes, strict=True) if a.kind == "network")


def _badness(topology: Topology, box: tuple[int, ...]) -> tuple[float, ...]:
    slices = _slices(topology, box)
    hosts = np.unique(topology.host[tuple(slice(0, side) for side in box)]).size
    torus = [s for s, a in zip(box, topology.axes, strict=True) if a.kind == "torus"]
    spread = sum(torus) if torus else 0
    return (slices, hosts, spread, *box)


def _first(topology: Topology, devices: int) -> Topology:
    """No box has this volume: take devices host by host."""
    order = np.argsort(topology.host.ravel(), kind="stable")[:devices]
    name = "chip" if topology.chip.family == "tpu" else topology.axes[-1].name
    speed = min(axis.speed for axis in topology.axes)
    return dataclasses.replace(
        topology,
        name=f"{devices} of {topology.name}",
        axes=(PhysicalAxis(name, devices, "switch", speed),),
        host=topology.host.ravel()[order],
        index=topology.index.ravel()[order],
        scattered=True,
    )
