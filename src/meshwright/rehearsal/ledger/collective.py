"""`Collective` and `Ledger`: the entries and the book."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from meshwright.rehearsal.ledger.axes import AxisPart
from meshwright.rehearsal.ledger.clashes import Clash
from meshwright.rehearsal.programs import Runs, Source

# In the order in which they are shown: what should not be there at all comes first.
NOBODY_ASKED = "nobody asked"
GRADIENT_SUMS = "gradient sums"
PARAMETER_GATHERS = "parameter gathers"
ACTIVATION_EXCHANGES = "activation exchanges"
CAUSES = (NOBODY_ASKED, GRADIENT_SUMS, PARAMETER_GATHERS, ACTIVATION_EXCHANGES)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, however many instructions it is written in.

    `bytes` is what a device holds of the larger side, each time it runs: the result of an
    all-gather or a broadcast, the operand of everything else. `moved` is what a device sends of
    it when the group works as a ring. `axes` is `None` when the groups follow no axes of the mesh.
    `seconds` is the model's time for one run, with nothing to hide behind; `meanwhile` the
    operations (dots, convolutions) that the schedule puts between its start and its end.
    """

    kind: str
    dtype: str
    shape: str
    bytes: int
    moved: int
    axes: tuple[AxisPart, ...] | None
    group_sizes: tuple[int, ...]
    groups: int
    links: str
    seconds: float
    times: Runs
    asynchronous: bool
    meanwhile: float
    op_name: str
    source: Source | None
    cause: str
    why: str
    instructions: tuple[str, ...]
    clash: Clash | None = None

    @property
    def group_size(self) -> int:
        return max(self.group_sizes)

    @property
    def total_seconds(self) -> float:
        return self.seconds * self.times.count

    @property
    def total_bytes(self) -> int:
        return self.bytes * self.times.count

    @property
    def total_moved(self) -> int:
        return self.moved * self.times.count

    @property
    def over(self) -> str:
        """The axes in words."""
        if self.axes is None:
            return f"irregular {'/'.join(map(str, self.group_sizes))}"
        return ", ".join(map(str, self.axes)) or "itself"


@dataclasses.dataclass(frozen=True)
class Ledger:
    """All collectives of a program, in program order. Prints itself, grouped by cause."""

    entries: tuple[Collective, ...]
    clashes: tuple[Clash, ...] = ()

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, number: int) -> Collective:
        return self.entries[number]

    def by_cause(self) -> dict[str, tuple[Collective, ...]]:
        """The entries of every cause that occurs, what nobody asked for first."""
        return {
            cause: entries
            for cause in CAUSES
            if (entries := tuple(entry for entry in self.entries if entry.cause == cause))
        }

    @property
    def seconds(self) -> float:
        """Modelled time of all of them, one after the other."""
        return sum(entry.total_seconds for entry in self.entries)

    @property
    def bytes(self) -> int:
        return sum(entry.total_bytes for entry in self.entries)

    @property
    def moved(self) -> int:
        return sum(entry.total_moved for entry in self.entries)

    def __str__(self) -> str:
        from meshwright.rehearsal.ledger.show import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from meshwright.rehearsal.ledger.page import as_html

        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        from meshwright.rehearsal.ledger.show import as_json

        return as_json(self)
