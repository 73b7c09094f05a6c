"""The top of a report: does it fit, and the few numbers that matter."""

from __future__ import annotations

from meshwright._tables import duration
from meshwright.partitioning.show import amount
from meshwright.rehearsal.drawing.markup import Html, join, tag
from meshwright.rehearsal.result import Rehearsal
from meshwright.rehearsal.show import headline


def verdict(result: Rehearsal) -> Html:
    """Fits or not, by how much, and what was compiled."""
    first, *more = headline(result).splitlines()
    good = result.fits
    return tag(
        "header",
        tag("h1", f"{result.name} on {result.placement.topology.name}"),
        tag("p", first, class_="what"),
        tag(
            "p",
            tag("strong", "fits" if good else "does not fit"),
            tag("span", result.memory.verdict().partition(": ")[2]),
            class_="verdict good" if good else "verdict bad",
        ),
        *(tag("p", line, class_="note") for line in more),
        tag("dl", _tiles(result), class_="tiles"),
    )


def _tiles(result: Rehearsal) -> Html:
    memory, timing = result.memory, result.time
    sign = "to spare" if memory.margin >= 0 else "too much"
    found = [("memory of a device", f"{memory.peak / memory.limit:.0%}", _of(result))]
    found.append((sign, amount(abs(memory.margin)), f"limit {amount(memory.limit)}"))
    if timing is not None:
        found.append(("modelled step", duration(timing.total), "by the model"))
        found.append(("utilisation", f"{timing.utilisation:.0%}", "of the chip's peak"))
        sent = result.collectives
        found.append(("sent by a device", amount(sent.moved), f"{len(sent):,} collectives"))
    return join(
        tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="small"))
        for name, value, note in found
    )


def _of(result: Rehearsal) -> str:
    return f"{amount(result.memory.peak)} of {amount(result.memory.limit)}"
