"""From JAX devices, live or compile-only, to a `Topology`."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from meshwright._compat import is_compile_only
from meshwright.errors import TopologyError, listing, short
from meshwright.hardware.chips import Chip, chip_of_kind
from meshwright.hardware.named import (
    may_twist,
    network_axis,
    text,
    torus_axes,
    with_speeds,
    wraparound,
)
from meshwright.hardware.topology import PhysicalAxis, Topology

# An accelerator we have no table for: relative speeds still rank placements.
UNKNOWN = Chip("unknown", "gpu", (), 100, 16, 1, link=100, network=10)


def from_devices(
    devices: Sequence[Any],
    twisted: bool | None = None,
    speeds: Mapping[str, float] | None = None,
    sort_slices: bool = True,
) -> Topology:
    """See `topology`."""
    check_devices(devices)
    first = devices[0]
    chip = chip_of_kind(first.device_kind, first.platform) or UNKNOWN
    chip = with_speeds(chip, speeds)
    key = _slice_key(devices)
    groups = _grouped(devices, key, sort_slices)
    if chip.family == "tpu" and all(hasattr(d, "coords") for d in devices):
        found = _torus(chip, devices, groups, bool(twisted))
        if found is not None:
            return found
    return _flat(chip, devices, groups)


def check_devices(devices: Sequence[Any]) -> None:
    """Devices that exist, once each, of one kind. Never lists them."""
    if not devices:
        raise TopologyError("there are no devices. Pass at least one, or leave devices out.")
    for device in devices:
        if not (hasattr(device, "platform") and hasattr(device, "device_kind")):
            raise TopologyError(
                f"{short(device)} is not a JAX device. Pass jax.devices() or a part of it."
            )
    kinds = collections.Counter((d.platform, d.device_kind) for d in devices)
    if len(kinds) > 1:
        counts = listing(f"{n} of {platform} {kind!r}" for (platform, kind), n in kinds.items())
        raise TopologyError(
            f"devices of {len(kinds)} kinds in one mesh: {counts}. "
            "Pass devices of one kind, e.g. jax.devices('cpu')."
        )
    repeated = len(devices) - len(set(devices))
    if repeated:
        raise TopologyError(
            f"{repeated} of {len(devices)} devices appear more than once. Pass each device once."
        )
    clients = {id(device.client) for device in devices}
    if len(clients) > 1:
        raise TopologyError(
            f"the {len(devices)} devices belong to {len(clients)} different runtimes (before and "
            "after a backend reset, or live and compile-only). Ask jax.devices() again."
        )


def _slice_key(devices: Sequence[Any]) -> Callable[[Any], Hashable]:
    """Which part of the slow network a device is in.

    TPU: its slice, never its host: all hosts of a slice share the torus. GPU: its NVLink
    domain: compile-only devices hold it in their first coordinate (their `slice_index` reads
    0 throughout), live ones in `slice_index`, which JAX derives from the fabric. CPU: its
    process.
    """
    first = devices[0]
    if first.platform == "tpu":
        return lambda d: getattr(d, "slice_index", 0) or 0
    if first.platform == "gpu" or first.platform in ("cuda", "rocm"):
        if is_compile_only(first) and hasattr(first, "coords"):
            return lambda d: d.coords[0]
        if all(getattr(d, "slice_index", None) is not None for d in devices):
            return lambda d: d.slice_index
    return lambda d: d.process_index


def _grouped(
    devices: Sequence[Any], key: Callable[[Any], Hashable], sort_slices: bool
) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for place, device in enumerate(devices):
        groups.setdefault(key(device), []).append(place)
    return [groups[k] for k in (sorted(groups) if sort_slices else groups)]


def _torus(
    chip: Chip, devices: Sequence[Any], groups: list[list[int]], twisted: bool
) -> Topology | None:
    """The box of coordinates that every slice fills, or `None`."""
    boxes = []
    for group in groups:
        points = np.array([(*devices[i].coords, devices[i].core_on_chip) for i in group])
        points = points - points.min(axis=0)
        shape = tuple(int(side) for side in points.max(axis=0) + 1)
        flat = np.ravel_multi_index(tuple(points.T), shape)
        if math.prod(shape) != len(group) or np.unique(flat).size != len(group):
            return None
        index = np.empty(math.prod(shape), np.int64)
        index[flat] = group
        boxes.append((shape, index))
    shapes = {shape for shape, _ in boxes}
    if len(shapes) > 1:
        return None
    (shape,) = shapes
    sides, cores = shape[:3], shape[3]
    sides = sides[: chip.torus] if set(sides[chip.torus :]) <= {1} else sides
    whole, slice_wraps = _whole_slice(chip, devices[0], len(sides))
    wraps = tuple(
        wrap and side == full for wrap, side, full in zip(slice_wraps, sides, whole, strict=True)
    )
    if twisted and not (may_twist(chip, sides) and sides == whole):
        raise TopologyError(f"a {text(sides)} {chip.name} slice cannot be twisted.")
    chip = dataclasses.replace(chip, cores=cores, core=chip.core or 6 * chip.link)
    axes = torus_axes(chip, sides, wraps, twisted)
    if len(groups) > 1:
        axes = (network_axis(chip, len(groups), "slice"), *axes)
    if cores > 1:
        axes = (*axes, PhysicalAxis("core", cores, "core", chip.core))
    index = np.concatenate([box for _, box in boxes])
    name = f"{chip.name}:{text(sides)}" + ("_twisted" if twisted else "")
    name += f" x {len(groups)} slices" if len(groups) > 1 else ""
    return _finish(name, chip, axes, devices, index)


def _whole_slice(chip: Chip, device: Any, dims: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """The sides of the slice a device belongs to, and which of them wrap.

    Devices do not say; the sides do (`shapes.wraparound`). A part of a slice has no ring of
    its own unless it covers the whole side.
    """
    key = getattr(device, "slice_index", 0)
    everyone = [d for d in device.client.devices() if getattr(d, "slice_index", 0) == key]
    points = np.array([d.coords for d in everyone])
    sides = tuple(int(side) for side in np.ptp(points, axis=0)[:dims] + 1)
    return sides, wraparound(chip, sides)


def _flat(chip: Chip, devices: Sequence[Any], groups: list[list[int]]) -> Topology:
    """Equal groups joined by the slow network, or one flat group when they are uneven."""
    scattered = chip.family == "tpu"
    if len({len(group) for group in groups}) > 1:
        groups, scattered = [list(itertools.chain(*groups))], True
    order = [
        sorted(group, key=lambda i: (devices[i].process_index, devices[i].id)) for group in groups
    ]
    name = "cpu" if chip.family == "cpu" else ("gpu" if chip.family == "gpu" else "chip")
    axes: tuple[PhysicalAxis, ...]
    axes = (PhysicalAxis(name, len(groups[0]), "switch", chip.link),)
    if len(groups) > 1:
        processes = len({device.process_index for device in devices})
        inside = "host" if processes == len(groups) else "domain"
        word = "slice" if chip.family == "tpu" else inside
        axes = (network_axis(chip, len(groups), word), *axes)
    kind = chip.name if chip.name != "unknown" else devices[0].device_kind
    label = f"{kind}:{len(groups[0])}" + (f"x{len(groups)}" if len(groups) > 1 else "")
    return _finish(label, chip, axes, devices, np.array([*itertools.chain(*order)]), scattered)


def _finish(
    name: str,
    chip: Chip,
    axes: tuple[PhysicalAxis, ...],
    devices: Sequence[Any],
    index: np.ndarray,
    scattered: bool = False,
) -> Topology:
    shape = tuple(axis.size for axis in axes)
    host = np.array([device.process_index for device in devices], np.int32)
    return Topology(
        name,
        chip,
        axes,
        host[index].reshape(shape),
        index.reshape(shape),
        tuple(devices),
        scattered,
    )
