"""`Rehearsal`: everything that is known about a step before it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright._html import html_table
from meshwright._text import amount, duration, table
from meshwright.errors import RehearsalError, short
from meshwright.partitioning.report import PartitionReport
from meshwright.placement.placement import Placement
from meshwright.rehearsal.collectives.types import CAUSES, Collectives
from meshwright.rehearsal.memory import Memory
from meshwright.rehearsal.request import Request
from meshwright.rehearsal.step_time import StepTime

if TYPE_CHECKING:
    from meshwright.rehearsal.remedies import Remedy


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rehearsal:
    """What the compiler made of a step. Prints itself; HTML in a notebook; `to_json()`.

    `time` is `None`, and there are no collectives, where the compiler ran out of memory.
    `stand_in`: compiled for simulated CPU devices instead of the hardware. `text` is the
    optimised program itself, `results` the shapes of what it returns.
    """

    request: Request
    placement: Placement
    arguments: PartitionReport
    memory: Memory
    collectives: Collectives
    time: StepTime | None
    compiler: str
    stand_in: bool
    compile_seconds: float
    from_cache: bool
    text: str
    results: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def margin(self) -> int:
        """Bytes to spare on a device; negative when it does not fit."""
        return self.memory.margin

    @property
    def flops(self) -> float | None:
        """Operations of all multiplications on one device."""
        return None if self.time is None else self.time.flops

    @property
    def bytes(self) -> float | None:
        """Bytes the kernels read and write of a device's memory."""
        return None if self.time is None else self.time.bytes

    def remedies(self, *, check: bool = False) -> tuple[Remedy, ...]:
        """Ways to need less memory, cheapest first; with `check` each is compiled too."""
        from meshwright.rehearsal.remedies import find_remedies

        return find_remedies(self, check=check)

    def compare(self, other: Rehearsal) -> Comparison:
        """The two side by side."""
        if not isinstance(other, Rehearsal):
            raise RehearsalError(f"compare: {short(other)} is not a rehearsal.")
        return Comparison(self, other)

    def __repr__(self) -> str:
        placed = self.placement
        verdict = "fits" if self.fits else "does not fit"
        return f"<Rehearsal of {self.name}: {placed.spec} on {placed.topology.name}, {verdict}>"

    def __str__(self) -> str:
        from meshwright.rehearsal.rendering import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from meshwright.rehearsal.rendering import as_html

        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        from meshwright.rehearsal.rendering import as_json

        return as_json(self)


# Two rehearsals side by side.


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
