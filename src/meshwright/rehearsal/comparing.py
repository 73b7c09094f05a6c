"""Two rehearsals side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from meshwright._tables import duration, html_table, table
from meshwright.partitioning.show import amount
from meshwright.rehearsal.ledger.collective import CAUSES
from meshwright.rehearsal.result import Rehearsal


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """What differs between two rehearsals. Prints itself; HTML in a notebook; `to_json()`."""

    one: Rehearsal
    other: Rehearsal

    def rows(self) -> Iterator[tuple[str, Any, Any, str]]:
        """What is compared, both values, and the kind of number: bytes, seconds or a word."""
        one, other = self.one, self.other
        yield "mesh", str(one.placement.spec), str(other.placement.spec), "word"
        yield "on", one.placement.topology.name, other.placement.topology.name, "word"
        yield "fits", _yes(one.fits), _yes(other.fits), "word"
        yield "peak memory", one.memory.peak, other.memory.peak, "bytes"
        yield "arguments", one.memory.arguments, other.memory.arguments, "bytes"
        yield "temporaries", one.memory.temporaries, other.memory.temporaries, "bytes"
        yield "margin", one.margin, other.margin, "bytes"
        for cause in CAUSES:
            yield f"{cause}, moved", _moved(one, cause), _moved(other, cause), "bytes"
        yield from self._times()

    def _times(self) -> Iterator[tuple[str, Any, Any, str]]:
        one, other = self.one.time, self.other.time
        for name in ("compute", "memory", "exposed", "total"):
            label = "modelled step" if name == "total" else f"step: {name}"
            yield (
                label,
                None if one is None else getattr(one, name),
                None if other is None else getattr(other, name),
                "seconds",
            )

    def __str__(self) -> str:
        return table(self._cells(), [False, True, True, True])

    def _repr_html_(self) -> str:
        return html_table(self._cells(), [False, True, True, True])

    def _cells(self) -> list[list[str]]:
        cells = [["", self.one.name, self.other.name, "ratio"]]
        for label, first, second, kind in self.rows():
            if not first and not second:
                continue
            cells.append([label, _word(first, kind), _word(second, kind), _ratio(first, second)])
        return cells

    def to_json(self) -> dict[str, Any]:
        return {label: [first, second] for label, first, second, _ in self.rows()}


def _moved(result: Rehearsal, cause: str) -> int:
    return sum(entry.total_moved for entry in result.collectives if entry.cause == cause)


def _word(value: Any, kind: str) -> str:
    if value is None:
        return "-"
    if kind == "bytes":
        return amount(value)
    return duration(value) if kind == "seconds" else str(value)


def _ratio(first: Any, second: Any) -> str:
    if isinstance(first, (int, float)) and isinstance(second, (int, float)) and first > 0:
        return f"{second / first:.2f}" if second >= 0 else ""
    return ""


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
