"""What it costs to bring arrays from one cut to another, and what of it runs beside a product.

Seconds are those of the model of collectives. What compilers hide was read off the programs that
libtpu and CUDA's compiler make of single products and of decoders.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from meshwright.hardware.topology import Topology
from meshwright.placement.placement import AxisPlan
from meshwright.planning.operation_work import Work
from meshwright.planning.stored_values import LANES
from meshwright.rehearsal.collectives.costs import group_cost

Cut = dict[int, int]  # axis -> dim of a value

# What of gathers and scatters runs beside the product that they belong to, at most its time. CUDA's
# compiler starts them early; a TPU's takes product and exchange piece by piece, one for each device
# that has a part, if these are no more than 32, even of small arrays. A piece is some kernels. What
# several products need is gathered whole, and so is the smaller of two operands that lie cut
# along the sum by different axes.
_HIDDEN = {"tpu": 0.9, "gpu": 0.6}
MOST_PIECES, _LEAST_IN_PIECES = 32, 2**18
_HIDDEN_OF_MANY = {"v5e": 0.35}  # among more devices, by kind of TPU; none on others
PIECE_KERNELS = 5
# How many pieces' exchanges a product has to last (single ones on a v5e: 1.7 do not, 1.85 do).
_WAITING_PIECES = 1.8
# How much more is summed up where a scatter is not possible: in float32, and not in pieces.
_WHOLE = 4.0
_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
# Compilers merge small collectives of a loop's body: what each adds to the time until they start.
_MERGED = 0.25
# An axis that leaves a dim on which a later one stays, or comes to one that a later one cuts,
# leaves the pieces in another order than the mesh has them. Partitioners gather all axes of the
# dim, or permute the pieces of an all-to-all as well, between devices that are farther apart than
# those of one axis (how many times the all-to-all's seconds, on a v5e).
_REORDERED = 1.3
_SAMPLES = (2**20, 2**28)  # bytes between which the time of a collective is a line


@dataclasses.dataclass(frozen=True)
class AxisSpeed:
    """Seconds of each kind of collective over one axis: a constant, and per byte of the array."""

    size: int
    lines: dict[str, tuple[float, float]]

    def seconds(self, kind: str, size: float) -> float:
        """Seconds for an array of `size` bytes (of an all-gather: what it leaves)."""
        start, per_byte = self.lines[kind]
        return start + per_byte * size


def axis_speed(plan: AxisPlan, topology: Topology, scatters: bool = True) -> AxisSpeed:
    """Read the speed of an axis off the model of collectives.

    `scatters`: False for a compiler that makes an all-reduce of every reduce-scatter.
    """
    lines = {}
    small, large = _SAMPLES
    for kind in _KINDS:
        meant = "all-reduce" if kind == "reduce-scatter" and not scatters else kind
        first = group_cost(meant, small, plan, topology).seconds
        second = group_cost(meant, large, plan, topology).seconds
        slope = (second - first) / (large - small)
        lines[kind] = (_MERGED * max(0.0, first - slope * small), slope)
    return AxisSpeed(plan.size, lines)


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """One collective that a plan implies: over which axis, of how many bytes, how long.

    `runs`: for how many runs of its operation it is made once.
    """

    kind: str
    axis: int
    bytes: float
    seconds: float
    runs: int = 1


class Beside:
    """What of a product's exchanges can run beside it: seconds, and pieces that they are cut into.

    `loops`: into how many parts each loop of the product is cut; `product`: its own seconds.
    `multiplies`: a product of matrices, and not a convolution.
    `shared`: by how many products the array at hand is used; `sides`: the loops of its dims.
    `whole`: a TPU gathers the array at hand before. `rounds`: how often the result is read and
    written, to add a piece of the sum to it. `in_full`: nothing is taken in pieces, and what is
    gathered is so before, beside other work.
    """

    __slots__ = (
        "in_full", "loops", "multiplies", "pieces", "product", "rounds", "seconds", "shared",
        "sides", "whole",
    )  # fmt: skip

    def __init__(
        self,
        loops: frozenset[int],
        product: float,
        multiplies: bool = True,
        in_full: bool = False,
    ) -> None:
        self.loops = frozenset() if in_full else loops
        self.product, self.multiplies, self.in_full, self.shared = product, multiplies, in_full, 1
        self.sides: dict[int, str] = {}
        self.whole = False
        self.seconds = self.pieces = self.rounds = 0.0

    def add(self, pieces: int, seconds: float) -> None:
        """Count an exchange that is taken in so many pieces."""
        self.seconds += seconds / self.shared
        self.pieces += pieces / self.shared


class ExchangeCosts:
    """Seconds of the exchanges of one operation on one mesh.

    `overlaps`: whether the compiler runs some of them beside products.
    """

    def __init__(self, axes: Sequence[AxisSpeed], topology: Topology, overlaps: bool) -> None:
        self.axes = tuple(axes)
        self.sizes = tuple(axis.size for axis in axes)
        chip = topology.chip
        self._tpu = chip.family == "tpu" and overlaps
        self._hidden = _HIDDEN.get(chip.family, 0.0) if overlaps else 0.0
        self._hidden_of_many = _HIDDEN_OF_MANY.get(chip.name, 0.0)

    def divided(self, cut: Cut) -> int:
        """Into how many parts a cut divides an array."""
        parts = 1
        for axis in cut:  # the innermost loop of the search
            parts *= self.sizes[axis]
        return parts

    def _beside(self, beside: Beside, parts: int, size: float, seconds: float) -> bool:
        """Count what a product hides of an exchange among so many devices: a TPU's only in pieces.

        These are those of one of its loops, so that rows that other axes cut as well prevent it,
        and so does a product that is over before the next piece is there. Returns whether it is
        taken in pieces.
        """
        if not self._tpu:
            beside.add(0, self._hidden * seconds)
        elif parts > MOST_PIECES:
            if beside.multiplies:
                beside.add(0, self._hidden_of_many * seconds)
        elif (
            parts in beside.loops
            and size >= _LEAST_IN_PIECES
            and beside.product * parts >= _WAITING_PIECES * seconds
        ):
            beside.add(parts, self._hidden * seconds)
            return True
        return False

    def smaller_apart(self, work: Work, lies: Sequence[Cut], needed: Sequence[Cut]) -> int | None:
        """Of two operands that lie cut along the sum, each by an axis that the other has not, the
        number of the smaller one as they are needed; `None` where there are none, or equal ones."""
        one, other = (
            {axis for axis, dim in lies[n].items() if work.sides[n].get(dim) == "sum"}
            for n in (0, 1)
        )
        if one <= other or other <= one:
            return None
        first, second = (work.values[n][1] / self.divided(needed[n]) for n in (0, 1))
        return None if first == second else int(second < first)

    def move(
        self,
        size: float,
        have: Cut,
        want: Cut,
        log: list[Exchange] | None,
        beside: Beside | None = None,
    ) -> float:
        """Seconds to bring an array of `size` bytes from one cut to another.

        `beside` is told which of them a product can hide.
        """
        if have == want:
            return 0.0
        local, seconds = size / self.divided(have), 0.0
        parts = math.prod([self.sizes[axis] for axis in have if axis not in want])
        for axis, dim in have.items():
            if axis not in want:
                local *= self.sizes[axis]
                kind = "all-gather"
            elif want[axis] != dim:
                kind = "all-to-all"
            else:
                continue
            # Later axes that stay on the dim that this one leaves, or on the one it comes to.
            inner: list[int] = []
            for other, place in have.items():
                stays = other > axis and want.get(other) == place
                if stays and (place == dim or place == want.get(axis)):
                    inner.append(other)
            size_here = local
            if inner and kind == "all-gather":  # of all axes on the dim, and sliced
                size_here *= math.prod([self.sizes[other] for other in inner])
            taken = self.axes[axis].seconds(kind, size_here)
            seconds += taken
            if beside is not None and beside.in_full and kind == "all-gather":
                beside.add(0, self._hidden * taken)
            elif beside is not None and kind == "all-gather" and not inner:
                side = beside.sides.get(dim)
                rivals = any(beside.sides.get(other) == side for other in want.values())
                alone = not (rivals or beside.whole)
                if (alone or not self._tpu) and self._beside(beside, parts, local, taken):
                    beside.rounds += (side == "sum" and beside.multiplies) * parts
            if log is not None:
                log.append(Exchange(kind, axis, size_here, taken))
            if kind == "all-to-all" and inner:
                taken *= _REORDERED
                seconds += taken
                if log is not None:
                    log.append(Exchange("collective-permute", axis, local, taken))
        return seconds

    def reduce(
        self,
        work: Work,
        number: int,
        partial: Sequence[int],
        lies: Cut,
        made: Cut,
        log: list[Exchange] | None,
        beside: Beside,
    ) -> float:
        """Seconds to add up partial sums: scattered where the result lies cut, else everywhere."""
        seconds, thinner = 0.0, 1
        local = work.values[number][1] / self.divided(made)
        scattered = math.prod([self.sizes[axis] for axis in partial if axis in lies])
        for axis in partial:
            runs = 1
            scatters = work.scatters or self._in_pieces(work, axis, partial, lies, local, beside)
            if scatters and axis in lies and lies[axis] not in made.values():
                kind, size = "reduce-scatter", local
                local /= self.sizes[axis]
                if self._tpu and scattered > MOST_PIECES:
                    kind = "all-reduce"  # and sliced
                taken = self.axes[axis].seconds(kind, size)
                # Sums over another axis as well, as of rows and sequence, are not in pieces.
                whole = not self._tpu or all(each in lies for each in partial)
                in_pieces = whole and self._beside(beside, scattered, size, taken)
                alone = in_pieces or not work.scatters
                if self._tpu and not (alone or self._scatters(work, number, lies[axis], made)):
                    kind = "all-reduce"
                    taken = self.axes[axis].seconds(kind, size)
            else:
                # Over several axes it goes level by level, on ever smaller parts.
                kind, size = "all-reduce", local / thinner
                if axis in lies and work.scatters:  # a dim that is cut already: summed up whole
                    size *= _WHOLE
                elif axis in lies and self._tpu:
                    # Of a convolution as it is, or with all of that dim: the mean of both.
                    parts = [self.sizes[each] for each, dim in made.items() if dim == lies[axis]]
                    size *= math.sqrt(math.prod(parts))
                thinner *= self.sizes[axis]
                taken = self.axes[axis].seconds(kind, size)
                if self._hidden and axis not in lies:  # once, after the loop that adds them up
                    runs = work.runs
            seconds += taken / runs
            if log is not None:
                log.append(Exchange(kind, axis, size, taken, runs))
        return seconds

    def _in_pieces(
        self,
        work: Work,
        axis: int,
        partial: Sequence[int],
        lies: Cut,
        size: float,
        beside: Beside,
    ) -> bool:
        """Whether the sums of a convolution are scattered after all: a TPU's, piece by piece."""
        parts = math.prod([self.sizes[each] for each in partial if each in lies])
        if not self._tpu or not all(each in lies for each in partial):
            return False
        if parts > MOST_PIECES or size < _LEAST_IN_PIECES:
            return False
        seconds = self.axes[axis].seconds("reduce-scatter", size)
        return parts in beside.loops and beside.product * parts >= _WAITING_PIECES * seconds

    def _scatters(self, work: Work, number: int, dim: int, made: Cut) -> bool:
        """Whether a TPU scatters the sums of a product along a dim of its result.

        Not along heads where it also has rows: heads before their columns, or heads that both
        operands have. They are the outermost dim as it lies in memory.
        """
        if not work.sides:
            return True
        sizes = [length for _, length in work.values[number][0]]
        for axis, cut in made.items():
            sizes[cut] //= self.sizes[axis]
        large = [n for n, size in enumerate(sizes) if size > 1]
        if dim not in large or dim == large[-1]:
            return True
        sides = work.sides[number]
        side = sides.get(dim)
        after = any(sides.get(n) == side and sizes[n] >= LANES for n in large if n > dim)
        return not (side == "both" or (after and len(large) > 3))
