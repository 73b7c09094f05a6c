"""Memory: stacked parts against the limit, and the largest buffers with where they come from."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.partitioning.show import amount
from meshwright.rehearsal.drawing.bars import Lane, Part, bars, legend
from meshwright.rehearsal.drawing.markup import Html, grid, join, tag
from meshwright.rehearsal.drawing.palette import GREY, MEMORY
from meshwright.rehearsal.memory.buffers import Buffer
from meshwright.rehearsal.memory.use import Memory
from meshwright.rehearsal.remedies import Remedy
from meshwright.rehearsal.result import Rehearsal

_BUFFERS = 12


def memory(result: Rehearsal, remedies: Sequence[Remedy] = ()) -> Html:
    """The bar of a device, one for each way out, and what lives at the peak."""
    use, devices = result.memory, result.placement.topology.num_devices
    alike = "the device" if devices == 1 else f"each of {devices:,} devices, all alike"
    lanes = [lane(alike, use), *map(_way_out, remedies)]
    drawn = bars(lanes, amount, limit=use.limit)
    note = tag("p", f"Note: {use.note}.", class_="note") if use.note else ""
    return join([drawn, legend(parts(use), amount, use.peak), note, buffers(use)])


def lane(title: str, use: Memory) -> Lane:
    return Lane(f"{title}: {amount(use.peak)}", parts(use))


def parts(use: Memory) -> tuple[Part, ...]:
    """What is allocated at once; results that overwrite an argument are counted as that."""
    sizes = {**use.parts(), "outputs": use.outputs - use.aliased}
    return tuple(Part(name, sizes[name], colour) for name, colour in MEMORY.items())


def _way_out(remedy: Remedy) -> Lane:
    title = f"{remedy.what} ({remedy.how})"
    if remedy.tried is not None:
        return lane(f"{title}, compiled", remedy.tried.memory)
    if remedy.peak is None or remedy.failed:
        return Lane(f"{title}: {remedy.failed or 'not tried'}", ())
    expected = Part("expected", max(0, remedy.peak), GREY)
    return Lane(f"{title}: about {amount(remedy.peak)}", (expected,))


def buffers(use: Memory) -> Html:
    """What lives at the peak, the largest first."""
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
    made = buffer.made_by
    if buffer.source is None:
        return "", made[:60]
    where = f" in {buffer.source.function}" if buffer.source.function else ""
    return tag("code", f"{buffer.source}{where}"[:80]), made[:60]
