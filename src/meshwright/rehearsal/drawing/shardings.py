"""How the arguments are cut: a drawing of every large one that differs, and the table of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from meshwright.partitioning import PartitionReport
from meshwright.partitioning.cuts import drawing
from meshwright.partitioning.report import LeafRow
from meshwright.partitioning.show import HEADING, RIGHT, amount, headline
from meshwright.rehearsal.drawing.markup import Html, grid, join, tag

_DRAWN, _ROWS = 8, 150


@dataclasses.dataclass(frozen=True)
class _Alike:
    """Arrays of one shape that are cut in one way."""

    row: LeafRow
    number: int


def shardings(report: PartitionReport) -> Html:
    figures = tag("div", *map(_figure, _alike(report.rows)), class_="figures arrays")
    shown = sorted(report.rows, key=lambda row: -row.device_bytes)[:_ROWS]
    cells = [
        [
            tag("code", row.path),
            tag("code", row.text),
            amount(row.bytes),
            amount(row.device_bytes),
            f"{row.copies:,}",
        ]
        for row in shown
    ]
    left = len(report.rows) - len(shown)
    table = tag(
        "details",
        tag("summary", tag("span", f"All {len(report.rows):,} arrays, largest on a device first")),
        grid("Shardings", HEADING, cells, RIGHT),
        tag("p", f"and {left:,} smaller ones", class_="note") if left else "",
    )
    words = "The piece of the first device is filled; axes stand behind the dims they cut."
    return join([tag("p", f"{headline(report)}."), tag("p", words, class_="note"), figures, table])


def _alike(rows: Iterable[LeafRow]) -> list[_Alike]:
    found: dict[str, _Alike] = {}
    for row in rows:
        if row.shape:
            before = found.get(row.text, _Alike(row, 0))
            named = min(before.row, row, key=lambda each: len(each.path))
            found[row.text] = _Alike(named, before.number + 1)
    return sorted(found.values(), key=lambda a: -a.row.bytes * a.number)[:_DRAWN]


def _figure(alike: _Alike) -> Html:
    row = alike.row
    others = f" and {alike.number - 1} alike" if alike.number > 1 else ""
    said = f"{amount(row.device_bytes)} of {amount(row.bytes)} on a device"
    return tag(
        "figure",
        tag("figcaption", tag("code", row.text), tag("small", f"{row.path}{others}")),
        Html(drawing(row.shape, row.local)),
        tag("small", said),
    )
