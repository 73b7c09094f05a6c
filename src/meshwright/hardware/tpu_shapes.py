"""Which shapes a TPU slice comes in, which shape a number of chips means, which of its dimensions
wrap around, and which shapes may be wired as twisted tori.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.errors import TopologyError, listing
from meshwright.hardware.chips import Chip

# From the cloud docs: every slice shape of the two-dimensional chips.
PLANAR = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# And the shapes below one cube of 4x4x4; v5p and TPU7x lack a few, all are buildable.
BELOW_CUBE = ((1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))

# The table of slices of the cloud docs for TPU v5p, and 8x8x12 of the defaults that Google's xpk
# has for v4: taken for what an accelerator type such as v5p-512 gets, and not twisted. Other
# shapes with as many chips must be asked for.
DOCUMENTED = (
    *((4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 12), (8, 8, 16)),
    *((8, 16, 16), (16, 16, 16), (16, 16, 24)),
)


def shapes_of_count(chip: Chip, chips: int) -> list[tuple[int, ...]]:
    """Return the shapes that a slice of so many chips may have, the documented default first.

    Only the default is returned where the cloud docs name one: it needs no choice.

    >>> from meshwright.hardware.chips import CHIPS
    >>> shapes_of_count(CHIPS["v5e"], 16), shapes_of_count(CHIPS["v5p"], 256)
    ([(4, 4)], [(4, 8, 8)])
    >>> shapes_of_count(CHIPS["v5p"], 384)
    [(4, 4, 24), (4, 8, 12)]
    """
    small = PLANAR if chip.torus == 2 else (*BELOW_CUBE, *DOCUMENTED)
    documented = [shape for shape in small if math.prod(shape) == chips <= chip.pod]
    if documented or chip.torus == 2 or chips % 64 or chips > chip.pod:
        return [tuple(shape) for shape in documented[:1]]
    cubes = chips // 64
    sides = [side for side in range(1, cubes + 1) if cubes % side == 0]
    return [
        (4 * a, 4 * b, 4 * (cubes // (a * b)))
        for a in sides
        for b in sides
        if cubes % (a * b) == 0 and a <= b <= cubes // (a * b)
    ]


def check_shape(chip: Chip, shape: tuple[int, ...]) -> None:
    """Refuse a shape that this chip does not come in, and name the near ones."""
    if chip.torus == 2:
        if shape not in PLANAR and shape[::-1] not in PLANAR:
            raise TopologyError(
                f"{chip.name} does not come in {shape_text(shape)}. Its shapes: "
                f"{listing((shape_text(s) for s in PLANAR), 10)}."
            )
        return
    chips = math.prod(shape)
    if len(shape) == 3 and (shape in BELOW_CUBE or is_whole_cubes(shape)) and chips <= chip.pod:
        return
    if chips > chip.pod:
        why = f"it has {chips} chips and a pod has {chip.pod}"
    else:
        why = f"beyond {shape_text(BELOW_CUBE[-1])} every side is a multiple of 4"
    rounded = tuple(max(4, 4 * round(side / 4)) for side in (*shape, 1, 1)[:3])
    nearest = f" Near: {shape_text(rounded)}." if math.prod(rounded) <= chip.pod else ""
    raise TopologyError(
        f"{chip.name} does not come in {shape_text(shape)}: {why}. Smaller shapes: "
        f"{listing(shape_text(s) for s in BELOW_CUBE)}.{nearest}"
    )


def wraparound(chip: Chip, shape: Sequence[int]) -> tuple[bool, ...]:
    """Return which dimensions of a slice close to a ring.

    v5e and v6e: only a whole side of 16. v4, v5p, TPU7x: all, once the slice is made of
    whole 4x4x4 cubes, because optical switches join the faces of the cubes.
    """
    if chip.torus == 2:
        return tuple(side == 16 for side in shape)
    return (is_whole_cubes(shape),) * len(shape)


def can_twist(chip: Chip, shape: Sequence[int]) -> bool:
    """Whether a slice can be a twisted torus: n x n x 2n or n x 2n x 2n, made of whole cubes."""
    if chip.torus != 3 or not is_whole_cubes(shape):
        return False
    a, b, c = sorted(shape)
    return c == 2 * a and b in (a, c)


def is_whole_cubes(shape: Sequence[int]) -> bool:
    return all(side % 4 == 0 for side in shape)


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
