"""`Placement`: which device sits where, what each axis costs there, and the runner-up."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from meshwright.hardware import Topology
from meshwright.placement.factors import Parts
from meshwright.placement.model import AxisCost
from meshwright.spec import MeshSpec


@dataclasses.dataclass(frozen=True)
class AxisPlan:
    """One mesh axis on the hardware. `parts` is `None` when the devices form no regular box."""

    name: str
    size: int
    weight: float
    parts: Parts | None
    order: str
    cost: AxisCost
    slow: int

    @property
    def weighted(self) -> float:
        return self.weight * self.cost.all_gather


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Which device sits at which mesh position, and why.

    `positions` has the mesh's shape and holds places in `topology.devices` (or in the
    hardware's own order). `cost` is the weighted sum of the axes' all-gather times.
    `runner_up` is the next best layout of another cost; for a mesh made elsewhere it is the
    layout we would have chosen, where that one is better.

    >>> import meshwright as mw
    >>> placed = mw.place("fsdp:-1, tp:4", mw.topology("v5e:16x16"))
    >>> placed.positions.shape
    (64, 4)
    """

    spec: MeshSpec
    topology: Topology
    positions: np.ndarray
    axes: tuple[AxisPlan, ...]
    runner_up: tuple[AxisPlan, ...] | None = None

    def __post_init__(self) -> None:
        self.positions.setflags(write=False)  # shared and cached, so nobody may write to it

    @property
    def cost(self) -> float:
        return sum(axis.weighted for axis in self.axes)

    @property
    def runner_up_cost(self) -> float | None:
        return sum(axis.weighted for axis in self.runner_up) if self.runner_up else None

    def __str__(self) -> str:
        from meshwright.placement.show import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from meshwright.placement.page import as_html

        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        """The same facts as plain data."""
        from meshwright.placement.show import as_json

        return as_json(self)
