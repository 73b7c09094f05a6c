"""A ledger as text and JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from meshwright._tables import duration, table
from meshwright.partitioning.show import amount
from meshwright.rehearsal.ledger.collective import Collective, Ledger
from meshwright.rehearsal.programs.names import primitives

HEADING = ["collective", "array", "over", "bytes", "times", "in all", "links", "source"]
RIGHT = [False, False, False, True, True, True, False, False]
WIDTH = 100
_MAY_BE_CUT = [HEADING.index(name) for name in ("array", "over", "links", "source")]
MOST_ROWS = 40
BESIDE = "* runs beside other work"


def as_text(ledger: Ledger) -> str:
    if not len(ledger):
        return "no collectives: nothing moves between devices"
    lines = [headline(ledger)]
    for cause, entries in ledger.by_cause().items():
        merged = rows(entries)
        lines.append(f"\n{cause_line(cause, entries)}")
        lines.append(table(_fitted([HEADING, *merged[:MOST_ROWS]]), RIGHT))
        if len(merged) > MOST_ROWS:
            lines.append(f"... and {len(merged) - MOST_ROWS:,} more rows")
    lines += [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in clash_lines(ledger)]
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


def clash_lines(ledger: Ledger) -> list[str]:
    """The partitioner's complaints, and which of them left no collective behind."""
    seen = {entry.clash for entry in ledger}
    return [
        f"clash: {clash}" + ("" if clash in seen else "; no collective is left of it")
        for clash in ledger.clashes
    ]


def rows(entries: Sequence[Collective]) -> list[list[str]]:
    """A row for all entries that look alike, the longest in all first."""
    alike: dict[tuple[str, ...], list[Collective]] = {}
    for entry in entries:
        alike.setdefault(_looks(entry), []).append(entry)
    merged = [(looks, _together(group)) for looks, group in alike.items()]
    merged.sort(key=lambda row: -row[1].total_seconds)
    return [
        [kind, array, over, size, str(one.times), duration(one.total_seconds), links, source]
        for (kind, array, over, size, links, source), one in merged
    ]


def _looks(entry: Collective) -> tuple[str, ...]:
    kind = entry.kind.removeprefix("collective-") + ("*" if entry.asynchronous else "")
    operation = ", ".join(primitives(entry.op_name))
    source = " ".join(filter(None, (str(entry.source or ""), operation))) or "unknown"
    return kind, entry.shape, entry.over, amount(entry.bytes), entry.links, source


def _together(entries: Sequence[Collective]) -> Collective:
    times = entries[0].times
    for entry in entries[1:]:
        times = times + entry.times
    return dataclasses.replace(entries[0], times=times)


def _fitted(cells: list[list[str]]) -> list[list[str]]:
    """The widest columns cut until a line fits the screen."""
    widths = [max(len(row[c]) for row in cells) for c in range(len(RIGHT))]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widths[max(_MAY_BE_CUT, key=widths.__getitem__)] -= 1
    return [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in cells]


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 2]}.."


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
