"""`FromCallback`: an array that a function makes piece by piece, where the pieces are needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import PartitionError, short
from meshwright.partitioning.leaves import is_shape


@dataclasses.dataclass(frozen=True)
class FromCallback:
    """An array that is only made where it is needed: `fn(index)` gives the piece at `index`.

    Stands in a tree like an array; `shard` calls `fn` for the pieces of this process alone, once
    for each.
    """

    shape: tuple[int, ...]
    dtype: Any
    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        if not is_shape(self.shape):
            raise PartitionError(
                f"FromCallback: {short(self.shape)} is not a shape, e.g. (1024, 4096)."
            )
        if not callable(self.fn):
            raise PartitionError(
                f"FromCallback: {short(self.fn)} is not a function. Pass one that takes an index "
                "and returns that part of the array."
            )
        object.__setattr__(self, "shape", tuple(int(side) for side in self.shape))
        object.__setattr__(self, "dtype", _read_dtype(self.dtype))


def _read_dtype(dtype: Any) -> Any:
    try:
        if dtype is not None:
            return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)
    except TypeError:
        pass
    raise PartitionError(f"FromCallback: {short(dtype)} is not a dtype, e.g. 'float32'.")
