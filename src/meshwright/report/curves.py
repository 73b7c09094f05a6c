"""Losses of one or more runs as a small chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright._tables import number
from meshwright.errors import RehearsalError, short
from meshwright.rehearsal.drawing.markup import Html, join, tag
from meshwright.rehearsal.drawing.palette import SERIES

_WIDE, _TALL, _LEFT, _BOTTOM, _EDGE = 440, 190, 52, 26, 12


def curves(runs: Mapping[str, Sequence[float]]) -> Html:
    """A line per run on common axes; where runs agree, later lines are dashed over earlier ones."""
    for name, values in runs.items():
        if len(values) < 2 or not all(abs(float(v)) < float("inf") for v in values):
            raise RehearsalError(
                f"training: {name!r} needs two or more finite losses, not {short(list(values))}."
            )
    values = [float(v) for run in runs.values() for v in run]
    low, high = min(values), max(values)
    steps = max(map(len, runs.values())) - 1
    scale = _Scale(low, high if high > low else low + 1.0, steps)
    lines = (
        _line(scale, at, name, [float(v) for v in run])
        for at, (name, run) in enumerate(runs.items())
    )
    said = ", ".join(f"{name} from {run[0]:.4f} to {run[-1]:.4f}" for name, run in runs.items())
    picture = tag(
        "svg",
        tag("title", "Loss"),
        *_axes(scale),
        *lines,
        class_="chart",
        viewBox=f"0 0 {_WIDE} {_TALL}",
        style="width:100%;max-width:520px;height:auto",
        role="img",
        aria_label=f"Loss by step: {said}",
        xmlns="http://www.w3.org/2000/svg",
    )
    return join([picture, _legend(runs)])


class _Scale:
    """Where a step and a loss stand in the picture."""

    def __init__(self, low: float, high: float, steps: int):
        self.low, self.high, self.steps = low, high, steps

    def x(self, step: float) -> float:
        return _LEFT + (_WIDE - _LEFT - _EDGE) * step / self.steps

    def y(self, loss: float) -> float:
        share = (loss - self.low) / (self.high - self.low)
        return _TALL - _BOTTOM - (_TALL - _BOTTOM - _EDGE) * share


def _axes(scale: _Scale) -> list[Html]:
    drawn = []
    for part in range(4):
        loss = scale.low + (scale.high - scale.low) * part / 3
        y = scale.y(loss)
        drawn.append(tag("line", x1=_LEFT, x2=_WIDE - _EDGE, y1=y, y2=y, class_="axis"))
        drawn.append(tag("text", number(loss), x=_LEFT - 8, y=y + 4, text_anchor="end"))
    for step, anchor in ((0, "start"), (scale.steps, "end")):
        word = f"step {step + 1}"
        drawn.append(tag("text", word, x=scale.x(step), y=_TALL - 8, text_anchor=anchor))
    return drawn


def _line(scale: _Scale, at: int, name: str, run: Sequence[float]) -> Html:
    points = "L".join(f"{scale.x(step):.1f} {scale.y(loss):.1f}" for step, loss in enumerate(run))
    dashes = {"stroke_dasharray": "7 7"} if at else {}
    return tag("path", tag("title", name), d=f"M{points}", stroke=_colour(at), **dashes)


def _legend(runs: Mapping[str, Sequence[float]]) -> Html:
    items = (
        tag(
            "li",
            tag("i", style=f"background:{_colour(at)}"),
            tag("span", name),
            tag("b", f"{float(run[-1]):.4f}"),
            tag("small", f"after {len(run)} steps, from {float(run[0]):.4f}"),
        )
        for at, (name, run) in enumerate(runs.items())
    )
    return tag("ul", *items, class_="legend")


def _colour(at: int) -> str:
    return SERIES[at % len(SERIES)]
