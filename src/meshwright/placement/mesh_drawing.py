"""A placement drawn on its machine: one picture per mesh axis, beside that of a plain reshape.

A cell is a device, in planes of two directions of the hardware; those of a third are labelled. The
shade of a cell is its position along the axis, the line through cells the first group of the axis
in its order, and a frame a host. Colours are one per axis, as everywhere on a page; all else is in
the ink of the page, so that pictures can be read in the dark.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from meshwright._html import Html, axis_colours, join, tag
from meshwright._text import duration, plural
from meshwright.hardware.topology import Topology

if TYPE_CHECKING:  # a placement draws itself with this file
    from meshwright.placement.placement import AxisPlan, Placement

MOST_CELLS = 1024  # more would make a notebook slow, and show no more
_CELL, _GAP = 14, 12  # pixels
_LINE, _LETTER = 14, 6  # what a line of words and a letter take
_ACROSS = 4  # planes in a row


def mesh_drawings(placement: Placement, plain: Placement | None = None) -> Html:
    """Draw every axis above size one; `plain` is the same mesh by a reshape of the device list."""
    axes = [(at, axis) for at, axis in enumerate(placement.axes) if axis.size > 1]
    if not axes:
        return Html()
    colours = axis_colours(axis.name for _, axis in axes)
    if plain is not None and (plain.positions == placement.positions).all():
        plain = None
    figures = (
        tag("figure", *_figure(placement, plain, at, colours[axis.name])) for at, axis in axes
    )
    return join(
        [_key(next(iter(colours.values()))), tag("div", *figures, class_="figures devices")]
    )


def _figure(
    placement: Placement, plain: Placement | None, at: int, colour: str
) -> tuple[Html, Html]:
    """The caption of an axis, and its picture in the placement, then by a plain reshape."""
    axis = placement.axes[at]
    drawn = [_drawn("as placed here", placement, at, colour)]
    if plain is not None:
        drawn.append(_drawn("by a plain reshape", plain, at, colour))
    group = f"{plural(axis.size, 'device')} in a group; an all-gather of 1 GiB takes"
    caption = tag("figcaption", tag("b", axis.name), group)
    return caption, tag("div", *drawn, class_="pair")


def _drawn(how: str, placement: Placement, at: int, colour: str) -> Html:
    cost = duration(placement.axes[at].cost.all_gather)
    return tag("div", tag("div", f"{how}: ", tag("b", cost)), *_axis_svg(placement, at, colour))


def costs_line(placement: Placement, plain: Placement) -> str:
    """Both costs in one line."""
    if (plain.positions == placement.positions).all():
        return "a plain reshape of the device list gives the same mesh"
    ratio = plain.cost / placement.cost if placement.cost else 1.0
    cost = f"cost {duration(placement.cost)} as placed here"
    return f"{cost}, {duration(plain.cost)} by a plain reshape of the device list ({ratio:.3g}x)"


def _key(colour: str) -> Html:
    """What the drawings mean."""

    def item(picture: Html, words: str) -> Html:
        size = {"width": 30, "height": 14, "aria_hidden": "true"}
        return tag("li", tag("svg", picture, **size), words)

    shades = join(
        tag("rect", x=x, y=1, width=9, height=12, fill=colour, fill_opacity=shade)
        for x, shade in ((0, _shade(0, 3)), (10, _shade(1, 3)), (20, _shade(2, 3)))
    )
    ring = tag("path", d="M4 7h22", class_="ring")
    start = tag("circle", cx=4, cy=7, r=3.5, class_="start")
    far = tag("path", d="M2 7h26", class_="ring far")
    host = tag("rect", x=2, y=1.5, width=26, height=11, class_="host")
    return tag(
        "ul",
        item(shades, "position along the axis, first to last"),
        item(join([ring, start]), "the first group from its start, neighbour to neighbour"),
        item(far, "the same, not to a neighbour in the picture: round the torus, or further"),
        item(host, "a host"),
        class_="key devices",
    )


@dataclasses.dataclass(frozen=True)
class _Panel:
    """A plane of grid points (-1 is empty) at a place of the picture, and what is fixed in it."""

    points: np.ndarray
    label: str
    x: int
    y: int


def _axis_svg(placement: Placement, at: int, colour: str) -> tuple[Html, Html]:
    """The devices as cells in planes, and a note of what is not drawn."""
    topology, axis = placement.topology, placement.axes[at]
    planes, left_out = _planes(topology)
    down, across = _direction_names(topology)
    panels = list(_laid_out(planes, left=_LETTER * (len(down) + 3)))
    along, first_group = _along(placement, at)
    centres = {
        int(point): (panel.x + j * _CELL + _CELL / 2, panel.y + i * _CELL + _CELL / 2)
        for panel in panels
        for (i, j), point in np.ndenumerate(panel.points)
        if point >= 0
    }
    width = max(
        panel.x + max(panel.points.shape[1] * _CELL, _LETTER * len(panel.label)) for panel in panels
    )
    width = max(width, panels[0].x + _LETTER * (len(across) + 2)) + 4
    height = max(panel.y + panel.points.shape[0] * _CELL for panel in panels) + 4
    svg = tag(
        "svg",
        *_cells(centres, along, axis.size, colour),
        *(_hosts(topology, panel) for panel in panels),
        *_ring([int(point) for point in first_group], centres, axis),
        *_labels(panels, down, across),
        viewBox=f"0 0 {width} {height}",
        width=width,
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        aria_label=f"{axis.name}: {plural(axis.size, 'device')} in a group, {axis.order}",
    )
    note = tag("div", f"{left_out:,} more devices not drawn") if left_out else Html()
    return svg, note


def _shade(position: int, size: int) -> str:
    """Opacity of a cell: from a hint of the colour to all of it, on light paper and on dark."""
    return f"{0.14 + 0.86 * position / max(1, size - 1):.2f}"


def _cells(
    centres: dict[int, tuple[float, float]], along: np.ndarray, size: int, colour: str
) -> Iterator[Html]:
    """The cells, in one element for each shade."""
    by_shade: dict[str, list[str]] = {}
    side = _CELL - 2
    for point, (x, y) in centres.items():
        cell = f"M{x - side / 2:g} {y - side / 2:g}h{side}v{side}h-{side}z"
        by_shade.setdefault(_shade(int(along[point]), size), []).append(cell)
    for shade, cells in by_shade.items():
        yield tag("path", class_="cell", d="".join(cells), fill=colour, fill_opacity=shade)


def _hosts(topology: Topology, panel: _Panel) -> Html:
    """Lines wherever the next device is of another host, and around the plane."""
    host = topology.host.ravel()
    tall, wide = panel.points.shape

    def owner(i: int, j: int) -> int:
        inside = 0 <= i < tall and 0 <= j < wide and panel.points[i, j] >= 0
        return int(host[panel.points[i, j]]) if inside else -1

    lines = []
    for i, j in itertools.product(range(tall + 1), range(wide + 1)):
        x, y = panel.x + j * _CELL, panel.y + i * _CELL
        if j < wide and owner(i - 1, j) != owner(i, j):
            lines.append(f"M{x} {y}h{_CELL}")
        if i < tall and owner(i, j - 1) != owner(i, j):
            lines.append(f"M{x} {y}v{_CELL}")
    return tag("path", class_="host", d="".join(lines))


def _ring(
    points: list[int], centres: dict[int, tuple[float, float]], axis: AxisPlan
) -> Iterator[Html]:
    """The first group in its order: steps to a neighbour drawn through, others dashed."""
    is_ring = axis.order == "ring" and axis.size > 2
    pairs = itertools.pairwise([*points, points[0]] if is_ring else points)
    near, far = list[str](), list[str]()
    for one, other in pairs:
        if one not in centres or other not in centres:
            continue  # not drawn
        (x, y), (to_x, to_y) = centres[one], centres[other]
        # Up to two cells on: axes of stride two leave every other device to another axis.
        is_near = abs(to_x - x) + abs(to_y - y) <= 2 * _CELL
        (near if is_near else far).append(f"M{x:g} {y:g}L{to_x:g} {to_y:g}")
    if near:
        yield tag("path", class_="ring", d="".join(near))
    if far:
        yield tag("path", class_="ring far", d="".join(far))
    if points[0] in centres:
        x, y = centres[points[0]]
        yield tag("circle", cx=f"{x:g}", cy=f"{y:g}", r=3.5, class_="start")


def _labels(panels: list[_Panel], down: str, across: str) -> Iterator[Html]:
    """The names of the two directions at the first plane, and at every plane what is fixed."""
    first = panels[0]
    above = first.y - 4 - (_LINE if first.label else 0)
    yield tag("text", f"{across} →", x=first.x, y=above)
    if down:
        yield tag("text", f"{down} ↓", x=first.x - 4, y=first.y + 10, text_anchor="end")
    for panel in panels:
        if panel.label:
            yield tag("text", panel.label, x=panel.x, y=panel.y - 4)


def _along(placement: Placement, axis_index: int) -> tuple[np.ndarray, np.ndarray]:
    """Per grid point its position along the axis; and the grid points of the first group."""
    positions, topology = placement.positions, placement.topology
    places = int(topology.index.max()) + 1
    along, point_of = np.zeros(places, np.int64), np.zeros(places, np.int64)
    size = positions.shape[axis_index]
    along[np.moveaxis(positions, axis_index, -1)] = np.arange(size)
    index = topology.index.ravel()
    point_of[index] = np.arange(index.size)
    first = np.moveaxis(positions, axis_index, 0).reshape(size, -1)[:, 0]
    return along[index], point_of[first]


# Planes. In: a topology. Out: its grid points, two directions at a time: two of the torus, or rows
# of a host or domain. Example: v5p:4x4x8 is drawn in eight planes of 4 x 4, z = 0 to z = 7.


def _torus(topology: Topology) -> list[int]:
    return [d for d, axis in enumerate(topology.axes) if axis.kind == "torus"]


def _direction_names(topology: Topology) -> tuple[str, str]:
    """The names of the direction down and of that across."""
    torus = _torus(topology)
    if len(torus) >= 2:
        return topology.axes[torus[0]].name, topology.axes[torus[1]].name
    if len(topology.axes) == 1:
        return "", topology.axes[0].name
    others = [axis.name for axis in topology.axes[:-1] if axis.size > 1]
    return ", ".join(others), topology.axes[-1].name


def _planes(topology: Topology) -> tuple[list[tuple[np.ndarray, str]], int]:
    """The planes with what is fixed in each, as many as are drawn; and the devices left out."""
    points = np.arange(topology.num_devices)
    torus = _torus(topology)
    if len(torus) >= 2:
        grid = np.moveaxis(points.reshape(topology.shape), torus[:2], (-2, -1))
        planes = grid.reshape(-1, *grid.shape[-2:])
        fixed = [axis for d, axis in enumerate(topology.axes) if d not in torus[:2]]
    else:
        wide = topology.shape[-1] if len(topology.shape) > 1 else min(16, topology.num_devices)
        planes = np.full((1, -(-points.size // wide), wide), -1)
        planes.flat[: points.size] = points
        fixed = []
    sizes = [axis.size for axis in fixed]
    shown, used = [], 0
    for number, plane in enumerate(planes):
        at = np.unravel_index(number, sizes) if sizes else ()
        label = ", ".join(
            f"{axis.name} = {int(i)}" for axis, i in zip(fixed, at, strict=True) if axis.size > 1
        )
        plane = plane[: max(1, (MOST_CELLS - used) // plane.shape[1]), :MOST_CELLS]
        shown.append((plane, label))
        used += int((plane >= 0).sum())
        if used >= MOST_CELLS:
            break
    return shown, max(0, topology.num_devices - used)


def _laid_out(planes: list[tuple[np.ndarray, str]], left: int) -> Iterator[_Panel]:
    """Planes in rows of four; a label that is wider than its plane has the room it needs."""
    tall, wide = planes[0][0].shape  # of the first, because the last ones may be cut
    labelled = max(len(label) for _, label in planes)
    step_x = max(wide * _CELL, _LETTER * labelled) + _GAP
    step_y = tall * _CELL + _GAP + (_LINE if labelled else 0)
    top = 2 * _LINE if labelled else _LINE
    for number, (points, label) in enumerate(planes):
        row, column = divmod(number, _ACROSS)
        yield _Panel(points, label, left + column * step_x, top + row * step_y)
