"""The mesh on the machine: what each axis costs, and the devices drawn once per axis."""

from __future__ import annotations

from meshwright.placement import Placement
from meshwright.placement.page import drawings
from meshwright.placement.show import HEADING, RIGHT, footnote, headline, rows
from meshwright.rehearsal.drawing.markup import Html, grid, join, tag


def mesh(placed: Placement) -> Html:
    notes = (tag("p", line, class_="note") for line in footnote(placed).splitlines())
    return join(
        [
            tag("p", f"{headline(placed)}."),
            tag("div", Html(drawings(placed)), class_="figures devices"),
            grid("Mesh axes", HEADING, rows(placed), RIGHT),
            *notes,
        ]
    )
