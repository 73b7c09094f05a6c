"""`Collectives`: every collective of a program, grouped by cause; how they print.

`Collective` is one of them, `AxisPart` a mesh axis it runs over, and `ShardingConflict` what the
partitioner complained of.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright._html import Html, join, tag
from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import amount, duration, plural, table, text_width
from meshwright.hlo.dataflow import RunCount
from meshwright.hlo.instructions import Source, SourceTable, primitives
from meshwright.hlo.program import read_instruction

# In the order in which they are shown: what should not be there at all comes first.
IMPLICIT_RESHARDING = "implicit resharding"
GRADIENT_SUMS = "gradient sums"
PARAMETER_GATHERS = "parameter gathers"
ACTIVATION_EXCHANGES = "activation exchanges"
CAUSES = (IMPLICIT_RESHARDING, GRADIENT_SUMS, PARAMETER_GATHERS, ACTIVATION_EXCHANGES)


@dataclasses.dataclass(frozen=True, repr=False)
class Collectives(Shown):
    """All collectives of a program, in program order. Prints itself, grouped by cause.

    `conflicts` are the partitioner's complaints, also those that no collective is left of.
    """

    entries: tuple[Collective, ...]
    conflicts: tuple[ShardingConflict, ...] = ()

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, number: int) -> Collective:
        return self.entries[number]

    def by_cause(self) -> dict[str, tuple[Collective, ...]]:
        """Return the entries of every cause that occurs, implicit resharding first."""
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
        """Bytes of the larger side of each, on one device, every run counted."""
        return sum(entry.total_bytes for entry in self.entries)

    @property
    def moved(self) -> int:
        """Bytes that one device sends, every run counted."""
        return sum(entry.total_moved for entry in self.entries)

    def _sheet(self) -> Sheet:
        if not self.entries:
            return Sheet("no collectives: nothing moves between devices")
        parts: list[str | Table] = [
            _cause_table(cause, entries) for cause, entries in self.by_cause().items()
        ]
        parts += [
            textwrap.fill(line, text_width(), subsequent_indent="  ")
            for line in conflict_lines(self)
        ]
        if any(entry.asynchronous for entry in self.entries):
            parts.append(BESIDE)
        return Sheet(collectives_headline(self), parts)

    def to_json(self) -> dict[str, Any]:
        """Return totals and every collective as plain data; times in seconds, sizes in bytes."""
        return {
            "seconds": self.seconds,
            "bytes": self.bytes,
            "moved": self.moved,
            "causes": {
                cause: {
                    "collectives": len(entries),
                    "seconds": sum(entry.total_seconds for entry in entries),
                    "moved": sum(entry.total_moved for entry in entries),
                }
                for cause, entries in self.by_cause().items()
            },
            "conflicts": [dataclasses.asdict(conflict) for conflict in self.conflicts],
            "collectives": [entry.to_json() for entry in self.entries],
        }


@dataclasses.dataclass(frozen=True, repr=False)
class Collective:
    """One collective of the program, however many instructions it is written in.

    `bytes` is what a device holds of the larger side, each time it runs: the result of an
    all-gather or a broadcast, the operand of everything else. `moved` is what a device sends of
    it when the group works as a ring. `axes` is `None` when the groups follow no axes of the mesh.
    `seconds` is the model's time for one run, with nothing to hide behind; `meanwhile` the
    operations (dots, convolutions) that the schedule puts between its start and its end. `shape`
    is that of the largest array; `dim` the one along which an all-gather joins the pieces. `pairs`:
    senders and receivers of a permute, as positions of the mesh; `beside_back`: the part of its
    time for which one that goes back between them can run beside it, since links go both ways.
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
    conflict: ShardingConflict | None = None
    dim: int | None = None
    pairs: frozenset[tuple[int, int]] = frozenset()
    beside_back: float = 0.0

    @property
    def group_size(self) -> int:
        """The number of devices in its largest group."""
        return max(self.group_sizes)

    @property
    def total_seconds(self) -> float:
        """Modelled seconds of all its runs in a step."""
        return self.seconds * self.times.count

    @property
    def total_bytes(self) -> int:
        """`bytes` of all its runs in a step."""
        return self.bytes * self.times.count

    @property
    def total_moved(self) -> int:
        """`moved` of all its runs in a step."""
        return self.moved * self.times.count

    @property
    def over(self) -> str:
        """The axes in words: `dp, tp:2/8`."""
        if self.axes is None:
            return f"irregular {'/'.join(map(str, self.group_sizes))}"
        return ", ".join(map(str, self.axes)) or "itself"

    def __repr__(self) -> str:
        source = f" from {self.source}" if self.source else ""
        return short_repr(self, f"{self.kind} of {self.shape} over {self.over}{source}")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain data; times in seconds, sizes in bytes."""
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "array": self.shape,
            "bytes": self.bytes,
            "moved": self.moved,
            "axes": None if self.axes is None else [dataclasses.asdict(p) for p in self.axes],
            "over": self.over,
            "group_sizes": list(self.group_sizes),
            "groups": self.groups,
            "links": self.links,
            "seconds": self.seconds,
            "times": dataclasses.asdict(self.times),
            "total_seconds": self.total_seconds,
            "asynchronous": self.asynchronous,
            "meanwhile_flops": self.meanwhile,
            "op_name": self.op_name,
            "source": None if self.source is None else dataclasses.asdict(self.source),
            "cause": self.cause,
            "why": self.why,
            "conflict": None if self.conflict is None else dataclasses.asdict(self.conflict),
            "instructions": list(self.instructions),
        }


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
        """Whether a group spans all positions of the axis."""
        return self.members == self.size

    def __str__(self) -> str:
        return self.name if self.whole else f"{self.name}:{self.members}/{self.size}"


@dataclasses.dataclass(frozen=True, repr=False)
class ShardingConflict:
    """Two shardings that do not go together, and the operation where they meet.

    `before` and `after` are as the partitioner writes them, e.g. `{devices=[4]<=[4]}`.
    """

    operation: str
    shape: str
    before: str
    after: str
    op_name: str = ""
    source: Source | None = None

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.shape} {self.operation}{where}: from {self.before} to {self.after}"

    def __repr__(self) -> str:
        return short_repr(self, str(self))


_COMPLAINT = re.compile(
    r"Involuntary full rematerialization\.[^\n]*? from sharding (?P<before>.+?) to (?P<after>.+?) "
    r"(?:efficiently|without doing a full rematerialization of the tensor) "
    r"for HLO operation:? (?P<operation>%.+?)"
    r"(?=\. (?:As the last resort|You probably want)|\.?\n|\.?$)"
)


# In: the compiler's standard error. Out: the shardings that the partitioner could not turn into one
# another without gathering the whole array, each once. XLA says so nowhere else, and its words have
# changed over time; both forms are known here. Example: "... Involuntary full rematerialization.
# The compiler cannot go from sharding {devices=[4]<=[4]} to {replicated} efficiently for HLO
# operation %copy = f32[8]{0} copy(%x) ..." is ShardingConflict("copy", "f32[8]", ...).
def read_conflicts(stderr: str) -> list[ShardingConflict]:
    """Read every complaint of the partitioner."""
    conflicts: dict[ShardingConflict, None] = {}  # in order, without repetitions
    for complaint in _COMPLAINT.finditer(stderr):
        instruction = read_instruction(f"  {complaint['operation']}", "")
        if instruction is not None:
            conflict = ShardingConflict(
                instruction.name,
                str(instruction.shape.leaves[0]),
                complaint["before"],
                complaint["after"],
                instruction.op_name,
                SourceTable({}).source(instruction),
            )
            conflicts.setdefault(conflict)
    return list(conflicts)


# Printing: a table per cause, entries that look alike merged into a row. `rehearsal.rendering` has
# the same rows on a page.

COLLECTIVE_HEADING = ["collective", "array", "over", "bytes", "times", "in all", "links", "source"]
COLLECTIVE_RIGHT = [False, False, False, True, True, True, False, False]
MOST_ROWS = 40
BESIDE = "* runs beside other work"


def collectives_headline(collectives: Collectives) -> str:
    return (
        f"{plural(len(collectives), 'collective')}: a device sends {amount(collectives.moved)}, "
        f"{duration(collectives.seconds)} if nothing runs beside them"
    )


def cause_line(cause: str, entries: Sequence[Collective]) -> str:
    """Sum up the collectives of one cause."""
    moved = sum(entry.total_moved for entry in entries)
    seconds = sum(entry.total_seconds for entry in entries)
    number = plural(len(entries), "collective")
    return f"{cause}: {number}, {amount(moved)} sent, {duration(seconds)}"


def conflict_lines(collectives: Collectives) -> list[str]:
    """Return the partitioner's complaints, and which of them left no collective behind."""
    seen = {entry.conflict for entry in collectives}
    return [
        f"conflict: {conflict}" + ("" if conflict in seen else "; no collective is left of it")
        for conflict in collectives.conflicts
    ]


def collective_rows(entries: Sequence[Collective]) -> list[list[str]]:
    """A row for all entries that look alike, the longest in all first."""
    alike: dict[tuple[str, ...], list[Collective]] = {}
    for entry in entries:
        alike.setdefault(_looks(entry), []).append(entry)
    merged = [(looks, _merged(group)) for looks, group in alike.items()]
    merged.sort(key=lambda row: -row[1].total_seconds)
    return [
        [kind, array, over, size, str(total.times), duration(total.total_seconds), links, source]
        for (kind, array, over, size, links, source), total in merged
    ]


def _looks(entry: Collective) -> tuple[str, ...]:
    kind = entry.kind.removeprefix("collective-") + ("*" if entry.asynchronous else "")
    operation = ", ".join(primitives(entry.op_name))
    source = " ".join(filter(None, (str(entry.source or ""), operation))) or "unknown"
    return kind, entry.shape, entry.over, amount(entry.bytes), entry.links, source


def _merged(entries: Sequence[Collective]) -> Collective:
    times = entries[0].times
    for entry in entries[1:]:
        times = times + entry.times
    return dataclasses.replace(entries[0], times=times)


@dataclasses.dataclass(frozen=True)
class _CauseTable(Table):
    """A table under a line of its own. Its text is cut to the width of a screen, not its HTML."""

    title: str = ""

    def text(self) -> str:
        lines = table([self.heading, *self.rows], self.right, text_width())
        more = f"\n{self.left_out}" if self.left_out else ""
        return f"\n{self.title}\n{lines}{more}"

    def html(self) -> Html:
        return join([tag("h3", self.title), super().html()])


def _cause_table(cause: str, entries: Sequence[Collective]) -> Table:
    rows = collective_rows(entries)
    more = f"... and {len(rows) - MOST_ROWS:,} more rows" if len(rows) > MOST_ROWS else ""
    return _CauseTable(
        COLLECTIVE_HEADING, rows[:MOST_ROWS], COLLECTIVE_RIGHT, more, cause_line(cause, entries)
    )
