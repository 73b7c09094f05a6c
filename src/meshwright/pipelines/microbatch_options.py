"""The options of `value_and_grad` and of `pipeline`: which arguments are cut, what is reduced how.

All that can be wrong by itself is refused where the option is given; what depends on the arguments
of a call (how many there are, their names) is refused at that call.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from meshwright.errors import PipelineError, near, short
from meshwright.pipelines.arguments import Keyword
from meshwright.pipelines.reductions import check_words

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
