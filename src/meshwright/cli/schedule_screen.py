"""Schedules on a terminal: the plain text, with the kinds of task in their colours."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from meshwright.mpmd.schedules.compare import Comparison
from meshwright.mpmd.schedules.drawing.colours import fill, ink
from meshwright.mpmd.schedules.drawing.show import as_lines
from meshwright.mpmd.schedules.tasks import KINDS
from meshwright.mpmd.schedules.timeline import Timeline

_STYLES = {kind: f"{ink(fill(kind))} on {fill(kind)}" for kind in KINDS}


def show_timeline(timeline: Timeline) -> None:
    lines = []
    for line in as_lines(timeline):
        text = Text()
        for piece, kind in line:
            text.append(piece, style=_STYLES.get(kind, "bold" if kind else ""))
        text.rstrip()
        lines.append(text)
    _print(lines)


def show_comparison(table: Comparison) -> None:
    head, columns, *rows = str(table).splitlines()
    lines = [Text(head, style="bold"), Text(columns, style="dim")]
    for line, row in zip(rows, table.rows, strict=True):
        lines.append(Text(line, style="" if row.fits else "dim"))
    _print(lines)


def _print(lines: list[Text]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line, soft_wrap=True)
