"""A placement as HTML: the table, and the machine drawn once per axis."""

from __future__ import annotations

import html

import numpy as np

from meshwright._tables import html_table
from meshwright.hardware import Topology
from meshwright.placement.plan import Placement
from meshwright.placement.show import HEADING, RIGHT, footnote, headline, rows

MOST_CELLS = 1024
_CELL, _GAP = 14, 10


def as_html(placement: Placement) -> str:
    """One self-contained block, no scripts and nothing fetched."""
    notes = "<br>".join(html.escape(line) for line in footnote(placement).splitlines())
    return (
        '<div style="font-family:system-ui,sans-serif">'
        f"<b>{html.escape(headline(placement))}</b>"
        f'<div style="overflow-x:auto">{html_table([HEADING, *rows(placement)], RIGHT)}</div>'
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
    for number, points in enumerate(panels):
        column = number % 4 * (wide * _CELL + _GAP)
        row = number // 4 * (tall * _CELL + _GAP)
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
        rows = -(-points.size // wide)
        planes = np.full((1, rows, wide), -1)
        planes.flat[: points.size] = points
    shown, used = [], 0
    for plane in planes:
        plane = plane[: max(1, (MOST_CELLS - used) // plane.shape[1]), :MOST_CELLS]
        shown.append(plane)
        used += int((plane >= 0).sum())
        if used >= MOST_CELLS:
            break
    return shown, max(0, topology.num_devices - used)
