"""HTML that is known to be safe, apart from text that has yet to be escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


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


def grid(
    label: str, heading: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[bool]
) -> Html:
    """A table in a box of its own; numbers stand to the right."""

    def line(kind: str, cells: Sequence[object], **more: str) -> Html:
        return tag(
            "tr",
            *(
                tag(kind, cell, **({"class_": "number"} if flush else {}), **more)
                for cell, flush in zip(cells, right, strict=True)
            ),
        )

    head = tag("thead", line("th", heading, scope="col"))
    return wide(label, tag("table", head, tag("tbody", *(line("td", row) for row in rows))))
