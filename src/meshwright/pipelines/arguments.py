"""The arguments of a step, and the options that say which of them are cut and what is reduced how.

Keywords are turned into positions, and the rows of a batch checked. Of the options of
`value_and_grad` and of `pipeline`, all that can be wrong by itself is refused where the option is
given; what depends on the arguments of a call (how many there are, their names) at that call.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from meshwright.errors import PipelineError, listing, near, short
from meshwright.pipelines.trace_marks import check_words
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
    if array.rows % microbatches or not array.rows:
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


# The options of microbatches.

# An argument by its number or, for those that have a name, by its name.
Argument = int | str


class MicrobatchOptions(TypedDict, total=False):
    """The options of `value_and_grad` and `forward`, for functions that pass them on."""

    argnums: int | Sequence[int]
    has_aux: bool
    reduce: str
    aux: Any
    carry: Argument | None
    whole: Argument | Sequence[Argument]
    cut: Argument | Sequence[Argument] | Mapping[Argument, int]
    outputs: Any


@dataclasses.dataclass(frozen=True)
class CheckedOptions:
    """The options in their plain form; `cut` has the dim along which an argument is cut.

    `gradient` is False for `schedule="forward"`; then `outputs` says how results are reduced, and
    `reduce` is not used. `given` are the names of the options that the caller passed.
    """

    argnums: int | tuple[int, ...] = 0
    has_aux: bool = False
    reduce: str = "mean"
    aux: Any = "stack"
    carry: Argument | None = None
    whole: tuple[Argument, ...] = ()
    cut: Mapping[Argument, int] = dataclasses.field(default_factory=dict)
    outputs: Any = "stack"
    gradient: bool = True
    given: tuple[str, ...] = ()

    @property
    def differentiated(self) -> tuple[int, ...]:
        """The arguments that `argnums` names, one or several."""
        return (self.argnums,) if isinstance(self.argnums, int) else self.argnums

    @property
    def returns_pair(self) -> bool:
        """Whether the function returns its value and something beside it."""
        return self.has_aux or self.carry is not None


def check_options(options: Mapping[str, Any], *, gradient: bool) -> CheckedOptions:
    """Refuse options that are unknown, wrong by themselves, or contradict one another."""
    known = tuple(MicrobatchOptions.__annotations__)
    for name in options:
        if name not in known:
            hint = near(name, (*known, "donate_argnums", "rules", "timeout"))
            raise PipelineError(f"pipeline has no option {name!r}.{hint}", option=name)
    _check_fit(options, gradient)
    given: dict[str, Any] = dict(options)
    if "argnums" in given:
        given["argnums"] = _check_argnums(given["argnums"])
    if not isinstance(given.get("has_aux", False), bool):
        raise PipelineError(
            f"has_aux: {short(given['has_aux'])} is not True or False.", option="has_aux"
        )
    if given.get("reduce", "mean") not in ("mean", "sum", "stack"):
        raise PipelineError(
            f"reduce: {short(given['reduce'])} is not 'mean', 'sum' or 'stack' (the value and the "
            "gradients of every microbatch).",
            option="reduce",
        )
    for name in ("aux", "outputs"):
        if name in given:
            check_words(name, given[name])
    if given.get("carry") is not None:
        given["carry"] = _check_argument("carry", given["carry"])
    if "whole" in given:
        given["whole"] = tuple(_check_argument("whole", n) for n in _as_list(given["whole"]))
    if "cut" in given:
        given["cut"] = _check_cut(given["cut"])
    checked = CheckedOptions(**given, gradient=gradient, given=tuple(sorted(options)))
    check_conflicts(checked)
    return checked


def _check_fit(options: Mapping[str, Any], gradient: bool) -> None:
    """Refuse options for steps with gradients where there are none, and the reverse."""
    if gradient and "outputs" in options:
        raise PipelineError(
            "outputs: the step has gradients, and outputs beside the value are has_aux=True with "
            "aux=. With schedule='forward', outputs= says how results are reduced.",
            option="outputs",
        )
    if not gradient and "reduce" in options:
        raise PipelineError(
            "reduce: schedule='forward' has no gradients. How results are reduced is outputs=, "
            f"e.g. outputs={short(options['reduce'])}.",
            option="reduce",
        )
    if "aux" in options and options.get("has_aux", False) is False:
        raise PipelineError(
            f"aux={short(options['aux'])}: outputs beside the value are there with has_aux=True "
            "only. Pass both, or none.",
            option="aux",
        )


def _check_argnums(argnums: Any) -> int | tuple[int, ...]:
    several = isinstance(argnums, (tuple, list))
    numbers = tuple(argnums) if several else (argnums,)
    for n in numbers:
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise PipelineError(
                f"argnums: {short(argnums)} is not the number of an argument, counted from 0, or a "
                "tuple of them.",
                option="argnums",
            )
    if not numbers or len(set(numbers)) < len(numbers):
        raise PipelineError(
            f"argnums: {short(argnums)} names {'one twice' if numbers else 'no argument'}.",
            option="argnums",
        )
    return numbers if several else numbers[0]


def _as_list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (tuple, list, set, frozenset)) else [given]


def _check_argument(option: str, argument: Any) -> Argument:
    plain = isinstance(argument, (int, str)) and not isinstance(argument, bool)
    if not plain or (isinstance(argument, int) and argument < 0):
        raise PipelineError(
            f"{option}: {short(argument)} is not an argument: pass its number, counted from 0, or "
            "its name.",
            option=option,
        )
    return argument  # type: ignore[no-any-return]


def _check_cut(cut: Any) -> dict[Argument, int]:
    """Return the dim along which each argument of `cut` is cut: the first unless it says so."""
    dims = dict(cut) if isinstance(cut, Mapping) else dict.fromkeys(_as_list(cut), 0)
    for argument, dim in dims.items():
        _check_argument("cut", argument)
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
            raise PipelineError(
                f"cut: {short(dim)} is not a dim of argument {argument!r}: pass "
                "{argument: dim}, counted from 0.",
                option="cut",
            )
    return dims


def check_conflicts(options: CheckedOptions) -> None:
    """Refuse options that say two things of one argument."""
    for option, arguments in (("whole", options.whole), ("cut", options.cut)):
        for number in options.differentiated:
            if number in arguments:
                raise PipelineError(
                    f"{option}={number}: argument {number} holds the parameters, which are never "
                    "cut.",
                    option=option,
                )
        if options.carry is not None and options.carry in arguments:
            raise PipelineError(
                f"{option}={options.carry!r} and carry={options.carry!r}: what is carried from "
                "microbatch to microbatch is whole anyway. Say carry alone.",
                option=option,
            )
    for argument in options.whole:
        if argument in options.cut:
            raise PipelineError(
                f"whole={argument!r} and cut={argument!r}: say one of the two.", option="whole"
            )
    if options.carry in options.differentiated:
        what = "is differentiated" if options.gradient else "holds the parameters"
        raise PipelineError(
            f"carry={options.carry}: argument {options.carry} {what}.", option="carry"
        )


def resolve_names(
    options: CheckedOptions, fn: Callable[..., Any], args: Sequence[Any]
) -> CheckedOptions:
    """Return the options with numbers in the place of names; refuse those of no argument.

    `args` are a call's arguments in order, keyword-only ones last (`positional_arguments`).
    """
    numbers = _numbers_by_name(fn, args)

    def number(option: str, argument: Argument) -> int:
        if isinstance(argument, str):
            if argument not in numbers:
                raise PipelineError(
                    f"{option}={argument!r}: the function got no argument of that name."
                    f"{near(argument, numbers)}",
                    option=option,
                )
            return numbers[argument]
        if argument >= len(args):
            raise PipelineError(
                f"{option}={argument}: the function got {len(args)} arguments.", option=option
            )
        return argument

    for n in options.differentiated:
        number("argnums", n)
    resolved = dataclasses.replace(
        options,
        carry=None if options.carry is None else number("carry", options.carry),
        whole=tuple(number("whole", n) for n in options.whole),
        cut={number("cut", n): dim for n, dim in options.cut.items()},
    )
    check_conflicts(resolved)
    return resolved


def _numbers_by_name(fn: Callable[..., Any], args: Sequence[Any]) -> dict[str, int]:
    """Map the names of a call's arguments to their positions."""
    numbers = {arg.name: n for n, arg in enumerate(args) if isinstance(arg, Keyword)}
    positional = len(args) - len(numbers)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # builtins have none
        return numbers
    named = [p.name for p in parameters if p.kind in kinds][:positional]
    return {name: n for n, name in enumerate(named)} | numbers
