"""Trees of arrays and other things: the arrays are data, the rest belongs to the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from meshwright.partitioning.leaves import path_text


@dataclasses.dataclass(frozen=True)
class Split:
    """A tree taken apart: `arrays` at `places`, `rest` in between, and the paths of the arrays."""

    treedef: Any
    places: tuple[int, ...]
    rest: tuple[Any, ...]
    paths: tuple[str, ...]
    arrays: tuple[Any, ...] = dataclasses.field(compare=False, repr=False)

    def rebuild(self, arrays: Sequence[Any], other: Any = "rest") -> Any:
        """The tree with `arrays` in place of its own; with `other` in place of the rest."""
        leaves: list[Any] = list(self.rest) if other == "rest" else [other] * len(self.rest)
        for place, array in zip(self.places, arrays, strict=True):
            leaves[place] = array
        return jax.tree.unflatten(self.treedef, leaves)


def take_apart(tree: Any) -> Split:
    """Arrays and numbers of a tree on one side, functions and other leaves on the other."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    places = tuple(n for n, (_, leaf) in enumerate(flat) if is_data(leaf))
    chosen = set(places)
    return Split(
        treedef,
        places,
        tuple(None if n in chosen else leaf for n, (_, leaf) in enumerate(flat)),
        tuple(path_text(flat[n][0]) for n in places),
        tuple(flat[n][1] for n in places),
    )


def is_data(leaf: Any) -> bool:
    if isinstance(leaf, (bool, int, float, complex, np.generic)):
        return True
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)


def as_shape(leaf: Any) -> Any:
    """What tracing must know of an array; numbers stay numbers, which JAX types weakly."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            tuple(leaf.shape),
            jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True),
            weak_type=weak,
        )
    return leaf
