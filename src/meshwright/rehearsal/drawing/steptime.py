"""Where the time of a step goes, and the communication in it by cause and by axis."""

from __future__ import annotations

from collections.abc import Callable

from meshwright._tables import duration
from meshwright.rehearsal.drawing.bars import Lane, Part, bars, legend
from meshwright.rehearsal.drawing.markup import Html, join, tag
from meshwright.rehearsal.drawing.palette import CAUSES, SERIES, TIME
from meshwright.rehearsal.ledger import Collective, Ledger
from meshwright.rehearsal.result import Rehearsal


def steptime(result: Rehearsal) -> Html:
    """Lanes on one time scale: the step, its communication by cause, and by mesh axis."""
    timing = result.time
    if timing is None:
        return tag("p", "The compiler ran out of memory, so there is no program to time.")
    own = tuple(Part(name, timing.parts()[name], colour) for name, colour in TIME.items())
    lanes = [Lane(f"a step: {duration(timing.total)}", own)]
    if len(result.collectives):
        hidden = f", {duration(timing.hidden)} of it hidden" if timing.hidden else ""
        lanes.append(
            Lane(f"communication by cause{hidden}", grouped(result.collectives, _cause, CAUSES))
        )
        axes = sorted({entry.over for entry in result.collectives})
        colours = {axis: SERIES[at % len(SERIES)] for at, axis in enumerate(axes)}
        lanes.append(Lane("communication by axis", grouped(result.collectives, _over, colours)))
    whole = max(lane.size for lane in lanes)
    drawn = (
        (bars([lane], duration, whole=whole), legend(lane.parts, duration, lane.size))
        for lane in lanes
    )
    compiler = Html()
    if timing.compiler is not None:
        compiler = tag(
            "p",
            f"The compiler's own estimate of its kernels: {duration(timing.compiler)}.",
            class_="note",
        )
    return join([*(piece for pair in drawn for piece in pair), compiler])


def grouped(
    ledger: Ledger, key: Callable[[Collective], str], colours: dict[str, str]
) -> tuple[Part, ...]:
    """The time of all collectives, one part per group."""
    seconds = dict.fromkeys(colours, 0.0)
    for entry in ledger:
        seconds[key(entry)] += entry.total_seconds
    return tuple(Part(name, size, colours[name]) for name, size in seconds.items())


def _cause(entry: Collective) -> str:
    return entry.cause


def _over(entry: Collective) -> str:
    return entry.over
