"""Boxes: which part of an array each device holds, and where two shardings overlap.

Pure geometry, computed from shardings and shapes; no device is touched. Both `reshard` and
`route` are planned from the overlaps found here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import jax
from jax.sharding import Sharding

Shape = tuple[int, ...]
# `(start, stop)` per dim, in the indices of the whole array.
Box = tuple[tuple[int, int], ...]
Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The part that a shard of the source and a shard of the target have in common.

    `box` is that part and `source` the whole source shard, both in indices of the array;
    `take` cuts the part out of the source shard, `put` is its place in the target shard.
    """

    source: Box
    box: Box
    take: Slices
    put: Slices


# The caches below are keyed by sharding and shape. A model has few distinct pairs of them however
# many arrays it has, and on thousands of devices one entry takes milliseconds to compute.


@functools.lru_cache(maxsize=1024)
def device_boxes(sharding: Sharding, shape: Shape) -> Mapping[jax.Device, Box]:
    """Return the box of every device, those of other processes included."""
    indices = sharding.devices_indices_map(shape)
    return {device: box_at(index or (), shape) for device, index in indices.items()}


@functools.lru_cache(maxsize=1024)
def addressable_positions(sharding: Sharding, shape: Shape) -> Mapping[Box, int]:
    """Return, for each box this process holds, the position of an addressable shard with it."""
    here = sharding.addressable_devices_indices_map(shape)
    return {box_at(index or (), shape): position for position, index in enumerate(here.values())}


@functools.lru_cache(maxsize=1024)
def find_overlaps(
    source: Sharding | None, target: Sharding, shape: Shape
) -> Mapping[Box, tuple[Overlap, ...]]:
    """Return what each box of the target is made of; a source of None is one box, the whole array.

    JAX splits every dim by itself, so the boxes of a sharding form a grid. The source boxes under
    a target box are then a product of intervals, found by bisection: no pair of boxes that do not
    overlap is ever looked at.
    """
    held = set(device_boxes(source, shape).values()) if source else {whole(shape)}
    intervals = [sorted(set(dim)) for dim in zip(*held, strict=True)]
    wanted = set(device_boxes(target, shape).values())
    return {box: tuple(_overlaps_with(box, intervals)) for box in wanted}


def is_in_place(source: Sharding, target: Sharding, shape: Shape) -> bool:
    """Whether every device of the target already holds its box."""
    held = device_boxes(source, shape)
    return source.memory_kind == target.memory_kind and all(
        held.get(device) == box for device, box in device_boxes(target, shape).items()
    )


def keeps_boxes(source: Sharding, target: Sharding, shape: Shape) -> bool:
    """Whether every box of the target is a box of the source: shards are copied, never cut."""
    held = set(device_boxes(source, shape).values())
    return set(device_boxes(target, shape).values()) <= held


def box_at(index: Sequence[slice], shape: Shape) -> Box:
    """
    >>> box_at((slice(None), slice(2, 4)), (8, 8))
    ((0, 8), (2, 4))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def box_shape(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def box_size(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(box_shape(box))


def whole(shape: Shape) -> Box:
    return tuple((0, size) for size in shape)


def relative_to(outer: Box, inner: Box) -> Box:
    """Return `inner` in the indices of the box `outer` that it lies in.

    >>> relative_to(((4, 8), (0, 8)), ((6, 8), (0, 2)))
    ((2, 4), (0, 2))
    """
    return tuple(
        (start - base, stop - base) for (start, stop), (base, _) in zip(inner, outer, strict=True)
    )


def as_slices(box: Box) -> Slices:
    return tuple(slice(start, stop) for start, stop in box)


def bounding_box(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that contains all of `boxes`.

    >>> bounding_box([((0, 2), (0, 4)), ((2, 4), (0, 4))])
    ((0, 4), (0, 4))
    """
    return tuple(
        (min(start for start, _ in dim), max(stop for _, stop in dim))
        for dim in zip(*boxes, strict=True)
    )


def tile(parts: Sequence[Box], box: Box) -> bool:
    """Whether parts of a box that do not overlap each other fill it without a gap."""
    return sum(map(box_size, parts)) == box_size(box)


def _overlaps_with(box: Box, intervals: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Overlap]:
    """Yield the overlaps of one target box with the grid of source boxes, in index order."""
    under = (_overlapping(known, *side) for known, side in zip(intervals, box, strict=True))
    for source in itertools.product(*under):
        part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(source, box, strict=True))
        yield Overlap(
            source,
            part,
            take=as_slices(relative_to(source, part)),
            put=as_slices(relative_to(box, part)),
        )


def _overlapping(
    intervals: Sequence[tuple[int, int]], start: int, stop: int
) -> list[tuple[int, int]]:
    # The last interval that begins at or before `start`; earlier ones end before it.
    first = max(bisect_right(intervals, start, key=lambda interval: interval[0]) - 1, 0)
    candidates = itertools.takewhile(lambda interval: interval[0] < stop, intervals[first:])
    return [interval for interval in candidates if interval[1] > start]
