"""What a rule says of one operation: its iteration dims, and whether each may be cut.

A matrix product `(m, k) x (k, n) -> (m, n)` loops over three dims: m and n may be cut freely, each
device then computes its part; a cut of k leaves partial sums to be added up. An operation's rule
lists these loops with the dims of its operands and results that each one runs over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Kind = Literal["free", "sum", "whole"]
Platform = Literal["tpu", "cuda", "cpu"]
Shape = tuple[int, ...]
Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class IterationDim:
    """Name one loop of an operation: may be cut, leaves partial results, or must be whole.

    `at` has (index into inputs + outputs, dim); dims of size 1 are left out. `tied` says that its
    members are one group of dims; without it they are only listed. Where tied members differ in
    size (8 heads, and 8 * 128 columns), a cut must divide each of them. `blocks`, if not 0: a cut
    must divide this number too, since the dims are taken in so many blocks that stay whole.
    """

    kind: Kind
    at: tuple[tuple[int, int], ...]
    tied: bool = True
    blocks: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """List the iteration dims of an operation and its floating-point work.

    Every dim of an operand or result that is larger than 1 is in exactly one of them. `known` is
    False where the primitive has no rule and dims of equal size were taken for the same.
    `exponentials` are those of a kernel, which takes time for them beside its products.
    """

    dims: tuple[IterationDim, ...]
    flops: float = 0.0
    known: bool = True
    exponentials: float = 0.0


class Loops:
    """Collects the iteration dims of one operation, by the shapes of its operands and results."""

    def __init__(
        self, inputs: Sequence[Shape], outputs: Sequence[Shape], platform: Platform = "tpu"
    ) -> None:
        self.inputs = [tuple(shape) for shape in inputs]
        self.outputs = [tuple(shape) for shape in outputs]
        self.shapes = self.inputs + self.outputs
        self.result = len(self.inputs)  # the index of the first result
        self.platform = platform
        self.dims: list[IterationDim] = []

    def add(self, kind: Kind, *at: tuple[int, int], tied: bool = True, blocks: int = 0) -> None:
        """Add a loop over these dims; those of size 1 are dropped, and so is a loop over none."""
        # Dims in parameters are NumPy integers now and then.
        kept = tuple((index, int(dim)) for index, dim in at if self.shapes[index][dim] > 1)
        if kept:
            self.dims.append(IterationDim(kind, kept, tied, blocks))

    def free(self, *at: tuple[int, int]) -> None:
        """Add a loop that may be cut: no device needs anything of another."""
        self.add("free", *at)

    def blocks(self, count: int, *at: tuple[int, int]) -> None:
        """Add a loop that may be cut between blocks, of which there are `count`."""
        self.add("free", *at, blocks=count)

    def sum(self, *at: tuple[int, int]) -> None:
        """Add a loop that leaves partial results when cut."""
        self.add("sum", *at)

    def along(self, *at: tuple[int, int]) -> None:
        """Add a loop that must not be cut, over dims that are the same one (a sort's, a scan's)."""
        self.add("whole", *at)

    def whole(self, *at: tuple[int, int]) -> None:
        """Add dims that must not be cut; each stands for itself."""
        for one in at:
            self.add("whole", one, tied=False)

    def rule(self, flops: float = 0.0, *, known: bool = True, exponentials: float = 0.0) -> Rule:
        """Return the loops as a rule; dims that none of them runs over are whole."""
        listed = {member for dim in self.dims for member in dim.at}
        for index, shape in enumerate(self.shapes):
            self.whole(*((index, dim) for dim in range(len(shape)) if (index, dim) not in listed))
        return Rule(tuple(self.dims), float(flops), known, float(exponentials))


def windows_touch_once(
    size: int,
    count: int,
    window: int,
    stride: int,
    padding: tuple[int, int],
    dilations: tuple[int, int] = (1, 1),
) -> bool:
    """Whether windows lie side by side, each within its own stride of the operand.

    Then a cut of the operand into equal parts is one of the windows, and nobody needs a neighbour's
    border: patches of an image, a pooling without overlap, a window of 1. `dilations` are those of
    the operand and of the window.
    """
    base, spread = dilations
    reach = (window - 1) * spread + 1
    return tuple(padding) == (0, 0) and base == 1 and reach <= stride and size == count * stride
