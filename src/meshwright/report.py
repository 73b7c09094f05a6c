"""`page`: a rehearsal, and what ran of it, as one web page that fetches nothing.

The frame and the sections that every rehearsal has are of `rehearsal.rendering`; here is what a
page may also hold: a comparison, a pipeline's timeline, losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright._html import Html, bars, join, tag, wide
from meshwright._text import amount, number
from meshwright.errors import RehearsalError, short
from meshwright.pipelines.explanation import Explanation
from meshwright.pipelines.profiling import MeasuredTimeline
from meshwright.rehearsal.avoidable_costs import AvoidableCosts
from meshwright.rehearsal.remedy_table import Remedy
from meshwright.rehearsal.rendering import as_page
from meshwright.rehearsal.result import Comparison, Rehearsal
from meshwright.schedules.timeline import Timeline

AnyTimeline = Explanation | MeasuredTimeline | Timeline


def page(
    result: Rehearsal,
    *,
    remedies: Sequence[Remedy] = (),
    costs: AvoidableCosts | None = None,
    pipeline: Mapping[str, AnyTimeline] | AnyTimeline | None = None,
    training: Mapping[str, Sequence[float]] | Sequence[float] | None = None,
    comparison: Comparison | None = None,
    title: str | None = None,
) -> str:
    """Render a rehearsal as one HTML page that works offline, on a phone, and without scripts.

    `result.save("out.html")` writes one; this is for pages that hold more. With scripts tables sort
    and filter, and the numbers are there as JSON to download.

    `remedies` are drawn beside the memory they save; `costs` are `result.costs(check=True)`, by
    default those that were not tried. `pipeline` is what `step.explain(...)` or
    `step.timeline(...)` returned, `training` the losses of a run, either also a dict of several by
    name, and `comparison` what `result.compare(other)` returned. `title` is by default the name of
    the step and of the hardware. Raises `RehearsalError` for losses that cannot be drawn.

    >>> import meshwright as mw
    >>> from meshwright.report import page
    >>> r = mw.rehearse_model("tiny", batch=16, mesh="fsdp:4, tp:2", on="cpu:8")
    >>> page(r, training=[3.2, 2.9, 2.7])[:15]
    '<!doctype html>'
    """
    if not isinstance(result, Rehearsal):
        raise RehearsalError(f"page: {short(result)} is not what rehearse(...) returns.")
    more: dict[str, tuple[str, Html]] = {}
    if comparison is not None:
        more["comparison"] = ("Side by side", draw_comparison(comparison))
    if pipeline is not None:
        pipelines = pipeline if isinstance(pipeline, Mapping) else {"": pipeline}
        more["pipeline"] = ("The pipeline", draw_pipelines(pipelines))
    if training is not None:
        runs = training if isinstance(training, Mapping) else {"loss": training}
        more["training"] = ("Training", draw_losses(runs))
    return as_page(result, remedies=remedies, costs=costs, more=more, title=title)


# What a page may hold besides the rehearsal.


def draw_comparison(comparison: Comparison) -> Html:
    """Draw the memory of two rehearsals on one scale, and the table."""
    lanes = [
        each.memory.lane(f"{each.name} as {each.placement.spec}")
        for each in (comparison.first, comparison.second)
    ]
    limit = min(comparison.first.memory.limit, comparison.second.memory.limit)
    return join([bars(lanes, amount, limit=limit), comparison._sheet().inside()])


def draw_pipelines(pipelines: Mapping[str, AnyTimeline]) -> Html:
    """Draw when the tasks of pipelines run, in boxes that scroll.

    A picture is not shrunk to the page: a task must stay wide enough to be told from the next.
    """
    return join(
        join([tag("p", name) if name else "", _draw_pipeline(pipeline)])
        for name, pipeline in pipelines.items()
    )


def _draw_pipeline(pipeline: AnyTimeline) -> Html:
    if isinstance(pipeline, MeasuredTimeline):
        note = (
            f"Measured, in ms; predicted from the times of its tasks: {pipeline.ratio:.2f} of it."
        )
        return join([_picture("Measured timeline", pipeline.svg()), tag("p", note, class_="note")])
    if isinstance(pipeline, Explanation):
        return _picture("Stages and predicted timeline", pipeline._repr_html_())
    return _picture("Timeline", pipeline.svg())


def _picture(label: str, svg: str) -> Html:
    return tag("div", wide(label, Html(svg)), class_="picture")


# The chart of losses, in the units of its view box.
_WIDE, _TALL, _LEFT, _BOTTOM, _EDGE = 440, 190, 52, 26, 12


def draw_losses(runs: Mapping[str, Sequence[float]]) -> Html:
    """Draw a line per run on common axes; later lines are dashed, to show where runs agree."""
    for name, values in runs.items():
        if len(values) < 2 or not all(abs(float(v)) < float("inf") for v in values):
            raise RehearsalError(
                f"training: {name!r} needs two or more finite losses, not {short(list(values))}.",
                option="training",
            )
    values = [float(v) for run in runs.values() for v in run]
    low, high = min(values), max(values)
    steps = max(map(len, runs.values())) - 1
    scale = _Scale(low, high if high > low else low + 1.0, steps)  # a flat line needs a height
    lines = (
        _line(scale, at, name, [float(v) for v in run])
        for at, (name, run) in enumerate(runs.items())
    )
    words = ", ".join(f"{name} from {run[0]:.4f} to {run[-1]:.4f}" for name, run in runs.items())
    picture = tag(
        "svg",
        tag("title", "Loss"),
        *_axes(scale),
        *lines,
        class_="chart",
        viewBox=f"0 0 {_WIDE} {_TALL}",
        style="width:100%;max-width:520px;height:auto",
        role="img",
        aria_label=f"Loss by step: {words}",
        xmlns="http://www.w3.org/2000/svg",
    )
    return join([picture, _legend(runs)])


class _Scale:
    """How steps and losses become x and y of the chart."""

    def __init__(self, low: float, high: float, steps: int):
        self.low, self.high, self.steps = low, high, steps

    def x(self, step: float) -> float:
        return _LEFT + (_WIDE - _LEFT - _EDGE) * step / self.steps

    def y(self, loss: float) -> float:
        share = (loss - self.low) / (self.high - self.low)
        return _TALL - _BOTTOM - (_TALL - _BOTTOM - _EDGE) * share


def _axes(scale: _Scale) -> list[Html]:
    elements = []
    for part in range(4):
        loss = scale.low + (scale.high - scale.low) * part / 3
        y = scale.y(loss)
        elements.append(tag("line", x1=_LEFT, x2=_WIDE - _EDGE, y1=y, y2=y, class_="axis"))
        elements.append(tag("text", number(loss), x=_LEFT - 8, y=y + 4, text_anchor="end"))
    for step, anchor in ((0, "start"), (scale.steps, "end")):
        label = f"step {step + 1}"
        elements.append(tag("text", label, x=scale.x(step), y=_TALL - 8, text_anchor=anchor))
    return elements


def _line(scale: _Scale, at: int, name: str, run: Sequence[float]) -> Html:
    points = "L".join(f"{scale.x(step):.1f} {scale.y(loss):.1f}" for step, loss in enumerate(run))
    dashes = {"stroke_dasharray": _dashes(at), "class_": "other"} if at else {}
    return tag("path", tag("title", name), d=f"M{points}", **dashes)


def _legend(runs: Mapping[str, Sequence[float]]) -> Html:
    items = (
        tag(
            "li",
            _sample(at),
            tag("span", name),
            tag("b", f"{float(run[-1]):.4f}"),
            tag("small", f"after {len(run)} steps, from {float(run[0]):.4f}"),
        )
        for at, (name, run) in enumerate(runs.items())
    )
    return tag("ul", *items, class_="legend")


def _sample(at: int) -> Html:
    """A short line as that of a run is drawn."""
    dashes = {"stroke_dasharray": _dashes(at), "class_": "other"} if at else {}
    line = tag("path", d="M0 6h28", **dashes)
    return tag("svg", line, class_="chart sample", width=28, height=12, aria_hidden="true")


def _dashes(at: int) -> str:
    """The dashes of a run: shorter for each, and no colour, which would have another meaning."""
    return f"{max(2, 9 - 2 * at)} {3 + at % 3}"
