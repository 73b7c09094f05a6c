"""`Topology`: every device at a point of a physical grid, and `topology()`, which makes one.

A grid point is what JAX calls a device (a core of a TPU7x chip, a whole chip elsewhere). Each
direction of the grid is a `PhysicalAxis`: a torus dimension, a switch, the cores of a chip, or
DCN, the data-center network, which joins slices, NVLink domains or hosts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from meshwright._checks import is_single_slice
from meshwright._show import Sheet, Shown
from meshwright._text import plural, plural_noun
from meshwright.errors import TopologyError, short
from meshwright.hardware.calibration_file import Calibration, read_speeds
from meshwright.hardware.chips import Chip

Kind = Literal["network", "torus", "switch", "core"]


@dataclasses.dataclass(frozen=True)
class PhysicalAxis:
    """One direction of the machine. `speed` in GB/s one way.

    A `torus` direction has links between neighbours (`speed` each); `switch`, `network` and
    `core` directions join everything at once (`speed` per device). `wraps`: the last chip is
    linked to the first; `twisted`: that link arrives half way along the longest direction.
    """

    name: str
    size: int
    kind: Kind
    speed: float
    wraps: bool = False
    twisted: bool = False

    def __str__(self) -> str:
        if self.kind == "network":
            return f"{self.size} {plural_noun(self.size, self.name)} over DCN"
        ends = " twisted" if self.twisted else (" wraps" if self.wraps else "")
        return f"{self.name} {self.size}{ends}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Topology(Shown):
    """Where the devices are: pure data, made without touching any of them.

    `axes` run from the slowest network to the fastest; `shape` is their sizes. `host` gives
    the host of every grid point. `index` gives, for every grid point, the place of its
    device in `devices` (or in the hardware's own order when there are no devices). `scattered`:
    the devices fill no box of the torus, so their links are unknown.

    Topologies compare by identity (`eq=False`): they are keys of caches, and comparing or hashing
    the arrays of a large one would cost more than what is cached.

    >>> import meshwright as mw
    >>> pod = mw.topology("v5p:4x4x8", slices=2)
    >>> pod.num_devices, pod.num_hosts, pod.num_slices, pod.shape
    (256, 64, 2, (2, 4, 4, 8))
    >>> pod
    <Topology v5p:4x4x8 x 2 slices: 256 devices on 64 hosts>
    """

    name: str
    chip: Chip
    axes: tuple[PhysicalAxis, ...]
    host: np.ndarray
    index: np.ndarray
    devices: tuple[Any, ...] | None = None
    scattered: bool = False

    def __post_init__(self) -> None:
        for array in (self.host, self.index):  # shared and cached, so read-only
            array.setflags(write=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of every direction of the grid, in the order of `axes`."""
        return tuple(axis.size for axis in self.axes)

    @property
    def num_devices(self) -> int:
        """The number of JAX devices."""
        return math.prod(self.shape)

    @property
    def num_chips(self) -> int:
        """The number of chips, each of which may be several JAX devices."""
        return self.num_devices // self.size_of("core")

    @property
    def num_hosts(self) -> int:
        """The number of machines that hold the devices."""
        return int(np.unique(self.host).size)

    @property
    def num_slices(self) -> int:
        """Parts joined by DCN: slices, NVLink domains, or hosts."""
        return self.size_of("network")

    @property
    def slices(self) -> np.ndarray:
        """The slice of every grid point."""
        inside = self.num_devices // self.num_slices
        return (np.arange(self.num_devices) // inside).reshape(self.shape)

    @property
    def coords(self) -> np.ndarray:
        """Grid coordinates of every device, `(devices, directions)`, in grid order."""
        return np.stack(np.unravel_index(np.arange(self.num_devices), self.shape), axis=-1)

    @property
    def speeds(self) -> Calibration:
        """Every figure of its chip that results go by, with its source."""
        return self.chip.speeds

    def size_of(self, kind: Kind) -> int:
        """Return the number of devices along all directions of one kind, 1 if there is none."""
        return math.prod(axis.size for axis in self.axes if axis.kind == kind)

    def _sheet(self) -> Sheet:
        devices = plural(self.num_devices, "device")
        if self.num_chips != self.num_devices:
            devices += f" = {plural(self.num_chips, 'chip')}"
        headline = f"{self.name}: {devices} on {plural(self.num_hosts, 'host')}"
        lines = [f"  {axis}, {axis.speed:.4g} GB/s {_PER[axis.kind]}" for axis in self.axes]
        if self.scattered:
            lines.append("  scattered: these devices fill no box, their links are unknown")
        if self.chip.measured:
            lines.append(f"  speeds: {self.chip.whose_speeds(self.num_devices)}")
        return Sheet(headline, ["\n".join(lines)])

    def to_json(self) -> dict[str, Any]:
        """Return everything a script needs, as plain data."""
        return {
            "name": self.name,
            "chip": self.chip.name,
            "devices": self.num_devices,
            "chips": self.num_chips,
            "hosts": self.num_hosts,
            "slices": self.num_slices,
            "scattered": self.scattered,
            "axes": [
                {
                    "name": axis.name,
                    "size": axis.size,
                    "kind": axis.kind,
                    "gb_per_s": axis.speed,
                    "wraps": axis.wraps,
                    "twisted": axis.twisted,
                }
                for axis in self.axes
            ],
            "memory_gb": self.chip.memory_gb,
            "bf16_tflops": self.chip.tflops,
            "speeds": self.chip.whose_speeds(self.num_devices),
        }


# What the speed of a direction is counted per.
_PER = {"torus": "a link", "switch": "a device", "network": "a device", "core": "between cores"}


def topology(
    source: str | Sequence[Any] | Topology,
    *,
    slices: int = 1,
    chips_per_host: Sequence[int] | None = None,
    twisted: bool | None = None,
    speeds: Mapping[str, float] | str | os.PathLike[str] | Calibration | None = None,
    sort_slices: bool = True,
) -> Topology:
    """Describe the hardware that a name such as `v5p:8x8x8` means, or a list of JAX devices.

    Args:
      source: a name, or devices; a `Topology` is returned as it is, or with measured `speeds`.
        Names: `v4: v5e: v5p: v6e: tpu7x:` with a shape (`v5p:4x4x8_twisted` for a twisted torus),
        `a100: h100: h200: b200: gb200:` with GPUs per NVLink domain and domains (`h100:8x4` is 4
        hosts of 8), `cpu:` with devices and hosts; and those of the clouds, `v5litepod-16`,
        `v5p-128` (cores, so 64 chips), `8xh100`, `a3-megagpu-8g`, `p5.48xlarge`, with the shape
        that their documentation says.
      slices: how many of them are joined by DCN; of a name only.
      chips_per_host: how a TPU slice is cut into hosts, in place of what is usual.
      twisted: whether the torus is twisted; by default as the name says.
      speeds: other figures than the published ones: `link`, `network`, `core` and `bus` in GB/s,
        `tflops`, `memory_gb`, `memory_tbps`, `ram_gb`. Or a file of `meshwright calibrate`, or
        what `calibrate` returned: measured speeds; `"default"` is the user's own file.
      sort_slices: False keeps the slices of a device list in the order in which they appear.

    Raises:
      TopologyError: for hardware that is unknown or cannot exist.

    >>> print(topology("v5e:16x16"))
    v5e:16x16: 256 devices on 64 hosts
      x 16 wraps, 50 GB/s a link
      y 16 wraps, 50 GB/s a link
    """
    if twisted is not None and not isinstance(twisted, bool):
        raise TopologyError(
            f"twisted: {short(twisted)} is not True, False or None.", option="twisted"
        )
    if isinstance(source, Topology):
        if isinstance(speeds, (str, os.PathLike, Calibration)):
            source, speeds = measured_by(source, speeds), None
        given = chips_per_host is not None or twisted is not None or speeds
        if given or not is_single_slice(slices):
            raise TopologyError(
                f"{source.name}: a ready topology takes no further options. "
                "Pass them where it is made, topology(name, slices=...)."
            )
        return source
    # `named` and `live` both build `Topology`s, so they import this module and not it them.
    if isinstance(source, str):
        from meshwright.hardware.named import from_name

        return from_name(source, slices, chips_per_host, twisted, speeds)
    if isinstance(source, Mapping) or not hasattr(source, "__iter__"):
        raise TopologyError(
            f"cannot read hardware from {short(source)}. "
            "Pass a name such as 'v5p:8x8x8', or a list of JAX devices."
        )
    if not is_single_slice(slices) or chips_per_host is not None:
        raise TopologyError("slices and chips_per_host are read off the devices; leave them out.")
    from meshwright.hardware.live import from_devices

    return from_devices(list(source), twisted, speeds, sort_slices)


def measured_by(hardware: Topology, speeds: str | os.PathLike[str] | Calibration) -> Topology:
    """Return the same machine with measured speeds."""
    calibration = read_speeds(speeds, hardware.chip.name)
    return dataclasses.replace(
        hardware, chip=dataclasses.replace(hardware.chip, measured=calibration)
    )


def compact_part(topology: Topology, devices: int, slices: int | None = None) -> Topology:
    """Return the part with `devices` devices on the fewest slices, then the fewest hosts.

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
            if slices in (None, _slices_in(topology, box))
        ),
        key=lambda box: _spread(topology, box),
        default=None,
    )
    if slices in (None, 1):
        # 7 chips of a v5e form a box only as a line through 4 hosts, but they fit on 2. Where a
        # box wastes that many hosts, fewer hosts are worth more than links that are known.
        host_by_host = _host_by_host(topology, devices)
        fewest = -(-devices * topology.num_slices // topology.num_devices)
        if best is None or _slices_in(topology, best) > fewest:
            return host_by_host
        if _spread(topology, best)[1] > 1.5 * host_by_host.num_hosts:
            return host_by_host
    elif best is None:
        raise TopologyError(
            f"no part of {topology.name} has {devices} devices in {slices} equal slices."
        )
    return _box_of(topology, best, f"{devices} of {topology.name}")


def _box_of(topology: Topology, box: tuple[int, ...], name: str) -> Topology:
    """Return the box at the origin: elsewhere the links are the same, but hosts might be cut."""
    where = tuple(slice(0, side) for side in box)
    axes = tuple(
        dataclasses.replace(
            axis,
            size=side,
            wraps=axis.wraps and side == axis.size,
            twisted=axis.twisted and box == topology.shape,
        )
        for axis, side in zip(topology.axes, box, strict=True)
    )
    # Directions of one chip mean nothing, but a torus keeps its number of dimensions: 1x4 chips
    # are still coordinates of a plane.
    keep = [d for d, axis in enumerate(axes) if axis.size > 1 or axis.kind == "torus"]
    keep = keep or [len(axes) - 1]
    shape = tuple(axes[d].size for d in keep)
    return dataclasses.replace(
        topology,
        name=name,
        axes=tuple(axes[d] for d in keep),
        host=topology.host[where].reshape(shape),
        index=topology.index[where].reshape(shape),
    )


def _boxes(shape: tuple[int, ...], volume: int) -> Iterator[tuple[int, ...]]:
    """Yield the sides of every box of this volume that fits."""
    sides = [[d for d in range(1, side + 1) if volume % d == 0] for side in shape[:-1]]
    for box in itertools.product(*sides):
        last, rest = divmod(volume, math.prod(box))
        if not rest and 0 < last <= shape[-1]:
            yield (*box, last)


def _slices_in(topology: Topology, box: tuple[int, ...]) -> int:
    return math.prod(
        side for side, axis in zip(box, topology.axes, strict=True) if axis.kind == "network"
    )


def _spread(topology: Topology, box: tuple[int, ...]) -> tuple[float, ...]:
    """How far a box is spread, to compare boxes: slices, hosts, length of its torus sides."""
    hosts = np.unique(topology.host[tuple(slice(0, side) for side in box)]).size
    torus = sum(side for side, axis in zip(box, topology.axes, strict=True) if axis.kind == "torus")
    # The sides themselves come last, so that ties break alike in every process.
    return (_slices_in(topology, box), hosts, torus, *box)


def _host_by_host(topology: Topology, devices: int) -> Topology:
    """Return the first devices in the order of their hosts, as one scattered switch."""
    order = np.argsort(topology.host.ravel(), kind="stable")[:devices]
    name = "chip" if topology.chip.family == "tpu" else topology.axes[-1].name
    speed = min(axis.speed for axis in topology.axes)  # links unknown: assume the slowest
    return dataclasses.replace(
        topology,
        name=f"{devices} of {topology.name}",
        axes=(PhysicalAxis(name, devices, "switch", speed),),
        host=topology.host.ravel()[order],
        index=topology.index.ravel()[order],
        scattered=True,
    )
