"""What stands around the lanes of a picture: title, legend, names, figures and the time axis."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator

from meshwright.mpmd.schedules.drawing.colours import NAMES, fill
from meshwright.mpmd.schedules.drawing.figures import headline, plural, round_up, tidy
from meshwright.mpmd.schedules.drawing.layout import LANE, Layout

_TICKS_APART = 70
_LETTER = 6.3  # the width of a letter at 11 pixels, on the safe side


def frame(layout: Layout) -> tuple[str, float, float]:
    """Everything but the lanes, and the size of the whole picture."""
    legend = _legend(layout)
    title = headline(layout.timeline)
    width = max(
        layout.right + 132,
        32 + 1.35 * _LETTER * len(title),
        32 + sum(step for _, step in legend),
    )
    height = layout.bottom + 74
    parts = [
        f'<text class="strong" x="16" y="27" font-size="14" font-weight="600">'
        f"{html.escape(title)}</text>",
        _summary(layout),
        *_axis(layout),
        *_sides(layout),
        *_breaks(layout),
    ]
    x = 16.0
    for drawn, step in legend:
        parts.append(f'<g transform="translate({x:.1f} {height - 26:g})">{drawn}</g>')
        x += step
    return "".join(parts), width, height


def _summary(layout: Layout) -> str:
    timeline = layout.timeline
    return (
        f'<text x="16" y="46">makespan {tidy(timeline.makespan)} · '
        f"bubble {tidy(timeline.bubble)} · idle {100 * timeline.idle:.1f} % · at most "
        f"{plural(max(timeline.memory), 'microbatch')} held</text>"
    )


def _sides(layout: Layout) -> Iterator[str]:
    """The groups' names on the left, their figures on the right."""
    timeline, right = layout.timeline, layout.right
    yield f'<text x="{right + 56:.1f}" y="56" text-anchor="end">bubble</text>'
    yield f'<text x="{right + 112:.1f}" y="56" text-anchor="end">held</text>'
    for row, group in enumerate(layout.crop.groups):
        y = layout.y(row) + 17
        yield f'<text x="16" y="{y:g}">group {group}</text>'
        for x, value in ((56, timeline.bubbles[group]), (112, timeline.memory[group])):
            yield (
                f'<text class="strong" x="{right + x:.1f}" y="{y:g}" text-anchor="end">'
                f"{tidy(value)}</text>"
            )


def _axis(layout: Layout) -> Iterator[str]:
    """Lines at round times."""
    step = round_up(_TICKS_APART / layout.scale)
    top, bottom = layout.y(0) - 3, layout.bottom + 5
    for window, (first, last) in enumerate(layout.crop.windows()):
        number = math.ceil(first / step - 1e-9)
        while number * step <= last + 1e-9:
            x = layout.x(number * step, window)
            yield f'<path class="line" d="M{x:.1f} {top:g}V{bottom:g}"/>'
            yield (
                f'<text x="{x:.1f}" y="{bottom + 13:g}" text-anchor="middle">{number * step:g}'
                "</text>"
            )
            number += 1


def _breaks(layout: Layout) -> Iterator[str]:
    """Where time or groups are left out, and how much."""
    crop = layout.crop
    if crop.left_out:
        middle = (layout.x(crop.head, 0) + layout.x(crop.tail, 1)) / 2
        for row in range(len(crop.groups)):
            yield (
                f'<text x="{middle:.1f}" y="{layout.y(row) + 17:g}" text-anchor="middle">···</text>'
            )
        yield (
            f'<text class="strong" x="{middle:.1f}" y="{layout.bottom + 34:g}" '
            f'text-anchor="middle">{crop.time_note()}</text>'
        )
    missing = layout.timeline.schedule.groups - len(crop.groups)
    if missing:
        y = layout.y(len(crop.groups) // 2) - LANE / 2
        yield f'<text class="strong" x="16" y="{y + 1:g}">{missing:,} groups left out</text>'


def _legend(layout: Layout) -> list[tuple[str, float]]:
    """Swatches with their meaning, and how far each one reaches."""
    schedule = layout.timeline.schedule
    several = max(map(len, schedule.stages_of))
    items = []
    for kind, name in NAMES.items():
        if kind in schedule.counts:
            shades = range(several) if several <= 4 else (0, several // 2, several - 1)
            colours = [fill(kind, shade, several) for shade in shades]
            items.append(_swatch(colours, f"{kind} {name}"))
    items.append(_swatch([], "waits", "lane"))
    if any(schedule.overlapped):
        items.append(_swatch([], "run as one", "pair"))
    if several > 1:
        items.append(("<text y='10'>paler: later stage of its group</text>", 32 * _LETTER))
    return items


def _swatch(colours: list[str], text: str, shape: str = "") -> tuple[str, float]:
    wide = 12 * max(1, len(colours))
    if shape:
        drawn = f'<rect class="{shape}" width="12" height="12" rx="2"/>'
    else:
        drawn = "".join(
            f'<rect x="{12 * at}" width="12" height="12" fill="{colour}"/>'
            for at, colour in enumerate(colours)
        )
    return f'{drawn}<text x="{wide + 5}" y="10">{text}</text>', wide + 21 + _LETTER * len(text)
