"""`PlanCosts`: how long a step takes and what it needs when its dims are cut by a plan.

A plan has, for each axis of a mesh, an ordered list of kinds of dims. In every array and in every
operation the first kind of the list that is there, and that the axis divides, takes the axis. What
an operation needs otherwise is gathered; what it leaves as partial sums is reduced. So `[batch]` is
data parallelism, `[batch, embed]` FSDP, `[heads, mlp, vocab]` Megatron's.

Speeds are those of rehearsals, and exchanges take what the model of collectives says.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import math
from collections.abc import Sequence

from meshwright.hardware.topology import Topology
from meshwright.planning.dim_groups import HEAVY, VIEWS, DimGroups, Layout
from meshwright.planning.exchange_costs import (
    PIECE_KERNELS,
    AxisSpeed,
    Beside,
    Cut,
    Exchange,
    ExchangeCosts,
)
from meshwright.planning.moment_bytes import MomentBytes, kinds_in
from meshwright.planning.operation_work import Work, WorkOf, takes_apart
from meshwright.planning.plan_memory import ON_CHIP, During, live_sets
from meshwright.planning.stored_values import kept_values, tile_padding
from meshwright.planning.traced_program import Operation, TracedProgram
from meshwright.planning.written_forms import SLICE_SECONDS
from meshwright.rehearsal.kernel_speeds import speeds

Lists = tuple[tuple[int, ...], ...]  # per axis, kinds of dims in the order in which they take it

_SMALL = 4096  # bytes: arrays below are not worth an exchange, and lie where they are
_NEGLIGIBLE = 3e-4  # part of all work below which an operation is left out
# What an elementwise operation reads is mostly at hand, in the kernel that makes it.
_FUSED = 0.5
_PER_ENTRY = 0.01  # part of the time by which a list must be better to be longer by one
# The same for a dim that two axes may cut for different reasons, and for one that no argument has
# (queries to a key, halves of a head): partitioners then exchange in more and larger pieces than
# needed, a tenth of a step's time and more.
_PER_DOUBLE = 0.03
_OVER = 10.0  # how much a plan costs for being over the limit, times the part it is over


# Of operations that the same kinds decide: seconds of computing, exchanging and what is hidden;
# bytes at each of the worst moments; what operations hold for themselves; what of it is on chip.
_Part = tuple[float, float, float, list[float], dict[During, float], list[float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """How an operation is computed under a plan: the cut of every value as it is used or made.

    `exchange` are the seconds that it waits for exchanges, `hidden` those beside its computing.
    `gathered`: bytes of each operand as it is needed, where it lies in smaller pieces; a TPU
    gathers what it multiplies as bf16. `summed`: over how many devices its result is added up.
    """

    compute: float
    exchange: float
    hidden: float
    cuts: tuple[Cut, ...]
    gathered: tuple[float, ...] = ()
    summed: int = 1


@dataclasses.dataclass(frozen=True)
class Totals:
    """Seconds of a step by part, and the bytes of one device at the worst moment.

    `exchange` is what the step waits for, `hidden` what runs beside its computing.
    """

    compute: float
    exchange: float
    hidden: float
    bytes: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exchange


class PlanCosts:
    """Costs of plans for one program on one kind of chip; `on` chooses the mesh."""

    def __init__(
        self,
        program: TracedProgram,
        groups: DimGroups,
        topology: Topology,
        donated: Sequence[bool],
        limit: float,
        overlaps: bool = True,
        constants: float = 0.0,
    ):
        self.program, self.groups, self.limit = program, groups, limit
        self.topology, self._overlaps = topology, overlaps
        self.constants = constants  # bytes of what the step closes over, whole on every device
        self.speeds = speeds(topology.chip)
        # Products that the TPU's own compiler has scheduled reach more than those it has not.
        own = speeds(topology.chip, scheduled=True).tpu
        self._products = own.nominal / own.scheduled if own and overlaps else 1.0
        self._product_seconds: dict[tuple[float, int, str, float, bool], float] = {}  # of any mesh
        self.exchanging = ExchangeCosts((), topology, overlaps)
        self.sizes = self.exchanging.sizes
        self.tried = 0
        self.tpu = topology.chip.family == "tpu" and overlaps
        family = topology.chip.family if overlaps else ""
        kept = kept_values(program, family)
        self._work_of = WorkOf(program, groups, kept, self.tpu)
        folded: dict[Work, int] = collections.defaultdict(int)
        for operation in program.operations:
            if operation.primitive in VIEWS:
                continue
            if (
                operation.primitive in HEAVY
                or kept.intersection(operation.outputs)
                or takes_apart(program, operation)
            ):
                folded[self.work(operation)] += operation.times
        weight = {work: times * self._alone(work) for work, times in folded.items()}
        least = _NEGLIGIBLE * sum(weight.values())
        # Operations whose cost is decided by the same kinds are summed up once per choice of these.
        self._bundles: dict[frozenset[int], list[tuple[Work, int]]] = collections.defaultdict(list)
        for work, times in folded.items():
            if weight[work] > least:
                self._bundles[kinds_in(dims for dims, _ in work.values)].append((work, times))
        moments = live_sets(program, groups.layout, kept, donated, family)
        self.moments = MomentBytes(moments, self.work)
        for kinds in self.moments.kinds:
            self._bundles[kinds]  # an entry, if only for its memory
        seen = {kind for value in program.arguments for kind, _ in groups.layout[value]}
        others = {groups.every, *groups.queries}
        self._inner = frozenset(range(groups.count)) - seen - others
        self._first_query = groups.count - len(groups.queries)
        self._clear()

    def on(self, axes: Sequence[AxisSpeed]) -> PlanCosts:
        """Cost plans on a mesh of these axes from now on."""
        self.exchanging = ExchangeCosts(axes, self.topology, self._overlaps)
        self.sizes = self.exchanging.sizes
        self._clear()
        return self

    @property
    def axes(self) -> tuple[AxisSpeed, ...]:
        """The axes of the mesh."""
        return self.exchanging.axes

    def _clear(self) -> None:
        """Forget what was costed on another mesh."""
        # For each bundle, its parts by the lists without the kinds that it does not have.
        self._parts: list[dict[Lists, _Part]] = [{} for _ in self._bundles]
        self._shortened: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._cuts: dict[Lists, dict[Layout, Cut]] = {}
        self._cuts_of: Lists | None = None
        self._lists_here: Lists = ()
        self._cuts_here: dict[Layout, Cut] = {}
        self._expanded: dict[Lists, Lists] = {}

    def copy(self) -> PlanCosts:
        """Return costs of the same program, for another mesh."""
        return copy.copy(self)

    def resized(self, program: TracedProgram, groups: DimGroups) -> PlanCosts:
        """Return costs of the same operations where the program's arrays have other sizes."""
        other = self.copy()
        other.program, other.groups = program, groups
        other._work_of = self._work_of.resized(program, groups)
        return other

    def work(self, operation: Operation) -> Work:
        """Return an operation without its place in the program."""
        return self._work_of(operation)

    def _alone(self, work: Work) -> float:
        """Seconds of an operation on one device."""
        moved = sum(size for _, size in work.values)
        seconds = max(self._multiplying(work, 1), moved / self.speeds.bytes)
        return seconds + work.one_by_one * SLICE_SECONDS

    def _multiplying(self, work: Work, ways: int) -> float:
        if not work.flops and not work.exponentials:
            return 0.0
        key = work.flops, ways, work.dtype, work.exponentials, work.is_kernel
        seconds = self._product_seconds.get(key)
        if seconds is None:
            kind = "pallas tpu" if self.speeds.tpu is not None else "triton"
            seconds = self.speeds.compute(
                work.flops / ways, work.dtype, kind if work.is_kernel else ""
            )
            if not work.is_kernel:
                seconds *= self._products
            elif self.speeds.tpu is not None:
                seconds += self.speeds.tpu.exponentials(work.exponentials / ways)
            self._product_seconds[key] = seconds
        return seconds

    def cut(self, layout: Layout, lists: Lists) -> Cut:
        """How an array lies: each axis on the first kind of its list that is there and divides."""
        if lists is not self._cuts_of:  # mostly the same object as before
            self._cuts_of, self._lists_here = lists, self._expand(lists)
            self._cuts_here = self._cuts.setdefault(self._lists_here, {})
        found = self._cuts_here.get(layout)
        if found is None:
            found = self._cuts_here[layout] = {}
            ways = [1] * len(layout)
            for axis, order in enumerate(self._lists_here):
                size = self.sizes[axis]
                for wanted in order:
                    for dim, (kind, length) in enumerate(layout):
                        if kind == wanted and length % (ways[dim] * size) == 0:
                            found[axis] = dim
                            ways[dim] *= size
                            break
                    if axis in found:
                        break
        return found

    def _expand(self, lists: Lists) -> Lists:
        """Put the kinds of all weights in the place of the one that stands for them."""
        every, weights = self.groups.every, self.groups.weights
        if not weights or not any(every in order for order in lists):
            return lists
        if lists not in self._expanded:
            self._expanded[lists] = tuple(
                tuple(dict.fromkeys(k for e in order for k in (weights if e == every else (e,))))
                for order in lists
            )
        return self._expanded[lists]

    def part(self, layout: Layout, lists: Lists) -> float:
        """What one device needs of an array's bytes."""
        cut = self.cut(layout, lists)
        if not self.tpu:
            return 1 / self.exchanging.divided(cut)
        dims = [length for _, length in layout]
        for axis, dim in cut.items():
            dims[dim] //= self.sizes[axis]
        return tile_padding(tuple(dims)) / self.exchanging.divided(cut)

    # In: an operation and a plan. Out: the cheapest way to obey it. Where a kind is in the
    # operation twice (queries and keys) either may take the axis, so all ways are tried. Some may
    # take a later kind of the list. A lookup in rows: tokens are sorted to their experts row by
    # row, and sent afterwards. A lookup in a table that one axis cuts by its width: it is looked up
    # in parts, and the result is sent. A product of few rows with large weights: it is computed
    # where these lie.
    def way(self, work: Work, lists: Lists, log: list[Exchange] | None = None) -> Way:
        """Return how an operation is computed under a plan; `log` gets its exchanges."""
        options: list[list[int | None]] = []
        if self.groups.weights:
            lists = self._expand(lists)
        for axis, order in enumerate(lists):
            size = self.sizes[axis]
            takers: list[int | None] = []
            for wanted in order:
                if takers and work.looks_up == "table" and sum(wanted in o for o in lists) > 1:
                    continue
                takers += [
                    n
                    for n, (iteration, kind, length, _) in enumerate(work.dims)
                    if kind == wanted and iteration != "whole" and length % size == 0
                ]
                if not takers or (work.heaviest >= 0 and _exchanges_heaviest(work, takers)):
                    continue
                if not work.looks_up:
                    break
            options.append(takers or [None])
        choices = list(itertools.product(*options))
        if len(choices) == 1:
            return self._way(work, lists, choices[0], log)
        ways = [self._way(work, lists, choice, None) for choice in choices]
        best = min(range(len(ways)), key=lambda n: ways[n].compute + ways[n].exchange)
        if log is not None:
            self._way(work, lists, choices[best], log)
        return ways[best]

    def _way(
        self,
        work: Work,
        lists: Lists,
        choice: Sequence[int | None],
        log: list[Exchange] | None,
    ) -> Way:
        cuts: list[Cut] = [{} for _ in work.values]
        partial: list[int] = []
        ways, taken = 1, dict[int, int]()
        for axis, number in enumerate(choice):
            if number is None:
                continue
            iteration, _, length, at = work.dims[number]
            before = taken.get(number, 1)
            if length % (before * self.sizes[axis]):
                continue
            taken[number] = before * self.sizes[axis]
            ways *= self.sizes[axis]
            if iteration == "sum":
                partial.append(axis)
            for value, dim in at:
                cuts[value][axis] = dim
        seconds = moved = 0.0
        gathered = [0.0] * work.inputs
        product = self._multiplying(work, ways)
        # Where queries are cut, keys and values are gathered before, and written down as such.
        by_queries = any(work.dims[number][1] >= self._first_query for number in taken)
        beside = Beside(frozenset(taken.values()), product, work.multiplies, by_queries)
        smaller: int | None = None
        if self.tpu and work.multiplies:
            lying = [self.cut(layout, lists) for layout, _ in work.values]
            smaller = self.exchanging.smaller_apart(work, lying, cuts)
        divided = self.exchanging.divided
        read = 1.0 if work.heavy else _FUSED
        for number, (layout, size) in enumerate(work.values):
            is_input = number < work.inputs
            local = size / divided(cuts[number])
            moved += local * read if is_input else local
            if size < _SMALL:
                continue
            lies = self.cut(layout, lists)
            if is_input:
                if lies == cuts[number]:
                    continue
                entries: list[Exchange] | None = [] if log is not None else None
                shared = work.shared[number]
                beside.shared = shared
                beside.whole = work.uses[number] > 1 or number == smaller
                beside.sides = work.sides[number] if work.sides else {}
                sent_as = work.sent_as[number]
                need = self.exchanging.move(size * sent_as, lies, cuts[number], entries, beside)
                if need:
                    gathered[number] = local * sent_as
                seconds += need / shared
                if log is not None:
                    log += [
                        dataclasses.replace(e, bytes=e.bytes / shared, seconds=e.seconds / shared)
                        for e in entries or ()
                    ]
                continue
            beside.shared = 1
            moved += (beside.rounds + work.copies) * local
            if partial:
                seconds += self.exchanging.reduce(
                    work, number, partial, lies, cuts[number], log, beside
                )
            seconds += self.exchanging.move(size, cuts[number], lies, log)
        compute = max(product, 0.0 if work.only_moves else moved / self.speeds.bytes)
        if work.one_by_one:
            compute += work.one_by_one / divided(cuts[1]) * SLICE_SECONDS
        hidden = 0.0
        if work.multiplies or (self.tpu and not work.scatters):
            hidden = min(beside.seconds, compute)
            compute += beside.pieces * PIECE_KERNELS * self.speeds.start
        summed = math.prod([self.sizes[axis] for axis in partial])
        return Way(compute, seconds - hidden, hidden, tuple(cuts), tuple(gathered), summed)

    def totals(self, lists: Lists) -> Totals:
        """Sum up a step under a plan."""
        compute = exchange = hidden = 0.0
        held = dict[During, float]()
        sizes = [0.0] * len(self.moments.during)
        on_chip = [0.0] * len(self.moments.during)
        shortened = [self._shorten(order) for order in lists]
        for (kinds, bundle), parts, *here in zip(
            self._bundles.items(), self._parts, *shortened, strict=True
        ):
            key = tuple(here)
            part = parts.get(key)
            if part is None:
                part = parts[key] = self._bundle(kinds, bundle, key)
            compute += part[0]
            exchange += part[1]
            hidden += part[2]
            if part[3]:
                sizes = [total + more for total, more in zip(sizes, part[3], strict=True)]
                on_chip = [total + more for total, more in zip(on_chip, part[5], strict=True)]
            for during, more in part[4].items():
                held[during] = max(held.get(during, 0.0), more)
        most = max(
            size - min(passing, ON_CHIP) + held.get(during, 0.0)
            for size, passing, during in zip(sizes, on_chip, self.moments.during, strict=True)
        )
        return Totals(compute, exchange, hidden, most + self.constants)

    def _shorten(self, order: tuple[int, ...]) -> list[tuple[int, ...]]:
        """For every bundle, an axis's list with the kinds alone that the bundle has."""
        short = self._shortened.get(order)
        if short is None:
            (whole,) = self._expand((order,))
            short = [tuple([k for k in whole if k in kinds]) for kinds in self._bundles]
            self._shortened[order] = short
        return short

    def _bundle(
        self, kinds: frozenset[int], bundle: Sequence[tuple[Work, int]], lists: Lists
    ) -> _Part:
        compute = exchange = hidden = 0.0
        held = dict[During, float]()
        for work, times in bundle:
            way = self.way(work, lists)
            compute += times * way.compute
            exchange += times * way.exchange
            hidden += times * way.hidden
            if any(way.gathered):
                during: During = "loop" if work.looped else "step"
                during = "lookup" if work.looks_up == "rows" else during
                held[during] = max(held.get(during, 0.0), sum(way.gathered))
        sizes, on_chip = self.moments.of(kinds, self, lists)
        return compute, exchange, hidden, sizes, held, on_chip

    def objective(self, lists: Lists) -> float:
        """What the search makes small: seconds, more if it does not fit or is complicated."""
        self.tried += 1
        totals = self.totals(lists)
        over = max(0.0, totals.bytes / self.limit - 1.0)
        entries = sum(map(len, lists))
        inner = sum(kind in self._inner for order in lists for kind in order)
        return (
            totals.seconds
            * (1 + _OVER * over)
            * (1 + _PER_ENTRY * entries + _PER_DOUBLE * (self._doubles(lists) + inner))
        )

    def _doubles(self, lists: Lists) -> int:
        """How often a kind stands in the lists of two axes that are not alike."""
        return sum(
            len(set(one) & set(other))
            for one, other in itertools.combinations(lists, 2)
            if one != other
        )

    def exchanges(self, lists: Lists) -> list[tuple[Exchange, Work, int]]:
        """Every exchange that a plan implies, with its operation and how often it runs."""
        found = []
        for bundle in self._bundles.values():
            for work, times in bundle:
                log: list[Exchange] = []
                self.way(work, lists, log)
                found += [(entry, work, times // entry.runs) for entry in log]
        return found


def _exchanges_heaviest(work: Work, takers: Sequence[int | None]) -> bool:
    """Whether no loop that may take an axis runs over the value that outweighs all others."""
    return not any(
        value == work.heaviest
        for number in takers
        if number is not None
        for value, _ in work.dims[number][3]
    )
