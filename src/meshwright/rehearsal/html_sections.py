"""The sections of a rehearsal as HTML: verdict, advice, memory, time, mesh, collectives, arrays.

`rendering` puts them into a notebook's block or onto a page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from meshwright._html import (
    CAUSES,
    GREY,
    Html,
    Lane,
    Part,
    axis_colours,
    badge,
    bars,
    cut_picture,
    fold,
    grid,
    join,
    legend,
    tag,
)
from meshwright._text import amount, duration, plural
from meshwright.hlo.instructions import Source
from meshwright.partitioning.report import (
    LeafRow,
    PartitionReport,
    folded_rows,
    report_headline,
)
from meshwright.placement.placement import (
    PLACEMENT_HEADING,
    PLACEMENT_RIGHT,
    Placement,
    footnote,
    placement_headline,
    placement_rows,
)
from meshwright.rehearsal.collectives.types import (
    BESIDE,
    COLLECTIVE_HEADING,
    COLLECTIVE_RIGHT,
    IMPLICIT_RESHARDING,
    MOST_ROWS,
    Collective,
    Collectives,
    cause_line,
    collective_rows,
    collectives_headline,
)
from meshwright.rehearsal.host_transfers import bus_lane
from meshwright.rehearsal.memory import CPU_ESTIMATE, Buffer, Memory
from meshwright.rehearsal.step_time import CUSTOM_HEADING, CUSTOM_RIGHT, custom_rows

if TYPE_CHECKING:  # `result` imports this file, and a `Rehearsal` prints itself with it
    from meshwright.rehearsal.avoidable_costs import AvoidableCosts
    from meshwright.rehearsal.remedy_table import Remedy
    from meshwright.rehearsal.result import Rehearsal


def sections(
    result: Rehearsal, remedies: Sequence[Remedy] = (), costs: AvoidableCosts | None = None
) -> dict[str, tuple[str, Html]]:
    """Title and content of every section, by a short name for links."""
    return {
        "memory": ("Memory", memory_section(result, remedies)),
        "time": ("Where a step's time goes", time_section(result, costs)),
        "mesh": ("The mesh on the machine", mesh_section(result.placement)),
        "collectives": ("What moves between devices", collectives_section(result)),
        "shardings": ("How the arrays are sharded", shardings_section(result.arguments)),
    }


def section(name: str, title: str, content: Html, estimate: bool = False) -> Html:
    """A section with its heading; `estimate` marks its numbers as those of CPU devices."""
    mark = badge(CPU_ESTIMATE) if estimate else Html()
    return tag("section", tag("h2", title, mark), content, id=name)


# The top of a report: does it fit, and the few numbers that matter.


def verdict(result: Rehearsal, lines: Sequence[str]) -> Html:
    """Say whether it fits, by how much, and what was compiled (`lines`)."""
    good = result.fits
    mark = badge(CPU_ESTIMATE) if result.stand_in else Html()
    return tag(
        "header",
        tag("h1", f"{result.name} on {result.placement.topology.name}"),
        tag("p", lines[0], class_="what"),
        tag(
            "p",
            tag("strong", "fits" if good else "does not fit"),
            mark,
            tag("span", result.memory.verdict().partition(": ")[2]),
            class_="verdict good" if good else "verdict bad",
        ),
        *(tag("p", line, class_="note") for line in lines[1:]),
        tag("dl", _tiles(result), class_="tiles"),
    )


def _tiles(result: Rehearsal) -> Html:
    memory, timing = result.memory, result.time
    sign = "to spare" if memory.margin >= 0 else "too much"
    left = f"of {amount(memory.limit)}, {amount(abs(memory.margin))} {sign}"
    tiles = [("memory of a device", f"{memory.peak / memory.limit:.0%}", left)]
    if timing is not None:
        tiles.append(("modelled step", duration(timing.total), f"by {timing.speeds}"))
        if result.tokens_per_second is not None:
            tiles.append(("tokens a second", f"{result.tokens_per_second:,.0f}", "on all devices"))
        elif result.examples_per_second is not None:
            rate = f"{result.examples_per_second:,.4g}"
            tiles.append(("examples a second", rate, "on all devices"))
        tiles.append(("MFU", f"{result.mfu or 0:.0%}", "model FLOPs, remat not counted"))
        busy = f"{timing.hardware_utilisation:.0%}"
        tiles.append(("hardware utilisation", busy, "all that runs, of the chip's peak"))
        sent = result.collectives
        tiles.append(("sent by a device", amount(sent.moved), plural(len(sent), "collective")))
    mark = [tag("dd", badge(CPU_ESTIMATE))] if result.stand_in else []
    return join(
        tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="small"), *mark)
        for name, value, note in tiles
    )


# Memory: stacked parts against the limit, and the largest buffers with where they come from.

_LAYERS, _BUFFERS, _OPEN = 12, 8, 1  # layers that are listed, buffers of each, layers unfolded


def memory_section(result: Rehearsal, remedies: Sequence[Remedy] = ()) -> Html:
    """Draw a bar for a device, one for each remedy, and list the buffers at the peak."""
    use, devices = result.memory, result.placement.topology.num_devices
    alike = "the device" if devices == 1 else f"each of {devices:,} devices, all alike"
    own = use.lane(alike)
    drawn = bars([own, *map(_remedy_lane, remedies)], amount, limit=use.limit)
    note = tag("p", f"Note: {use.note}.", class_="note") if use.note else ""
    host = result.host_memory._sheet().inside() if result.host_memory else ""
    return join([drawn, legend(own.parts, amount, use.peak), note, _buffers(use), host])


def _remedy_lane(remedy: Remedy) -> Lane:
    title = f"{remedy.what} ({remedy.how})"
    if remedy.tried is not None:
        return remedy.tried.memory.lane(f"{title}, compiled")
    if remedy.failed:
        return Lane(f"{title}: {remedy.failed}", ())
    expected = Part("expected", max(0, remedy.peak), GREY)
    return Lane(f"{title}: about {amount(remedy.peak)}", (expected,))


def _buffers(use: Memory) -> Html:
    """The buffers that live at the peak by layer, the largest first."""
    layers: dict[str, list[Buffer]] = {}
    for buffer in use.buffers:
        layers.setdefault(buffer.layer, []).append(buffer)
    if not layers:
        return Html()
    ordered = sorted(layers.items(), key=lambda item: -sum(b.bytes for b in item[1]))
    largest = sum(buffer.bytes for buffer in ordered[0][1]) or 1
    folded = (
        _layer(name, buffers, largest, is_open=at < _OPEN)
        for at, (name, buffers) in enumerate(ordered[:_LAYERS])
    )
    left = len(ordered) - _LAYERS
    more = tag("p", f"and {plural(left, 'layer')} with less", class_="note") if left > 0 else ""
    return join([tag("h3", "Largest buffers at the peak, by layer"), *folded, more])


def _layer(name: str, buffers: Sequence[Buffer], largest: int, is_open: bool) -> Html:
    size = sum(buffer.bytes for buffer in buffers)
    words = f"{name}: {amount(size)} in {plural(len(buffers), 'buffer')}"
    rows = [
        [tag("code", b.shape), amount(b.bytes), _source(b.source), _cut(b.made_by, 60)]
        for b in buffers[:_BUFFERS]
    ]
    heading = ["array", "bytes", "source", "made by"]
    table = grid(
        f"Buffers of {name}",
        heading,
        rows,
        [False, True, False, False],
        ["", "", "source", "less"],
    )
    left = len(buffers) - len(rows)
    more = tag("p", f"and {left:,} smaller ones", class_="note") if left else ""
    summary = join([_share(size / largest), tag("span", words)])
    return fold(summary, table, more, is_open=is_open)


def _share(share: float) -> Html:
    return tag("span", tag("i", style=f"width:{share:.1%}"), class_="share")


def _source(source: Source | None) -> Html:
    """A line of code, short; the whole path where the mouse rests on it."""
    if source is None:
        return Html()
    where = f" in {source.function}" if source.function else ""
    return tag("code", str(source), title=f"{source.file}:{source.line}{where}")


def _cut(words: str, most: int) -> Html:
    return tag("span", words[:most], title=words) if len(words) > most else tag("span", words)


# The mesh on the machine: what each axis costs, and the devices drawn once per axis.

_LESS_OF_AXES = ("", "", "less", "less", "less", "", "less", "", "less", "less", "less")


def mesh_section(placed: Placement) -> Html:
    notes = (tag("p", line, class_="note") for line in footnote(placed).splitlines())
    rows = placement_rows(placed)
    return join(
        [
            tag("p", f"{placement_headline(placed)}."),
            placed.drawing(),
            grid("Mesh axes", PLACEMENT_HEADING, rows, PLACEMENT_RIGHT, _LESS_OF_AXES),
            *notes,
        ]
    )


# Collectives, a table per cause; implicit resharding comes first.


def collectives_section(result: Rehearsal) -> Html:
    collectives = result.collectives
    if result.time is None:
        return tag("p", "Not known: the compiler gave up before it had a program.")
    offloaded = tag("p", str(result.host_transfers)) if result.host_transfers else Html()
    if not len(collectives):
        return join([tag("p", "No collectives: nothing moves between devices."), offloaded])
    causes = collectives.by_cause()
    parts = [tag("p", f"{collectives_headline(collectives)}."), offloaded]
    if IMPLICIT_RESHARDING not in causes:
        parts.append(tag("p", "No implicit resharding.", class_="note"))
    parts += [_cause_table(cause, entries) for cause, entries in causes.items()]
    parts += [
        tag("p", f"Conflicting shardings: {conflict}", class_="conflict")
        for conflict in collectives.conflicts
    ]
    if any(entry.asynchronous for entry in collectives):
        parts.append(tag("p", BESIDE, class_="note"))
    return join(parts)


_LESS = ("", "", "", "less", "less", "", "less", "source")


def _cause_table(cause: str, entries: Sequence[Collective]) -> Html:
    merged = collective_rows(entries)
    paths = {str(entry.source): entry.source for entry in entries if entry.source}
    rows = [[*cells, _with_path(source, paths)] for *cells, source in merged[:MOST_ROWS]]
    colour = tag("i", style=f"background:{CAUSES[cause]}")
    left_out = len(merged) - MOST_ROWS
    return fold(
        join([colour, tag("span", cause_line(cause, entries))]),
        grid(cause, COLLECTIVE_HEADING, rows, COLLECTIVE_RIGHT, _LESS),
        tag("p", f"and {left_out:,} more rows", class_="note") if left_out > 0 else "",
        is_open=True,
    )


def _with_path(words: str, paths: dict[str, Source]) -> Html:
    """The line and the operation of a row; the whole path where the mouse rests on it."""
    line, _, operation = words.partition(" ")
    if line not in paths:
        return tag("span", words)
    return join([_source(paths[line]), " ", tag("span", operation, class_="less")])


# How the arguments are cut: a drawing of every large one that differs, and the table of all.

_DRAWN = 8


@dataclasses.dataclass(frozen=True)
class _Alike:
    """Arrays of one shape and sharding; the one with the shortest path is shown."""

    row: LeafRow
    number: int


def shardings_section(report: PartitionReport) -> Html:
    figures = tag("div", *map(_figure, _alike(report.rows)), class_="figures arrays")
    ordered = sorted(report.rows, key=lambda row: -row.device_bytes)
    table = fold(
        tag("span", f"All {len(report.rows):,} arrays, largest on a device first"),
        folded_rows(ordered),
    )
    words = "The piece of the first device is filled; axes stand behind the dims they shard."
    return join(
        [tag("p", f"{report_headline(report)}."), tag("p", words, class_="note"), figures, table]
    )


def _alike(rows: Iterable[LeafRow]) -> list[_Alike]:
    by_text: dict[str, _Alike] = {}
    for row in rows:
        if row.shape:
            before = by_text.get(row.text, _Alike(row, 0))
            named = min(before.row, row, key=lambda each: len(each.path))
            by_text[row.text] = _Alike(named, before.number + 1)
    return sorted(by_text.values(), key=lambda a: -a.row.bytes * a.number)[:_DRAWN]


def _figure(alike: _Alike) -> Html:
    row = alike.row
    others = f" and {alike.number - 1} alike" if alike.number > 1 else ""
    sizes = f"{amount(row.device_bytes)} of {amount(row.bytes)} on a device"
    return tag(
        "figure",
        tag("figcaption", tag("code", row.text), tag("small", f"{row.path}{others}")),
        cut_picture(row.shape, row.local),
        tag("small", sizes),
    )


# Where the time of a step goes, and the communication in it by cause and by axis.


def time_section(result: Rehearsal, costs: AvoidableCosts | None = None) -> Html:
    """Draw lanes on one time scale: the step, its communication by cause, and by mesh axis."""
    timing = result.time
    if timing is None:
        return tag("p", "The compiler ran out of memory, so there is no program to time.")
    lanes = [timing.lane()]
    if len(result.collectives):
        hidden = f", {duration(timing.hidden)} of it hidden" if timing.hidden else ""
        lanes.append(
            Lane(f"communication by cause{hidden}", _seconds_by(result.collectives, _cause, CAUSES))
        )
        spec = result.placement.spec
        axes = (name for name, size in zip(spec.names, spec.sizes, strict=True) if size > 1)
        joint = sorted({entry.over for entry in result.collectives})
        colours = axis_colours([*axes, *joint])
        lanes.append(Lane("communication by axis", _seconds_by(result.collectives, _over, colours)))
    if result.host_transfers is not None:
        lanes.append(bus_lane(timing.host_exposed, timing.host_hidden))
    whole = max(lane.size for lane in lanes)
    drawn = (
        (bars([lane], duration, whole=whole), legend(lane.parts, duration, lane.size))
        for lane in lanes
    )
    compiler = Html()
    if timing.compiler is not None:
        some = (
            "some of its kernels (no code generated)" if timing.compiler_partial else "its kernels"
        )
        words = f"The compiler's own estimate of {some}: {duration(timing.compiler)}."
        compiler = tag("p", words, class_="note")
    custom = Html()
    if timing.custom:
        rows = custom_rows(timing.custom)
        custom = grid("Custom kernels", CUSTOM_HEADING, rows, CUSTOM_RIGHT)
    said = (*timing.repeated_lines(), *timing.doubts())
    doubts = (tag("p", line, class_="note") for line in said)
    pieces = (piece for pair in drawn for piece in pair)
    saved = _saved(result.costs() if costs is None else costs)
    return join([*pieces, compiler, custom, *doubts, saved])


def _saved(costs: AvoidableCosts) -> Html:
    """What another sharding would save."""
    if not costs:
        return Html()
    return join([tag("h3", "What could be saved"), costs._sheet().inside()])


def _seconds_by(
    collectives: Collectives, key: Callable[[Collective], str], colours: dict[str, str]
) -> tuple[Part, ...]:
    """Return the time of all collectives, one part per group."""
    seconds = dict.fromkeys(colours, 0.0)
    for entry in collectives:
        seconds[key(entry)] += entry.total_seconds
    return tuple(Part(name, size, colours[name]) for name, size in seconds.items())


def _cause(entry: Collective) -> str:
    return entry.cause


def _over(entry: Collective) -> str:
    return entry.over
