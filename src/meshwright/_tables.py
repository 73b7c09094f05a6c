"""Plain text tables and numbers a person can read."""

from __future__ import annotations

import html
from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Columns aligned with spaces; the first row is the heading.

    >>> print(table([["axis", "size"], ["dp", "2"]], [False, True]))
    axis  size
    dp       2
    """
    widths = [max(len(row[c]) for row in rows) for c in range(len(right))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    )


def html_table(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """The same table for a notebook."""

    def line(tag: str, row: Sequence[str]) -> str:
        cells = "".join(
            f'<{tag} style="text-align:{"right" if flush else "left"};padding:2px 10px">'
            f"{html.escape(cell)}</{tag}>"
            for cell, flush in zip(row, right, strict=True)
        )
        return f"<tr>{cells}</tr>"

    body = "".join(line("td", row) for row in rows[1:])
    return f"<table><thead>{line('th', rows[0])}</thead><tbody>{body}</tbody></table>"


def duration(seconds: float) -> str:
    """
    >>> duration(0.0211), duration(0.0000042), duration(2.5)
    ('21.1 ms', '4.20 us', '2.50 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:#.3g} {unit}".replace(". ", " ")
    raise AssertionError


def number(value: float) -> str:
    """
    >>> number(12.0), number(0.75), number(0.0039)
    ('12', '0.75', '0.0039')
    """
    return f"{value:.3g}"
