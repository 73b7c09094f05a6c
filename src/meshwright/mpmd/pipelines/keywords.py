"""Calls with keywords as calls without: what has a place goes there, the rest comes last."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.mpmd.pipelines.statics import is_number


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
