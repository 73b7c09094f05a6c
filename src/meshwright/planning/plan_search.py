"""Search the cheapest lists of dims for every mesh that the hardware allows.

Meshes of few axes come first: the best plans of a mesh, with one of its axes split in two, are
where the search on a finer mesh begins, beside those of its siblings and lists of one kind. From
there it goes by inserting, removing and swapping entries, the best few plans at a time, until
nothing gets better.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.axes import axis_weights
from meshwright.hardware.topology import Topology
from meshwright.placement.placement import Placement
from meshwright.placement.placer import placement_of
from meshwright.planning.exchange_costs import AxisSpeed, axis_speed
from meshwright.planning.plan_costs import Lists, PlanCosts, Totals
from meshwright.spec.mesh_spec import MeshSpec

_BEAM = 4
_LONGEST = 5  # kinds in one list
_PATIENCE = 2  # rounds without a better plan
_BETTER = 0.999
_SEARCHED_TWICE = 2  # axes
_SEEDED_KINDS = 7  # that are tried alone on every axis
_MOST_MESHES = 36
_HUGE = 512  # devices of one axis
MAY_BE_BETTER = 1.03  # times the best plan's objective: predictions are not nearer than that
_NO_GAIN = 1.1  # the same for plans that cut queries, after some rounds
_HOPELESS = 1.4  # times the best plan's objective: no mesh this far behind came back in trials


Hardware = Topology | Placement  # to place meshes on, or with the one mesh that is meant


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that was found on one mesh: its sizes, lists, and what they cost.

    `intensity`: how much each axis was taken to carry when the mesh was placed; `None`: by size.
    """

    sizes: tuple[int, ...]
    lists: Lists
    objective: float
    totals: Totals
    intensity: tuple[float, ...] | None = None

    @property
    def rank(self) -> tuple[Any, ...]:
        """By what it is sorted: its cost; of equals that of fewer axes is simpler."""
        return self.objective, len(self.sizes), self.sizes, self.lists


def mesh_sizes(devices: int, most: int) -> list[tuple[int, ...]]:
    """List meshes of up to `most` axes that use all devices, sizes falling, few axes first.

    >>> mesh_sizes(8, 2)
    [(8,), (4, 2)]
    """

    def split(rest: int, axes: int, top: int) -> Iterator[tuple[int, ...]]:
        if rest == 1:
            yield ()
        elif axes:
            for size in range(min(rest, top), 1, -1):
                if rest % size == 0:
                    for others in split(rest // size, axes - 1, size):
                        yield (size, *others)

    # Meshes with a huge axis last: of many devices not all meshes are searched.
    found = sorted(
        split(devices, most, devices),
        key=lambda sizes: (len(sizes), sizes[:1] > (_HUGE,), sizes[::-1]),
    )
    return found or [()]


def by_size(sizes: Sequence[int]) -> tuple[float, ...]:
    """Return how much each axis of a mesh is taken to carry before it is known."""
    return tuple(3.0**number for number in range(len(sizes)))


def named_intensity(
    names: Sequence[str], sizes: Sequence[int], carried: Sequence[float] | None
) -> dict[str, float]:
    """Return intensities with which a mesh with names is placed as `speeds_on` places it without.

    The intensity of an axis that moves weights counts for the part that the others leave of them.

    >>> named_intensity(["fsdp", "tp"], [32, 8], [2.0, 3.0])
    {'fsdp': 16.0, 'tp': 3.0}
    """
    parts = axis_weights(names, sizes, dict.fromkeys(names, 1.0))
    weights = carried or by_size(sizes)
    return {name: weight / part for name, weight, part in zip(names, weights, parts, strict=True)}


def speeds_on(
    sizes: Sequence[int],
    hardware: Hardware,
    intensity: Sequence[float] | None = None,
    scatters: bool = True,
) -> tuple[AxisSpeed, ...]:
    """Place a mesh of these sizes and return the speeds of its axes.

    Before it is known what an axis carries, small axes count as the busiest ones. A mesh that is
    placed already lies as it lies.
    """
    if not sizes:
        return ()
    if isinstance(hardware, Placement):
        return tuple(axis_speed(axis, hardware.topology, scatters) for axis in hardware.axes)
    names = [f"axis{number}" for number in range(len(sizes))]
    weights = intensity or by_size(sizes)
    spec = MeshSpec.parse(list(zip(names, sizes, strict=True)))
    placed = placement_of(spec, hardware, intensity=dict(zip(names, weights, strict=True)))
    return tuple(axis_speed(axis, hardware, scatters) for axis in placed.axes)


class _Allowed:
    """Which kinds an axis may list: those it divides somewhere, and what the user keeps.

    Those of queries only where the search is for them.
    """

    def __init__(self, costs: PlanCosts, kept: Mapping[int, int], queries: bool = False):
        self.kept = kept  # kind -> axis, which it takes alone, before all that is not kept
        self.every = costs.groups.every
        self.kinds = [
            [
                kind
                for kind in range(costs.groups.count)
                if kept.get(kind, axis) == axis
                and (queries or kind in kept or kind not in costs.groups.queries)
                and any(size % length == 0 for size in costs.groups.sizes[kind])
            ]
            for axis, length in enumerate(costs.sizes)
        ]

    def ok(self, lists: Lists) -> bool:
        for axis, order in enumerate(lists):
            first = {kind for kind, at in self.kept.items() if at == axis}
            if set(order[: len(first)]) != first:
                return False
        return all(kind in self.kinds[axis] for axis, order in enumerate(lists) for kind in order)

    def in_order(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """Put what is kept first, and the kind that stands for all weights last.

        Behind that no other of theirs counts.
        """
        if not self.kept and self.every not in order[:-1]:
            return order
        return tuple(sorted(order, key=lambda kind: (kind not in self.kept, kind == self.every)))

    def start(self) -> Lists:
        return tuple(
            tuple(kind for kind, at in sorted(self.kept.items()) if at == axis)
            for axis in range(len(self.kinds))
        )


def search_lists(
    costs: PlanCosts,
    seeds: Sequence[Lists] = (),
    kept: Mapping[int, int] | None = None,
    hopeless: float = math.inf,
) -> list[tuple[float, Lists]]:
    """Return the best plans that were found on the mesh of `costs`, the best first.

    A search that is still above `hopeless` after some rounds is ended.
    """
    allowed = _Allowed(costs, kept or {})
    start = allowed.start()
    seen: dict[Lists, float] = {start: costs.objective(start)}
    simple = [start, *_simple(allowed, start)]
    # Seeds are ahead of simple plans at first, and may lead nowhere: few axes are searched twice.
    apart = seeds and len(start) <= _SEARCHED_TWICE
    for firsts in [simple, seeds] if apart else [[*seeds, *simple]]:
        _climb(costs, allowed, [lists for lists in firsts if allowed.ok(lists)], seen, hopeless)
    return sorted((cost, lists) for lists, cost in seen.items())[: 2 * _BEAM]


def _climb(
    costs: PlanCosts,
    allowed: _Allowed,
    firsts: Sequence[Lists],
    seen: dict[Lists, float],
    hopeless: float,
) -> None:
    """Go from some plans to better ones, the best few at a time; `seen` gets what they cost."""

    def cost(lists: Lists) -> float:
        if lists not in seen:
            seen[lists] = costs.objective(lists)
        return seen[lists]

    def best_of(many: Iterable[Lists]) -> list[Lists]:
        # Of plans with the same kinds in another order, and as fast, one is enough.
        different: dict[Any, Lists] = {}
        for lists in sorted(many, key=lambda lists: (cost(lists), lists)):
            different.setdefault((seen[lists], tuple(map(frozenset, lists))), lists)
        return list(different.values())[:_BEAM]

    front = best_of(firsts)
    if not front:
        return
    met, best, stale = set(front), front[0], 0
    for rounds in itertools.count():
        if not front or stale >= _PATIENCE or (rounds >= _PATIENCE and seen[best] > hopeless):
            break
        new = {other for lists in front for other in _neighbours(lists, allowed)} - met
        met |= new
        front = best_of(new)
        stale = 0 if front and seen[front[0]] < seen[best] * _BETTER else stale + 1
        best = min([best, *front], key=lambda lists: (seen[lists], lists))


def _simple(allowed: _Allowed, start: Lists) -> Iterator[Lists]:
    """Yield plans with one kind for each axis, beside what is kept."""
    options = [
        [order, *((*order, kind) for kind in allowed.kinds[axis][:_SEEDED_KINDS])]
        for axis, order in enumerate(start)
    ]
    if math.prod(map(len, options)) <= 1000:
        yield from itertools.product(*options)


def _neighbours(lists: Lists, allowed: _Allowed) -> Iterator[Lists]:
    """Yield the plans that differ by an entry more or less, one in another place, or two lists."""

    def changed(axis: int, order: tuple[int, ...]) -> Lists:
        return (*lists[:axis], allowed.in_order(order), *lists[axis + 1 :])

    for axis, order in enumerate(lists):
        if len(order) < _LONGEST:
            for kind in allowed.kinds[axis]:
                if kind not in order:
                    for at in range(len(order) + 1):
                        yield changed(axis, (*order[:at], kind, *order[at:]))
        for at, kind in enumerate(order):
            if allowed.kept.get(kind) != axis:
                yield changed(axis, order[:at] + order[at + 1 :])
            if at:
                yield changed(axis, (*order[: at - 1], kind, order[at - 1], *order[at + 1 :]))
    for one, other in itertools.permutations(range(len(lists)), 2):
        for at, kind in enumerate(lists[one]):
            if kind in allowed.kinds[other] and kind not in lists[other] + tuple(allowed.kept):
                moved = list(lists)
                moved[one] = lists[one][:at] + lists[one][at + 1 :]
                moved[other] = allowed.in_order((*lists[other], kind))
                yield tuple(moved)
    for one, other in itertools.combinations(range(len(lists)), 2):
        swapped = list(lists)
        swapped[one], swapped[other] = lists[other], lists[one]
        if allowed.ok(tuple(swapped)):
            yield tuple(swapped)


def search_meshes(
    costs: PlanCosts,
    hardware: Hardware,
    meshes: Sequence[tuple[int, ...]],
    *,
    scatters: bool = True,
    kept: Mapping[int, int] | None = None,
    told: Callable[[tuple[int, ...], int], None] | None = None,
) -> list[Candidate]:
    """Search every mesh, coarse ones first; return the best plans of each, the best first.

    A found plan's exchanges say how much each axis carries: the mesh is placed anew by that, and
    costed again.
    """
    found: dict[tuple[int, ...], list[Candidate]] = {}
    for number, sizes in enumerate(meshes):
        if len(found) == _MOST_MESHES:
            break
        hopeless = _HOPELESS * min(
            (candidates[0].objective for candidates in found.values()), default=math.inf
        )
        parents = [
            candidates[0].objective
            for coarse, candidates in found.items()
            if len(coarse) == len(sizes) - 1 and any(_split_axis(coarse, coarse, sizes))
        ]
        if len(sizes) > 2 and min(parents, default=0.0) > hopeless:
            continue
        if told is not None:
            told(sizes, number)
        costs.on(speeds_on(sizes, hardware, scatters=scatters))
        seeds = [
            lists
            for coarse, candidates in found.items()
            if len(coarse) == len(sizes) - 1
            for candidate in candidates[:2]
            for lists in _split_axis(coarse, candidate.lists, sizes)
        ]
        seeds += [
            candidates[0].lists for other, candidates in found.items() if len(other) == len(sizes)
        ]
        best = [lists for _, lists in search_lists(costs, seeds, kept, hopeless)]
        # By what the best plan carries over each axis, the mesh may lie better.
        first, carried = costs.axes, None
        moved = _carried(costs, best[0])
        if (again := speeds_on(sizes, hardware, moved, scatters)) != first:
            reached = costs.objective(best[0])
            costs.on(again)
            if costs.objective(best[0]) < reached:
                best = [lists for _, lists in search_lists(costs, best[:_BEAM], kept, hopeless)]
                carried = moved
            else:
                costs.on(first)
        found[sizes] = [
            Candidate(sizes, lists, costs.objective(lists), costs.totals(lists), carried)
            for lists in best[: 2 * _BEAM]
        ]
    return sorted(
        (each for candidates in found.values() for each in candidates),
        key=lambda each: each.rank,
    )


# In: the plans that were found, none of which cuts queries. Out: better ones that do. They are
# looked for apart, so that the others are what they would be without: compilers do not always keep
# to a plan that cuts scores by their queries, and then the best of the others is taken. One change
# of the best plans of each mesh is tried, and the meshes that come out best are searched.
def search_queries(
    costs: PlanCosts,
    hardware: Hardware,
    found: Sequence[Candidate],
    scatters: bool,
    kept: Mapping[int, int],
) -> list[Candidate]:
    """Return plans that cut queries (context parallelism), if they may be better than `found`."""
    queries = costs.groups.queries
    if not queries or not found or queries.keys() & kept.keys():
        return []
    best = found[0].objective
    starts = []
    for sizes in dict.fromkeys(each.sizes for each in found):
        here = [each for each in found if each.sizes == sizes]
        costs.on(speeds_on(sizes, hardware, here[0].intensity, scatters))
        firsts = [
            lists
            for each in here[:_BEAM]
            for lists in _neighbours(each.lists, _Allowed(costs, kept, queries=True))
            if queries.keys() & set(itertools.chain(*lists))
        ]
        if firsts:
            least = min(costs.objective(lists) for lists in firsts)
            starts.append((least, sizes, here[0].intensity, firsts))
    result = []
    for least, sizes, carried, firsts in sorted(starts)[:_BEAM]:
        if least > _HOPELESS * best:
            break
        costs.on(speeds_on(sizes, hardware, carried, scatters))
        seen: dict[Lists, float] = {}
        allowed = _Allowed(costs, kept, queries=True)
        _climb(costs, allowed, firsts, seen, _NO_GAIN * best)
        better: dict[Totals, Candidate] = {}
        for cost, lists in sorted((cost, lists) for lists, cost in seen.items()):
            if cost < MAY_BE_BETTER * best and queries.keys() & set(itertools.chain(*lists)):
                totals = costs.totals(lists)
                better.setdefault(totals, Candidate(sizes, lists, cost, totals, carried))
        result += list(better.values())[:_BEAM]
    return sorted(result, key=lambda each: each.rank)


def _carried(costs: PlanCosts, lists: Lists) -> tuple[float, ...]:
    """Bytes that a plan moves over each axis in a step, as intensities for a placement."""
    moved = [1.0] * len(lists)
    for entry, _, times in costs.exchanges(lists):
        moved[entry.axis] += times * entry.bytes
    return tuple(moved)


def _split_axis(
    coarse: tuple[int, ...], lists: Sequence[Any], fine: tuple[int, ...]
) -> Iterator[tuple[Any, ...]]:
    """Yield the plan of a coarse mesh on a finer one, where one axis has become two."""
    for order in itertools.permutations(range(len(fine))):
        # The first two of this order come from one axis, the others are as they were.
        one, other, *rest = order
        if one > other:
            continue
        left = list(enumerate(coarse))
        assigned: dict[int, int] = {}
        for axis in (None, *rest):
            size = fine[one] * fine[other] if axis is None else fine[axis]
            match = next((entry for entry in left if entry[1] == size), None)
            if match is None:
                break
            left.remove(match)
            for target in (one, other) if axis is None else (axis,):
                assigned[target] = match[0]
        else:
            yield tuple(lists[assigned[axis]] for axis in range(len(fine)))


def axis_names(
    lists: Lists,
    batch: frozenset[int],
    experts: frozenset[int],
    queries: Mapping[int, int] | None = None,
) -> tuple[str, ...]:
    """Name the axes of a plan by what they shard, as JAX users do: dp, fsdp, ep, cp, tp."""
    names: list[str] = []
    for order in lists:
        if order and order[0] in experts:
            name = "ep"
        elif batch.intersection(order):
            name = "dp" if all(kind in batch for kind in order) else "fsdp"
        elif any(q in order and order[0] in (q, same) for q, same in (queries or {}).items()):
            name = "cp"
        else:
            name = "tp"
        count = sum(each.rstrip("0123456789") == name for each in names)
        names.append(f"{name}{count + 1}" if count else name)
    return tuple(names)
