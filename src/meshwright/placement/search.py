"""The search: choose a piece of the machine for every axis, together covering all of it."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.hardware.topology import PhysicalAxis, Topology
from meshwright.placement.cost_model import Part, Parts, axis_cost

_SAME = 1e-9


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to lay out every axis, with its weighted cost."""

    cost: float
    parts: tuple[Parts, ...]


@dataclasses.dataclass(frozen=True)
class _Option:
    """One way to lay out one axis. `use` packs what it takes of the machine into an integer."""

    cost: float
    use: int
    parts: Parts


class _Ledger:
    """What is left of the machine, packed: one field per prime factor that can be taken.

    A torus prime has a field of its own, since its place matters; the equal primes of a
    switch or network share one. The top bit of each field is a guard: it falls when more is
    taken than there is, so one subtraction checks every field at once.
    """

    def __init__(self, topology: Topology, nesting: Sequence[Sequence[int]]):
        self._fields: dict[tuple[int, int], int] = {}
        self.all = self.guard = shift = 0
        for dim, order in enumerate(nesting):
            torus = topology.axes[dim].kind == "torus"
            keys = range(len(order)) if torus else sorted(set(order))
            for key in keys:
                amount = 1 if torus else order.count(key)
                width = amount.bit_length()
                self._fields[dim, key] = shift
                self.all |= amount << shift
                self.guard |= 1 << (shift + width)
                shift += width + 1
        self._topology, self._nesting = topology, nesting

    def use(self, parts: Parts) -> int:
        total = 0
        for part in parts:
            if self._topology.axes[part.dim].kind == "torus":
                stride = 1
                for place, prime in enumerate(self._nesting[part.dim]):
                    if part.stride <= stride < part.stride * part.factor:
                        total += 1 << self._fields[part.dim, place]
                    stride *= prime
            else:
                for prime in primes(part.factor):
                    total += 1 << self._fields[part.dim, prime]
        return total


def search(
    topology: Topology,
    sizes: Sequence[int],
    weights: Sequence[float],
    slow: Sequence[int | None],
    allow_split: bool,
) -> list[Choice]:
    """The best choice and the next one of another cost, best first. Empty: none exists.

    Complete: depth first over axes, heaviest first, each with its options in the order of
    their cost. A branch is left when even the cheapest rest cannot beat the second best, or when
    the same part of the machine was left over before at two lower costs, or at the same one.
    """
    best: list[Choice] = []
    for nesting in nestings(topology):
        if not allow_split and any(
            order != primes(axis.size) for order, axis in zip(nesting, topology.axes, strict=True)
        ):
            continue  # whole directions look alike in any order
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
    ledger = _Ledger(topology, nesting)
    pieces = [
        runs(axis, dim, nesting[dim], whole=not allow_split)
        if axis.kind == "torus"
        else shares(axis, dim)
        for dim, axis in enumerate(topology.axes)
    ]
    options = [
        _options(topology, ledger, pieces, size, weight, part, place / max(1, len(sizes) - 1))
        for place, (size, weight, part) in enumerate(zip(sizes, weights, slow, strict=True))
    ]
    if not all(options):
        return
    axes = sorted(range(len(sizes)), key=lambda i: (-options[i][-1].cost, len(options[i]), i))
    rest = [math.fsum(options[i][0].cost for i in axes[k:]) for k in range(len(axes) + 1)]
    chosen: list[_Option] = []
    reached: dict[tuple[int, int], list[float]] = {}

    def descend(level: int, left: int, cost: float) -> None:
        if level == len(axes):
            if left == 0:
                placed = dict(zip(axes, (option.parts for option in chosen), strict=True))
                _keep(best, Choice(cost, tuple(placed[i] for i in range(len(axes)))))
            return
        if not _is_news(reached.setdefault((level, left), []), cost):
            return
        for option in options[axes[level]]:
            total = cost + option.cost
            if _too_dear(best, total + rest[level + 1]):
                break
            after = (left | ledger.guard) - option.use
            if after & ledger.guard == ledger.guard:
                chosen.append(option)
                descend(level + 1, after ^ ledger.guard, total)
                chosen.pop()

    descend(0, ledger.all, 0.0)


def _options(
    topology: Topology,
    ledger: _Ledger,
    pieces: list[list[Part | None]],
    size: int,
    weight: float,
    slow: int | None,
    place: float,
) -> list[_Option]:
    """Every layout of one axis, cheapest first; among equals, the one nearest its own place."""
    found = []
    for parts in combinations(size, pieces):
        if slow is not None and slow != math.prod(
            p.factor for p in parts if topology.axes[p.dim].kind == "network"
        ):
            continue
        cost = weight * axis_cost(topology, parts).all_gather
        found.append(_Option(cost, ledger.use(parts), parts))
    last = max(1, len(topology.axes) - 1)

    def away(option: _Option) -> tuple[Any, ...]:
        away = sum(abs(p.dim / last - place) for p in option.parts)
        return (float(f"{option.cost:.9g}"), away, tuple((p.dim, p.stride) for p in option.parts))

    return sorted(found, key=away)


def _is_news(before: list[float], cost: float) -> bool:
    """Whether `cost` is among the two lowest so far and unlike them; notes it if so."""
    if any(abs(cost - other) <= _SAME * other for other in before):
        return False
    if len(before) == 2 and cost > before[1]:
        return False
    before[:] = sorted([*before, cost])[:2]
    return True


def _too_dear(best: list[Choice], least: float) -> bool:
    """Whether nothing of this cost or more can become the best or the runner-up."""
    return len(best) == 2 and least >= best[1].cost * (1 - _SAME)


def _keep(best: list[Choice], choice: Choice) -> None:
    """Hold the two best of different cost; the first found wins among equals."""
    if all(abs(choice.cost - other.cost) > _SAME * other.cost for other in best):
        best[:] = heapq.nsmallest(2, [*best, choice], key=lambda c: c.cost)


# Primes, and the ways to take an axis out of the physical directions.


@functools.cache
def primes(number: int) -> tuple[int, ...]:
    """
    >>> primes(28)
    (2, 2, 7)
    """
    found, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return (*found, number) if number > 1 else tuple(found)


def prime_orders(number: int) -> list[tuple[int, ...]]:
    """Every order in which a direction's primes can be nested, innermost first."""
    return sorted(set(itertools.permutations(primes(number)))) if number > 1 else [()]


def nestings(topology: Topology) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to order the primes of every direction.

    The order matters on a torus alone: a switch or a network joins all its devices alike.
    """
    yield from itertools.product(
        *(
            prime_orders(axis.size) if axis.kind == "torus" else [primes(axis.size)]
            for axis in topology.axes
        )
    )


def runs(axis: PhysicalAxis, dim: int, order: tuple[int, ...], whole: bool) -> list[Part | None]:
    """The pieces of a torus direction that one mesh axis may take: none, or a run of primes.

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
            pieces.append(Part(dim, factor, stride))
    return pieces


def shares(axis: PhysicalAxis, dim: int) -> list[Part | None]:
    """The pieces of a switch, network or chip: any divisor. The stride comes later."""
    divisors = [d for d in range(2, axis.size + 1) if axis.size % d == 0]
    return [None, *(Part(dim, factor, 0) for factor in divisors)]


def combinations(
    size: int, pieces: Sequence[Sequence[Part | None]], dim: int = 0
) -> Iterator[Parts]:
    """Every choice of one piece per direction whose factors multiply to `size`."""
    if dim == len(pieces):
        if size == 1:
            yield ()
        return
    for piece in pieces[dim]:
        if piece is None:
            yield from combinations(size, pieces, dim + 1)
        elif size % piece.factor == 0:
            for rest in combinations(size // piece.factor, pieces, dim + 1):
                yield (piece, *rest)
