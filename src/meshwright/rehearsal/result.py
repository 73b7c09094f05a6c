"""`Rehearsal`: everything that is known about a step before it runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from meshwright.errors import RehearsalError, short
from meshwright.partitioning import PartitionReport
from meshwright.placement import Placement
from meshwright.rehearsal.ledger import Ledger
from meshwright.rehearsal.memory.use import Memory
from meshwright.rehearsal.request import Request
from meshwright.rehearsal.timing.steptime import StepTime

if TYPE_CHECKING:
    from meshwright.rehearsal.comparing import Comparison
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
    collectives: Ledger
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
        from meshwright.rehearsal.comparing import Comparison

        if not isinstance(other, Rehearsal):
            raise RehearsalError(f"compare: {short(other)} is not a rehearsal.")
        return Comparison(self, other)

    def __repr__(self) -> str:
        placed = self.placement
        verdict = "fits" if self.fits else "does not fit"
        return f"<Rehearsal of {self.name}: {placed.spec} on {placed.topology.name}, {verdict}>"

    def __str__(self) -> str:
        from meshwright.rehearsal.show import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from meshwright.rehearsal.page import as_html

        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        from meshwright.rehearsal.show import as_json

        return as_json(self)
