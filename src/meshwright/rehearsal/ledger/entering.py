"""`ledger(program, placement)`: every collective of a program entered in the book."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshwright.placement import AxisPlan, Placement
from meshwright.rehearsal.ledger.axes import AxisPart, axes_crossed, axes_of
from meshwright.rehearsal.ledger.causes import Causes
from meshwright.rehearsal.ledger.clashes import Clash
from meshwright.rehearsal.ledger.collective import Collective, Ledger
from meshwright.rehearsal.ledger.finding import Found, find
from meshwright.rehearsal.ledger.groups import read_groups, read_pairs, written_groups
from meshwright.rehearsal.ledger.naming import named
from meshwright.rehearsal.ledger.positions import Positions
from meshwright.rehearsal.ledger.wires import Cost, group_cost, pairs_cost, plan_of
from meshwright.rehearsal.programs import Program, Shape


def ledger(program: Program, placement: Placement, clashes: Sequence[Clash] = ()) -> Ledger:
    """What a program moves between devices.

    `placement` is that of the mesh the program was compiled for (`mw.explain(mesh)`), `clashes`
    what `read_clashes` found in the compiler's standard error.
    """
    located = tuple(_located(clash, program) for clash in clashes)
    book = _Book(program, placement, Causes(program, located))
    return Ledger(tuple(book.entry(found) for found in find(program)), located)


def _located(clash: Clash, program: Program) -> Clash:
    """A clash with the source that the program gives for an operation of the same name."""
    if clash.source is not None or not clash.op_name:
        return clash
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.op_name == clash.op_name:
                return dataclasses.replace(clash, source=program.source(instruction))
    return clash


@dataclasses.dataclass(frozen=True)
class _Span:
    """Whom a collective joins."""

    axes: tuple[AxisPart, ...] | None
    sizes: tuple[int, ...]
    groups: int
    plan: AxisPlan | None
    pairs: np.ndarray | None = None


class _Book:
    def __init__(self, program: Program, placement: Placement, causes: Causes) -> None:
        self.program, self.placement, self.causes = program, placement, causes
        self.positions = Positions(placement, program.devices)
        self.names, self.sizes = placement.spec.names, placement.spec.sizes
        self.spans: dict[str, _Span] = {}

    def entry(self, found: Found) -> Collective:
        span = self.span(found)
        payload = (found.results,) if _counts_result(found.kind) else found.operands
        size = sum(shape.bytes for shape in payload)
        op_name, source = named(self.program, found)
        cost = self.cost(found.kind, size, span)
        cause = self.causes.of(found, op_name, span.axes, max(span.sizes))
        return Collective(
            found.kind,
            "+".join(dict.fromkeys(leaf.dtype for shape in payload for leaf in shape.leaves)),
            _written(payload),
            size,
            _moved(found.kind, size, span),
            span.axes,
            span.sizes,
            span.groups,
            cost.links,
            cost.seconds,
            self.program.times(found.instruction.computation),
            found.asynchronous,
            found.meanwhile,
            op_name,
            source,
            cause.name,
            cause.why,
            found.parts,
            cause.clash,
        )

    def cost(self, kind: str, size: int, span: _Span) -> Cost:
        if span.plan is not None:
            return group_cost(kind, size, span.plan, self.placement.topology)
        pairs = span.pairs if span.pairs is not None else np.empty((0, 2), np.int64)
        return pairs_cost(size, pairs, self.placement)

    def span(self, found: Found) -> _Span:
        """Whom it joins; collectives that say so in the same words join the same."""
        if found.transfer is not None:
            words = found.transfer.target
        elif found.kind == "collective-permute":
            words = found.instruction.attribute("source_target_pairs") or ""
        else:
            words = written_groups(found.instruction)
        if words not in self.spans:
            self.spans[words] = self.spanned(found, words)
        return self.spans[words]

    def spanned(self, found: Found, words: str) -> _Span:
        transfer, positions = found.transfer, self.positions
        if transfer is not None and transfer.between_slices:
            if found.kind == "collective-permute":
                return self.by_pairs(positions.of_device_ids(transfer.pairs))
            return self.by_groups([positions.of_device_ids(group) for group in transfer.groups])
        if found.kind == "collective-permute":
            return self.by_pairs(np.concatenate(positions.of(read_pairs(words))))
        groups = read_groups(words, self.program.devices)
        return self.by_groups([there for group in groups for there in positions.of(group)])

    def by_groups(self, groups: Sequence[np.ndarray]) -> _Span:
        axes = axes_of(groups, self.names, self.sizes)
        sizes = tuple(sorted({group.size for group in groups}))
        return _Span(axes, sizes, len(groups), plan_of(self.placement, groups, axes))

    def by_pairs(self, pairs: np.ndarray) -> _Span:
        axes = axes_crossed(pairs, self.names, self.sizes)
        size = int(np.prod([part.size for part in axes], dtype=np.int64))
        return _Span(axes, (size,), self.placement.positions.size // size, None, pairs)


def _counts_result(kind: str) -> bool:
    return kind in ("all-gather", "collective-broadcast")


def _moved(kind: str, size: int, span: _Span) -> int:
    """Bytes a device sends, the group at work as a ring."""
    members = max(span.sizes)
    if members == 1:
        return 0
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    once = size * (members - 1) // members
    return 2 * once if kind == "all-reduce" else once


def _written(payload: Sequence[Shape]) -> str:
    """The arrays in a few letters: `f32[8,8]`, `2 x f32[8,8]`, `f32[8,8] + 3 more`."""
    leaves = [str(leaf) for shape in payload for leaf in shape.leaves]
    if len(leaves) == 1:
        return leaves[0]
    if len(set(leaves)) == 1:
        return f"{len(leaves)} x {leaves[0]}"
    return f"{leaves[0]} + {len(leaves) - 1} more"
