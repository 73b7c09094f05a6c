"""Which shapes a TPU comes in, which of their dimensions wrap around, which may be twisted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.errors import TopologyError, listing
from meshwright.hardware.chips import Chip

# cloud docs: every slice shape of the two-dimensional chips.
PLANAR = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# cloud docs: the shapes below one cube of 4x4x4; v5p and TPU7x lack a few, all are buildable.
BELOW_CUBE = ((1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


def check_shape(chip: Chip, shape: tuple[int, ...]) -> None:
    """Refuse a shape that this chip does not come in, and name the near ones."""
    if chip.torus == 2:
        known = {
            *PLANAR,
            *(s[::-1] for s in PLANAR),
        }
        if shape not in known:
            raise TopologyError(
                f"{chip.name} does not come in {text(shape)}. Its shapes: "
                f"{listing((text(s) for s in PLANAR), 10)}."
            )
        return
    chips = math.prod(shape)
    if len(shape) == 3 and (shape in BELOW_CUBE or is_cubes(shape)) and chips <= chip.pod:
        return
    if chips > chip.pod:
        why = f"it has {chips} chips and a pod has {chip.pod}"
    else:
        why = f"beyond {text(BELOW_CUBE[-1])} every side is a multiple of 4"
    rounded = tuple(max(4, 4 * round(side / 4)) for side in (*shape, 1, 1)[:3])
    near = f" Near: {text(rounded)}." if math.prod(rounded) <= chip.pod else ""
    raise TopologyError(
        f"{chip.name} does not come in {text(shape)}: {why}. Smaller shapes: "
        f"{listing(text(s) for s in BELOW_CUBE)}.{near}"
    )


def wraparound(chip: Chip, shape: Sequence[int]) -> tuple[bool, ...]:
    """Which dimensions close to a ring.

    v5e and v6e: only a whole side of 16. v4, v5p, TPU7x: all, once the slice is made of
    whole 4x4x4 cubes.
    """
    if chip.torus == 2:
        return tuple(side == 16 for side in shape)
    return (is_cubes(shape),) * len(shape)


def may_twist(chip: Chip, shape: Sequence[int]) -> bool:
    """n x n x 2n and n x 2n x 2n, made of whole cubes, can be wired as twisted tori."""
    if chip.torus != 3 or not is_cubes(shape):
        return False
    a, b, c = sorted(shape)
    return c == 2 * a and b in (a, c)


def is_cubes(shape: Sequence[int]) -> bool:
    return all(side % 4 == 0 for side in shape)


def text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
