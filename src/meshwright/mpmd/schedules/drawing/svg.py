"""A timeline as a picture: a lane per group, a box per task."""

from __future__ import annotations

import html

from meshwright.mpmd.schedules.drawing.colours import NAMES, STYLE, fill, ink
from meshwright.mpmd.schedules.drawing.layout import LANE, Layout, lay_out
from meshwright.mpmd.schedules.drawing.svg_frame import frame
from meshwright.mpmd.schedules.timeline import Timeline


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
