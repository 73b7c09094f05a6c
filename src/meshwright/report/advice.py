"""What to do next, most important first: ways out, surprises, then what would be worth trying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.axes import role
from meshwright.partitioning.show import amount
from meshwright.rehearsal import Collective, Rehearsal
from meshwright.rehearsal.ledger.collective import NOBODY_ASKED
from meshwright.rehearsal.remedies import Remedy
from meshwright.rehearsal.request import EXTRAS
from meshwright.rehearsal.show import next_steps

_MUCH_WAITING, _MUCH_READING, _MUCH_ROOM = 0.25, 0.4, 0.4


def advice(result: Rehearsal, remedies: Sequence[Remedy] = ()) -> list[str]:
    found = [f"{remedy}." for remedy in remedies]
    known = {str(remedy) for remedy in result.remedies()} if remedies else set()
    found += [step for step in next_steps(result) if step not in known]
    found += [*_waiting(result), *_room(result), *_stand_in(result)]
    return found or ["It fits and nothing stands out: rent the machine and run it."]


def _waiting(result: Rehearsal) -> Iterator[str]:
    """What a step waits for, where that is much and the step fits."""
    timing = result.time
    if timing is None or not timing.total or not result.fits:
        return
    share = timing.exposed / timing.total
    if share > _MUCH_WAITING and len(result.collectives):
        worst = max(result.collectives, key=lambda entry: entry.total_seconds)
        where = f", from {worst.source}" if worst.source else ""
        yield (
            f"{share:.0%} of the step waits for communication. The largest part is the "
            f"{worst.kind} of {worst.shape} over {worst.over}{where}: {_less(worst)}."
        )
    reading = timing.memory / timing.total
    if reading > _MUCH_READING and not result.stand_in:  # how kernels fuse is the CPU's there
        yield (
            f"{reading:.0%} of the step waits for the chip's own memory: more rows on a device, "
            "or kernels that fuse more (attention first)."
        )


def _less(entry: Collective) -> str:
    """How to send less over the axes of a collective."""
    if entry.cause == NOBODY_ASKED:
        return "constrain its operands to one sharding"
    if all(role(axis.name).moves == "weights" for axis in entry.axes or ()):
        return "more rows on a device would share its cost"
    return f"a smaller {entry.over} would send less"


def _room(result: Rehearsal) -> Iterator[str]:
    if result.fits and result.margin > _MUCH_ROOM * result.memory.limit:
        yield (
            f"{amount(result.margin)} of every device are free: a larger batch or less "
            "rematerialisation would use them."
        )


def _stand_in(result: Rehearsal) -> Iterator[str]:
    if result.stand_in:
        chip = result.placement.topology.chip
        yield (
            f"Ask the compiler of {chip.name} itself before you rent it: pip install "
            f"'meshwright[{EXTRAS[chip.family]}]', then rehearse again without compiler='cpu'."
        )
