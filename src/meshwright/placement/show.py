"""A placement as text and JSON."""

from __future__ import annotations

import string
from typing import Any

import numpy as np

from meshwright._tables import duration, number, table
from meshwright.hardware import Topology
from meshwright.hardware.show import as_json as topology_json
from meshwright.hardware.show import count
from meshwright.placement.plan import AxisPlan, Placement

HEADING = (
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
RIGHT = (False, True, False, False, False, True, True, True, True, False, True)


def as_text(placement: Placement) -> str:
    return "\n".join(
        [
            headline(placement),
            table([HEADING, *rows(placement)], RIGHT),
            footnote(placement),
        ]
    )


def headline(placement: Placement) -> str:
    topology = placement.topology
    network = topology.axes[0]
    joined = ""
    if network.kind == "network" and network.name != "host":
        joined = f", {count(network.size, network.name)}"
    return (
        f"{placement.spec} on {topology.name} ({count(topology.num_devices, 'device')}, "
        f"{count(topology.num_hosts, 'host')}{joined})"
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


def rows(placement: Placement) -> list[list[str]]:
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
        "topology": topology_json(placement.topology),
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


def drawing(placement: Placement, columns: int = 32, rows: int = 16) -> str:
    """The chips as letters, one letter per group of the busiest axis."""
    dim = busiest(placement)
    labels = group_of_point(placement, dim)
    plane, where = _plane(placement.topology, labels, placement.axes[dim])
    letters = string.ascii_letters + string.digits + "#$%&*+=?@!<>^~"
    shown = plane[:rows, :columns]
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
