"""A rehearsal as HTML: for a notebook whole, for a report section by section."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.rehearsal.drawing.markup import Html, join, tag
from meshwright.rehearsal.drawing.memory import memory
from meshwright.rehearsal.drawing.mesh import mesh
from meshwright.rehearsal.drawing.moves import moves
from meshwright.rehearsal.drawing.shardings import shardings
from meshwright.rehearsal.drawing.steptime import steptime
from meshwright.rehearsal.drawing.style import style
from meshwright.rehearsal.drawing.verdict import verdict
from meshwright.rehearsal.remedies import Remedy
from meshwright.rehearsal.result import Rehearsal
from meshwright.rehearsal.show import next_steps


def as_html(result: Rehearsal) -> str:
    """One self-contained block, no scripts and nothing fetched."""
    parts = [verdict(result)]
    if advice := next_steps(result):
        parts.append(tag("section", tag("h2", "What to do next"), advised(advice)))
    parts += [tag("section", tag("h2", title), body) for title, body in sections(result).values()]
    return tag("div", tag("style", Html(style())), *parts, class_="mw")


def sections(result: Rehearsal, remedies: Sequence[Remedy] = ()) -> dict[str, tuple[str, Html]]:
    """Title and content of every section, by a short name for links."""
    return {
        "memory": ("Memory", memory(result, remedies)),
        "time": ("Where a step's time goes", steptime(result)),
        "mesh": ("The mesh on the machine", mesh(result.placement)),
        "collectives": ("What moves between devices", _moves(result)),
        "shardings": ("How the arrays are cut", shardings(result.arguments)),
    }


def advised(lines: Sequence[str]) -> Html:
    """Steps in order."""
    return tag(
        "ol", join(tag("li", f"{line[:1].upper()}{line[1:]}") for line in lines), class_="next"
    )


def _moves(result: Rehearsal) -> Html:
    if result.time is None:
        return tag("p", "Not known: the compiler gave up before it had a program.")
    return moves(result.collectives)
