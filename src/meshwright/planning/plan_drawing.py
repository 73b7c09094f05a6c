"""Drawings of a plan: its arrays with their dims coloured by group, and all plans tried.

Plain SVG, of fixed size, with words for those who do not see it; nothing is fetched.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshwright._html import Html, axis_colours, ink, join, page, style, tag, wide
from meshwright._text import amount, duration, plural
from meshwright.planning.dim_groups import WHOLE
from meshwright.planning.plan_text import short_name

if TYPE_CHECKING:
    from meshwright.planning.step_plan import Alternative, Plan

_PAGE = ":root{color-scheme:light dark}body{margin:0}.mw{padding:20px;min-height:100vh}"
_MOST_ARRAYS = 24
_CELL, _TALL, _NAMES, _GAP = 132, 30, 230, 8  # pixels
_GREY = "#aeb7c4"


def plan_drawing(plan: Plan) -> Html:
    """Draw the arrays of a plan and, where there are several, the plans that were tried."""
    drawn = [tag("h3", "The arrays, and which axis cuts which dim"), arrays_picture(plan)]
    if len(plan.alternatives) > 1:
        drawn += [tag("h3", "Time against memory of the plans tried"), scatter_picture(plan)]
    return join(drawn)


def plan_page(plan: Plan) -> str:
    """A whole page, in the style of reports."""
    title = f"{plan.name} on {plan.topology.name}, planned"
    return page(title, plan._sheet().inside(), css=style() + _PAGE, body_class="mw")


# Arrays. One row for each set of arguments of the same dims, a box for each dim, in the colour of
# its group; a dim that axes cut says so.


def arrays_picture(plan: Plan) -> Html:
    """Draw the arguments as rows of boxes, one for each dim."""
    colours = axis_colours(plan.groups)
    rows = _array_rows(plan)
    most = max((len(cells) for _, cells in rows), default=0)
    shown = rows[:_MOST_ARRAYS]
    parts: list[Html] = []
    for number, (name, cells) in enumerate(shown):
        top = number * (_TALL + _GAP)
        parts.append(tag("text", name, x=0, y=top + 20, font_size=13, fill="currentColor"))
        for at, (group, size, axes) in enumerate(cells):
            parts.append(
                _dim_box(_NAMES + at * (_CELL + 4), top, group, size, axes, colours.get(group))
            )
    width, height = _NAMES + most * (_CELL + 4), max(1, len(shown)) * (_TALL + _GAP)
    svg = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=_said(shown),
        xmlns="http://www.w3.org/2000/svg",
    )
    rest = len(rows) - len(shown)
    more = tag("p", f"... and {plural(rest, 'array')} more", class_="note") if rest > 0 else Html()
    return join([wide("Arrays of the step", svg), _legend(plan, colours), more])


def _array_rows(plan: Plan) -> list[tuple[str, list[tuple[str, int, str]]]]:
    """Arguments by their dims: a name for those that are alike, and group, size and axes of each.

    Optimizer state that looks like its parameter is counted, not drawn again.
    """
    program, layout = plan.costs.program, plan.costs.groups.layout
    found: dict[tuple[tuple[str, int, str], ...], list[str]] = collections.defaultdict(list)
    weight: dict[tuple[tuple[str, int, str], ...], int] = {}
    for path, value in sorted(
        zip(plan.step.paths, program.arguments, strict=True), key=lambda e: (len(e[0]), e[0])
    ):
        dims = layout[value]
        if not dims:
            continue
        cut = plan.costs.cut(dims, plan.lists) if any(plan.layouts.of_value(value)) else {}
        cells = tuple(
            (
                "" if kind <= WHOLE else plan.groups[kind],
                size,
                ", ".join(plan.axes[axis].name for axis in sorted(cut) if cut[axis] == dim),
            )
            for dim, (kind, size) in enumerate(dims)
        )
        found[cells].append(path)
        weight[cells] = max(weight.get(cells, 0), program.bytes[value])
    rows = []
    for cells in sorted(found, key=lambda each: (-weight[each], found[each])):
        paths = found[cells]
        more = f" +{len(paths) - 1}" if len(paths) > 1 else ""
        rows.append((short_name(paths[0], 28) + more, list(cells)))
    return rows


def _dim_box(x: int, y: int, group: str, size: int, axes: str, colour: str | None) -> Html:
    """A dim: filled if it is cut, outlined if it is whole."""
    fill = colour or _GREY
    words = f"{short_name(group, 12)} {size:,}" if group else f"{size:,}"
    if axes:
        words = f"{size:,} by {axes}"
    about = f"{group or 'no group'}, size {size:,}, {f'cut by {axes}' if axes else 'whole'}"
    box = tag(
        "rect",
        x=x + 1,
        y=y + 1,
        width=_CELL - 2,
        height=_TALL - 2,
        rx=4,
        fill=fill if axes else "none",
        stroke=fill,
        stroke_width=2,
    )
    text = tag(
        "text",
        words,
        x=x + _CELL / 2,
        y=y + 20,
        font_size=12,
        text_anchor="middle",
        fill=ink(fill) if axes else "currentColor",
    )
    return tag("g", tag("title", about), box, text)


def _said(rows: Sequence[tuple[str, list[tuple[str, int, str]]]]) -> str:
    def dim(group: str, size: int, axes: str) -> str:
        return f"{group or size} cut by {axes}" if axes else f"{group or size} whole"

    return "; ".join(f"{name}: {', '.join(dim(*cell) for cell in cells)}" for name, cells in rows)


def _legend(plan: Plan, colours: Mapping[str, str]) -> Html:
    items = (
        tag("li", tag("i", style=f"background:{colours[name]}"), tag("span", name))
        for name in plan.groups
    )
    return tag("ul", *items, class_="legend")


# Plans. A point for each plan that was kept, the chosen one filled, the limit of memory a line.

_WIDE, _HIGH, _LEFT, _BELOW = 560, 300, 84, 44


def scatter_picture(plan: Plan) -> Html:
    """Draw time against memory of the plans that were kept."""
    points = plan.alternatives
    seconds = [each.predicted.seconds for each in points]
    memory = [each.predicted.bytes for each in points]
    most_memory = max([*memory, plan.limit if min(memory) > plan.limit / 4 else 0.0]) * 1.08
    fastest, slowest = min(seconds), max(seconds)
    pad = (slowest - fastest or fastest or 1.0) * 0.08
    low, high = max(0.0, fastest - pad), slowest + pad

    def across(size: float) -> float:
        return round(_LEFT + (_WIDE - _LEFT - 10) * size / (most_memory or 1.0), 1)

    def up(time: float) -> float:
        return round((_HIGH - _BELOW) - (_HIGH - _BELOW - 10) * (time - low) / (high - low), 1)

    bottom = _HIGH - _BELOW
    parts = [
        tag(
            "path",
            d=f"M{_LEFT} 4V{bottom}H{_WIDE}",
            fill="none",
            stroke="currentColor",
            stroke_opacity=0.5,
        ),
        *(_label(_LEFT - 6, up(time) + 4, duration(time), "end") for time in (fastest, slowest)),
        _label(_LEFT, bottom + 16, "0", "middle"),
        _label(across(max(memory)), bottom + 16, amount(max(memory)), "middle"),
        _label((_LEFT + _WIDE) / 2, _HIGH - 6, "memory of a device, predicted", "middle"),
        _label(4, 12, "a step", "start"),
    ]
    if plan.limit <= most_memory:
        x = across(plan.limit)
        parts.append(
            tag(
                "line",
                x1=x,
                x2=x,
                y1=4,
                y2=bottom,
                stroke="#b23a2b",
                stroke_width=2,
                stroke_dasharray="5 4",
            )
        )
        parts.append(_label(x - 4, 14, f"limit {amount(plan.limit)}", "end"))
    # The chosen plan last, on top of those that it covers.
    for each in sorted(points, key=lambda each: each.chosen):
        parts.append(_point(each, across(each.predicted.bytes), up(each.predicted.seconds)))
    chosen = next((each for each in points if each.chosen), points[0])
    said = (
        f"{plural(len(points), 'plan')}: steps of {duration(fastest)} to {duration(slowest)}, "
        f"{amount(min(memory))} to {amount(max(memory))} a device; chosen: {chosen.mesh} with "
        f"{duration(chosen.predicted.seconds)} and {amount(chosen.predicted.bytes)}; limit "
        f"{amount(plan.limit)}"
    )
    svg = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {_WIDE} {_HIGH}",
        width=_WIDE,
        height=_HIGH,
        role="img",
        aria_label=said,
        xmlns="http://www.w3.org/2000/svg",
    )
    note = "Filled: the plan. Each circle has its mesh and numbers. "
    if plan.limit > most_memory:
        note += f"The limit, {amount(plan.limit)}, is far to the right."
    return join([wide("Plans tried", svg), tag("p", note, class_="note")])


def _label(x: float, y: float, words: str, anchor: str) -> Html:
    return tag("text", words, x=x, y=y, font_size=12, text_anchor=anchor, fill="currentColor")


def _point(each: Alternative, x: float, y: float) -> Html:
    time, size = duration(each.predicted.seconds), amount(each.predicted.bytes)
    colour = "#2c5cab" if each.fits else "#b23a2b"
    return tag(
        "g",
        tag("title", f"{each.mesh}: {time}, {size}{'' if each.fits else ', does not fit'}"),
        tag(
            "circle",
            cx=x,
            cy=y,
            r=7 if each.chosen else 5,
            fill=colour,
            fill_opacity=1 if each.chosen else 0.15,
            stroke=colour,
            stroke_width=1.5,
        ),
    )
