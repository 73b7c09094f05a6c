"""Two rehearsals side by side: memory on one scale, and the table."""

from __future__ import annotations

from meshwright.partitioning.show import amount
from meshwright.rehearsal.comparing import Comparison
from meshwright.rehearsal.drawing.bars import bars
from meshwright.rehearsal.drawing.markup import Html, join, wide
from meshwright.rehearsal.drawing.memory import lane


def beside(comparison: Comparison) -> Html:
    lanes = [
        lane(f"{each.name} as {each.placement.spec}", each.memory)
        for each in (comparison.one, comparison.other)
    ]
    limit = min(comparison.one.memory.limit, comparison.other.memory.limit)
    drawn = bars(lanes, amount, limit=limit)
    return join([drawn, wide("Comparison", Html(comparison._repr_html_()))])
