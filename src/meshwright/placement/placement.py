"""`Placement`: which device sits where, what each axis costs there, and the runner-up."""

from __future__ import annotations

import dataclasses
import html
import string
from typing import Any

import numpy as np

from meshwright._html import html_table
from meshwright._text import duration, number, plural, table
from meshwright.hardware.topology import Topology
from meshwright.placement.cost_model import AxisCost, Parts
from meshwright.spec.mesh_spec import MeshSpec


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
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        """The same facts as plain data."""
        return as_json(self)


# A placement as text and JSON.


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
    "slow network",
    "weight",
)
PLACEMENT_RIGHT = (False, True, False, False, False, True, True, True, True, False, True)


def as_text(placement: Placement) -> str:
    return "\n".join(
        [
            placement_headline(placement),
            table([PLACEMENT_HEADING, *placement_rows(placement)], PLACEMENT_RIGHT),
            footnote(placement),
        ]
    )


def placement_headline(placement: Placement) -> str:
    topology = placement.topology
    network = topology.axes[0]
    joined = ""
    if network.kind == "network" and network.name != "host":
        joined = f", {plural(network.size, network.name)}"
    return (
        f"{placement.spec} on {topology.name} ({plural(topology.num_devices, 'device')}, "
        f"{plural(topology.num_hosts, 'host')}{joined})"
    )


def footnote(placement: Placement) -> str:
    """The cost, how it is made up, and the runner-up."""
    text = f"cost {duration(placement.cost)}: all-gather of 1 GiB x weight, summed over the axes"
    if placement.runner_up is None or placement.runner_up_cost is None:
        return text
    ratio = placement.runner_up_cost / placement.cost if placement.cost else 1.0
    layout = "; ".join(
        f"{axis.name} = {made_of(placement.topology, axis)}"
        for axis in placement.runner_up
        if axis.size > 1
    )
    other = "a better layout" if ratio < 1 else "runner-up"
    return f"{text}\n{other} {duration(placement.runner_up_cost)} ({ratio:.3g}x): {layout}"


def placement_rows(placement: Placement) -> list[list[str]]:
    return [_row(placement.topology, axis) for axis in placement.axes]


def _row(topology: Topology, axis: AxisPlan) -> list[str]:
    if axis.size == 1:
        return [axis.name, "1", *["-"] * 8, number(axis.weight)]
    cost = axis.cost
    inside = axis.slow < axis.size
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
    """How much of the axis crosses the slow network."""
    if axis.slow == 1:
        return "no"
    return f"{axis.slow} parts at {number(axis.cost.network)} GB/s"


def made_of(topology: Topology, axis: AxisPlan) -> str:
    """Pieces of physical directions, e.g. `x 8 step 2, y 8 step 2`."""
    if axis.parts is None:
        return "scattered devices"
    return ", ".join(
        f"{topology.axes[part.dim].name} {part.factor}"
        + (f" step {part.stride}" if part.stride > 1 else "")
        for part in axis.parts
    )


def as_json(placement: Placement) -> dict[str, Any]:
    return {
        "spec": str(placement.spec),
        "topology": placement.topology.to_json(),
        "cost_s": placement.cost,
        "runner_up_cost_s": placement.runner_up_cost,
        "axes": [_axis_json(placement.topology, axis) for axis in placement.axes],
        "runner_up": [_axis_json(placement.topology, axis) for axis in placement.runner_up or ()],
    }


def _axis_json(topology: Topology, axis: AxisPlan) -> dict[str, Any]:
    return {
        "name": axis.name,
        "size": axis.size,
        "weight": axis.weight,
        "made_of": [
            {"direction": topology.axes[p.dim].name, "factor": p.factor, "stride": p.stride}
            for p in axis.parts or ()
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


def busiest(placement: Placement) -> int:
    """The axis that works hardest, which is the one worth drawing."""
    return max(
        range(len(placement.axes)),
        key=lambda d: (placement.axes[d].size > 1, placement.axes[d].weight, d),
    )


def drawing(placement: Placement, columns: int = 32, placement_rows: int = 16) -> str:
    """The chips as letters, one letter per group of the busiest axis."""
    dim = busiest(placement)
    labels = group_of_point(placement, dim)
    plane, where = _plane(placement.topology, labels, placement.axes[dim])
    letters = string.ascii_letters + string.digits + "#$%&*+=?@!<>^~"
    shown = plane[:placement_rows, :columns]
    lines = [" ".join(letters[group % len(letters)] for group in row) for row in shown]
    cut = " (its corner)" if shown.size < plane.size else ""
    title = f"groups of {placement.axes[dim].name!r}, a letter each{where}{cut}:"
    return "\n  ".join([title, *lines])


def group_of_point(placement: Placement, dim: int) -> np.ndarray:
    """For every grid point, the number of its group along mesh axis `dim`."""
    groups = np.arange(placement.positions.size // placement.positions.shape[dim])
    moved = np.moveaxis(placement.positions, dim, -1).reshape(groups.size, -1)
    of_place = np.zeros(placement.topology.index.max() + 1, np.int64)
    of_place[moved] = groups[:, None]
    labels: np.ndarray = of_place[placement.topology.index]
    return labels


def _plane(topology: Topology, labels: np.ndarray, axis: AxisPlan) -> tuple[np.ndarray, str]:
    """Two directions to look at, the others fixed at 0, and the words that say so.

    The directions the axis runs along come first, so that its groups can be seen.
    """
    used = {part.dim for part in axis.parts or ()}
    dims = [d for d, size in enumerate(topology.shape) if size > 1]
    torus = [d for d in dims if topology.axes[d].kind == "torus"]
    keep = sorted(sorted(torus or dims, key=lambda d: (d not in used, d))[:2]) or [0]
    at = tuple(slice(None) if d in keep else 0 for d in range(len(topology.shape)))
    fixed = [f"{topology.axes[d].name} = 0" for d in dims if d not in keep]
    where = f", {' down, '.join(topology.axes[d].name for d in keep)} across"
    return np.atleast_2d(labels[at]), where + (f", at {', '.join(fixed)}" if fixed else "")


# A placement as HTML: the table, and the machine drawn once per axis.


MOST_CELLS = 1024
_CELL, _GAP = 14, 10


def as_html(placement: Placement) -> str:
    """One self-contained block, no scripts and nothing fetched."""
    notes = "<br>".join(html.escape(line) for line in footnote(placement).splitlines())
    rows = html_table([PLACEMENT_HEADING, *placement_rows(placement)], PLACEMENT_RIGHT)
    return (
        '<div style="font-family:system-ui,sans-serif">'
        f"<b>{html.escape(placement_headline(placement))}</b>"
        f'<div style="overflow-x:auto">{rows}</div>'
        f"<p>{notes}</p>"
        f'<div style="display:flex;flex-wrap:wrap;gap:24px">{drawings(placement)}</div></div>'
    )


def drawings(placement: Placement) -> str:
    """One picture per axis above size one: colour is the position along the axis."""
    return "".join(
        f"<figure style='margin:0'><figcaption>{html.escape(axis.name)}: "
        f"position 0 to {axis.size - 1}, first group outlined</figcaption>"
        f"{picture(placement, dim)}</figure>"
        for dim, axis in enumerate(placement.axes)
        if axis.size > 1
    )


def picture(placement: Placement, dim: int) -> str:
    """The devices as cells in planes of two directions, as an SVG."""
    topology = placement.topology
    along, first_group = _along(placement, dim)
    panels, left_out = _panels(topology)
    cells, width, height = [], 0, 0
    size = placement.axes[dim].size
    tall, wide = panels[0].shape  # the last ones may be cut
    for panel, points in enumerate(panels):
        column = panel % 4 * (wide * _CELL + _GAP)
        row = panel // 4 * (tall * _CELL + _GAP)
        for (i, j), point in np.ndenumerate(points):
            if point < 0:
                continue
            hue = 300 * int(along[point]) // max(1, size - 1)
            edge = ' stroke="#000" stroke-width="2"' if first_group[point] else ""
            x, y = column + j * _CELL + 1, row + i * _CELL + 1
            cells.append(
                f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="{_CELL - 2}" '
                f'fill="hsl({hue} 70% 60%)"{edge}/>'
            )
            width, height = max(width, x + _CELL), max(height, y + _CELL)
    note = f"<div>{left_out:,} more devices not drawn</div>" if left_out else ""
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" style="max-width:100%" '
        f'xmlns="http://www.w3.org/2000/svg" role="img">{"".join(cells)}</svg>{note}'
    )


def _along(placement: Placement, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Per grid point: its position along the axis, and whether it is in the first group."""
    positions = placement.positions
    size = int(placement.topology.index.max()) + 1
    along, first = np.zeros(size, np.int64), np.zeros(size, bool)
    steps = np.arange(positions.shape[dim])
    along[np.moveaxis(positions, dim, -1)] = steps
    first[np.moveaxis(positions, dim, 0).reshape(steps.size, -1)[:, 0]] = True
    index = placement.topology.index.ravel()
    return along[index], first[index]


def _panels(topology: Topology) -> tuple[list[np.ndarray], int]:
    """Grid points in planes: two torus directions, or rows of a host or domain; -1 is empty."""
    points = np.arange(topology.num_devices)
    torus = [d for d, axis in enumerate(topology.axes) if axis.kind == "torus"]
    if len(torus) >= 2:
        grid = np.moveaxis(points.reshape(topology.shape), torus[:2], (-2, -1))
        planes = grid.reshape(-1, *grid.shape[-2:])
    else:
        wide = topology.shape[-1] if len(topology.shape) > 1 else min(16, topology.num_devices)
        placement_rows = -(-points.size // wide)
        planes = np.full((1, placement_rows, wide), -1)
        planes.flat[: points.size] = points
    shown, used = [], 0
    for plane in planes:
        plane = plane[: max(1, (MOST_CELLS - used) // plane.shape[1]), :MOST_CELLS]
        shown.append(plane)
        used += int((plane >= 0).sum())
        if used >= MOST_CELLS:
            break
    return shown, max(0, topology.num_devices - used)
