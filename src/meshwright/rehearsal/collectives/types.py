"""`Collective` and `Collectives`: the entries and the book."""

from __future__ import annotations

import dataclasses
import html
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshwright._html import html_table
from meshwright._text import amount, duration, table
from meshwright.hlo.dataflow import RunCount
from meshwright.hlo.instructions import Source, SourceTable, primitives
from meshwright.hlo.program import read_instruction

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
    times: RunCount
    asynchronous: bool
    meanwhile: float
    op_name: str
    source: Source | None
    cause: str
    why: str
    instructions: tuple[str, ...]
    clash: ShardingConflict | None = None

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
class Collectives:
    """All collectives of a program, in program order. Prints itself, grouped by cause."""

    entries: tuple[Collective, ...]
    clashes: tuple[ShardingConflict, ...] = ()

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
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        return as_json(self)


# A ledger as text and JSON.


COLLECTIVE_HEADING = ["collective", "array", "over", "bytes", "times", "in all", "links", "source"]
COLLECTIVE_RIGHT = [False, False, False, True, True, True, False, False]
WIDTH = 100
_MAY_BE_CUT = [COLLECTIVE_HEADING.index(name) for name in ("array", "over", "links", "source")]
MOST_ROWS = 40
BESIDE = "* runs beside other work"


def as_text(ledger: Collectives) -> str:
    if not len(ledger):
        return "no collectives: nothing moves between devices"
    lines = [collectives_headline(ledger)]
    for cause, entries in ledger.by_cause().items():
        merged = collective_rows(entries)
        lines.append(f"\n{cause_line(cause, entries)}")
        lines.append(table(_fitted([COLLECTIVE_HEADING, *merged[:MOST_ROWS]]), COLLECTIVE_RIGHT))
        if len(merged) > MOST_ROWS:
            lines.append(f"... and {len(merged) - MOST_ROWS:,} more rows")
    lines += [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in clash_lines(ledger)]
    if any(entry.asynchronous for entry in ledger):
        lines.append(BESIDE)
    return "\n".join(lines)


def collectives_headline(ledger: Collectives) -> str:
    return (
        f"{_count(len(ledger))}: a device sends {amount(ledger.moved)}, "
        f"{duration(ledger.seconds)} if nothing runs beside them"
    )


def cause_line(cause: str, entries: Sequence[Collective]) -> str:
    moved = sum(entry.total_moved for entry in entries)
    seconds = sum(entry.total_seconds for entry in entries)
    return f"{cause}: {_count(len(entries))}, {amount(moved)} sent, {duration(seconds)}"


def clash_lines(ledger: Collectives) -> list[str]:
    """The partitioner's complaints, and which of them left no collective behind."""
    seen = {entry.clash for entry in ledger}
    return [
        f"clash: {clash}" + ("" if clash in seen else "; no collective is left of it")
        for clash in ledger.clashes
    ]


def collective_rows(entries: Sequence[Collective]) -> list[list[str]]:
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
    widths = [max(len(row[c]) for row in cells) for c in range(len(COLLECTIVE_RIGHT))]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widths[max(_MAY_BE_CUT, key=widths.__getitem__)] -= 1
    return [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in cells]


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 2]}.."


def _count(number: int) -> str:
    return f"{number:,} collective{'' if number == 1 else 's'}"


def as_json(ledger: Collectives) -> dict[str, Any]:
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


# A ledger for a notebook or a report.


def as_html(ledger: Collectives) -> str:
    if not len(ledger):
        return "<p>no collectives: nothing moves between devices</p>"
    parts = [f"<b>{html.escape(collectives_headline(ledger))}</b>"]
    for cause, entries in ledger.by_cause().items():
        merged = collective_rows(entries)
        parts.append(f"<h4>{html.escape(cause_line(cause, entries))}</h4>")
        parts.append('<div style="overflow-x:auto">')
        parts.append(
            html_table([COLLECTIVE_HEADING, *merged[:MOST_ROWS]], COLLECTIVE_RIGHT) + "</div>"
        )
        if len(merged) > MOST_ROWS:
            parts.append(f"<p>... and {len(merged) - MOST_ROWS:,} more rows</p>")
    parts += [f"<p>{html.escape(line)}</p>" for line in clash_lines(ledger)]
    if any(entry.asynchronous for entry in ledger):
        parts.append(f"<p>{BESIDE}</p>")
    return f'<div style="font-family:system-ui,sans-serif">{"".join(parts)}</div>'


# Which mesh axes a collective runs over.


@dataclasses.dataclass(frozen=True)
class AxisPart:
    """A mesh axis, or `members` of its `size` positions.

    >>> print(AxisPart("tp", 8, 8), AxisPart("tp", 2, 8))
    tp tp:2/8
    """

    name: str
    members: int
    size: int

    @property
    def whole(self) -> bool:
        return self.members == self.size

    def __str__(self) -> str:
        return self.name if self.whole else f"{self.name}:{self.members}/{self.size}"


def axes_of(
    groups: Sequence[np.ndarray], names: Sequence[str], sizes: Sequence[int]
) -> tuple[AxisPart, ...] | None:
    """The axes, or parts of them, whose combinations every group consists of.

    `groups` hold positions in the mesh, counted in row order. `None` when the groups differ in
    size, or one of them is no full set of combinations.

    >>> [str(part) for part in axes_of([np.array([0, 2]), np.array([1, 3])], ["dp", "tp"], [2, 2])]
    ['dp']
    """
    members = groups[0].size
    if any(group.size != members for group in groups):
        return None
    coords = np.stack(np.unravel_index(np.stack(groups), tuple(sizes)), axis=-1)
    ordered = np.sort(coords, axis=1)
    different = 1 + (np.diff(ordered, axis=1) != 0).sum(axis=1)
    if (different != different[0]).any() or math.prod(different[0].tolist()) != members:
        return None
    return tuple(
        AxisPart(name, int(count), size)
        for name, count, size in zip(names, different[0], sizes, strict=True)
        if count > 1
    )


def axes_crossed(
    pairs: np.ndarray, names: Sequence[str], sizes: Sequence[int]
) -> tuple[AxisPart, ...]:
    """The axes along which some pair of sender and receiver differs."""
    coords = np.stack(np.unravel_index(pairs, tuple(sizes)), axis=-1)
    differs = (coords[:, 0] != coords[:, 1]).any(axis=0)
    return tuple(
        AxisPart(name, size, size)
        for name, size, crossed in zip(names, sizes, differs, strict=True)
        if crossed
    )


# What the partitioner complains of: a sharding it could not turn into another without gathering
# the whole array. It says so on standard error alone, in words that have changed over time.


_COMPLAINT = re.compile(
    r"Involuntary full rematerialization\.[^\n]*? from sharding (?P<before>.+?) to (?P<after>.+?) "
    r"(?:efficiently|without doing a full rematerialization of the tensor) "
    r"for HLO operation:? (?P<operation>%.+?)"
    r"(?=\. (?:As the last resort|You probably want)|\.?\n|\.?$)"
)


@dataclasses.dataclass(frozen=True)
class ShardingConflict:
    """Two shardings that do not go together, and the operation where they meet."""

    operation: str
    shape: str
    before: str
    after: str
    op_name: str = ""
    source: Source | None = None

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.shape} {self.operation}{where}: from {self.before} to {self.after}"


def read_clashes(stderr: str) -> list[ShardingConflict]:
    """Every complaint in a compiler's standard error, each once."""
    found: dict[ShardingConflict, None] = {}
    for complaint in _COMPLAINT.finditer(stderr):
        instruction = read_instruction(f"  {complaint['operation']}", "")
        if instruction is not None:
            clash = ShardingConflict(
                instruction.name,
                str(instruction.shape.leaves[0]),
                complaint["before"],
                complaint["after"],
                instruction.op_name,
                SourceTable({}).source(instruction),
            )
            found.setdefault(clash)
    return list(found)
