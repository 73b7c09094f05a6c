"""Lanes of stacked parts on one scale, as pictures that are as wide as there is room."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from meshwright.mpmd.schedules.drawing.colours import ink
from meshwright.rehearsal.drawing.markup import Html, join, tag

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
