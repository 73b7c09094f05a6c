"""A timeline as a picture: a lane per group, a box per task."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Iterator

from meshwright._html import html_table, ink, rgb
from meshwright._text import plural, tidy
from meshwright.schedules.text_plot import (
    HEADING,
    RIGHT,
    Crop,
    Line,
    crop,
    draw_lines,
    headline,
    round_up,
    rows,
    summary,
    typical,
)
from meshwright.schedules.timeline import Timeline
from meshwright.schedules.types import NAMES


def draw_svg(timeline: Timeline) -> str:
    """A picture of its own: nothing is fetched, light and dark, every box says what it is.

    Lanes are shaded while their group waits for others. Long schedules are drawn at both ends,
    up to 1,500 boxes and 16 lanes, and the picture says what it leaves out.
    """
    layout = lay_out(timeline)
    lanes = "".join(_lane(layout, row) for row in range(len(layout.crop.groups)))
    inside, width, height = frame(layout)
    return (
        f'<svg class="mw-schedule" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        'style="max-width:100%;height:auto" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{html.escape(timeline.schedule.name)} schedule"><style>{STYLE}</style>'
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}" rx="8"/>'
        f"{inside}{lanes}</svg>\n"
    )


def _lane(layout: Layout, row: int) -> str:
    """A group's tasks, and shade where it waits between its own first and last one."""
    timeline, group = layout.timeline, layout.crop.groups[row]
    starts, ends = timeline.starts[group], timeline.ends[group]
    span = "".join(
        f'<rect class="lane" x="{x:.1f}" width="{width:.1f}" height="{LANE}" rx="3"/>'
        for x, width in layout.pieces(starts[0], ends[-1])
    )
    boxes = "".join(_box(layout, group, at) for at in range(len(starts)))
    pairs = "".join(
        f'<rect class="pair" x="{x:.1f}" y="0.7" width="{width:.1f}" height="{LANE - 1.4:g}" '
        'rx="3"/>'
        for at in sorted(timeline.schedule.overlapped[group])
        for x, width in layout.pieces(starts[at], ends[at + 1])
    )
    return (
        f'<g transform="translate(0 {layout.y(row):g})" text-anchor="middle">{span}{boxes}{pairs}'
        "</g>"
    )


def _box(layout: Layout, group: int, at: int) -> str:
    timeline = layout.timeline
    task, stages = timeline.schedule.tasks[group][at], timeline.schedule.stages_of[group]
    start, end = timeline.starts[group][at], timeline.ends[group][at]
    colour = fill(task.kind, stages.index(task.stage), len(stages))
    title = (
        f"{task}: {NAMES[task.kind]}, stage {task.stage}, microbatch {task.microbatch}, "
        f"{start:.6g} to {end:.6g}"
    )
    number, parts = str(task.microbatch), []
    for x, width in layout.pieces(start, end):
        inner = max(width - 1, 0.6 * width)
        parts.append(
            f'<g><title>{title}</title><rect x="{x:.1f}" width="{inner:.1f}" height="{LANE}" '
            f'rx="{min(3, inner / 4):.1f}" fill="{colour}"/>'
        )
        if size := next((s for s in (11, 9) if inner >= 0.56 * s * len(number) + 1), 0):
            small = ' font-size="9"' if size == 9 else ""
            parts.append(
                f'<text x="{x + inner / 2:.1f}" y="17" style="fill:{ink(colour)}"{small}>{number}'
                "</text>"
            )
        parts.append("</g>")
    return "".join(parts)


# What stands around the lanes of a picture: title, legend, names, figures and the time axis.


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


# Where things stand in a picture of a timeline, in pixels.


MOST_BOXES, MOST_LANES = 1500, 16
LANE, GAP, BREAK = 26, 7, 34
LEFT, TOP = 76, 64
_WIDEST, _NARROWEST = 1200.0, 360.0  # of the lanes
_BOX, _SMALLEST_BOX = 26.0, 7.0  # a typical task's width, when there is room and when there is not


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where things are: pixels per unit of time, and what is left out."""

    timeline: Timeline
    crop: Crop
    scale: float

    def x(self, time: float, window: int) -> float:
        """The place of a time inside the first or the second drawn window."""
        if not window:
            return LEFT + time * self.scale
        return LEFT + (self.crop.head + time - self.crop.tail) * self.scale + BREAK

    def y(self, row: int) -> float:
        """The top of a lane; lanes that are left out leave a gap."""
        groups = self.crop.groups
        jump = row > 0 and any(b > a + 1 for a, b in itertools.pairwise(groups))
        return TOP + row * (LANE + GAP) + (LANE if jump else 0)

    @property
    def right(self) -> float:
        return self.x(self.crop.end, len(self.crop.windows()) - 1)

    @property
    def bottom(self) -> float:
        return self.y(len(self.crop.groups) - 1) + LANE

    def pieces(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """The drawn parts of a stretch of time: x and width."""
        for window, first, last in self.crop.seen(start, end):
            x = self.x(first, window)
            yield x, self.x(last, window) - x


def lay_out(timeline: Timeline) -> Layout:
    """All of it if tasks get wide enough to tell apart, else both ends."""
    task, whole = typical(timeline), timeline.makespan
    wanted = max(_BOX / task, _NARROWEST / whole)
    scale = min(wanted, max(_WIDEST / whole, _SMALLEST_BOX / task))
    most_time = _WIDEST / scale * (1 + 1e-9)
    chosen = crop(timeline, most_time, MOST_LANES)
    while _boxes(timeline, chosen) > MOST_BOXES:
        most_time *= 0.9
        chosen = crop(timeline, most_time, MOST_LANES)
    drawn = sum(last - first for first, last in chosen.windows())
    return Layout(timeline, chosen, min(wanted, _WIDEST / drawn))


def _boxes(timeline: Timeline, chosen: Crop) -> int:
    return sum(
        end > first and start < last
        for group in chosen.groups
        for start, end in zip(timeline.starts[group], timeline.ends[group], strict=True)
        for first, last in chosen.windows()
    )


# The colours of a drawing: a hue per kind of task, a shade per stage of a group.

# Apart in lightness as well as in hue, so that no kind is told by red against green alone.
_HUES = {"F": "#3b6fc4", "B": "#f0a630", "W": "#2f9e7a", "BW": "#bf4636"}
_PALEST = 0.55

# A picture brings its own background, so it reads the same on any page.
STYLE = """\
.mw-schedule{font-family:ui-sans-serif,system-ui,"Segoe UI",Roboto,sans-serif;font-size:11px}
.mw-schedule text{fill:#5b6675;font-variant-numeric:tabular-nums}
.mw-schedule .page{fill:#ffffff}
.mw-schedule .lane{fill:#e8ecf2}
.mw-schedule .line{stroke:#d9dfe8;stroke-width:1}
.mw-schedule .strong{fill:#16202e}
.mw-schedule .pair{fill:none;stroke:#16202e;stroke-width:1.5}
@media (prefers-color-scheme:dark){
.mw-schedule text{fill:#9aa6b6}
.mw-schedule .page{fill:#151a21}
.mw-schedule .lane{fill:#29313c}
.mw-schedule .line{stroke:#2c343f}
.mw-schedule .strong{fill:#eef2f7}
.mw-schedule .pair{stroke:#ffffff}
}
"""


def fill(kind: str, number: int = 0, stages: int = 1) -> str:
    """The colour of a task of the group's `number`-th stage: the first full, later ones paler.

    >>> fill("F"), fill("F", 1, 2)
    ('#3b6fc4', '#a7bee4')
    """
    share = _PALEST * number / max(1, stages - 1)
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in rgb(_HUES[kind]))


# A timeline as text and HTML.


MOST_ROWS = 64


def as_text(timeline: Timeline) -> str:
    """At most 100 columns wide; plain letters, no colours.

    >>> from meshwright.schedules import schedule, simulate
    >>> print(as_text(simulate(schedule("1f1b", groups=2, microbatches=4))))
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
