"""`Figure` and `LinkFigure`: one speed of a device, one collective's line; read and shown.

In: a row of a file of speeds. Out: the value, checked, and its cells in a table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from meshwright._checks import JsonFields
from meshwright._show import Table
from meshwright._text import amount, duration
from meshwright.errors import short

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_NO_LINE = 0.3  # error of a line from which on its points are said not to lie on one


@dataclasses.dataclass(frozen=True)
class Figure:
    """One speed or time of a device: the median of all devices and runs.

    `spread` is half of what lies between the slowest and the fastest tenth of the runs, as a part
    of `value`; 0 where it is not known. `each` has the median of every device, in the order of the
    file's `processes`. `source` says where it is from, if it was not measured on them.
    """

    name: str
    value: float
    unit: str
    spread: float
    each: tuple[float, ...] = ()
    source: str = ""


@dataclasses.dataclass(frozen=True)
class LinkFigure:
    """One collective over groups of `members` devices: `latency + bytes / bandwidth` seconds.

    `links` says what joins them, as in a rehearsal; `slices` how many parts of the machine that
    DCN joins they span. `points` are what the line is fitted to: bytes, seconds and their spread.
    `error` is the root mean square error of the line over them: 0.5 is a time 1.5 times too long
    or too short. `each`: every device's seconds at the most bytes, without waiting for others of
    its group.
    """

    kind: str
    axis: str
    links: str
    members: int
    slices: int
    latency: float
    bandwidth: float
    error: float
    points: tuple[tuple[float, float, float], ...]
    each: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """What was measured, over which links."""
        return f"{self.kind} over {self.members} by {self.links}"

    def seconds(self, size: float) -> float:
        """The time of so many bytes by the line."""
        return self.latency + size / self.bandwidth

    @property
    def off(self) -> tuple[float, ...]:
        """How many times too long or too short the line is at each point, less 1."""
        least = 1e-9  # what a trace can tell; keeps a time of 0 from being infinitely far off
        pairs = [
            (max(self.seconds(size), least), max(took, least)) for size, took, _ in self.points
        ]
        return tuple(max(line / took, took / line) - 1 for line, took in pairs)

    @property
    def true_error(self) -> float:
        """The root mean square of `off`; files of before 2026-11-18 have another `error`."""
        logs = [math.log1p(each) ** 2 for each in self.off]
        return math.expm1(math.sqrt(sum(logs) / len(logs))) if logs else self.error

    @property
    def problem(self) -> str:
        """Says where the points are farthest from the line, if they do not lie on one; else empty.

        >>> points = (4e3, 1e-5, 0.0), (4e6, 1e-2, 0.0)
        >>> LinkFigure("all-gather", "x", "NVLink", 2, 1, 1e-5, 4e9, 0.0, points).problem
        'all-gather, x: its points are not a line; 3.815 MiB took 10.0 ms, the line has 1.01 ms'
        """
        if self.true_error <= _NO_LINE or not self.points:
            return ""
        size, took, _ = self.points[max(range(len(self.off)), key=self.off.__getitem__)]
        return (
            f"{self.kind}, {self.axis}: its points are not a line; {amount(int(size))} took "
            f"{duration(took)}, the line has {duration(self.seconds(size))}"
        )


def figure_table(figures: Sequence[Figure]) -> Table:
    """Every figure with its spread, and its source where one has any."""
    rows = [[each.name, measured_text(each.value, each.unit), _part(each)] for each in figures]
    heading, right = ["figure", "value", "spread"], [False, True, True]
    if any(each.source for each in figures):
        rows = [[*row, each.source] for row, each in zip(rows, figures, strict=True)]
        heading, right = [*heading, "source"], [*right, False]
    return Table(heading, rows, right)


def _part(figure: Figure) -> str:
    return f"{figure.spread:.0%}" if figure.spread or not figure.source else "-"


def measured_text(value: float, unit: str) -> str:
    """A value with its unit, in words: `692 TFLOP/s`, `4.25 TB/s`, `2.5 us`."""
    if unit == "s":
        return duration(value)
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


def link_cells(row: LinkFigure) -> list[str]:
    sizes = f"{amount(row.points[0][0])} to {amount(row.points[-1][0])}" if row.points else ""
    speed = "-" if math.isinf(row.bandwidth) else f"{row.bandwidth / 1e9:.3g}"
    cells = [f"{row.kind}, {row.axis}", str(row.members), row.links, duration(row.latency), speed]
    return [*cells, f"{row.true_error:.0%}", sizes]


_LEAST = 1e-15  # of a speed or a time in its unit
_MOST_SECONDS = 3600.0  # of a kernel or a collective: none takes an hour


# The unit of figures that rehearsals look up, by the first word of their names.
_UNITS = {
    **dict.fromkeys(("product", "sustained", "kernel"), "FLOP/s"),
    **dict.fromkeys(("memory", "bus"), "B/s"),
    **dict.fromkeys(("function", "irregular", "apart", "loop"), "elements/s"),
    **dict.fromkeys(("start", "latency", "fill"), "s"),
}


def read_figure(row: JsonFields) -> Figure:
    name, unit = row.text("name"), row.text("unit")
    row = JsonFields(row.data, f"figure {short(name)}")
    first, *rest = name.split() or [""]
    if unit != (usual := _UNITS.get(first, unit)):
        raise row.wrong("unit", unit, repr(usual))
    if first == "product" and not (len(rest) == 2 and rest[1].isdecimal() and int(rest[1][:9])):
        raise row.wrong("name", name, "a dtype and a side, as 'product bf16 4096'")
    each = row.numbers("each", _LEAST) if "each" in row.data else ()
    if unit == "s":
        _check_seconds(row, "value", row.get("value"))
    source = row.text("source") if "source" in row.data else ""
    return Figure(name, row.number("value", _LEAST), unit, row.number("spread"), each, source)


def read_link(row: JsonFields) -> LinkFigure:
    kind, axis, links = (row.text(name) for name in ("kind", "axis", "links"))
    row = JsonFields(row.data, f"{short(kind)} over {short(axis)}")
    if kind not in COLLECTIVES:
        raise row.wrong("kind", kind, f"one of {', '.join(COLLECTIVES)}")
    _check_seconds(row, "latency", row.get("latency"))
    points = []
    for point in row.list_of("points"):
        if not isinstance(point, list) or len(point) != 3:
            raise row.wrong("points", point, "bytes, seconds and their spread")
        size, seconds, spread = (row.as_number("points", value) for value in point)
        _check_seconds(row, "points", seconds)
        points.append((size, seconds, spread))
    return LinkFigure(
        *(kind, axis, links, row.count("members", 2), row.count("slices", 1)),
        *(row.number("latency"), row.number("bandwidth", _LEAST), row.number("error")),
        *(tuple(points), row.numbers("each")),
    )


def _check_seconds(row: JsonFields, name: str, value: Any) -> None:
    if row.as_number(name, value) > _MOST_SECONDS:
        raise row.wrong(name, value, f"seconds up to {_MOST_SECONDS:,.0f}")


def link_text(link: LinkFigure) -> str:
    return f"{short(link.kind)} over {short(link.axis)}"
