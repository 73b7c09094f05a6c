"""The rows of a batch: what is cut along them, and whether that can be meant."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from meshwright.errors import PipelineError, listing


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array of the batch: the number of its argument, what it is called, and its rows."""

    argument: int
    name: str
    count: int


def one_microbatch(shape: Any, microbatches: int, rows: Rows) -> Any:
    """The shape of an array's share in one microbatch."""
    if rows.count % microbatches:
        raise PipelineError(
            f"{rows.name}: {rows.count} rows cannot be cut into {microbatches} microbatches. Take "
            f"{rows.count // microbatches * microbatches or microbatches} or "
            f"{-(-rows.count // microbatches) * microbatches} rows, or another number of "
            f"microbatches; if every microbatch needs all of it, pass whole={rows.argument}."
        )
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (rows.count // microbatches, *shape.shape[1:]), shape.dtype
    )


def check_alike(batch: Sequence[Rows], microbatches: int) -> None:
    """Refuse arrays of different lengths, of which some may not be meant to be cut: a mask.

    One row per microbatch is meant so: a random key for each.
    """
    doubtful = [rows for rows in batch if rows.count != microbatches]
    counts = Counter(rows.count for rows in doubtful)
    if len(counts) < 2:
        return
    usual = counts.most_common(1)[0][0]
    odd = next(rows for rows in doubtful if rows.count != usual)
    have = listing([f"{rows.name} has {rows.count} rows" for rows in doubtful], 6)
    raise PipelineError(
        f"{have}. Arguments are cut along dim 0 into {microbatches} microbatches, and these are "
        f"not one batch. Pass whole={odd.argument} if every microbatch needs all of it, or "
        f"cut={odd.argument} if it is to be cut."
    )
