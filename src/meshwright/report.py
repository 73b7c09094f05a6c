"""`page`: a rehearsal, and what ran of it, as one web page that fetches nothing.

The sections that every rehearsal has are drawn by `rehearsal.rendering`; here are the frame, the
advice at its top, and what a page may also hold: a comparison, a pipeline's timeline, losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshwright._html import SERIES, Html, bars, join, style, tag, wide
from meshwright._html import page as html_page
from meshwright._text import amount, number
from meshwright._version import __version__
from meshwright.axes import role
from meshwright.errors import RehearsalError, short
from meshwright.pipelines.explanation import Explanation
from meshwright.pipelines.profiling import MeasuredTimeline
from meshwright.rehearsal.avoidable_costs import AvoidableCosts
from meshwright.rehearsal.collectives.types import IMPLICIT_RESHARDING, Collective
from meshwright.rehearsal.remedies import Remedy
from meshwright.rehearsal.rendering import (
    advice_list,
    memory_lane,
    next_steps,
    sections,
    verdict,
)
from meshwright.rehearsal.request import EXTRAS
from meshwright.rehearsal.result import Comparison, Rehearsal
from meshwright.schedules.timeline import Timeline

AnyTimeline = Explanation | MeasuredTimeline | Timeline

# Around the style sheet of every picture: what only a whole page has. `color-scheme` lets the
# browser paint its own background dark, too.
_FRAME = """\
:root{color-scheme:light dark}
body{margin:0}
.mw.page{min-height:100vh}
.mw.page>main,.mw.page>nav,.mw.page>footer{max-width:1080px;margin:0 auto;padding:0 20px}
.mw.page>main{padding-top:28px}
.mw.page>footer{color:var(--soft);font-size:13px;padding-top:20px;padding-bottom:40px}
.mw.page>nav{border-bottom:1px solid var(--line);max-width:none;padding:9px 20px;font-size:14px}
.mw.page>nav div{max-width:1040px;margin:0 auto;display:flex;flex-wrap:wrap;gap:2px 18px}
.mw.page>nav b{margin-right:6px}
"""


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
    parts = {  # heading and content, by the name that links use
        "next": ("What to do next", advice_list(advice(result, remedies))),
        **sections(result, remedies, costs),
    }
    if comparison is not None:
        parts["comparison"] = ("Side by side", draw_comparison(comparison))
    if pipeline is not None:
        pipelines = pipeline if isinstance(pipeline, Mapping) else {"": pipeline}
        parts["pipeline"] = ("The pipeline", draw_pipelines(pipelines))
    if training is not None:
        runs = training if isinstance(training, Mapping) else {"loss": training}
        parts["training"] = ("Training", draw_losses(runs))
    body = join(
        tag("section", tag("h2", heading), content, id=name)
        for name, (heading, content) in parts.items()
    )
    title = title or f"{result.name} on {result.placement.topology.name}"
    return _framed(title, tuple(parts), join([verdict(result), body]))


def _framed(title: str, names: Sequence[str], body: Html) -> str:
    """A page with links to its sections above, and who made it below."""
    links = (tag("a", name, href=f"#{name}") for name in names)
    made_by = f"Made by meshwright {__version__}. Nothing on this page is fetched."
    inside = join(
        [
            tag("nav", tag("div", tag("b", title), *links), aria_label="Sections"),
            tag("main", body),
            tag("footer", made_by),
        ]
    )
    return html_page(title, inside, css=style() + _FRAME, body_class="mw page")


# What a page may hold besides the rehearsal.


def draw_comparison(comparison: Comparison) -> Html:
    """Draw the memory of two rehearsals on one scale, and the table."""
    lanes = [
        memory_lane(f"{each.name} as {each.placement.spec}", each.memory)
        for each in (comparison.first, comparison.second)
    ]
    limit = min(comparison.first.memory.limit, comparison.second.memory.limit)
    return join(
        [bars(lanes, amount, limit=limit), wide("Comparison", Html(comparison._repr_html_()))]
    )


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


# Fractions of the step's time, and of a device's memory, from which advice is given.
_MUCH_WAITING, _MUCH_READING, _MUCH_ROOM = 0.25, 0.4, 0.4


def advice(result: Rehearsal, remedies: Sequence[Remedy] = ()) -> list[str]:
    """Say what to do next, most important first.

    How to make it fit, then implicit resharding, then what would be worth trying.
    """
    lines = [f"{remedy}." for remedy in remedies]
    # `next_steps` lists the result's own remedies; where some are given, they are listed once.
    known = {str(remedy) for remedy in result.remedies()} if remedies else set()
    lines += [step for step in next_steps(result) if step not in known]
    lines += [*_waiting(result), *_room(result), *_stand_in(result)]
    return lines or ["It fits and nothing stands out: rent the machine and run it."]


def _waiting(result: Rehearsal) -> Iterator[str]:
    """What a step waits for, where that is much and the step fits."""
    timing = result.time
    if timing is None or not timing.total or not result.fits:
        return
    share = timing.exposed / timing.total
    if share > _MUCH_WAITING and len(result.collectives):
        worst = max(result.collectives, key=lambda entry: entry.total_seconds)
        where = f", from {worst.source}" if worst.source else ""
        yield (
            f"{share:.0%} of the step waits for communication. The largest part is the "
            f"{worst.kind} of {worst.shape} over {worst.over}{where}: {_less(worst)}."
        )
    reading = timing.memory / timing.total
    if reading > _MUCH_READING and not result.stand_in:  # how kernels fuse is the CPU's there
        yield (
            f"{reading:.0%} of the step waits for the chip's own memory: more rows on a device, "
            "or kernels that fuse more (attention first)."
        )


def _less(entry: Collective) -> str:
    """How to send less over the axes of a collective."""
    if entry.cause == IMPLICIT_RESHARDING:
        return "constrain its operands to one sharding"
    if all(role(axis.name).moves == "weights" for axis in entry.axes or ()):
        return "more rows on a device would share its cost"
    return f"a smaller {entry.over} would send less"


def _room(result: Rehearsal) -> Iterator[str]:
    if result.fits and result.margin > _MUCH_ROOM * result.memory.limit:
        yield (
            f"{amount(result.margin)} of every device are free: a larger batch or less "
            "rematerialisation would use them."
        )


def _stand_in(result: Rehearsal) -> Iterator[str]:
    if result.stand_in:
        chip = result.placement.topology.chip
        yield (
            f"Ask the compiler of {chip.name} itself before you rent it: pip install "
            f"'meshwright[{EXTRAS[chip.family]}]', then rehearse again without compiler='cpu'."
        )
