"""`page(...)`: everything about a rehearsal on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright._version import __version__
from meshwright.errors import RehearsalError, short
from meshwright.rehearsal import Rehearsal
from meshwright.rehearsal.comparing import Comparison
from meshwright.rehearsal.drawing.markup import Html, join, tag
from meshwright.rehearsal.drawing.style import style
from meshwright.rehearsal.drawing.verdict import verdict
from meshwright.rehearsal.page import advised, sections
from meshwright.rehearsal.remedies import Remedy
from meshwright.report.advice import advice
from meshwright.report.beside import beside
from meshwright.report.curves import curves
from meshwright.report.timelines import AnyTimeline, timelines

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
        "next": ("What to do next", advised(advice(result, remedies))),
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
