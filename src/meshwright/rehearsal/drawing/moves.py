"""The ledger of collectives, a table per cause; what nobody asked for comes first."""

from __future__ import annotations

from meshwright.rehearsal.drawing.markup import Html, grid, join, tag
from meshwright.rehearsal.drawing.palette import CAUSES
from meshwright.rehearsal.ledger import Ledger
from meshwright.rehearsal.ledger.collective import NOBODY_ASKED
from meshwright.rehearsal.ledger.show import (
    BESIDE,
    HEADING,
    MOST_ROWS,
    RIGHT,
    cause_line,
    headline,
    rows,
)


def moves(ledger: Ledger) -> Html:
    if not len(ledger):
        return tag("p", "No collectives: nothing moves between devices.")
    causes = ledger.by_cause()
    parts = [tag("p", f"{headline(ledger)}.")]
    if NOBODY_ASKED not in causes:
        parts.append(tag("p", "Nothing moves that nobody asked for.", class_="note"))
    for cause, entries in causes.items():
        merged = rows(entries)
        mark = tag("i", style=f"background:{CAUSES[cause]}")
        title = tag("summary", mark, tag("span", cause_line(cause, entries)))
        left = len(merged) - MOST_ROWS
        parts.append(
            tag(
                "details",
                title,
                grid(cause, HEADING, merged[:MOST_ROWS], RIGHT),
                tag("p", f"and {left:,} more rows", class_="note") if left > 0 else "",
                open="",
            )
        )
    parts += [
        tag("p", f"Shardings that clash: {clash}", class_="clash") for clash in ledger.clashes
    ]
    if any(entry.asynchronous for entry in ledger):
        parts.append(tag("p", BESIDE, class_="note"))
    return join(parts)
