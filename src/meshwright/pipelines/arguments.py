"""The arguments of a step: keywords turned into positions, and the rows of a batch checked."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import PipelineError, listing
from meshwright.trees.split import is_number
from meshwright.trees.walk import is_key

# Calls with keywords become calls without: what has a position goes there, the rest comes last as
# `Keyword`. Everything behind this line (donation, microbatches, plans) counts arguments by number.


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Keyword:
    """A keyword-only argument: a pytree node, so that its arrays are traced like any other's."""

    name: str
    value: Any

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], str]:
        # By its name, not as `value`: paths are in messages, and rules match them.
        return [(jax.tree_util.GetAttrKey(self.name), self.value)], self.name

    @classmethod
    def tree_unflatten(cls, name: str, children: Sequence[Any]) -> Keyword:
        return cls(name, *children)


def positional_arguments(
    fn: Callable[..., Any], args: Any, keywords: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Order the arguments of a call as the function's parameters are.

    >>> positional_arguments(lambda params, x, *, rate: None, (1,), {"rate": 3, "x": 2})
    (1, 2, Keyword(name='rate', value=Array(3, dtype=int32, weak_type=True)))
    """
    if not keywords:
        return tuple(args)
    bound = inspect.signature(fn).bind(*args, **keywords)
    # A number inside of a tree, as in a `Keyword`, would be a setting: part of the program,
    # compiled again for each value (`trees.split`). An argument is data, so the number becomes an
    # array.
    values = {
        name: jnp.asarray(value) if is_number(value) else value
        for name, value in bound.kwargs.items()
    }
    return (*bound.args, *(Keyword(name, value) for name, value in values.items()))


def takes_positional(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fn` so that it is called with the result of `positional_arguments`."""

    # Keywords too: a function may be wrapped twice, as that of a pipeline in `value_and_grad`.
    @functools.wraps(fn)
    def wrapped(*args: Any, **more: Any) -> Any:
        keywords = {arg.name: arg.value for arg in args if isinstance(arg, Keyword)}
        return fn(*(arg for arg in args if not isinstance(arg, Keyword)), **keywords, **more)

    return wrapped


def argument_label(argument: Any, number: int) -> int | str:
    """Return how options and messages name an argument: by its number, or by its only name."""
    return argument.name if isinstance(argument, Keyword) else number


# Arrays of a batch are cut along a dim, the first unless the caller says so, into microbatches.
# Whether that is what the caller means is checked: a mask of tokens by tokens, cut along its rows,
# would train on nonsense without an error.


@dataclasses.dataclass(frozen=True)
class BatchArray:
    """An array of the batch: its argument, what messages call it, and the dim that is cut."""

    argument: int | str
    name: str
    shape: tuple[int, ...]
    dim: int = 0

    @property
    def rows(self) -> int:
        return self.shape[self.dim]

    def __str__(self) -> str:
        return f"{self.rows} rows" + (f" (dim {self.dim})" if self.dim else "")


def microbatch_shape(shape: Any, microbatches: int, array: BatchArray) -> Any:
    """Return the shape of one microbatch of an array; refuse rows that do not divide."""
    if array.dim >= len(array.shape):
        raise PipelineError(
            f"{array.name}: cut along dim {array.dim}, but its shape is {array.shape}. Name a dim "
            f"that it has: cut={{{array.argument!r}: {len(array.shape) - 1}}}.",
            option="cut",
        )
    if array.rows % microbatches:
        each = array.rows // microbatches
        fitting = [str(n * microbatches) for n in (each, each + 1) if n]
        raise PipelineError(
            f"{array.name}: {array} cannot be cut into {microbatches} microbatches. Take "
            f"{' or '.join(fitting)} rows, or another number of microbatches; if every "
            f"microbatch needs all of it, pass whole={array.argument!r}."
        )
    rows = list(array.shape)
    rows[array.dim] //= microbatches
    return jax.ShapeDtypeStruct(tuple(rows), shape.dtype)  # type: ignore[no-untyped-call]


def has_key_per_microbatch(shape: Any, microbatches: int) -> bool:
    """Return whether an array holds one random key per microbatch, typed or raw (uint32[n, 2])."""
    raw = shape.dtype == jnp.uint32 and shape.shape[1:] == (2,)
    holds_keys = raw or is_key(shape.dtype)
    return holds_keys and bool(shape.shape[0] == microbatches)


def check_same_rows(
    batch: Sequence[BatchArray], cut: Collection[int | str], microbatches: int
) -> None:
    """Refuse arrays of different lengths, of which some may not be meant to be cut: a mask.

    The batch has as many rows as most arguments; others are named in `cut`. Where no number of
    rows is the most common one, every argument that is not named may be the odd one.
    """
    # One vote per argument and length, so that a tree with many arrays does not outvote the rest.
    votes = Counter(rows for _, rows in {(array.argument, array.rows) for array in batch})
    if len(votes) < 2:
        return
    (usual, most), (_, next_most) = votes.most_common(2)
    tie = most == next_most
    odd = [a for a in batch if a.argument not in cut and (tie or a.rows != usual)]
    if not odd:
        return
    sizes = listing([f"{array.name} has {array}" for array in batch], 6)
    numbers = list(dict.fromkeys(array.argument for array in odd))
    wholes = [f"whole={n!r} if every microbatch needs all of argument {n!r}" for n in numbers]
    all_cut = sorted({*numbers, *cut}, key=str)
    cuts = repr(all_cut[0] if len(all_cut) == 1 else tuple(all_cut))
    raise PipelineError(
        f"{sizes}. Arguments are cut along dim 0 into {microbatches} microbatches, and these are "
        f"not one batch. Pass {listing(wholes, 6)}, or cut={cuts} if "
        f"{'it is' if len(all_cut) == 1 else 'each is'} to be cut by its own rows."
    )
