"""Device numbers in a text, turned into positions of the mesh.

Number `i` is position `i` of the mesh, counted in row order. A program for several TPU slices is
written for one of them: its numbers count the positions of any one slice. What goes between
slices names devices by their own numbers instead.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.placement import Placement
from meshwright.rehearsal.ledger.wires import grid_coords

_PER_SLICE = 100_000


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """Where the numbers of one program point to."""

    placement: Placement
    devices: int

    def __post_init__(self) -> None:
        total, slices = self.placement.positions.size, self.placement.topology.num_slices
        if self.devices not in (total, total // slices):
            raise MeshwrightError(
                f"the program is for {self.devices:,} devices, the mesh has {total:,}. "
                "Pass the placement of the mesh it was compiled for."
            )

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """For each copy of the program, the positions its numbers mean."""
        total = self.placement.positions.size
        if self.devices == total:
            return np.arange(total)[None]
        return np.argsort(self._slices, kind="stable").reshape(-1, self.devices)

    def of(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Positions of a group or of pairs, in every copy of the program."""
        return [row[numbers] for row in self.rows]

    def of_device_ids(self, ids: np.ndarray) -> np.ndarray:
        """Positions of devices that go by their own numbers."""
        order = np.argsort(self._ids)
        found: np.ndarray = order[np.searchsorted(self._ids[order], ids)]
        return found

    @functools.cached_property
    def _slices(self) -> np.ndarray:
        topology = self.placement.topology
        network = [dim for dim, axis in enumerate(topology.axes) if axis.kind == "network"]
        numbers: np.ndarray = grid_coords(self.placement)[:, network].sum(axis=1)
        return numbers

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        """A TPU's own number: its slice, then its chip, the first direction counting fastest."""
        topology = self.placement.topology
        inside = [dim for dim, axis in enumerate(topology.axes) if axis.kind != "network"]
        number, step = np.zeros(self.placement.positions.size, np.int64), 1
        cores = [dim for dim in inside if topology.axes[dim].kind == "core"]
        for dim in [*cores, *(dim for dim in inside if dim not in cores)]:
            number += step * grid_coords(self.placement)[:, dim]
            step *= topology.axes[dim].size
        number += _PER_SLICE * (1 + self._slices)
        return number
