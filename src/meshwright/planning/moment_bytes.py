"""`MomentBytes`: what one device holds at the worst moments of a step, cut by a plan."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from meshwright.planning.dim_groups import WHOLE, Layout
from meshwright.planning.operation_work import Work
from meshwright.planning.plan_memory import LARGEST_ON_CHIP, During, Moment
from meshwright.planning.traced_program import Operation

if TYPE_CHECKING:
    from meshwright.planning.plan_costs import Lists, PlanCosts


@dataclasses.dataclass(frozen=True, slots=True)
class Lying:
    """Arrays of a layout, as they lie; bytes of all devices."""

    layout: Layout
    size: float

    def layouts(self) -> Iterable[Layout]:
        return (self.layout,)

    def bytes(self, costs: PlanCosts, lists: Lists) -> float:
        return self.size * costs.part(self.layout, lists)


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting(Lying):
    """An array that is there for products that wait.

    On a TPU the sums of those that wait for a loop to end are there in its place, if smaller.
    """

    products: tuple[Work, ...]

    def layouts(self) -> Iterable[Layout]:
        return (self.layout, *(dims for work in self.products for dims, _ in work.values))

    def bytes(self, costs: PlanCosts, lists: Lists) -> float:
        held = Lying.bytes(self, costs, lists)
        if not costs.tpu or all(work.looped for work in self.products):
            return held
        made = ((work.values[-1][1], costs.way(work, lists).cuts[-1]) for work in self.products)
        return min(held, sum(size / costs.exchanging.divided(cut) for size, cut in made))


@dataclasses.dataclass(frozen=True, slots=True)
class LookedUp(Lying):
    """What a lookup in a table has made.

    Of a table that the whole mesh cuts every device has all rows, some of them zeros: a TPU adds
    them up everywhere, and takes its part where they are used. Over a part of the mesh it scatters.
    """

    lookup: Work

    def layouts(self) -> Iterable[Layout]:
        return (self.layout, *(dims for dims, _ in self.lookup.values))

    def bytes(self, costs: PlanCosts, lists: Lists) -> float:
        held = Lying.bytes(self, costs, lists)
        way = costs.way(self.lookup, lists)
        if way.summed < math.prod(costs.sizes):
            return held
        return max(held, self.size / costs.exchanging.divided(way.cuts[-1]))


@dataclasses.dataclass(frozen=True, slots=True)
class _Passing(Lying):
    """Of what lies there, what a TPU may keep on the chip if so many devices have a copy of it."""

    copies: float
    count: int

    def bytes(self, costs: PlanCosts, lists: Lists) -> float:
        part = costs.part(self.layout, lists)
        few = self.copies > part * math.prod(costs.sizes)
        return 0.0 if few or self.size * part > self.count * LARGEST_ON_CHIP else self.size * part


@dataclasses.dataclass(frozen=True, slots=True)
class Gathered:
    """Operands that are gathered once for several products each; `first` is the first of these.

    `number` is that of the operand in it. `count`: how many operands there are so, as those of all
    layers.
    """

    first: Work
    number: int
    count: int

    def layouts(self) -> Iterable[Layout]:
        return [dims for dims, _ in self.first.values]

    def bytes(self, costs: PlanCosts, lists: Lists) -> float:
        return self.count * costs.way(self.first, lists).gathered[self.number]


_ByKinds = dict[frozenset[int], list[Lying | Gathered]]


class MomentBytes:
    """The arrays at every moment, by the kinds of dims that decide what a device has of them.

    `during`: of every moment, what may need more of memory then.
    """

    def __init__(self, moments: Sequence[Moment], work_of: Callable[[Operation], Work]):
        self.during: list[During] = [moment.during for moment in moments]
        self.held: list[_ByKinds] = []
        self._passing: list[_ByKinds] = []
        for moment in moments:
            gathered = collections.Counter((work_of(use), n) for use, n in moment.gathered)
            self.held.append(
                _by_kinds(
                    [
                        *(Lying(layout, size) for layout, size in moment.live.items()),
                        *(
                            Waiting(layout, size, tuple(map(work_of, products)))
                            for layout, size, products in moment.waiting
                        ),
                        *(
                            LookedUp(layout, size, work_of(lookup))
                            for layout, size, lookup in moment.looked_up
                        ),
                        *(Gathered(*use, count) for use, count in gathered.items()),
                    ]
                )
            )
            self._passing.append(
                _by_kinds(
                    _Passing(layout, size, copies, count)
                    for (layout, copies), (size, count) in moment.passing.items()
                )
            )
        # In this order, so that sums are the same everywhere.
        self.kinds = dict.fromkeys(kinds for each in (*self.held, *self._passing) for kinds in each)

    def of(
        self, kinds: frozenset[int], costs: PlanCosts, lists: Lists
    ) -> tuple[list[float], list[float]]:
        """Bytes on one device, at each moment, of what these kinds decide; and those on chip."""
        if kinds not in self.kinds:
            return [], []
        held, on_chip = (
            [sum(each.bytes(costs, lists) for each in moment.get(kinds, ())) for moment in moments]
            for moments in (self.held, self._passing)
        )
        return held, on_chip


def _by_kinds(arrays: Iterable[Lying | Gathered]) -> _ByKinds:
    found: _ByKinds = collections.defaultdict(list)
    for each in arrays:
        found[kinds_in(each.layouts())].append(each)
    return found


def kinds_in(layouts: Iterable[Layout]) -> frozenset[int]:
    """The kinds of dims that some arrays have."""
    return frozenset(kind for layout in layouts for kind, _ in layout if kind != WHOLE)
