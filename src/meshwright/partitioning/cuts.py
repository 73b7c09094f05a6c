"""A drawing of how an array is cut: one panel per piece of its leading dims."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_LONGEST, _SHORTEST, _GAP = 128, 40, 8
_MOST_LINES, _MOST_PANELS = 16, 8


def drawing(shape: Sequence[int], local: Sequence[int]) -> str:
    """The array with its cuts as an SVG; the first device's piece is filled.

    The last two dims are a rectangle, the one before them a row of panels, the one before that a
    column of rows. At most 16 cuts a side and 8 panels are drawn; the line below has the numbers.
    """
    counts = [max(1, side // max(1, piece)) for side, piece in zip(shape, local, strict=True)]
    sides = [1] * (4 - len(shape)) + list(shape)[-4:]
    cuts = [1] * (4 - len(counts)) + counts[-4:]
    panels = [min(cut, _MOST_PANELS) for cut in cuts[:2]]
    lines = [min(cut, _MOST_LINES) for cut in cuts[2:]]
    height, width = _box(sides[2], sides[3])
    parts = [
        _panel(column * (width + _GAP) + 1, row * (height + _GAP) + 1, width, height, lines, not at)
        for at, (row, column) in enumerate(itertools.product(range(panels[0]), range(panels[1])))
    ]
    across, down = panels[1] * (width + _GAP), panels[0] * (height + _GAP)
    words = [
        f"{side} in {cut}" if cut > 1 else f"{side}"
        for side, cut in zip(shape, counts, strict=True)
    ]
    return (
        f'<svg viewBox="0 0 {across} {down}" width="{across}" style="max-width:100%" '
        f'xmlns="http://www.w3.org/2000/svg" role="img">{"".join(parts)}</svg>'
        f"<div>{' x '.join(words)}</div>"
    )


def _box(rows: int, columns: int) -> tuple[int, int]:
    """Sides that keep the array's proportions within reason."""
    longest = max(rows, columns, 1)
    return (
        max(_SHORTEST, round(_LONGEST * rows / longest)),
        max(_SHORTEST, round(_LONGEST * columns / longest)),
    )


def _panel(x: int, y: int, width: int, height: int, lines: Sequence[int], first: bool) -> str:
    rows, columns = lines
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="#eef" stroke="#446"/>']
    if first:
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width / columns:.1f}" height="{height / rows:.1f}" '
            'fill="#e8a33d"/>'
        )
    for line in range(1, columns):
        parts.append(f'<path d="M{x + width * line / columns:.1f} {y}v{height}" stroke="#446"/>')
    for line in range(1, rows):
        parts.append(f'<path d="M{x} {y + height * line / rows:.1f}h{width}" stroke="#446"/>')
    return "".join(parts)
