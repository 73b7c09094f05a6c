"""HTML for pages and notebooks: escaped markup, tables, bars, one palette, one style sheet.

`Html` is text that is markup already; every other text is escaped when it is put into markup, so
that no name of a user's array can break a page.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
from collections.abc import Callable, Iterable, Sequence
from importlib import resources


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: object) -> Html:
    """Text for a page; HTML stays as it is.

    >>> escape("<b>"), escape(Html("<b>"))
    ('&lt;b&gt;', '<b>')
    """
    return text if isinstance(text, Html) else Html(html.escape(str(text)))


def join(parts: Iterable[str]) -> Html:
    return Html("".join(escape(part) for part in parts))


def tag(name: str, *inside: object, **attributes: object) -> Html:
    """An element. `class_` is the attribute `class`, `stroke_width` is `stroke-width`.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{written}>{join(map(escape, inside))}</{name}>")


def wide(label: str, *inside: object) -> Html:
    """A box that scrolls by itself, also with the keyboard, where its content is too wide."""
    return tag("div", *inside, class_="wide", role="region", aria_label=label, tabindex=0)


def badge(words: str) -> Html:
    """A few words in a frame, beside what they are about."""
    return tag("span", words, class_="badge")


def grid(
    label: str,
    heading: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Sequence[bool],
    classes: Sequence[str] = (),
) -> Html:
    """A table in a box of its own; numbers stand to the right.

    `classes` has one of each column: "less" is left out on a phone, where there is room for few.
    """
    kinds = [
        " ".join(filter(None, ("number" if flush else "", kind)))
        for flush, kind in itertools.zip_longest(right, classes, fillvalue="")
    ]

    def line(name: str, cells: Sequence[object], **more: str) -> Html:
        return tag(
            "tr",
            *(
                tag(name, cell, **({"class_": kind} if kind else {}), **more)
                for cell, kind in zip(cells, kinds, strict=True)
            ),
        )

    head = tag("thead", line("th", heading, scope="col"))
    return wide(label, tag("table", head, tag("tbody", *(line("td", row) for row in rows))))


def fold(summary: object, *inside: object, is_open: bool = False) -> Html:
    """A line that unfolds what is inside of it, without a script."""
    return tag("details", tag("summary", summary), *inside, **({"open": ""} if is_open else {}))


def block(*inside: object) -> Html:
    """What a notebook shows of a value: the one style, then the content; no scripts."""
    return tag("div", tag("style", Html(style())), *inside, class_="mw")


# `color-scheme` lets the browser paint its own background dark, too.
_PLAIN = ":root{color-scheme:light dark}body{margin:16px}"


def page(title: str, body: str, *, css: str = _PLAIN, body_class: str = "") -> str:
    """A whole page around a value's HTML: works offline, readable on a phone."""
    named = f' class="{html.escape(body_class)}"' if body_class else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{css}</style></head>"
        f"<body{named}>{body}</body></html>\n"
    )


# Lanes of stacked parts on one scale, as SVG pictures that are as wide as there is room: positions
# are percentages, so that one picture serves a wide screen and a phone without a script.

_TALL, _EDGE = 30, 4
# A label is drawn where its part is this much of the width, and stays on a phone from there.
_ROOM, _ROOM_ON_A_PHONE = 8.0, 22.0


@dataclasses.dataclass(frozen=True)
class Part:
    """A stretch of a lane."""

    name: str
    size: float
    colour: str


@dataclasses.dataclass(frozen=True)
class Lane:
    """Parts one after the other, under a line of words."""

    title: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> float:
        return sum(part.size for part in self.parts)


def bars(
    lanes: Sequence[Lane],
    write: Callable[[float], str],
    *,
    limit: float | None = None,
    whole: float = 0.0,
) -> Html:
    """All lanes on one scale, up to `whole` at least; what lies beyond the limit is hatched."""
    whole = max([whole, limit or 0.0, *(lane.size for lane in lanes)]) or 1.0
    words = _limit_words(limit / whole * 100, f"limit {write(limit)}") if limit else Html()
    drawn = (
        tag("p", lane.title, class_="lane") + _lane(lane, whole, write, limit) for lane in lanes
    )
    return join([words, *map(Html, drawn)])


def legend(parts: Sequence[Part], write: Callable[[float], str], whole: float) -> Html:
    """What the colours mean, with numbers."""
    items = (
        tag(
            "li",
            tag("i", style=f"background:{part.colour}"),
            tag("span", part.name),
            tag("b", write(part.size)),
            tag("small", _percent(part.size / (whole or 1))),
        )
        for part in parts
        if part.size
    )
    return tag("ul", *items, class_="legend")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "<1%"


_HATCH = Html(
    '<defs><pattern id="mw-over" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="3" height="7" fill="#000" '
    'fill-opacity=".3"/></pattern></defs>'
)


def _lane(lane: Lane, whole: float, write: Callable[[float], str], limit: float | None) -> Html:
    ends = f"{(limit or lane.size) / whole:.2%}"
    track = tag("rect", y=_EDGE, width=ends, height=_TALL, class_="track")
    boxes, words, passed = [track], list[Html](), 0.0
    for part in lane.parts:
        x, width = passed / whole * 100, part.size / whole * 100
        said = tag("title", f"{part.name}: {write(part.size)}")
        boxes.append(tag("g", said, _rect(x, width, part.colour)))
        words.append(_inside(write(part.size), part.colour, x, width))
        passed += part.size
    if limit:
        x = limit / whole * 100
        if passed > limit:
            boxes += [_HATCH, _rect(x, (passed - limit) / whole * 100, "url(#mw-over)")]
        boxes.append(tag("line", x1=ends, x2=ends, y1=0, y2=_TALL + 2 * _EDGE, class_="limit"))
    return tag(
        "svg",
        *boxes,
        *words,
        class_="bar",
        width="100%",
        height=_TALL + 2 * _EDGE,
        role="img",
        aria_label=_words(lane, write),
        xmlns="http://www.w3.org/2000/svg",
    )


def _inside(words: str, colour: str, x: float, width: float) -> Html:
    """The size of a part, written into it where there is room."""
    if width < _ROOM:
        return Html()
    return tag(
        "text",
        words,
        x=f"{x + width / 2:.2f}%",
        y=_EDGE + 20,
        style=f"fill:{ink(colour)}",
        text_anchor="middle",
        class_="inside" if width >= _ROOM_ON_A_PHONE else "inside roomy",
    )


def _rect(x: float, width: float, fill: str) -> Html:
    return tag("rect", x=f"{x:.2f}%", y=_EDGE, width=f"{width:.2f}%", height=_TALL, fill=fill)


def _limit_words(x: float, words: str) -> Html:
    """Where the marks of the limit stand, over the first lane."""
    side = f"right:{100 - x:.2f}%" if x > 40 else f"left:{x:.2f}%"
    return tag("p", tag("span", words, style=side), class_="limit-words")


def _words(lane: Lane, write: Callable[[float], str]) -> str:
    said = ", ".join(f"{part.name} {write(part.size)}" for part in lane.parts if part.size)
    return f"{lane.title}: {said}"


# A drawing of how an array is cut: one panel per shard of its leading dims.

_LONGEST, _SHORTEST, _GAP = 128, 40, 8  # sides of a panel and the space between, in pixels
_MOST_LINES, _MOST_PANELS = 16, 8


def cut_picture(shape: Sequence[int], local: Sequence[int]) -> Html:
    """Draw the array with its cuts as an SVG; the first device's shard is filled.

    The last two dims are a rectangle, the one before them a row of panels, the one before that a
    column of rows. At most 16 cuts a side and 8 panels are drawn; the line below has the numbers.
    """
    # An array without elements is drawn as if its empty dims were of size one.
    counts = [max(1, size // max(1, part)) for size, part in zip(shape, local, strict=True)]
    # Filled up to four dims from the left; of more than four, the leading ones are not drawn.
    sizes = [1] * (4 - len(shape)) + list(shape)[-4:]
    cuts = [1] * (4 - len(counts)) + counts[-4:]
    panels = [min(cut, _MOST_PANELS) for cut in cuts[:2]]
    lines = [min(cut, _MOST_LINES) for cut in cuts[2:]]
    height, width = _panel_size(sizes[2], sizes[3])
    parts = [
        _panel(column * (width + _GAP) + 1, row * (height + _GAP) + 1, width, height, lines, not at)
        for at, (row, column) in enumerate(itertools.product(range(panels[0]), range(panels[1])))
    ]
    across, down = panels[1] * (width + _GAP), panels[0] * (height + _GAP)
    words = [
        f"{size} in {count}" if count > 1 else f"{size}"
        for size, count in zip(shape, counts, strict=True)
    ]
    svg = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {across} {down}",
        width=across,
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        aria_label=" x ".join(words),
    )
    return join([svg, tag("div", " x ".join(words))])


def _panel_size(rows: int, columns: int) -> tuple[int, int]:
    """Return height and width in the array's proportions; a vector still gets a visible side."""
    longest = max(rows, columns, 1)
    return (
        max(_SHORTEST, round(_LONGEST * rows / longest)),
        max(_SHORTEST, round(_LONGEST * columns / longest)),
    )


def _panel(x: int, y: int, width: int, height: int, lines: Sequence[int], first: bool) -> Html:
    """Draw a rectangle cut into `lines` rows and columns; in the `first` one a shard is filled."""
    rows, columns = lines
    parts = [tag("rect", class_="whole", x=x, y=y, width=width, height=height)]
    if first:
        sides = {"width": f"{width / columns:.1f}", "height": f"{height / rows:.1f}"}
        parts.append(tag("rect", class_="piece", x=x, y=y, **sides))
    cuts = [f"M{x + width * line / columns:.1f} {y}v{height}" for line in range(1, columns)]
    cuts += [f"M{x} {y + height * line / rows:.1f}h{width}" for line in range(1, rows)]
    if cuts:
        parts.append(tag("path", class_="cut", d="".join(cuts)))
    return join(parts)


# One colour, one meaning, on a whole page: parts of memory, parts of time, causes of communication,
# mesh axes and tasks of a pipeline share none. Those of one subject are of one family; neighbours
# differ in lightness, too. Lines of losses have no colour but dashes, pieces of arrays are drawn in
# the ink.

BLUE, AMBER, GREEN, RED = "#3b6fc4", "#f0a630", "#2f9e7a", "#bf4636"
GREY, HIDDEN = "#aeb7c4", "#d6c3a8"  # what is expected; what runs beside the step

MEMORY = {"arguments": BLUE, "outputs": "#93b8f0", "temporaries": AMBER, "code": "#5d6673"}
TIME = {
    "compute": GREEN,
    "memory": "#9ad4be",
    "starting kernels": "#a8995a",
    "exposed communication": RED,
    "exposed host transfers": "#8a5a34",
}
CAUSES = {
    "implicit resharding": "#7a1f3d",
    "gradient sums": "#d96c8e",
    "parameter gathers": "#f0b5c5",
    "activation exchanges": "#a6456d",
}
# By `schedules.types.TaskKind`; they differ in lightness, so that no two only as red and green.
TASKS = {"F": "#0d4f66", "B": "#e6d13a", "W": "#2e7d32", "BW": "#ef6c00"}
_AXES = ("#8466c4", "#2393a8", "#c05cc6", "#8aa436", "#4a4a9c", "#5fc4d6", "#6d7a1f", "#b9a4e6")


def axis_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each mesh axis, or set of axes, in the order in which they come."""
    return {name: _AXES[at % len(_AXES)] for at, name in enumerate(dict.fromkeys(names))}


@functools.cache
def style() -> str:
    """The one style sheet of every picture; all its rules are for what is inside of `.mw`."""
    return resources.files(__package__).joinpath("_style.css").read_text(encoding="utf-8")


# Of black and white one always has a contrast of at least 4.5, as small print needs.
_DARK, _LIGHT = "#000000", "#ffffff"


def ink(colour: str) -> str:
    """Return the text colour that stands out best on a fill.

    >>> ink("#3b6fc4"), ink("#f0a630")
    ('#ffffff', '#000000')
    """
    return max(_DARK, _LIGHT, key=lambda text: contrast(text, colour))


def contrast(one: str, other: str) -> float:
    """How far apart two colours are in lightness, from 1 to 21, as WCAG counts it.

    >>> contrast("#000000", "#ffffff")
    21.0
    """
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    linear = [
        c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb(colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def rgb(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
