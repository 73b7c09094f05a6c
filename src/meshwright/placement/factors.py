"""Primes, and the ways to take an axis out of the physical directions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from meshwright.hardware import PhysicalAxis, Topology


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of one physical direction: `factor` devices, `stride` apart."""

    dim: int
    factor: int
    stride: int


Parts = tuple[Part, ...]


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
