"""`Region`: the program that runs once per microbatch, as one equation of a step's trace.

`microbatching.py` records regions, pass 1 finds them in the trace, and all later passes read them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

from meshwright import _compat
from meshwright._compat import Jaxpr
from meshwright.pipelines.reductions import Reduction, reduced_dtype, reduced_shape

Role = Literal["whole", "params", "split", "carry"]
CLOSURE = "closure"  # the name of operands that are no arguments


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A program that runs once per microbatch, as it stands in the trace of a step.

    `jaxpr` has no constants. Its inputs are what `roles` say: "params" are differentiated, "split"
    is this microbatch's part of the batch, cut along the dim that `dims` has, "whole" is the same
    in every microbatch, and "carry" comes from the microbatch before. `names` are what messages
    call them. Results are values, reduced over microbatches as `reductions` say ("carry" goes into
    the next microbatch), then one gradient per "params" input, reduced by `gradient` (None without
    gradients). `where` is the user's line that called for it.
    """

    jaxpr: Jaxpr
    roles: tuple[Role, ...]
    dims: tuple[int, ...]
    names: tuple[str, ...]
    reductions: tuple[Reduction, ...]
    gradient: str | None
    microbatches: int
    where: str

    @property
    def result_shapes(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of every result, after the reduction over microbatches."""
        return [
            (
                reduced_shape(var.aval.shape, how, self.microbatches),
                reduced_dtype(var.aval.dtype, how),
            )
            for var, how in zip(self.jaxpr.outvars, self.all_reductions, strict=True)
        ]

    @property
    def all_reductions(self) -> tuple[Reduction, ...]:
        """How every result is reduced, gradients included."""
        grads = self.roles.count("params") if self.gradient else 0
        return self.reductions + (self.gradient or "",) * grads


@functools.cache
def region_primitive() -> Any:
    """Return the primitive of the one equation that stands for a region; it is never run."""
    return _compat.region_primitive("microbatched", lambda region: region.result_shapes)


@dataclasses.dataclass
class RegionTrace:
    """The trace of a step in progress: how many regions it has recorded so far."""

    microbatches: int
    regions: int = 0


# A context variable, not a global: another thread may call the same function as it is.
_region_trace: contextvars.ContextVar[RegionTrace | None] = contextvars.ContextVar(
    "region_trace", default=None
)


@contextlib.contextmanager
def recording_regions(microbatches: int) -> Iterator[RegionTrace]:
    """Make `value_and_grad` and `forward` record regions instead of running."""
    trace = RegionTrace(microbatches)
    token = _region_trace.set(trace)
    try:
        yield trace
    finally:
        _region_trace.reset(token)


def region_trace() -> RegionTrace | None:
    """Return the trace in progress; None where functions simply run."""
    return _region_trace.get()
