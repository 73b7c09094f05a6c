"""What a step's own `jit` says of its arguments: which are static, which are donated.

`jax.jit`, `nnx.jit` and `eqx.filter_jit` hold other leaves to be data. A plan's step takes the same
arguments as the user's: what was a part of the program there is a part of it here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from meshwright._checks import argument_numbers
from meshwright.errors import PlanningError, RehearsalError, listing
from meshwright.rehearsal.step_arguments import is_filter_jit, traces_itself, unbound
from meshwright.trees.split import Split, is_number, split_arrays
from meshwright.trees.walk import problem_lines, shown_path, tie_problems, walk

_DEEP = 10**6  # keys into a tree: Python numbers are data wherever they stand
_STATIC = -1


def read_arguments(
    function: Callable[..., Any],
    args: Sequence[Any],
    names: Sequence[str],
    donate_argnums: int | Sequence[int] | None,
) -> tuple[tuple[Split, ...], tuple[int, ...]]:
    """Separate the arrays of every argument from the rest; also return which are donated."""
    _check_arguments(args, names)
    bare: Any = unbound(function)
    depths, donated = [0] * len(args), [False] * len(args)
    if is_filter_jit(bare):
        depths = [_STATIC] * len(args)
        first = not (isinstance(function, functools.partial) and function.args)
        donated = [
            bare.donate_first if first and number == 0 else bare.donate_rest
            for number in range(len(args))
        ]
    elif traces_itself(bare):
        bound = function.args if isinstance(function, functools.partial) else ()
        named = function.keywords if isinstance(function, functools.partial) else {}
        traced = bare.trace(*bound, *args, **named)
        # Flax's `nnx.jit` wraps what its own `jax.jit` made, in trees of its own.
        plain = not hasattr(traced, "traced")
        infos = getattr(traced, "traced", traced).args_info[0]
        aligned = _align((*bound, *args), infos, plain)[len(bound) :]
        donated = [any(leaf.donated for leaf in jax.tree.leaves(info)) for info in aligned]
        depths = [_STATIC if info is None else _DEEP if plain else 0 for info in aligned]
    parts = tuple(split_arrays(arg, depth) for arg, depth in zip(args, depths, strict=True))
    if not any(part.arrays for part in parts):
        raise PlanningError(
            f"plan: none of the arguments ({', '.join(names)}) holds an array. Pass the state and "
            "the batch as arguments, as arrays or as jax.ShapeDtypeStructs."
        )
    if donate_argnums is not None:
        try:
            return parts, argument_numbers("donate_argnums", donate_argnums, len(args))
        except RehearsalError as error:
            raise PlanningError(str(error), option="donate_argnums") from error
    return parts, tuple(number for number, gone in enumerate(donated) if gone)


def _check_arguments(args: Sequence[Any], names: Sequence[str]) -> None:
    for arg, name in zip(args, names, strict=True):
        for leaf in jax.tree.leaves(arg, is_leaf=lambda node: isinstance(node, Iterator)):
            if isinstance(leaf, Iterator):
                raise PlanningError(
                    f"{name}: a {type(leaf).__name__}, which gives its values once. Pass one "
                    f"batch: next({name})."
                )
        walk(arg)  # refuses trees that hide their arrays
    problems = tie_problems(dict(zip(names, args, strict=True)))
    if problems:
        raise PlanningError(f"plan: {problem_lines(problems).strip()}")


# A trace does not say which arguments were static: they are missing in it. Those left are matched
# in order, by structure and shapes.
def _align(args: Sequence[Any], infos: Sequence[Any], plain: bool) -> list[Any]:
    """Return for every argument what its trace knows of it; `None` for static ones."""
    if len(infos) == len(args):
        return list(infos)
    left, aligned = list(infos), []
    for arg in args:
        alike = bool(left) and (_is_like(arg, left[0]) if plain else not _is_setting(arg))
        aligned.append(left.pop(0) if alike else None)
    return aligned


def _is_like(arg: Any, info: Any) -> bool:
    leaves, structure = jax.tree.flatten(arg)
    infos, other = jax.tree.flatten(info)
    same: Any = structure
    return bool(same == other) and all(
        tuple(getattr(leaf, "shape", ())) == tuple(each.shape)
        and (hasattr(leaf, "shape") or is_number(leaf) or isinstance(leaf, bool))
        for leaf, each in zip(leaves, infos, strict=True)
    )


def _is_setting(arg: Any) -> bool:
    return not walk(arg).arrays


def wrong_arguments(parts: Sequence[Split], args: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Say where arguments differ from those that were planned for: structure and static leaves."""
    problems = []
    for part, arg, name in zip(parts, args, names, strict=True):
        leaves, treedef = jax.tree.flatten(arg)
        if treedef != part.treedef:
            problems.append(f"{name}: another structure than was planned for{_moved(part, arg)}.")
            continue
        arrays = set(part.positions)
        paths: list[Any] = []
        for position, (leaf, planned) in enumerate(zip(leaves, part.static, strict=True)):
            if position in arrays or leaf is planned or _equal(leaf, planned):
                continue
            paths = paths or jax.tree_util.tree_flatten_with_path(arg)[0]
            place = jax.tree_util.keystr(paths[position][0], simple=True, separator="/")
            where = shown_path("/".join(filter(None, (name, place))))
            problems.append(f"{where}: {leaf!r} here, {planned!r} when it was planned.")
    return problems


def _moved(part: Split, arg: Any) -> str:
    """Say which leaves are gone, and which are new where all that was planned for were arrays."""
    here = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]
    ]
    gone = [shown_path(path) for path in part.paths if path and path not in here]
    all_arrays = len(part.positions) == len(part.static)
    new = [shown_path(p) for p in here if all_arrays and p and p not in part.paths]
    told = [
        f"{listing(names, 3)} {word}" for names, word in ((gone, "gone"), (new, "new")) if names
    ]
    return f" ({', '.join(told)})" if told else ""


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # a comparison of the user's own type
        return False
