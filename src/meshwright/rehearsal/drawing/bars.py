"""Lanes of stacked parts on one scale, as a picture that is as wide as there is room."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from meshwright.mpmd.schedules.drawing.colours import ink
from meshwright.rehearsal.drawing.markup import Html, join, tag

_TALL, _APART, _WORDS = 30, 14, 18
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
    label: str,
    lanes: Sequence[Lane],
    write: Callable[[float], str],
    *,
    limit: float | None = None,
    whole: float = 0.0,
) -> Html:
    """All lanes on one scale, up to `whole` at least; what lies beyond the limit is hatched."""
    whole = max([whole, limit or 0.0, *(lane.size for lane in lanes)]) or 1.0
    top = _WORDS if limit else 0
    step = _WORDS + _TALL + _APART
    drawn = [_lane(lane, at * step + top, whole, write, limit) for at, lane in enumerate(lanes)]
    height = top + len(lanes) * step - _APART + 2
    if limit:
        drawn.append(_limit_words(limit / whole * 100, f"limit {write(limit)}"))
    return tag(
        "svg",
        tag("title", label),
        _HATCH if limit else "",
        *drawn,
        class_="bars",
        width="100%",
        height=height,
        role="img",
        aria_label=f"{label}: {'; '.join(_words(lane, write) for lane in lanes)}",
        xmlns="http://www.w3.org/2000/svg",
    )


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


def _lane(
    lane: Lane, y: float, whole: float, write: Callable[[float], str], limit: float | None
) -> Html:
    title = tag("text", lane.title, x=0, y=y + 12)
    boxes, words, passed = [], [], 0.0
    for part in lane.parts:
        x, width = passed / whole * 100, part.size / whole * 100
        said = tag("title", f"{part.name}: {write(part.size)}")
        boxes.append(tag("g", said, _rect(x, width, y + _WORDS, part.colour)))
        words.append(_inside(write(part.size), part.colour, x, width, y + _WORDS))
        passed += part.size
    if limit:
        x = limit / whole * 100
        boxes.append(_rect(x, max(0.0, passed - limit) / whole * 100, y + _WORDS, "url(#mw-over)"))
        boxes.append(_mark(x, y + _WORDS))
    return join([title, *boxes, *words])


def _inside(words: str, colour: str, x: float, width: float, y: float) -> Html:
    """The size of a part, written into it where there is room."""
    if width < _ROOM:
        return Html()
    return tag(
        "text",
        words,
        x=f"{x + width / 2:.2f}%",
        y=y + 20,
        style=f"fill:{ink(colour)}",
        text_anchor="middle",
        class_="inside" if width >= _ROOM_ON_A_PHONE else "inside roomy",
    )


def _rect(x: float, width: float, y: float, fill: str) -> Html:
    return tag("rect", x=f"{x:.2f}%", y=y, width=f"{width:.2f}%", height=_TALL, fill=fill)


def _mark(x: float, y: float) -> Html:
    return tag("line", x1=f"{x:.2f}%", x2=f"{x:.2f}%", y1=y - 4, y2=y + _TALL + 4, class_="limit")


def _limit_words(x: float, words: str) -> Html:
    anchor = "end" if x > 50 else "middle" if x > 12 else "start"
    return tag("text", words, x=f"{x:.2f}%", y=12, text_anchor=anchor, class_="limit-words")


def _words(lane: Lane, write: Callable[[float], str]) -> str:
    said = ", ".join(f"{part.name} {write(part.size)}" for part in lane.parts if part.size)
    return f"{lane.title}: {said}"
