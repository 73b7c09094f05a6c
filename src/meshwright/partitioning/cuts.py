"""A drawing of how an array is cut: one panel per piece of its leading dims."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_LONGEST, _GAP, _MOST_LINES, _MOST_PANELS = 120, 8, 16, 8


def drawing(shape: Sequence[int], local: Sequence[int]) -> str:
    """An SVG of the array with its cuts; the first device's piece is filled.

    The last two dims are a rectangle, the one before them a row of panels, the one before that a
    column of rows. Long rows of cuts are drawn with their number instead of every line.
    """
    counts = [side // piece for side, piece in zip(shape, local, strict=True)]
    sides = [1] * (4 - len(shape)) + list(shape)[-4:]
    cuts = [1] * (4 - len(counts)) + counts[-4:]
    panels = [min(cut, _MOST_PANELS) for cut in cuts[:2]]
    height, width = _box(sides[2], sides[3])
    parts = []
    for row, column in itertools.product(range(panels[0]), range(panels[1])):
        x, y = column * (width + _GAP) + 1, row * (height + _GAP) + 1
        parts.append(_panel(x, y, width, height, cuts[2], cuts[3], row == column == 0))
    total = (panels[1] * (width + _GAP), panels[0] * (height + _GAP) + 14)
    label = " x ".join(
        f"{side} in {cut}" if cut > 1 else str(side)
        for side, cut in zip(shape, counts, strict=True)
    )
    return (
        f'<svg viewBox="0 0 {total[0]} {total[1]}" width="{total[0]}" style="max-width:100%" '
        f'xmlns="http://www.w3.org/2000/svg" role="img">{"".join(parts)}'
        f'<text x="0" y="{total[1] - 3}" font-size="10">{label}</text></svg>'
    )


def _box(rows: int, columns: int) -> tuple[int, int]:
    """Sides that keep the array's proportions within reason."""
    longest = max(rows, columns)
    return (
        max(16, round(_LONGEST * rows / longest)),
        max(16, round(_LONGEST * columns / longest)),
    )


def _panel(x: int, y: int, width: int, height: int, rows: int, columns: int, first: bool) -> str:
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="#eef" stroke="#446"/>']
    if first:
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width / columns:.1f}" height="{height / rows:.1f}" '
            'fill="#e8a33d" stroke="#446"/>'
        )
    for line in range(1, min(columns, _MOST_LINES)):
        at = x + width * line / min(columns, _MOST_LINES)
        parts.append(f'<path d="M{at:.1f} {y}v{height}" stroke="#446" stroke-width="0.7"/>')
    for line in range(1, min(rows, _MOST_LINES)):
        at = y + height * line / min(rows, _MOST_LINES)
        parts.append(f'<path d="M{x} {at:.1f}h{width}" stroke="#446" stroke-width="0.7"/>')
    return "".join(parts)
