"""Show a value: as text for a terminal, as HTML for a notebook, and a short `repr`.

A value lays out what it shows once, as a `Sheet`; both forms are made from that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright._html import Html, block, grid, join, tag
from meshwright._text import table

LONGEST_REPR = 200


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells under a heading; `right` says which columns are flush right.

    `left_out` says what rows were left out, e.g. "... and 12 more arrays".
    """

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[bool]
    left_out: str = ""

    def text(self) -> str:
        lines = table([self.heading, *self.rows], self.right)
        return f"{lines}\n{self.left_out}" if self.left_out else lines

    def html(self) -> Html:
        more = tag("p", self.left_out, class_="note") if self.left_out else ""
        label = next(filter(None, self.heading), "Table")
        return join([grid(label, self.heading, self.rows, self.right), more])


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A headline, and under it notes (text), tables and pictures (`Html`, which text leaves out).

    >>> sheet = Sheet("one mesh", [Table(["axis", "size"], [["dp", "2"]], [False, True]), "a < b"])
    >>> print(sheet.text())
    one mesh
    axis  size
    dp       2
    a < b
    """

    headline: str
    parts: Sequence[str | Table | Html] = ()

    def text(self) -> str:
        shown = [part for part in self.parts if not isinstance(part, Html)]
        lines = [part.text() if isinstance(part, Table) else part for part in shown]
        return "\n".join([self.headline, *lines])

    def inside(self) -> Html:
        """What is shown as HTML, for a page that has the style sheet."""
        parts = [tag("b", self.headline)]
        for part in self.parts:
            if isinstance(part, Table):
                parts.append(part.html())
            elif isinstance(part, Html):
                parts.append(part)
            else:
                lines = (tag("span", line) for line in part.splitlines())
                parts.append(tag("p", Html("<br>".join(lines)), class_="note"))
        return join(parts)

    def html(self) -> Html:
        """One self-contained block: no scripts, nothing fetched."""
        return block(self.inside())


class Shown:
    """Base of values that show themselves; a subclass says what in `_sheet`."""

    __slots__ = ()

    def _sheet(self) -> Sheet:
        raise NotImplementedError  # pragma: no cover

    def __str__(self) -> str:
        return self._sheet().text()

    def _repr_html_(self) -> str:
        return self._sheet().html()

    def __repr__(self) -> str:
        return short_repr(self, self._sheet().headline)


def short_repr(value: object, words: str) -> str:
    """`<Topology v5p:8x8x8, 512 chips>`: the class and some words, however large the value is."""
    text = f"<{type(value).__name__} {' '.join(words.split())}>"
    return text if len(text) <= LONGEST_REPR else f"{text[: LONGEST_REPR - 5]} ...>"
