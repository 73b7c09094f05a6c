"""A timeline as text and HTML."""

from __future__ import annotations

import html

from meshwright._tables import html_table
from meshwright.mpmd.schedules.drawing.figures import HEADING, RIGHT, headline, rows, summary
from meshwright.mpmd.schedules.drawing.svg import draw_svg
from meshwright.mpmd.schedules.drawing.text_drawing import Line, draw_lines
from meshwright.mpmd.schedules.timeline import Timeline

MOST_ROWS = 64


def as_text(timeline: Timeline) -> str:
    """At most 100 columns wide; plain letters, no colours.

    >>> import meshwright as mw
    >>> print(as_text(mw.simulate(mw.schedule("1f1b", groups=2, microbatches=4))))
    1f1b: 2 groups, 2 stages, 4 microbatches; F=1, B=1, W=1 per group
            0              5              10             15
    group 0 F  F  ......bw    F  bw    F  bw    ...bw
            0  1        0     2  1     3  2        3
    group 1    F  bw    F  bw    F  bw    F  bw
               0  0     1  1     2  2     3  3
    F forward, bw whole backward, . waits
    under each task its microbatch, by the last digits that fit
    makespan 15, bubble 3, idle 20.0 %; microbatches held by each group: 2, 1
    """
    return "\n".join("".join(text for text, _ in line).rstrip() for line in as_lines(timeline))


def as_lines(timeline: Timeline) -> list[Line]:
    """The same as lines of pieces, each with the kind of its task, for those who have colours."""
    return [
        [(headline(timeline), "headline")],
        *draw_lines(timeline),
        [(summary(timeline), "")],
    ]


def as_html(timeline: Timeline) -> str:
    """The picture, and a line per group; nothing is fetched."""
    lines = rows(timeline)
    shown = html_table([HEADING, *lines[:MOST_ROWS]], RIGHT)
    left_out = len(lines) - MOST_ROWS
    more = f"<p>... and {left_out:,} more groups</p>" if left_out > 0 else ""
    return (
        f'<div style="font-family:system-ui,sans-serif">{draw_svg(timeline)}'
        f"<p>{html.escape(summary(timeline))}</p>"
        f'<div style="overflow-x:auto">{shown}</div>{more}</div>'
    )
