"""Can these values be placed as they are? Tracers, deleted arrays and narrowing are refused."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from meshwright.errors import PartitionError, short
from meshwright.partitioning.callbacks import FromCallback
from meshwright.partitioning.leaves import Leaf, refuse

Narrow = Literal["error", "convert"]
# Those with an option `narrow`; the others have none to speak of.
_NARROWING = ("shard", "init")


def check_narrow(narrow: object) -> None:
    if not isinstance(narrow, str) or narrow not in ("error", "convert"):
        raise PartitionError(f"narrow: {short(narrow)} is not 'error' or 'convert'.")


def check_values(leaves: Sequence[Leaf], narrow: Narrow = "error", what: str = "shard") -> None:
    """Refuse what cannot be placed, all at once; `what` is the function that was called."""
    refuse(what, value_problems(leaves, narrow, what))


def value_problems(leaves: Sequence[Leaf], narrow: Narrow, what: str) -> list[str]:
    """Tracers, deleted arrays, what is no array, values JAX would narrow."""
    found = ((leaf, _problem(leaf, narrow, what)) for leaf in leaves)
    return [f"{leaf.where}: {problem}" for leaf, problem in found if problem]


def _problem(leaf: Leaf, narrow: Narrow, what: str) -> str:
    value = leaf.value
    if isinstance(value, jax.core.Tracer):
        return (
            "a tracer. Under jit use jax.lax.with_sharding_constraint with the specs of "
            "partition, or jit's in_shardings."
        )
    if isinstance(value, jax.Array):
        gone = value.is_deleted()
        return "the array was deleted or donated. Use the one it went into." if gone else ""
    if isinstance(value, jax.ShapeDtypeStruct):
        return ""
    if not isinstance(value, (np.ndarray, np.generic, FromCallback)):
        return (
            f"{type(value).__name__} has a shape but is no array. Read it with numpy.asarray(x), "
            "or in pieces with FromCallback(x.shape, x.dtype, lambda index: x[index]); a shape "
            "alone is a jax.ShapeDtypeStruct."
        )
    kept = kept_dtype(leaf)
    if kept is None:
        return (
            f"{type(value).__name__} of {leaf.dtype} cannot be placed. "
            "Make it an array of numbers first."
        )
    if kept == native(leaf.dtype):
        return ""
    if narrow == "convert":
        return does_not_fit(value, kept)
    hint = ", or pass narrow='convert'" if what in _NARROWING else ""
    convert = "Convert it, enable" if hint else "Convert it, or enable"
    return f"{leaf.dtype} would become {kept}. {convert} jax_enable_x64{hint}."


def kept_dtype(leaf: Leaf) -> Any:
    """The dtype a leaf has once placed; None for text, objects and masked arrays."""
    if isinstance(leaf.value, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf.dtype
    if not _holds_numbers(leaf.dtype) or isinstance(leaf.value, np.ma.MaskedArray):
        return None
    return jax.dtypes.canonicalize_dtype(native(leaf.dtype), allow_extended_dtype=True)


@functools.lru_cache(maxsize=256)
def _holds_numbers(dtype: Any) -> bool:
    kinds = (np.number, np.bool_, jax.dtypes.prng_key)
    return any(jax.numpy.issubdtype(dtype, kind) for kind in kinds)


def does_not_fit(value: Any, kept: Any) -> str:
    """What is lost when integers of numpy become `kept`, which has fewer bits; or nothing."""
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in "iu":
        return ""
    if native(value.dtype) == kept or not value.size:
        return ""
    low, high, room = int(value.min()), int(value.max()), np.iinfo(kept)
    if room.min <= low and high <= room.max:
        return ""
    return (
        f"holds integers from {low} to {high}, and {kept} only those from {room.min} to "
        f"{room.max}. Enable jax_enable_x64, or take others."
    )


def native(dtype: Any) -> Any:
    """The same dtype in the byte order of this machine."""
    return dtype if getattr(dtype, "isnative", True) else dtype.newbyteorder("=")


def in_native_order(value: Any) -> Any:
    """Numpy's arrays in the byte order of this machine, which is all that JAX takes."""
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.isnative:
        return np.asarray(value, native(value.dtype))
    return value
