"""A pipeline on the page: its stages, and when its tasks run."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.mpmd import Timeline
from meshwright.mpmd.pipelines.explaining import Explanation
from meshwright.mpmd.pipelines.measuring import MeasuredTimeline
from meshwright.rehearsal.drawing.markup import Html, join, tag, wide

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
