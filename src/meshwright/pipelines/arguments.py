"""Calls with keywords as calls without: what has a place goes there, the rest comes last."""

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keyword:
    """An argument that has a name and no place."""

    name: str = dataclasses.field(metadata={"static": True})
    value: Any


def by_place(fn: Callable[..., Any], args: Any, keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call in the order of a function's parameters.

    >>> by_place(lambda params, x, *, rate: None, (1,), {"rate": 3, "x": 2})
    (1, 2, Keyword(name='rate', value=Array(3, dtype=int32, weak_type=True)))
    """
    if not keywords:
        return tuple(args)
    bound = inspect.signature(fn).bind(*args, **keywords)
    named = bound.kwargs.items()
    # A number that is an argument is data, although it stands inside of a tree here.
    numbers = {name: jnp.asarray(value) for name, value in named if is_number(value)}
    return (
        *bound.args,
        *(Keyword(name, value) for name, value in (bound.kwargs | numbers).items()),
    )


def takes_places(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is called with what `by_place` gives."""

    @functools.wraps(fn)
    def wrapped(*args: Any) -> Any:
        named = {arg.name: arg.value for arg in args if isinstance(arg, Keyword)}
        return fn(*(arg for arg in args if not isinstance(arg, Keyword)), **named)

    return wrapped


# The rows of a batch: what is cut along them, and whether that can be meant.


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array of the batch: the number of its argument, what it is called, and its rows."""

    argument: int
    name: str
    count: int


def one_microbatch(shape: Any, microbatches: int, rows: Rows) -> Any:
    """The shape of an array's share in one microbatch."""
    if rows.count % microbatches:
        each = rows.count // microbatches
        fitting = [str(n * microbatches) for n in (each, each + 1) if n]
        raise PipelineError(
            f"{rows.name}: {rows.count} rows cannot be cut into {microbatches} microbatches. Take "
            f"{' or '.join(fitting)} rows, or another number of microbatches; if every "
            f"microbatch needs all of it, pass whole={rows.argument}."
        )
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (rows.count // microbatches, *shape.shape[1:]), shape.dtype
    )


def is_key_each(shape: Any, microbatches: int) -> bool:
    """Whether an array holds a random key for each microbatch, new or of the old raw kind."""
    raw = shape.dtype == jnp.uint32 and shape.shape[1:] == (2,)
    is_key = raw or jnp.issubdtype(shape.dtype, jax.dtypes.prng_key)
    return is_key and bool(shape.shape[0] == microbatches)


def check_alike(batch: Sequence[Rows], cut: Collection[int], microbatches: int) -> None:
    """Refuse arrays of different lengths, of which some may not be meant to be cut: a mask.

    The batch has as many rows as most arguments; others are named in `cut`. Where no number of
    rows is the most common one, every argument that is not named may be the odd one.
    """
    votes = Counter(count for _, count in {(rows.argument, rows.count) for rows in batch})
    if len(votes) < 2:
        return
    (usual, most), (_, next_most) = votes.most_common(2)
    tie = most == next_most
    odd = [r for r in batch if r.argument not in cut and (tie or r.count != usual)]
    if not odd:
        return
    have = listing([f"{rows.name} has {rows.count} rows" for rows in batch], 6)
    numbers = list(dict.fromkeys(rows.argument for rows in odd))
    wholes = [f"whole={n} if every microbatch needs all of argument {n}" for n in numbers]
    every = sorted({*numbers, *cut})
    cuts = str(every[0] if len(every) == 1 else tuple(every))
    raise PipelineError(
        f"{have}. Arguments are cut along dim 0 into {microbatches} microbatches, and these are "
        f"not one batch. Pass {listing(wholes, 6)}, or cut={cuts} if "
        f"{'it is' if len(every) == 1 else 'each is'} to be cut by its own rows."
    )
