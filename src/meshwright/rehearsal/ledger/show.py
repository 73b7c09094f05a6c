"""A ledger as text and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshwright._tables import duration, table
from meshwright.partitioning.show import amount
from meshwright.rehearsal.ledger.collective import Collective, Ledger

HEADING = ["collective", "array", "over", "bytes", "times", "in all", "links", "source"]
RIGHT = [False, False, False, True, True, True, False, False]
_WIDEST = {"array": 26, "over": 14, "links": 12, "source": 20}
MOST_ROWS = 40
BESIDE = "* runs beside other work"


def as_text(ledger: Ledger) -> str:
    if not len(ledger):
        return "no collectives: nothing moves between devices"
    lines = [headline(ledger)]
    for cause, entries in ledger.by_cause().items():
        merged = rows(entries)
        lines.append(f"\n{cause_line(cause, entries)}")
        lines.append(table([HEADING, *merged[:MOST_ROWS]], RIGHT))
        if len(merged) > MOST_ROWS:
            lines.append(f"... and {len(merged) - MOST_ROWS:,} more rows")
    lines += [f"clash: {clash}" for clash in ledger.clashes]
    if any(entry.asynchronous for entry in ledger):
        lines.append(BESIDE)
    return "\n".join(lines)


def headline(ledger: Ledger) -> str:
    return (
        f"{_count(len(ledger))}: a device sends {amount(ledger.moved)}, "
        f"{duration(ledger.seconds)} if nothing runs beside them"
    )


def cause_line(cause: str, entries: Sequence[Collective]) -> str:
    moved = sum(entry.total_moved for entry in entries)
    seconds = sum(entry.total_seconds for entry in entries)
    return f"{cause}: {_count(len(entries))}, {amount(moved)} sent, {duration(seconds)}"


def rows(entries: Sequence[Collective]) -> list[list[str]]:
    """A row for all entries that look alike, the longest in all first."""
    alike: dict[tuple[str, ...], list[Collective]] = {}
    for entry in entries:
        alike.setdefault(_looks(entry), []).append(entry)
    merged = [(looks, _together(group)) for looks, group in alike.items()]
    merged.sort(key=lambda row: -row[1].total_seconds)
    return [
        [
            looks[0],
            _short(looks[1], "array"),
            _short(looks[2], "over"),
            amount(entry.bytes),
            str(entry.times),
            duration(entry.total_seconds),
            _short(looks[3], "links"),
            _short(looks[4], "source"),
        ]
        for looks, entry in merged
    ]


def _looks(entry: Collective) -> tuple[str, ...]:
    kind = entry.kind.removeprefix("collective-") + ("*" if entry.asynchronous else "")
    return kind, entry.shape, entry.over, entry.links, str(entry.source or "-"), str(entry.bytes)


def _together(entries: Sequence[Collective]) -> Collective:
    times = entries[0].times
    for entry in entries[1:]:
        times = times + entry.times
    return dataclasses.replace(entries[0], times=times)


def _short(text: str, column: str) -> str:
    widest = _WIDEST[column]
    return text if len(text) <= widest else f"{text[: widest - 3]}..."


def _count(number: int) -> str:
    return f"{number:,} collective{'' if number == 1 else 's'}"


def as_json(ledger: Ledger) -> dict[str, Any]:
    return {
        "seconds": ledger.seconds,
        "bytes": ledger.bytes,
        "moved": ledger.moved,
        "causes": {
            cause: {
                "collectives": len(entries),
                "seconds": sum(entry.total_seconds for entry in entries),
                "moved": sum(entry.total_moved for entry in entries),
            }
            for cause, entries in ledger.by_cause().items()
        },
        "clashes": [dataclasses.asdict(clash) for clash in ledger.clashes],
        "collectives": [_entry_json(entry) for entry in ledger],
    }


def _entry_json(entry: Collective) -> dict[str, Any]:
    source = entry.source
    return {
        "kind": entry.kind,
        "dtype": entry.dtype,
        "array": entry.shape,
        "bytes": entry.bytes,
        "moved": entry.moved,
        "axes": None if entry.axes is None else [dataclasses.asdict(p) for p in entry.axes],
        "over": entry.over,
        "group_sizes": list(entry.group_sizes),
        "groups": entry.groups,
        "links": entry.links,
        "seconds": entry.seconds,
        "times": dataclasses.asdict(entry.times),
        "total_seconds": entry.total_seconds,
        "asynchronous": entry.asynchronous,
        "meanwhile_flops": entry.meanwhile,
        "op_name": entry.op_name,
        "source": None if source is None else dataclasses.asdict(source),
        "cause": entry.cause,
        "why": entry.why,
        "clash": None if entry.clash is None else dataclasses.asdict(entry.clash),
        "instructions": list(entry.instructions),
    }
