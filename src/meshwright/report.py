"""The report. In: a rehearsal, and what ran. Out: one web page that needs nothing from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshwright._html import SERIES, Html, bars, join, style, tag, wide
from meshwright._text import amount, number
from meshwright._version import __version__
from meshwright.axes import role
from meshwright.errors import RehearsalError, short
from meshwright.pipelines.explanation import Explanation
from meshwright.pipelines.profiling import MeasuredTimeline
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

# `page(...)`: everything about a rehearsal on one page.


_FRAME = """\
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
    pipeline: Mapping[str, AnyTimeline] | AnyTimeline | None = None,
    training: Mapping[str, Sequence[float]] | Sequence[float] | None = None,
    comparison: Comparison | None = None,
    title: str | None = None,
) -> str:
    """A rehearsal as one HTML page: works offline, light and dark, on a phone, without scripts.

    `remedies` are drawn beside the memory they save. `pipeline` is what `step.explain(...)` or
    `step.timeline(...)` gave, `training` the losses of a run, either also several by name, and
    `comparison` what `result.compare(other)` gave.

    >>> import meshwright as mw
    >>> from meshwright.report import page
    >>> r = mw.rehearse_model("tiny", batch=16, mesh="fsdp:4, tp:2", on="cpu:8")
    >>> page(r, training=[3.2, 2.9, 2.7])[:15]
    '<!doctype html>'
    """
    if not isinstance(result, Rehearsal):
        raise RehearsalError(f"page: {short(result)} is not what rehearse(...) returns.")
    found = {
        "next": ("What to do next", advice_list(advice(result, remedies))),
        **sections(result, remedies),
    }
    if comparison is not None:
        found["comparison"] = ("Side by side", beside(comparison))
    if pipeline is not None:
        drawn = pipeline if isinstance(pipeline, Mapping) else {"": pipeline}
        found["pipeline"] = ("The pipeline", timelines(drawn))
    if training is not None:
        runs = training if isinstance(training, Mapping) else {"loss": training}
        found["training"] = ("Training", curves(runs))
    body = join(
        tag("section", tag("h2", heading), inside, id=name)
        for name, (heading, inside) in found.items()
    )
    named = title or f"{result.name} on {result.placement.topology.name}"
    return _document(named, tuple(found), join([verdict(result), body]))


def _document(title: str, names: Sequence[str], body: Html) -> str:
    links = (tag("a", name, href=f"#{name}") for name in names)
    return (
        "<!doctype html>\n"
        + tag(
            "html",
            tag(
                "head",
                Html('<meta charset="utf-8">'),
                Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
                Html('<meta name="color-scheme" content="light dark">'),
                tag("title", title),
                tag("style", Html(style() + _FRAME)),
            ),
            tag(
                "body",
                tag("nav", tag("div", tag("b", title), *links), aria_label="Sections"),
                tag("main", body),
                tag(
                    "footer", f"Made by meshwright {__version__}. Nothing on this page is fetched."
                ),
                class_="mw page",
            ),
            lang="en",
        )
        + "\n"
    )


# Two rehearsals side by side: memory on one scale, and the table.


def beside(comparison: Comparison) -> Html:
    lanes = [
        memory_lane(f"{each.name} as {each.placement.spec}", each.memory)
        for each in (comparison.first, comparison.second)
    ]
    limit = min(comparison.first.memory.limit, comparison.second.memory.limit)
    drawn = bars(lanes, amount, limit=limit)
    return join([drawn, wide("Comparison", Html(comparison._repr_html_()))])


# Losses of one or more runs as a small chart.


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


# A pipeline on the page: its stages, and when its tasks run.


AnyTimeline = Explanation | MeasuredTimeline | Timeline


def timelines(pipelines: Mapping[str, AnyTimeline]) -> Html:
    """Pictures in boxes that scroll: a task must stay wide enough to be told from the next."""
    return join(
        join([tag("p", name) if name else "", _drawn(pipeline)])
        for name, pipeline in pipelines.items()
    )


def _drawn(pipeline: AnyTimeline) -> Html:
    if isinstance(pipeline, MeasuredTimeline):
        said = (
            f"Measured, in ms; predicted from the times of its tasks: {pipeline.ratio:.2f} of it."
        )
        return join([_picture("Measured timeline", pipeline.svg()), tag("p", said, class_="note")])
    if isinstance(pipeline, Explanation):
        return _picture("Stages and predicted timeline", pipeline._repr_html_())
    return _picture("Timeline", pipeline.svg())


def _picture(label: str, drawn: str) -> Html:
    return tag("div", wide(label, Html(drawn)), class_="picture")


# What to do next, most important first: ways out, surprises, then what would be worth trying.


_MUCH_WAITING, _MUCH_READING, _MUCH_ROOM = 0.25, 0.4, 0.4


def advice(result: Rehearsal, remedies: Sequence[Remedy] = ()) -> list[str]:
    found = [f"{remedy}." for remedy in remedies]
    known = {str(remedy) for remedy in result.remedies()} if remedies else set()
    found += [step for step in next_steps(result) if step not in known]
    found += [*_waiting(result), *_room(result), *_stand_in(result)]
    return found or ["It fits and nothing stands out: rent the machine and run it."]


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
