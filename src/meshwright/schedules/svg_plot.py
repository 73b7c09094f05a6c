"""A timeline drawn as an SVG picture: a lane per group, a box per task.

The picture stands alone: its style, its colours for light and dark pages and a title for every
box are inside, and nothing is fetched.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright._html import TASKS, ink, rgb
from meshwright._text import plural, tidy
from meshwright.schedules.text_plot import Crop, crop, headline, median_duration, round_up
from meshwright.schedules.types import KIND_NAMES

# Only for annotations: a `Timeline` draws itself with these functions.
if TYPE_CHECKING:
    from meshwright.schedules.timeline import Timeline


def draw_svg(timeline: Timeline) -> str:
    """Draw a timeline as the text of an SVG file.

    Lanes are shaded while their group waits for others. Long schedules are drawn at both ends,
    up to 1,500 boxes and 16 lanes, and the picture says what it leaves out.
    """
    layout = _choose_layout(timeline)
    lanes = "".join(_lane(layout, row) for row in range(len(layout.crop.groups)))
    inside, width, height = _frame(layout)
    return (
        f'<svg class="mw-schedule" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        'style="max-width:100%;height:auto" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{html.escape(timeline.schedule.name)} schedule"><style>{_STYLE}</style>'
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}" rx="8"/>'
        f"{inside}{lanes}</svg>\n"
    )


def _lane(layout: _Layout, row: int) -> str:
    """A group's tasks, on a shade from its first to its last one that shows where it waits."""
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


def _box(layout: _Layout, group: int, at: int) -> str:
    """A task: in two parts if it lies across the break, its microbatch inside if that fits."""
    timeline = layout.timeline
    task, stages = timeline.schedule.tasks[group][at], timeline.schedule.stages_of[group]
    start, end = timeline.starts[group][at], timeline.ends[group][at]
    colour = fill(task.kind, stages.index(task.stage), len(stages))
    title = (
        f"{task}: {KIND_NAMES[task.kind]}, stage {task.stage}, microbatch {task.microbatch}, "
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


# Around the lanes: title, legend, names, figures and the time axis.

_TICKS_APART = 70  # pixels, at least
_LETTER = 6.3  # the width of a letter at 11 pixels, on the safe side


def _frame(layout: _Layout) -> tuple[str, float, float]:
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


def _summary(layout: _Layout) -> str:
    timeline = layout.timeline
    return (
        f'<text x="16" y="46">makespan {tidy(timeline.makespan)} · '
        f"bubble {tidy(timeline.bubble)} · idle {100 * timeline.idle:.1f} % · at most "
        f"{plural(max(timeline.memory), 'microbatch')} held</text>"
    )


def _sides(layout: _Layout) -> Iterator[str]:
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


def _axis(layout: _Layout) -> Iterator[str]:
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


def _breaks(layout: _Layout) -> Iterator[str]:
    """Marks where time or groups are left out, and how much."""
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


def _legend(layout: _Layout) -> list[tuple[str, float]]:
    """Swatches with their meaning, each with its width."""
    schedule = layout.timeline.schedule
    several = max(map(len, schedule.stages_of))
    items = []
    for kind, name in KIND_NAMES.items():
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


# Where things are in a picture, in pixels.

MOST_BOXES, MOST_LANES = 1500, 16
LANE, GAP, BREAK = 26, 7, 34
LEFT, TOP = 76, 64
_WIDEST, _NARROWEST = 1200.0, 360.0  # of the lanes
# The width of a task of median duration, when there is room and when there is not.
_BOX, _SMALLEST_BOX = 26.0, 7.0


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How times and groups become pixels: `scale` pixels per unit of time."""

    timeline: Timeline
    crop: Crop
    scale: float

    def x(self, time: float, window: int) -> float:
        """Return the x of a time, in the first or the second window of the crop."""
        if not window:
            return LEFT + time * self.scale
        return LEFT + (self.crop.head + time - self.crop.tail) * self.scale + BREAK

    def y(self, row: int) -> float:
        """Return the top of a lane; lanes that are left out leave a gap."""
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
        """Yield the x and the width of each part of a stretch of time that is drawn."""
        for window, first, last in self.crop.visible(start, end):
            x = self.x(first, window)
            yield x, self.x(last, window) - x


def _choose_layout(timeline: Timeline) -> _Layout:
    """Draw everything if boxes get wide enough to tell apart, else both ends."""
    task, whole = median_duration(timeline), timeline.makespan
    wanted = max(_BOX / task, _NARROWEST / whole)
    scale = min(wanted, max(_WIDEST / whole, _SMALLEST_BOX / task))
    most_time = _WIDEST / scale * (1 + 1e-9)
    chosen = crop(timeline, most_time, MOST_LANES)
    # Tasks far shorter than the median can still be too many for the width.
    while _count_boxes(timeline, chosen) > MOST_BOXES:
        most_time *= 0.9
        chosen = crop(timeline, most_time, MOST_LANES)
    drawn = sum(last - first for first, last in chosen.windows())
    return _Layout(timeline, chosen, min(wanted, _WIDEST / drawn))


def _count_boxes(timeline: Timeline, chosen: Crop) -> int:
    return sum(
        end > first and start < last
        for group in chosen.groups
        for start, end in zip(timeline.starts[group], timeline.ends[group], strict=True)
        for first, last in chosen.windows()
    )


_PALEST = 0.55  # how much white the shade of a group's last stage has

# A picture brings its own background, so it reads the same on any page.
_STYLE = """\
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
    """Return the colour of a task of the group's `number`-th stage: later stages are paler.

    >>> fill("F"), fill("F", 1, 2)
    ('#0d4f66', '#92b0ba')
    """
    share = _PALEST * number / max(1, stages - 1)
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in rgb(TASKS[kind]))
