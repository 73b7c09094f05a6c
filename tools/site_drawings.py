"""Draw the pictures of the pages about concepts, from the values that meshwright computes.

    python tools/site_drawings.py       # writes docs/*.svg

Colours are variables with light values: the site sets them for light and dark, and a drawing that
is opened by itself follows the reader's system.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

import meshwright as mw

DOCS = Path(__file__).parent.parent / "docs"
LIGHT = {
    "ink": "#16202e",
    "soft": "#5b6675",
    "line": "#c3ccd8",
    "card": "#eef2f7",
    "one": "#2c5cab",
    "two": "#b3541e",
    "three": "#1d7a58",
    "on": "#fff",
}
DARK = {
    "ink": "#eef2f7",
    "soft": "#9aa6b6",
    "line": "#445062",
    "card": "#222b38",
    "one": "#8fb4f0",
    "two": "#f0a87a",
    "three": "#5cc79f",
    "on": "#11151b",
}


def colour(name: str) -> str:
    return f"var(--{name},{LIGHT[name]})"


def drawing(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    """Frame the parts as an SVG that has both sets of colours."""
    dark = ";".join(f"--{name}:{value}" for name, value in DARK.items())
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" xmlns="http://www.w3.org/2000/svg" '
        f'role="img" aria-label="{label}" font-family="ui-sans-serif,system-ui,sans-serif" '
        f'font-size="13"><style>@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, *, fill: str = "ink", **options: object) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in options.items())
    return f'<text x="{x:g}" y="{y:g}" fill="{colour(fill)}"{more}>{words}</text>'


def box(x: float, y: float, w: float, h: float, fill: str, *, stroke: str = "none") -> str:
    line = stroke if stroke == "none" else colour(stroke)
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" fill="{colour(fill)}" '
        f'stroke="{line}"/>'
    )


def path(points: Sequence[tuple[float, float]], stroke: str, *, close: bool = False) -> str:
    steps = " L".join(f"{x:g} {y:g}" for x, y in points)
    return (
        f'<path d="M{steps}{" Z" if close else ""}" fill="none" stroke="{colour(stroke)}" '
        f'stroke-width="2.5" stroke-linejoin="round" stroke-linecap="round"/>'
    )


def draw_axes() -> str:
    """Eight devices as dp:2, fsdp:2, tp:2, with the shards of a batch and of a weight."""
    parts = []
    for dp in range(2):
        left = 70 + dp * 330
        parts.append(text(left + 125, 22, f"dp {dp}", text_anchor="middle", font_weight=600))
        for fsdp in range(2):
            top = 52 + fsdp * 118
            if dp == 0:
                parts.append(text(8, top + 54, f"fsdp {fsdp}"))
            for tp in range(2):
                x = left + tp * 130
                if fsdp == 0:
                    parts.append(text(x + 60, 42, f"tp {tp}", fill="soft", text_anchor="middle"))
                parts += device(x, top, 4 * dp + 2 * fsdp + tp, 2 * dp + fsdp, fsdp, tp)
    parts.append(text(70, 302, "blue: rows of the batch, P((dp, fsdp))", fill="one"))
    parts.append(text(400, 302, "orange: the quarter of the weight, P(fsdp, tp)", fill="two"))
    return drawing(740, 314, "Eight devices as dp:2, fsdp:2, tp:2", parts)


def device(x: float, y: float, number: int, rows: int, fsdp: int, tp: int) -> list[str]:
    parts = [box(x, y, 120, 106, "card", stroke="line")]
    parts.append(text(x + 10, y + 20, f"device {number}", fill="soft", font_size=11))
    for row in range(4):
        parts.append(box(x + 12, y + 32 + row * 15, 34, 12, "one" if row == rows else "line"))
    for down in range(2):
        for across in range(2):
            held = (down, across) == (fsdp, tp)
            fill = "two" if held else "line"
            parts.append(box(x + 62 + across * 24, y + 36 + down * 24, 21, 21, fill))
    return parts


def draw_torus() -> str:
    """The groups of tp:4 in a corner of v5e:16x16: the search's, and those of a plain reshape."""
    placed = mw.place("fsdp:64, tp:4", "v5e:16x16")
    plain = np.arange(256).reshape(64, 4)
    ours, theirs = placed.axes[1], (placed.runner_up or ())[1]
    parts = []
    for left, groups, title, axis in (
        (10, plain, "a plain reshape: lines of 4", theirs),
        (370, np.asarray(placed.positions), "the search: blocks of 2x2", ours),
    ):
        parts.append(text(left, 20, title, font_weight=600))
        cost = axis.cost
        note = f"{cost.bandwidth:.0f} GB/s, all-gather of 1 GiB {1e3 * cost.all_gather:.1f} ms"
        parts.append(text(left, 40, note, fill="soft"))
        parts += torus_groups(left, 56, groups)
    return drawing(700, 388, "Groups of tp:4 on a torus", parts)


def torus_groups(left: float, top: float, groups: np.ndarray) -> list[str]:
    """The chips of the corner, and a path through each group that lies in it."""
    side, step = 8, 40

    def at(chip: int) -> tuple[float, float]:
        return left + 20 + chip % 16 * step, top + 20 + chip // 16 * step

    parts = [box(left, top, side * step, side * step, "card")]
    for n, group in enumerate(groups):
        if all(chip % 16 < side and chip // 16 < side for chip in group):
            points = [at(int(chip)) for chip in group]
            block = len({x for x, _ in points}) > 1 and len({y for _, y in points}) > 1
            parts.append(path(points, ("one", "two", "three")[n % 3], close=block))
    for row in range(side):
        for column in range(side):
            x, y = at(16 * row + column)
            parts.append(
                f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="{colour("on")}" '
                f'stroke="{colour("ink")}" stroke-width="1.5"/>'
            )
    return parts


def draw_all_gather() -> str:
    """An all-gather of four shards around a ring, in three steps."""
    parts = []
    names = ("one", "two", "three", "soft")
    for step in range(4):
        left = 10 + step * 180
        title = "at first" if step == 0 else f"after step {step}"
        parts.append(text(left, 20, title, font_weight=600))
        for chip in range(4):
            y = 36 + chip * 42
            parts.append(box(left, y, 130, 34, "card", stroke="line"))
            for piece in range(4):
                held = (chip - piece) % 4 <= step
                parts.append(
                    box(left + 8 + piece * 30, y + 7, 24, 20, names[piece] if held else "line")
                )
        if step < 3:
            middle = left + 137
            parts.append(path([(middle, 120), (middle + 26, 120)], "soft"))
            parts.append(path([(middle + 20, 115), (middle + 26, 120), (middle + 20, 125)], "soft"))
    parts.append(
        text(
            10, 228, "each step, every device sends the piece it got last to the next", fill="soft"
        )
    )
    return drawing(690, 240, "An all-gather around a ring of four devices", parts)


def draw_schedule() -> str:
    """Two stages under 1f1b, as meshwright draws schedules."""
    schedule = mw.schedules.schedule("1f1b", groups=2, microbatches=4)
    return mw.schedules.simulate(schedule).svg() + "\n"


if __name__ == "__main__":
    for name, draw in {
        "axes": draw_axes,
        "torus": draw_torus,
        "all_gather": draw_all_gather,
        "two_stages": draw_schedule,
    }.items():
        (DOCS / f"{name}.svg").write_text(draw())
        print(f"docs/{name}.svg")
