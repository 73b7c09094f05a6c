"""Which mesh axes a collective runs over."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class AxisPart:
    """A mesh axis, or `members` of its `size` positions.

    >>> print(AxisPart("tp", 8, 8), AxisPart("tp", 2, 8))
    tp tp:2/8
    """

    name: str
    members: int
    size: int

    @property
    def whole(self) -> bool:
        return self.members == self.size

    def __str__(self) -> str:
        return self.name if self.whole else f"{self.name}:{self.members}/{self.size}"


def axes_of(
    groups: Sequence[np.ndarray], names: Sequence[str], sizes: Sequence[int]
) -> tuple[AxisPart, ...] | None:
    """The axes, or parts of them, whose combinations every group consists of.

    `groups` hold positions in the mesh, counted in row order. `None` when the groups differ in
    size, or one of them is no full set of combinations.

    >>> [str(part) for part in axes_of([np.array([0, 2]), np.array([1, 3])], ["dp", "tp"], [2, 2])]
    ['dp']
    """
    members = groups[0].size
    if any(group.size != members for group in groups):
        return None
    coords = np.stack(np.unravel_index(np.stack(groups), tuple(sizes)), axis=-1)
    ordered = np.sort(coords, axis=1)
    different = 1 + (np.diff(ordered, axis=1) != 0).sum(axis=1)
    if (different != different[0]).any() or math.prod(different[0].tolist()) != members:
        return None
    return tuple(
        AxisPart(name, int(count), size)
        for name, count, size in zip(names, different[0], sizes, strict=True)
        if count > 1
    )


def axes_crossed(
    pairs: np.ndarray, names: Sequence[str], sizes: Sequence[int]
) -> tuple[AxisPart, ...]:
    """The axes along which some pair of sender and receiver differs."""
    coords = np.stack(np.unravel_index(pairs, tuple(sizes)), axis=-1)
    differs = (coords[:, 0] != coords[:, 1]).any(axis=0)
    return tuple(
        AxisPart(name, size, size)
        for name, size, crossed in zip(names, sizes, differs, strict=True)
        if crossed
    )
