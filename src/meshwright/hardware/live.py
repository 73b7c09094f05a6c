"""Read a `Topology` off JAX devices, live or compile-only.

TPU devices carry coordinates: slices whose devices fill a box become a torus. All other devices,
and TPU devices that fill no box, become equal groups behind switches, joined by DCN.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from meshwright._compat import is_compile_only
from meshwright.errors import TopologyError, listing, short
from meshwright.hardware.chips import (
    Chip,
    can_twist,
    chip_of_file,
    chip_of_kind,
    shape_text,
    wraparound,
)
from meshwright.hardware.named import SpeedsLike, network_axis, torus_axes, with_speeds
from meshwright.hardware.topology import PhysicalAxis, Topology

# An accelerator we have no table for: relative speeds still rank placements.
UNKNOWN = chip_of_file("unknown", "gpu")


def from_devices(
    devices: Sequence[Any],
    twisted: bool | None = None,
    speeds: SpeedsLike = None,
    sort_slices: bool = True,
) -> Topology:
    """Build the topology of a list of devices; the options are those of `topology`."""
    check_devices(devices)
    first = devices[0]
    chip = chip_of_kind(first.device_kind, first.platform) or UNKNOWN
    chip = with_speeds(chip, speeds)
    slices = _by_slice(devices, _slice_key(devices), sort_slices)
    if chip.family == "tpu" and all(hasattr(device, "coords") for device in devices):
        torus = _torus_topology(chip, devices, slices, bool(twisted))
        if torus is not None:
            return torus
    return _switched_topology(chip, devices, slices)


def check_devices(devices: Sequence[Any]) -> None:
    """Refuse anything but JAX devices of one kind and one runtime, each once.

    The messages count devices and never list them: there may be 100,000.
    """
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
    # Equal ids do not make equal devices: after a backend reset the old ones are of no use.
    clients = {id(device.client) for device in devices}
    if len(clients) > 1:
        raise TopologyError(
            f"the {len(devices)} devices belong to {len(clients)} different runtimes (before and "
            "after a backend reset, or live and compile-only). Ask jax.devices() again."
        )


def _slice_key(devices: Sequence[Any]) -> Callable[[Any], Hashable]:
    """Return the function that tells which part, of those that DCN joins, a device is in.

    TPU: its slice, never its host: all hosts of a slice share the torus. GPU: its NVLink
    domain: compile-only devices hold it in their first coordinate (their `slice_index` reads
    0 throughout), live ones in `slice_index`, which JAX derives from the fabric. CPU: its
    process.
    """
    first = devices[0]
    if first.platform == "tpu":
        # Missing or None where the runtime knows of a single slice.
        return lambda d: getattr(d, "slice_index", 0) or 0
    if first.platform == "gpu" or first.platform in ("cuda", "rocm"):
        if is_compile_only(first) and hasattr(first, "coords"):
            return lambda d: d.coords[0]
        if all(getattr(d, "slice_index", None) is not None for d in devices):
            return lambda d: d.slice_index
    return lambda d: d.process_index


def _by_slice(
    devices: Sequence[Any], key: Callable[[Any], Hashable], sort_slices: bool
) -> list[list[int]]:
    """Return the places in `devices` of every slice's devices."""
    slices: dict[Any, list[int]] = {}
    for place, device in enumerate(devices):
        slices.setdefault(key(device), []).append(place)
    return [slices[k] for k in (sorted(slices) if sort_slices else slices)]


def _torus_topology(
    chip: Chip, devices: Sequence[Any], slices: list[list[int]], twisted: bool
) -> Topology | None:
    """Return the torus of a box of coordinates that every slice fills, or `None`."""
    boxes = []
    for places in slices:
        points = np.array([(*devices[i].coords, devices[i].core_on_chip) for i in places])
        points = points - points.min(axis=0)
        shape = tuple(int(side) for side in points.max(axis=0) + 1)
        flat = np.ravel_multi_index(tuple(points.T), shape)
        if math.prod(shape) != len(places) or np.unique(flat).size != len(places):
            return None
        index = np.empty(math.prod(shape), np.int64)
        index[flat] = places
        boxes.append((shape, index))
    shapes = {shape for shape, _ in boxes}
    if len(shapes) > 1:
        return None
    (shape,) = shapes
    # JAX gives every TPU three coordinates; planar chips have z = 0 throughout.
    sides, cores = shape[:3], shape[3]
    sides = sides[: chip.torus] if set(sides[chip.torus :]) <= {1} else sides
    whole, slice_wraps = _whole_slice(chip, devices[0], len(sides))
    wraps = tuple(
        wrap and side == full for wrap, side, full in zip(slice_wraps, sides, whole, strict=True)
    )
    if twisted and not (can_twist(chip, sides) and sides == whole):
        raise TopologyError(
            f"a {shape_text(sides)} {chip.name} slice cannot be twisted.", option="twisted"
        )
    # A v4 without megacore shows two devices a chip, for which the table has no speed: about six
    # links' worth, as on TPU7x.
    chip = dataclasses.replace(chip, cores=cores, core=chip.core or 6 * chip.link)
    axes = torus_axes(chip, sides, wraps, twisted)
    if len(slices) > 1:
        axes = (network_axis(chip, len(slices), "slice"), *axes)
    if cores > 1:
        axes = (*axes, PhysicalAxis("core", cores, "core", chip.core))
    index = np.concatenate([box for _, box in boxes])
    name = f"{chip.name}:{shape_text(sides)}" + ("_twisted" if twisted else "")
    name += f" x {len(slices)} slices" if len(slices) > 1 else ""
    return _with_devices(name, chip, axes, devices, index)


def _whole_slice(chip: Chip, device: Any, dims: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return the sides of the slice a device belongs to, and which of them wrap.

    Devices do not say; the sides do (`chips.wraparound`). A part of a slice has no ring of
    its own unless it covers the whole side.
    """
    key = getattr(device, "slice_index", 0)
    in_slice = [d for d in device.client.devices() if getattr(d, "slice_index", 0) == key]
    points = np.array([d.coords for d in in_slice])
    sides = tuple(int(side) for side in np.ptp(points, axis=0)[:dims] + 1)
    return sides, wraparound(chip, sides)


def _switched_topology(chip: Chip, devices: Sequence[Any], slices: list[list[int]]) -> Topology:
    """Equal groups joined by DCN, or one flat group when they are uneven."""
    scattered = chip.family == "tpu"  # it has links, but no box that would say which
    if len({len(places) for places in slices}) > 1:
        slices, scattered = [list(itertools.chain(*slices))], True
    order = [
        sorted(places, key=lambda i: (devices[i].process_index, devices[i].id)) for places in slices
    ]
    direction = "chip" if chip.family == "tpu" else chip.family
    axes: tuple[PhysicalAxis, ...]
    axes = (PhysicalAxis(direction, len(slices[0]), "switch", chip.link),)
    if len(slices) > 1:
        processes = len({device.process_index for device in devices})
        inside = "host" if processes == len(slices) else "domain"
        word = "slice" if chip.family == "tpu" else inside
        axes = (network_axis(chip, len(slices), word), *axes)
    kind = chip.name if chip.name != "unknown" else devices[0].device_kind
    name = f"{kind}:{len(slices[0])}" + (f"x{len(slices)}" if len(slices) > 1 else "")
    index = np.array([*itertools.chain(*order)])
    return _with_devices(name, chip, axes, devices, index, scattered)


def _with_devices(
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
        name=name,
        chip=chip,
        axes=axes,
        host=host[index].reshape(shape),
        index=index.reshape(shape),
        devices=tuple(devices),
        scattered=scattered,
    )
