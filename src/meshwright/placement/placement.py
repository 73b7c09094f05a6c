"""`Placement`: which device sits where in the mesh, what each axis costs there, and the runner-up.

A placement prints itself as a table, draws itself in a notebook, and gives plain data for scripts.
"""

from __future__ import annotations

import dataclasses
import string
from typing import Any

import numpy as np

from meshwright._html import Html, join, tag
from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import duration, number, plural
from meshwright.hardware.topology import Topology
from meshwright.placement.cost_model import AxisCost, Parts
from meshwright.placement.mesh_drawing import costs_line, mesh_drawings
from meshwright.spec.mesh_spec import MeshSpec


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Placement(Shown):
    """Which device sits at which mesh position, and why.

    `positions` has the mesh's shape and holds places in `topology.devices` (or in the
    hardware's own order). `cost` is the weighted sum of the axes' all-gather times.
    `runner_up` is the next best layout of another cost; for a mesh made elsewhere it is the
    layout we would have chosen, where that one is better.

    >>> import meshwright as mw
    >>> placed = mw.place("fsdp:-1, tp:4", mw.topology("v5e:16x16"))
    >>> placed.positions.shape
    (64, 4)
    >>> placed
    <Placement fsdp:64, tp:4 on v5e:16x16 (256 devices, 64 hosts)>
    """

    spec: MeshSpec
    topology: Topology
    positions: np.ndarray
    axes: tuple[AxisPlan, ...]
    runner_up: tuple[AxisPlan, ...] | None = None  # plans of all axes, as in `axes`

    def __post_init__(self) -> None:
        self.positions.setflags(write=False)  # shared and cached, so read-only

    @property
    def cost(self) -> float:
        """Seconds of an all-gather of 1 GiB over each axis, times its weight, summed."""
        return sum(axis.weighted for axis in self.axes)

    @property
    def runner_up_cost(self) -> float | None:
        """The cost of the runner-up in the same unit, or `None` where there is no other layout."""
        return sum(axis.weighted for axis in self.runner_up) if self.runner_up else None

    def _sheet(self) -> Sheet:
        axes = Table(PLACEMENT_HEADING, placement_rows(self), PLACEMENT_RIGHT)
        return Sheet(placement_headline(self), [axes, footnote(self), self.drawing()])

    def drawing(self) -> Html:
        """Draw every axis on the machine, beside a plain reshape of the device list."""
        # In the function because of a cycle: `placer` makes placements.
        from meshwright.placement.placer import plain_reshape

        plain = plain_reshape(self)
        return join([mesh_drawings(self, plain), tag("p", costs_line(self, plain), class_="note")])

    def to_json(self) -> dict[str, Any]:
        """Return what the table shows as plain data; times in seconds."""
        return {
            "spec": str(self.spec),
            "topology": self.topology.to_json(),
            "cost_s": self.cost,
            "runner_up_cost_s": self.runner_up_cost,
            "axes": [_axis_json(self.topology, axis) for axis in self.axes],
            "runner_up": [_axis_json(self.topology, axis) for axis in self.runner_up or ()],
        }


@dataclasses.dataclass(frozen=True, repr=False)
class AxisPlan:
    """One mesh axis on the hardware.

    `weight` is how much the axis counts in the cost (`axes.axis_weights`). `parts` is `None` when
    the devices form no regular box. `order` is `line`, `ring`, `grid`, or for meshes made
    elsewhere `other` or `scattered`. `slow`: how many parts joined by DCN the axis spans.
    """

    name: str
    size: int
    weight: float
    parts: Parts | None
    order: str
    cost: AxisCost
    slow: int

    @property
    def weighted(self) -> float:
        """What the axis adds to the cost of its placement."""
        return self.weight * self.cost.all_gather

    def __repr__(self) -> str:
        all_gather = duration(self.cost.all_gather)
        return short_repr(self, f"{self.name}:{self.size}, {self.order}, all-gather {all_gather}")


PLACEMENT_HEADING = (
    "axis",
    "size",
    "made of",
    "forms",
    "order",
    "GB/s",
    "hops",
    "all-gather",
    "all-reduce",
    "DCN",
    "weight",
)
PLACEMENT_RIGHT = (False, True, False, False, False, True, True, True, True, False, True)


def placement_headline(placement: Placement) -> str:
    """Return the request and the hardware in one line."""
    topology = placement.topology
    network = topology.axes[0]
    joined = ""
    if network.kind == "network" and network.name != "host":  # hosts are counted anyway
        joined = f", {plural(network.size, network.name)}"
    return (
        f"{placement.spec} on {topology.name} ({plural(topology.num_devices, 'device')}, "
        f"{plural(topology.num_hosts, 'host')}{joined})"
    )


def footnote(placement: Placement) -> str:
    """Return the cost, how it is made up, and the runner-up, in one or two lines."""
    text = f"cost {duration(placement.cost)}: all-gather of 1 GiB x weight, summed over the axes"
    if placement.topology.chip.measured is not None:
        text += f"\nspeeds: {placement.topology.chip.whose_speeds(placement.topology.num_devices)}"
    if placement.runner_up is None or placement.runner_up_cost is None:
        return text
    ratio = placement.runner_up_cost / placement.cost if placement.cost else 1.0
    layout = "; ".join(
        f"{axis.name} = {made_of(placement.topology, axis)}"
        for axis in placement.runner_up
        if axis.size > 1
    )
    label = "a better layout" if ratio < 1 else "runner-up"
    return f"{text}\n{label} {duration(placement.runner_up_cost)} ({ratio:.3g}x): {layout}"


def placement_rows(placement: Placement) -> list[list[str]]:
    """A row per mesh axis, under `PLACEMENT_HEADING`."""
    return [_row(placement.topology, axis) for axis in placement.axes]


def _row(topology: Topology, axis: AxisPlan) -> list[str]:
    if axis.size == 1:
        return [axis.name, "1", *["-"] * 8, number(axis.weight)]
    cost = axis.cost
    inside = axis.slow < axis.size  # else every device is alone in its slice: no link inside
    return [
        axis.name,
        str(axis.size),
        made_of(topology, axis),
        cost.shape if inside else "network",
        axis.order,
        number(cost.bandwidth if inside else cost.network),
        str(cost.hops) if inside else "-",
        duration(cost.all_gather),
        duration(cost.all_reduce),
        slow_text(axis),
        number(axis.weight),
    ]


def slow_text(axis: AxisPlan) -> str:
    """How much of the axis crosses DCN."""
    if axis.slow == 1:
        return "no"
    return f"{axis.slow} parts at {number(axis.cost.network)} GB/s"


def made_of(topology: Topology, axis: AxisPlan) -> str:
    """Pieces of physical directions, e.g. `x 8 step 2, y 8 step 2`."""
    if axis.parts is None:
        return "scattered devices"
    return ", ".join(
        f"{topology.axes[part.direction].name} {part.factor}"
        + (f" step {part.stride}" if part.stride > 1 else "")
        for part in axis.parts
    )


def _axis_json(topology: Topology, axis: AxisPlan) -> dict[str, Any]:
    return {
        "name": axis.name,
        "size": axis.size,
        "weight": axis.weight,
        "made_of": [
            {
                "direction": topology.axes[part.direction].name,
                "factor": part.factor,
                "stride": part.stride,
            }
            for part in axis.parts or ()
        ],
        "forms": axis.cost.shape,
        "order": axis.order,
        "gb_per_s": axis.cost.bandwidth,
        "network_gb_per_s": axis.cost.network,
        "hops": axis.cost.hops,
        "slow": axis.slow,
        "all_gather_1gib_s": axis.cost.all_gather,
        "all_reduce_1gib_s": axis.cost.all_reduce,
    }


def draw_groups(placement: Placement, columns: int = 32, rows: int = 16) -> str:
    """Draw the chips as letters, one letter per group of the axis with the largest weight."""
    axis_index = max(
        range(len(placement.axes)),
        key=lambda i: (placement.axes[i].size > 1, placement.axes[i].weight, i),
    )
    axis = placement.axes[axis_index]
    plane, where = _plane(placement.topology, _group_numbers(placement, axis_index), axis)
    letters = string.ascii_letters + string.digits + "#$%&*+=?@!<>^~"
    shown = plane[:rows, :columns]
    lines = [" ".join(letters[group % len(letters)] for group in row) for row in shown]
    cut = " (its corner)" if shown.size < plane.size else ""
    title = f"groups of {axis.name!r}, a letter each{where}{cut}:"
    return "\n  ".join([title, *lines])


def _group_numbers(placement: Placement, axis_index: int) -> np.ndarray:
    """For every grid point, the number of its group along a mesh axis."""
    positions, index = placement.positions, placement.topology.index
    groups = np.moveaxis(positions, axis_index, -1).reshape(-1, positions.shape[axis_index])
    # Positions are places in the whole machine's device list, of which this may be a part.
    group_of_place = np.zeros(index.max() + 1, np.int64)
    group_of_place[groups] = np.arange(len(groups))[:, None]
    numbers: np.ndarray = group_of_place[index]
    return numbers


def _plane(topology: Topology, labels: np.ndarray, axis: AxisPlan) -> tuple[np.ndarray, str]:
    """Two directions to look at, the others fixed at 0, and the words that say so.

    The directions the axis runs along come first, so that its groups can be seen.
    """
    used = {part.direction for part in axis.parts or ()}
    directions = [d for d, size in enumerate(topology.shape) if size > 1]
    torus = [d for d in directions if topology.axes[d].kind == "torus"]
    keep = sorted(sorted(torus or directions, key=lambda d: (d not in used, d))[:2]) or [0]
    at = tuple(slice(None) if d in keep else 0 for d in range(len(topology.shape)))
    # What is not shown is said, so that a plane is not taken for the machine.
    fixed = [f"{topology.axes[d].name} = 0" for d in directions if d not in keep]
    where = f", {' down, '.join(topology.axes[d].name for d in keep)} across"
    return np.atleast_2d(labels[at]), where + (f", at {', '.join(fixed)}" if fixed else "")
