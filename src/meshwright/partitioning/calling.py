"""Arrays from `FromCallback`s: the function is called for what this process holds, and checked."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.errors import PartitionError, short
from meshwright.partitioning.leaves import Leaf
from meshwright.partitioning.values import does_not_fit, in_native_order, kept_dtype, native


def make_from_callback(leaf: Leaf, sharding: NamedSharding) -> Any:
    """The array, its pieces checked as they come; equal pieces of several devices made once."""
    local, kept = sharding.shard_shape(leaf.shape), kept_dtype(leaf)
    made: dict[Any, Any] = {}

    def piece(index: Any) -> Any:
        key = tuple(side.indices(size) for side, size in zip(index, leaf.shape, strict=True))
        if key not in made:
            made[key] = _checked(leaf, index, local, kept)
        return made[key]

    return jax.make_array_from_callback(leaf.shape, sharding, piece, dtype=kept)


def _checked(leaf: Leaf, index: Any, local: tuple[int, ...], kept: Any) -> Any:
    try:
        made = leaf.value.fn(index)
    except Exception as error:
        error.add_note(f"{leaf.where}: raised by the function for the piece at {short(index)}.")
        raise
    shape, dtype = getattr(made, "shape", None), getattr(made, "dtype", None)
    if shape != local or native(dtype) not in (kept, native(leaf.dtype)):
        raise PartitionError(
            f"{leaf.where}: the function gave {dtype} {shape} for the piece at {short(index)}, "
            f"which is {leaf.dtype} {local}. Return that part of the array."
        )
    outside = does_not_fit(made, kept)
    if outside:
        raise PartitionError(f"{leaf.where}: the piece at {short(index)} {outside}")
    return in_native_order(made)
