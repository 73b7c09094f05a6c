"""`Topology`: every device at a point of a physical grid, and what each direction is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np

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
            return f"{self.size} {self.name}{'s' if self.size > 1 else ''} over the slow network"
        ends = " twisted" if self.twisted else (" wraps" if self.wraps else "")
        return f"{self.name} {self.size}{ends}"


@dataclasses.dataclass(frozen=True, eq=False)
class Topology:
    """Where the devices are: pure data, made without touching any of them.

    `axes` run from the slowest network to the fastest; `shape` is their sizes. `host` gives
    the host of every grid point. `index` gives, for every grid point, the place of its
    device in `devices` (or in the hardware's own order when there are no devices).

    >>> import meshwright as mw
    >>> pod = mw.topology("v5p:4x4x8", slices=2)
    >>> pod.num_devices, pod.num_hosts, pod.num_slices, pod.shape
    (256, 64, 2, (2, 4, 4, 8))
    """

    name: str
    chip: Chip
    axes: tuple[PhysicalAxis, ...]
    host: np.ndarray
    index: np.ndarray
    devices: tuple[Any, ...] | None = None
    scattered: bool = False

    def __post_init__(self) -> None:
        for array in (self.host, self.index):  # shared and cached, so nobody may write to them
            array.setflags(write=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def num_chips(self) -> int:
        return self.num_devices // self.size_of("core")

    @property
    def num_hosts(self) -> int:
        return int(np.unique(self.host).size)

    @property
    def num_slices(self) -> int:
        """Parts joined by the slow network: slices, NVLink domains, or hosts."""
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

    def size_of(self, kind: Kind) -> int:
        return math.prod(axis.size for axis in self.axes if axis.kind == kind)

    def __str__(self) -> str:
        from meshwright.hardware.show import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from meshwright.hardware.show import as_html

        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        """Everything a script needs, as plain data."""
        from meshwright.hardware.show import as_json

        return as_json(self)
