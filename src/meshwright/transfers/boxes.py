"""Boxes: which part of an array each device holds, and where two splits overlap. Pure."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import jax
from jax.sharding import Sharding

Shape = tuple[int, ...]
# `(start, stop)` per dim, in the indices of the whole array.
Box = tuple[tuple[int, int], ...]
Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Cut:
    """What one shard of the source gives to one shard of the target."""

    origin: Box
    part: Box
    take: Slices
    put: Slices


def box_at(index: Sequence[slice], shape: Shape) -> Box:
    """
    >>> box_at((slice(None), slice(2, 4)), (8, 8))
    ((0, 8), (2, 4))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def box_shape(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def whole(shape: Shape) -> Box:
    return tuple((0, size) for size in shape)


@functools.lru_cache(maxsize=1024)
def boxes(sharding: Sharding, shape: Shape) -> Mapping[jax.Device, Box]:
    """The box of every device, those of other processes included."""
    indices = sharding.devices_indices_map(shape)
    return {device: box_at(index or (), shape) for device, index in indices.items()}


@functools.lru_cache(maxsize=1024)
def places_here(sharding: Sharding, shape: Shape) -> Mapping[Box, int]:
    """For each box that this process holds, the position of an addressable shard with it."""
    here = sharding.addressable_devices_indices_map(shape)
    return {box_at(index or (), shape): place for place, index in enumerate(here.values())}


@functools.lru_cache(maxsize=1024)
def recipe(
    source: Sharding | None, target: Sharding, shape: Shape
) -> Mapping[Box, tuple[Cut, ...]]:
    """What each box of the target is made of. A source of None is one box, the whole array."""
    origins = set(boxes(source, shape).values()) if source else {whole(shape)}
    intervals = [sorted(set(dim)) for dim in zip(*origins, strict=True)]
    return {box: tuple(_cuts(intervals, box)) for box in set(boxes(target, shape).values())}


def in_place(source: Sharding, target: Sharding, shape: Shape) -> bool:
    """Whether every device of the target already holds its box."""
    held = boxes(source, shape)
    return source.memory_kind == target.memory_kind and all(
        held.get(device) == box for device, box in boxes(target, shape).items()
    )


def in_one_piece(source: Sharding, target: Sharding, shape: Shape) -> bool:
    """Whether every box of the target is a box of the source: nothing to cut, only to copy."""
    return set(boxes(target, shape).values()) <= set(boxes(source, shape).values())


def _cuts(intervals: Sequence[Sequence[tuple[int, int]]], box: Box) -> Iterator[Cut]:
    """Splits are grids: the shards under a box are a product of intervals, dim by dim."""
    under = (_overlapping(known, *side) for known, side in zip(intervals, box, strict=True))
    for origin in itertools.product(*under):
        part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(origin, box, strict=True))
        yield Cut(origin, part, _within(part, origin), _within(part, box))


def _overlapping(
    intervals: Sequence[tuple[int, int]], start: int, stop: int
) -> list[tuple[int, int]]:
    first = max(bisect_right(intervals, start, key=lambda interval: interval[0]) - 1, 0)
    over = itertools.takewhile(lambda interval: interval[0] < stop, intervals[first:])
    return [interval for interval in over if interval[1] > start]


def _within(part: Box, outer: Box) -> Slices:
    return tuple(
        slice(start - base, stop - base)
        for (start, stop), (base, _) in zip(part, outer, strict=True)
    )
