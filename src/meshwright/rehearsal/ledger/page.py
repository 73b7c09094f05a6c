"""A ledger for a notebook or a report."""

from __future__ import annotations

import html

from meshwright._tables import html_table
from meshwright.rehearsal.ledger.collective import Ledger
from meshwright.rehearsal.ledger.show import (
    BESIDE,
    HEADING,
    MOST_ROWS,
    RIGHT,
    cause_line,
    clash_lines,
    headline,
    rows,
)


def as_html(ledger: Ledger) -> str:
    if not len(ledger):
        return "<p>no collectives: nothing moves between devices</p>"
    parts = [f"<b>{html.escape(headline(ledger))}</b>"]
    for cause, entries in ledger.by_cause().items():
        merged = rows(entries)
        parts.append(f"<h4>{html.escape(cause_line(cause, entries))}</h4>")
        parts.append('<div style="overflow-x:auto">')
        parts.append(html_table([HEADING, *merged[:MOST_ROWS]], RIGHT) + "</div>")
        if len(merged) > MOST_ROWS:
            parts.append(f"<p>... and {len(merged) - MOST_ROWS:,} more rows</p>")
    parts += [f"<p>{html.escape(line)}</p>" for line in clash_lines(ledger)]
    if any(entry.asynchronous for entry in ledger):
        parts.append(f"<p>{BESIDE}</p>")
    return f'<div style="font-family:system-ui,sans-serif">{"".join(parts)}</div>'
