"""A rehearsal as text for the terminal and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from meshwright.rehearsal.remedies import Remedy
from meshwright.rehearsal.result import Rehearsal

_WORST = 3  # replicated arrays that are named


def as_text(result: Rehearsal, ways: Sequence[Remedy] = ()) -> str:
    """All of it. `ways` are the ways out, where they were tried."""
    parts = [headline(result), str(result.memory)]
    if result.time is not None:
        parts += [str(result.collectives), str(result.time)]
    if advice := next_steps(result, ways):
        parts.append("\n".join(map(_item, advice)))
    return "\n\n".join(parts)


def headline(result: Rehearsal) -> str:
    """What was compiled, for what, by which compiler."""
    placed = result.placement
    devices = placed.topology.num_devices
    how = "kept from before" if result.from_cache else f"compiled in {result.compile_seconds:.1f} s"
    lines = [
        f"{result.name} as {placed.spec} on {placed.topology.name} "
        f"({devices} device{'' if devices == 1 else 's'}), {how} by {result.compiler}"
    ]
    if result.stand_in:
        lines.append(
            f"Compiled for simulated CPU devices in place of {placed.topology.chip.name}: the "
            "partitioning is real, memory and fusion are the CPU's."
        )
    return "\n".join(lines)


def next_steps(result: Rehearsal, ways: Sequence[Remedy] = ()) -> list[str]:
    """What a reader would do about it, most important first."""
    found = []
    if not result.fits:
        found += [str(remedy) for remedy in ways or result.remedies()]
    unasked = [entry for entry in result.collectives if entry.cause == "nobody asked"]
    if unasked:
        worst = max(unasked, key=lambda entry: entry.total_seconds)
        place = f" from {worst.source}" if worst.source else ""
        found.append(
            f"{len(unasked)} collectives that nobody asked for. The largest: {worst.kind} of "
            f"{worst.shape}{place}. Constrain what it works on to one sharding."
        )
    copies = result.placement.topology.num_devices
    given = result.request.specs is not None  # then they were meant to be whole
    for row in () if given else result.arguments.replicated[:_WORST]:
        if row.bytes * copies > 0.05 * result.memory.limit and copies > 1:
            found.append(f"{row.path} ({row.text}) is whole on every device: give it a spec.")
    return found


def _item(line: str) -> str:
    return textwrap.fill(line, 100, initial_indent="- ", subsequent_indent="  ")


def as_json(result: Rehearsal) -> dict[str, Any]:
    return {
        "name": result.name,
        "mesh": str(result.placement.spec),
        "on": result.placement.topology.name,
        "devices": result.placement.topology.num_devices,
        "compiler": result.compiler,
        "stand_in": result.stand_in,
        "compile_seconds": result.compile_seconds,
        "from_cache": result.from_cache,
        "fits": result.fits,
        "memory": result.memory.to_json(),
        "collectives": None if result.time is None else result.collectives.to_json(),
        "time": None if result.time is None else result.time.to_json(),
        "arguments": result.arguments.to_json(),
        "next": next_steps(result),
    }
