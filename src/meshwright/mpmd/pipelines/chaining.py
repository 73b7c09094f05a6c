"""A list of stage functions as one function with marks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.errors import PipelineError, short
from meshwright.mpmd.pipelines.marks import stage


def chained(functions: Any) -> Callable[..., Any]:
    """Stage functions one after the other: `f(params[i], x)` gives the next one's `x`.

    The first takes the batch, or the beginning of it if it has no room for more. A later one that
    asks for more than `x` gets the end of the batch: `loss(params, x, labels)`.
    """
    if not isinstance(functions, Sequence) or not functions or not all(map(callable, functions)):
        raise PipelineError(f"{short(functions)} is not a function or a list of stage functions.")
    first, *later = functions
    labels = [max(0, _asked(function) - 1) for function in later]

    def chain(params: Any, *batch: Any) -> Any:
        _check_parameters(params, len(functions))
        taken = len(batch) if _has_room(first, len(batch)) else _asked(first)
        if taken + max(labels, default=0) < len(batch):
            raise PipelineError(
                f"argument {taken + 1} goes to no stage function. The first takes {taken} after "
                "its parameters; a later one that needs the end of the batch asks for it: "
                "f(params, x, labels)."
            )
        value = first(params[0], *batch[:taken])
        for before, function, own, count in zip(
            functions[:-1], later, params[1:], labels, strict=True
        ):
            given = stage(value, getattr(before, "__name__", None))
            value = function(own, given, *batch[len(batch) - count :])
        return value

    return chain


def _asked(function: Callable[..., Any]) -> int:
    """How many arguments a stage function needs after its parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return sum(one.kind in kinds and one.default is one.empty for one in found) - 1


def _has_room(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(None, *[None] * count)
    except TypeError:
        return False
    return True


def _check_parameters(params: Any, count: int) -> None:
    if isinstance(params, Mapping) or not hasattr(params, "__len__"):
        raise PipelineError(
            f"the parameters are a {type(params).__name__}. A list of stage functions takes a "
            "list of as many, params[i] for function i."
        )
    if len(params) != count:
        raise PipelineError(f"{count} stages, but parameters for {len(params)}.")
