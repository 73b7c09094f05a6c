"""`Remedies`: ways to need less memory, each with what it should save, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import amount, plural
from meshwright.errors import on_command_line
from meshwright.rehearsal.request import Request

if TYPE_CHECKING:  # `result` imports this file
    from meshwright.rehearsal.result import Rehearsal


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Remedy:
    """One change that saves memory: what to change and how, and the peak to expect in bytes.

    `how` is an option or a line of code, `command` the whole command line where there is one.
    `saves` are the bytes of a device that it saves of the peak. `request` is the changed request,
    where the change can be made here; `tried` is its rehearsal, or `failed` why there is none,
    after `remedies(check=True)`.
    """

    what: str
    how: str
    peak: int
    before: int
    request: Request | None = None
    command: str = ""
    tried: Rehearsal | None = None
    failed: str = ""

    @property
    def saves(self) -> int:
        """Bytes of a device's peak: as compiled if it was tried, else as estimated."""
        peak = self.peak if self.tried is None else self.tried.memory.peak
        return self.before - peak

    def outcome(self) -> str:
        """What a trial said, in a few words."""
        if self.tried is not None:
            fits = "fits" if self.tried.fits else "does NOT fit"
            return f"{fits}, {amount(self.tried.memory.peak)}"
        if self.failed:
            return self.failed
        return "yours to try" if self.request is None else "not yet"

    def __str__(self) -> str:
        change = f"{self.what} ({self.command or self.how})"
        if self.tried is not None:
            return f"{change}: tried, {self.tried.memory.verdict()}"
        if self.failed:
            return f"{change}: tried, {self.failed}"
        yours = "; yours to try" if self.request is None else ""
        return f"{change}: about {amount(self.peak)} a device{yours}"

    def __repr__(self) -> str:
        return short_repr(self, str(self))

    def to_json(self) -> dict[str, Any]:
        """Return the change, its sizes in bytes and what a trial said, as plain data."""
        return {
            "what": self.what,
            "how": self.how,
            "command": self.command or None,
            "peak": self.peak,
            "saves": self.saves,
            "tried": None if self.tried is None else self.tried.memory.to_json()["parts"],
            "tried_peak": None if self.tried is None else self.tried.memory.peak,
            "fits": None if self.tried is None else self.tried.fits,
            "failed": self.failed or None,
        }


class Remedies(Shown, Sequence[Remedy]):
    """All changes that save memory of a step, cheapest first. Prints as a table; `to_json()`.

    A sequence: it has a length, is iterated over and indexed; a slice of it is one too.
    """

    def __init__(self, result: Rehearsal, remedies: Iterable[Remedy]):
        self._result = result
        self._remedies = tuple(remedies)

    @overload
    def __getitem__(self, index: int) -> Remedy: ...
    @overload
    def __getitem__(self, index: slice) -> Remedies: ...
    def __getitem__(self, index: int | slice) -> Remedy | Remedies:
        if isinstance(index, slice):
            return Remedies(self._result, self._remedies[index])
        return self._remedies[index]

    def __len__(self) -> int:
        return len(self._remedies)

    def __iter__(self) -> Iterator[Remedy]:
        return iter(self._remedies)

    def to_json(self) -> dict[str, Any]:
        """Return the peak and its limit in bytes, and every remedy, as plain data."""
        memory = self._result.memory
        return {
            "peak": memory.peak,
            "limit": memory.limit,
            "estimated_on_cpu": memory.estimated,
            "remedies": [remedy.to_json() for remedy in self],
        }

    def _sheet(self) -> Sheet:
        memory = self._result.memory
        if not len(self):
            least = amount(memory.arguments)
            return Sheet(
                f"{memory.verdict()}. Nothing known saves memory of this step: {least} are "
                "arguments. Take a chip with more memory, or a smaller step."
                if not memory.fits
                else "nothing to save that is known"
            )
        rows = [
            [
                remedy.what,
                remedy.how,
                f"about {amount(remedy.peak)}",
                amount(remedy.saves),
                remedy.outcome(),
            ]
            for remedy in self
        ]
        heading = ["what", "how", "peak", "saves", "tried"]
        parts: list[str | Table] = [Table(heading, rows, [False, False, True, True, False])]
        parts += self.notes()
        if commands := [remedy.command for remedy in self if remedy.command]:
            parts.append("\n".join(commands))
        return Sheet(f"{plural(len(self), 'way')} to need less memory: {memory.verdict()}", parts)

    def notes(self) -> list[str]:
        """Return what the peaks are by, and how to be sure."""
        if not len(self):
            return []
        memory, mesh = self._result.memory, self._result.request.mesh
        untried = [way for way in self if way.tried is None and not way.failed]
        notes = ["Peaks and savings are estimates by the live ranges of the program's buffers."]
        if not untried:
            notes = ["Savings are those of the compiled programs."]
        elif memory.estimated:
            notes = [
                "The compiler refused and names a total alone: peaks and savings are estimates by "
                "the buffers of the same step on simulated CPU devices."
            ]
        elif memory.refused:
            notes = [
                "The compiler refused and names a total alone, and the step does not compile for "
                "CPU devices: peaks and savings are rough estimates by that total."
            ]
        peaks = [way.peak if way.tried is None else way.tried.memory.peak for way in self]
        if not memory.fits and min(peaks) > memory.limit:
            notes[0] += " None of these is enough alone."
        if any(way.request is not None and way.request.mesh != mesh for way in untried):
            notes[0] += " On another mesh the partitioner may gather more, or less."
        if any(way.request is not None for way in untried):
            how = "--try" if on_command_line() else "remedies(check=True), or --try,"
            notes[0] += f" {how} compiles them."
        return notes
