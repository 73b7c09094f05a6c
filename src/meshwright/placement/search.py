"""Search the layouts of a mesh: a piece of the machine for every axis, together all of it.

A layout gives every mesh axis some prime factors of the physical directions. On v5e:4x4, for
example, `dp:2, tp:8` can take 2 of x for `dp` and the other 2 of x with all of y for `tp`. The
search is complete, and exact up to ties: it returns the cheapest layout and the runner-up.

The order of primes within a torus direction matters (2 chips next to each other, or 2 chips half
a side apart), so the search runs once per order (`prime_nestings`) and keeps the best of all.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.hardware.topology import PhysicalAxis, Topology
from meshwright.placement.cost_model import (
    Part,
    Parts,
    axis_cost,
    parts_of_kind,
    total_factor,
)

# Costs are sums of floats in different orders; within this they count as equal.
_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to lay out every axis, with its weighted cost."""

    cost: float
    parts: tuple[Parts, ...]


def search(
    topology: Topology,
    sizes: Sequence[int],
    weights: Sequence[float],
    slow: Sequence[int | None],
    allow_split: bool,
) -> list[Choice]:
    """Return the best choice and the next one of another cost, best first; empty if none exists.

    `sizes`, `weights` and `slow` have one entry per mesh axis; `slow` fixes how many parts over
    DCN an axis spans, `None` leaves it free. `allow_split=False` gives every torus
    direction to one axis as a whole.

    Complete: depth first over axes, heaviest first, each with its options in the order of
    their cost. A branch is left when even the cheapest rest cannot beat the second best, or when
    the same part of the machine was left over before at two lower costs, or at the same one.
    """
    best: list[Choice] = []
    for nesting in prime_nestings(topology):
        if not allow_split and any(
            order != primes(axis.size) for order, axis in zip(nesting, topology.axes, strict=True)
        ):
            continue  # whole directions look alike in any order
        # `best` is shared, so later nestings are pruned by what earlier ones found.
        _search_nesting(topology, nesting, sizes, weights, slow, allow_split, best)
    return best


def _search_nesting(
    topology: Topology,
    nesting: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    weights: Sequence[float],
    slow: Sequence[int | None],
    allow_split: bool,
    best: list[Choice],
) -> None:
    machine = _PackedMachine(topology, nesting)
    pieces = [
        torus_pieces(direction, nesting[direction], whole=not allow_split)
        if axis.kind == "torus"
        else switch_pieces(axis, direction)
        for direction, axis in enumerate(topology.axes)
    ]
    options = [
        _options(topology, machine, pieces, size, weight, part, place / max(1, len(sizes) - 1))
        for place, (size, weight, part) in enumerate(zip(sizes, weights, slow, strict=True))
    ]
    if not all(options):  # an axis that fits nowhere, e.g. a prime the machine does not have
        return
    # The axis with the most at stake first: its cheap options then bound all that follows.
    axes = sorted(range(len(sizes)), key=lambda i: (-options[i][-1].cost, len(options[i]), i))
    cheapest_rest = [math.fsum(options[i][0].cost for i in axes[k:]) for k in range(len(axes) + 1)]
    chosen: list[_Option] = []
    # What is left of the machine decides what can follow, however it came about.
    reached: dict[tuple[int, int], list[float]] = {}

    def descend(level: int, left: int, cost: float) -> None:
        if level == len(axes):
            if left == 0:  # only a layout that uses every device counts
                placed = dict(zip(axes, (option.parts for option in chosen), strict=True))
                _keep_two_best(best, Choice(cost, tuple(placed[i] for i in range(len(axes)))))
            return
        if not _improves(reached.setdefault((level, left), []), cost):
            return
        for option in options[axes[level]]:
            total = cost + option.cost
            if _cannot_improve(best, total + cheapest_rest[level + 1]):
                break  # options are sorted by cost: the others are no better
            after = (left | machine.guard) - option.use
            if after & machine.guard == machine.guard:  # no field was overdrawn
                chosen.append(option)
                descend(level + 1, after ^ machine.guard, total)
                chosen.pop()

    descend(0, machine.all, 0.0)


@dataclasses.dataclass(frozen=True)
class _Option:
    """One way to lay out one axis. `use` packs what it takes of the machine into an integer."""

    cost: float
    use: int
    parts: Parts


class _PackedMachine:
    """The machine as an integer: one bit field per prime factor that an axis can take.

    A torus prime has a field of its own, since its place matters; the equal primes of a
    switch or network share one that counts them. The top bit of each field is a guard: it falls
    when more is taken than there is, so one subtraction checks every field at once. `all` is the
    whole machine, `guard` all guard bits.
    """

    def __init__(self, topology: Topology, nesting: Sequence[Sequence[int]]):
        self._fields: dict[tuple[int, int], int] = {}
        self.all = self.guard = shift = 0
        for direction, order in enumerate(nesting):
            torus = topology.axes[direction].kind == "torus"
            keys = range(len(order)) if torus else sorted(set(order))
            for key in keys:
                count = 1 if torus else order.count(key)
                width = count.bit_length()
                self._fields[direction, key] = shift
                self.all |= count << shift
                self.guard |= 1 << (shift + width)
                shift += width + 1
        self._topology, self._nesting = topology, nesting

    def use(self, parts: Parts) -> int:
        """What an axis made of these parts takes, as a number to subtract."""
        total = 0
        for part in parts:
            if self._topology.axes[part.direction].kind == "torus":
                stride = 1
                for place, prime in enumerate(self._nesting[part.direction]):
                    # This prime spans the strides from `stride` on; is it inside the part?
                    if part.stride <= stride < part.stride * part.factor:
                        total += 1 << self._fields[part.direction, place]
                    stride *= prime
            else:
                for prime in primes(part.factor):
                    total += 1 << self._fields[part.direction, prime]
        return total


def _options(
    topology: Topology,
    machine: _PackedMachine,
    pieces: list[list[Part | None]],
    size: int,
    weight: float,
    slow: int | None,
    place: float,
) -> list[_Option]:
    """Every layout of one axis, cheapest first; among equals, the one nearest its own place.

    `place` runs from 0 for the first mesh axis to 1 for the last. Ties go to directions at the
    same place, so that outer mesh axes lie in outer directions, as in a plain reshape.
    """
    options = []
    for parts in combinations(size, pieces):
        spans = total_factor(parts_of_kind(topology, parts, "network"))
        if slow is None or slow == spans:
            cost = weight * axis_cost(topology, parts).all_gather
            options.append(_Option(cost, machine.use(parts), parts))
    last = max(1, len(topology.axes) - 1)

    def rank(option: _Option) -> tuple[Any, ...]:
        away = sum(abs(p.direction / last - place) for p in option.parts)
        # Rounded, or the last bits of equal costs would decide instead.
        cost = float(f"{option.cost:.9g}")
        return (cost, away, tuple((p.direction, p.stride) for p in option.parts))

    return sorted(options, key=rank)


def _improves(before: list[float], cost: float) -> bool:
    """Whether `cost` is among the two lowest so far and unlike them; notes it if so."""
    # Equal cost and equal remainder: whatever follows was seen already.
    if any(abs(cost - other) <= _TOLERANCE * other for other in before):
        return False
    if len(before) == 2 and cost > before[1]:
        return False
    before[:] = sorted([*before, cost])[:2]
    return True


def _cannot_improve(best: list[Choice], least: float) -> bool:
    """Whether nothing of this cost or more can become the best or the runner-up."""
    return len(best) == 2 and least >= best[1].cost * (1 - _TOLERANCE)


def _keep_two_best(best: list[Choice], choice: Choice) -> None:
    """Add a choice to the two best of different cost; the first found wins among equals."""
    if all(abs(choice.cost - other.cost) > _TOLERANCE * other.cost for other in best):
        best[:] = heapq.nsmallest(2, [*best, choice], key=lambda c: c.cost)


@functools.cache
def primes(number: int) -> tuple[int, ...]:
    """Return the prime factors of a number, smallest first.

    >>> primes(28)
    (2, 2, 7)
    """
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return (*factors, number) if number > 1 else tuple(factors)


def prime_orders(number: int) -> list[tuple[int, ...]]:
    """Return every order in which a direction's primes can be nested, innermost first."""
    return sorted(set(itertools.permutations(primes(number)))) if number > 1 else [()]


def prime_nestings(topology: Topology) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every way to order the primes of every direction.

    The order matters on a torus alone: a switch or a network joins all its devices alike.
    """
    yield from itertools.product(
        *(
            prime_orders(axis.size) if axis.kind == "torus" else [primes(axis.size)]
            for axis in topology.axes
        )
    )


def torus_pieces(direction: int, order: tuple[int, ...], whole: bool) -> list[Part | None]:
    """Return the pieces of a torus direction that one mesh axis may take: none, or a run of primes.

    One run is enough. Two runs with a gap are never better: moving the lower one up to the
    upper leaves the largest stride of the axis as it was, and lets those in the gap move down
    to shorter strides.
    """
    pieces: list[Part | None] = [None]
    for start in range(len(order)):
        for end in range(start + 1, len(order) + 1):
            if whole and end - start != len(order):
                continue
            stride, factor = math.prod(order[:start]), math.prod(order[start:end])
            pieces.append(Part(direction, factor, stride))
    return pieces


def switch_pieces(axis: PhysicalAxis, direction: int) -> list[Part | None]:
    """Return the pieces of a switch, network or chip: any divisor. The placer sets strides later.

    All devices behind a switch are alike, so only how many an axis takes matters to its cost.
    """
    divisors = [d for d in range(2, axis.size + 1) if axis.size % d == 0]
    return [None, *(Part(direction, factor, 0) for factor in divisors)]


def combinations(
    size: int, pieces: Sequence[Sequence[Part | None]], direction: int = 0
) -> Iterator[Parts]:
    """Yield every choice of one piece per direction whose factors multiply to `size`."""
    if direction == len(pieces):
        if size == 1:
            yield ()
        return
    for piece in pieces[direction]:
        if piece is None:
            yield from combinations(size, pieces, direction + 1)
        elif size % piece.factor == 0:
            for rest in combinations(size // piece.factor, pieces, direction + 1):
                yield (piece, *rest)
