"""A `Rehearsal` as text for the terminal, as JSON, and as sections of HTML.

`report` puts the same sections on a page of its own, beside others.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from meshwright._html import (
    CAUSES,
    GREY,
    MEMORY,
    SERIES,
    TIME,
    Html,
    Lane,
    Part,
    bars,
    grid,
    join,
    legend,
    style,
    tag,
    wide,
)
from meshwright._text import amount, duration, plural_noun, text_width
from meshwright.partitioning.report import (
    REPORT_HEADING,
    REPORT_RIGHT,
    LeafRow,
    PartitionReport,
    drawing,
    report_headline,
)
from meshwright.placement.placement import (
    PLACEMENT_HEADING,
    PLACEMENT_RIGHT,
    Placement,
    drawings,
    footnote,
    placement_headline,
    placement_rows,
)
from meshwright.rehearsal.callbacks import callbacks_line
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
from meshwright.rehearsal.host_memory import host_notes
from meshwright.rehearsal.host_transfers import bus_lane
from meshwright.rehearsal.memory import Buffer, Memory
from meshwright.rehearsal.step_time import CUSTOM_HEADING, CUSTOM_RIGHT, custom_rows

if TYPE_CHECKING:  # `result` imports this file, and a `Rehearsal` prints itself with it
    from meshwright.rehearsal.avoidable_costs import AvoidableCosts
    from meshwright.rehearsal.remedy_table import Remedy
    from meshwright.rehearsal.result import Rehearsal

_WORST = 3  # replicated arrays that are named


def as_text(
    result: Rehearsal,
    remedies: Sequence[Remedy] = (),
    costs: AvoidableCosts | None = None,
    advice: Sequence[str] = (),
) -> str:
    """Print everything for a terminal; `remedies` and `costs` are those that were tried, if any.

    `advice`, if given, is what to do next, in place of the short list that every result has.
    """
    parts = [headline(result), str(result.memory)]
    if result.time is not None:
        parts += [str(result.collectives), str(result.time)]
    if costs := costs or result.costs():
        parts.append(str(costs))
    parts += [str(each) for each in (result.host_transfers, result.host_memory) if each is not None]
    if not result.memory.fits:
        parts.append(str(remedies or result.remedies()))
    if advice:
        parts.append("\n".join(["What to do next", *map(_item, advice)]))
    elif steps := next_steps(result, table=True):
        parts.append("\n".join(map(_item, steps)))
    return "\n\n".join(parts)


def headline(result: Rehearsal) -> str:
    """Say what was compiled, for what, by which compiler."""
    placed = result.placement
    how = "kept from before" if result.from_cache else f"compiled in {result.compile_seconds:.1f} s"
    devices = placed.topology.num_devices
    lines = [
        f"{result.name} as {placed.spec} on {placed.topology.name} "
        f"({devices} {plural_noun(devices, 'device')}), {how} by {result.compiler}"
    ]
    if result.stand_in:
        lines.append(
            f"Compiled for simulated CPU devices in place of {placed.topology.chip.name}: the "
            "partitioning is real, memory and fusion are the CPU's."
        )
    if result.callbacks:
        lines.append(callbacks_line(result.callbacks))
    lines += host_notes(result)
    return "\n".join(lines)


def next_steps(result: Rehearsal, table: bool = False) -> list[str]:
    """List what a reader would do about it, most important first; `table` has the remedies."""
    steps = [] if result.memory.fits or table else list(map(str, result.remedies()))
    if costs := result.costs():
        steps.append(f"Largest avoidable cost: {costs[0]}")
    # Small arrays are well replicated; one is named where its copies take 5 % of a device together.
    copies = result.placement.topology.num_devices
    given = result.request.in_shardings is not None  # then they were meant to be replicated
    for row in () if given else result.arguments.replicated[:_WORST]:
        if row.bytes * copies > 0.05 * result.memory.limit and copies > 1:
            steps.append(f"{row.path} ({row.text}) is whole on every device: give it a spec.")
    return steps


def _item(line: str) -> str:
    return textwrap.fill(line, text_width(), initial_indent="- ", subsequent_indent="  ")


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
        "costs": result.costs().to_json(),
        "host_memory": result.host_memory and result.host_memory.to_json(),
        "host_transfers": result.host_transfers and result.host_transfers.to_json(),
        "offload_lost": result.offload_lost,
        "callbacks": [callback.to_json() for callback in result.callbacks],
        "remedies": None if result.memory.fits else result.remedies().to_json(),
        "next": next_steps(result),
    }


# HTML: for a notebook whole, for a report section by section.


def as_html(result: Rehearsal) -> str:
    """Draw everything as one self-contained block: no scripts, nothing fetched."""
    parts = [verdict(result)]
    if advice := next_steps(result):
        parts.append(tag("section", tag("h2", "What to do next"), advice_list(advice)))
    parts += [tag("section", tag("h2", title), body) for title, body in sections(result).values()]
    return tag("div", tag("style", Html(style())), *parts, class_="mw")


def sections(
    result: Rehearsal, remedies: Sequence[Remedy] = (), costs: AvoidableCosts | None = None
) -> dict[str, tuple[str, Html]]:
    """Title and content of every section, by a short name for links."""
    return {
        "memory": ("Memory", memory_section(result, remedies)),
        "time": ("Where a step's time goes", time_section(result, costs)),
        "mesh": ("The mesh on the machine", mesh_section(result.placement)),
        "collectives": ("What moves between devices", collectives_section(result)),
        "shardings": ("How the arrays are cut", shardings_section(result.arguments)),
    }


def advice_list(lines: Sequence[str]) -> Html:
    """Number the steps to take, the most important first."""
    return tag(
        "ol", join(tag("li", f"{line[:1].upper()}{line[1:]}") for line in lines), class_="next"
    )


# Memory: stacked parts against the limit, and the largest buffers with where they come from.

_BUFFERS = 12


def memory_section(result: Rehearsal, remedies: Sequence[Remedy] = ()) -> Html:
    """Draw a bar for a device, one for each remedy, and list the buffers at the peak."""
    use, devices = result.memory, result.placement.topology.num_devices
    alike = "the device" if devices == 1 else f"each of {devices:,} devices, all alike"
    lanes = [memory_lane(alike, use), *map(_remedy_lane, remedies)]
    drawn = bars(lanes, amount, limit=use.limit)
    note = tag("p", f"Note: {use.note}.", class_="note") if use.note else ""
    host = Html(result.host_memory._repr_html_()) if result.host_memory else ""
    return join([drawn, legend(_memory_parts(use), amount, use.peak), note, _buffers(use), host])


def memory_lane(title: str, use: Memory) -> Lane:
    return Lane(f"{title}: {amount(use.peak)}", _memory_parts(use))


def _memory_parts(use: Memory) -> tuple[Part, ...]:
    """Return what is allocated at once; results that overwrite an argument count as that."""
    sizes = {**use.parts(), "outputs": use.outputs - use.aliased}
    return tuple(Part(name, sizes[name], colour) for name, colour in MEMORY.items())


def _remedy_lane(remedy: Remedy) -> Lane:
    title = f"{remedy.what} ({remedy.how})"
    if remedy.tried is not None:
        return memory_lane(f"{title}, compiled", remedy.tried.memory)
    if remedy.failed:
        return Lane(f"{title}: {remedy.failed}", ())
    expected = Part("expected", max(0, remedy.peak), GREY)
    return Lane(f"{title}: about {amount(remedy.peak)}", (expected,))


def _buffers(use: Memory) -> Html:
    """The buffers that live at the peak, the largest first."""
    if not use.buffers:
        return Html()
    shown = use.buffers[:_BUFFERS]
    largest = shown[0].bytes or 1
    rows = [
        [tag("code", b.shape), amount(b.bytes), _share(b.bytes / largest), *_origin(b)]
        for b in shown
    ]
    heading = ["array", "bytes", "", "source", "made by"]
    table = grid("Largest buffers", heading, rows, [False, True, False, False, False])
    left = len(use.buffers) - len(shown)
    more = tag("p", f"and {left:,} smaller ones", class_="note") if left else ""
    return join([tag("h3", "Largest buffers at the peak"), table, more])


def _share(share: float) -> Html:
    return tag("span", tag("i", style=f"width:{share:.1%}"), class_="share")


def _origin(buffer: Buffer) -> tuple[object, object]:
    operation = buffer.made_by[:60]
    if buffer.source is None:
        return "", operation
    where = f" in {buffer.source.function}" if buffer.source.function else ""
    return tag("code", f"{buffer.source}{where}"[:80]), operation


# The mesh on the machine: what each axis costs, and the devices drawn once per axis.


def mesh_section(placed: Placement) -> Html:
    notes = (tag("p", line, class_="note") for line in footnote(placed).splitlines())
    return join(
        [
            tag("p", f"{placement_headline(placed)}."),
            tag("div", Html(drawings(placed)), class_="figures devices"),
            grid("Mesh axes", PLACEMENT_HEADING, placement_rows(placed), PLACEMENT_RIGHT),
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


def _cause_table(cause: str, entries: Sequence[Collective]) -> Html:
    merged = collective_rows(entries)
    colour = tag("i", style=f"background:{CAUSES[cause]}")
    left_out = len(merged) - MOST_ROWS
    return tag(
        "details",
        tag("summary", colour, tag("span", cause_line(cause, entries))),
        grid(cause, COLLECTIVE_HEADING, merged[:MOST_ROWS], COLLECTIVE_RIGHT),
        tag("p", f"and {left_out:,} more rows", class_="note") if left_out > 0 else "",
        open="",
    )


# How the arguments are cut: a drawing of every large one that differs, and the table of all.

_DRAWN, _ROWS = 8, 150


@dataclasses.dataclass(frozen=True)
class _Alike:
    """Arrays of one shape and sharding; the one with the shortest path is shown."""

    row: LeafRow
    number: int


def shardings_section(report: PartitionReport) -> Html:
    figures = tag("div", *map(_figure, _alike(report.rows)), class_="figures arrays")
    shown = sorted(report.rows, key=lambda row: -row.device_bytes)[:_ROWS]
    cells = [
        [
            tag("code", row.path),
            tag("code", row.text),
            amount(row.bytes),
            amount(row.device_bytes),
            f"{row.copies:,}",
        ]
        for row in shown
    ]
    left = len(report.rows) - len(shown)
    table = tag(
        "details",
        tag("summary", tag("span", f"All {len(report.rows):,} arrays, largest on a device first")),
        grid("Shardings", REPORT_HEADING, cells, REPORT_RIGHT),
        tag("p", f"and {left:,} smaller ones", class_="note") if left else "",
    )
    words = "The piece of the first device is filled; axes stand behind the dims they cut."
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
        Html(drawing(row.shape, row.local)),
        tag("small", sizes),
    )


# Where the time of a step goes, and the communication in it by cause and by axis.


def time_section(result: Rehearsal, costs: AvoidableCosts | None = None) -> Html:
    """Draw lanes on one time scale: the step, its communication by cause, and by mesh axis."""
    timing = result.time
    if timing is None:
        return tag("p", "The compiler ran out of memory, so there is no program to time.")
    own = tuple(Part(name, timing.parts()[name], colour) for name, colour in TIME.items())
    lanes = [Lane(f"a step: {duration(timing.total)}", own)]
    if len(result.collectives):
        hidden = f", {duration(timing.hidden)} of it hidden" if timing.hidden else ""
        lanes.append(
            Lane(f"communication by cause{hidden}", _seconds_by(result.collectives, _cause, CAUSES))
        )
        axes = sorted({entry.over for entry in result.collectives})
        colours = {axis: SERIES[at % len(SERIES)] for at, axis in enumerate(axes)}
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
        compiler = tag(
            "p",
            f"The compiler's own estimate of its kernels: {duration(timing.compiler)}.",
            class_="note",
        )
    custom = Html()
    if timing.custom:
        rows = custom_rows(timing.custom)
        custom = grid("Custom kernels", CUSTOM_HEADING, rows, CUSTOM_RIGHT)
    said = (*timing.repeated_lines(), *timing.doubts())
    doubts = (tag("p", line, class_="note") for line in said)
    pieces = (piece for pair in drawn for piece in pair)
    return join([*pieces, compiler, custom, *doubts, _saved(costs or result.costs())])


def _saved(costs: AvoidableCosts) -> Html:
    """What another sharding would save."""
    if not costs:
        return Html()
    return join([tag("h3", "What could be saved"), wide("Costs", Html(costs._repr_html_()))])


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


# The top of a report: does it fit, and the few numbers that matter.


def verdict(result: Rehearsal) -> Html:
    """Say whether it fits, by how much, and what was compiled."""
    first, *more = headline(result).splitlines()
    good = result.fits
    return tag(
        "header",
        tag("h1", f"{result.name} on {result.placement.topology.name}"),
        tag("p", first, class_="what"),
        tag(
            "p",
            tag("strong", "fits" if good else "does not fit"),
            tag("span", result.memory.verdict().partition(": ")[2]),
            class_="verdict good" if good else "verdict bad",
        ),
        *(tag("p", line, class_="note") for line in more),
        tag("dl", _tiles(result), class_="tiles"),
    )


def _tiles(result: Rehearsal) -> Html:
    memory, timing = result.memory, result.time
    sign = "to spare" if memory.margin >= 0 else "too much"
    of_limit = f"{amount(memory.peak)} of {amount(memory.limit)}"
    tiles = [("memory of a device", f"{memory.peak / memory.limit:.0%}", of_limit)]
    tiles.append((sign, amount(abs(memory.margin)), f"limit {amount(memory.limit)}"))
    if timing is not None:
        tiles.append(("modelled step", duration(timing.total), "by the model"))
        tiles.append(("utilisation", f"{timing.utilisation:.0%}", "of the chip's peak"))
        sent = result.collectives
        tiles.append(("sent by a device", amount(sent.moved), f"{len(sent):,} collectives"))
    return join(
        tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="small"))
        for name, value, note in tiles
    )
