"""`TracedStep`: a step, traced once: its jaxpr over the arrays among its arguments."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from meshwright.errors import PlanningError
from meshwright.planning.carried_state import next_arguments
from meshwright.planning.written_forms import in_better_form, rows_by_slices
from meshwright.trees.split import Split, as_shape, split_arrays
from meshwright.trees.walk import variables_of


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step, traced: its jaxpr over the arrays among its arguments, and how to rebuild trees.

    `arguments`: a `Split` for each argument. `returned`: that of what the step returns; arrays that
    it left in NNX variables of its arguments follow in the jaxpr's results, and `in_place` says for
    each which array of the arguments it replaces. `carried`: for results that are the next step's
    arguments (the new state), by number, the array of the arguments that each takes the place of.
    `by_slices`: lines whose gradients added so many rows to tables slice by slice.
    """

    function: Callable[..., Any]
    closed: Any
    arguments: tuple[Split, ...]
    returned: Split
    in_place: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    names: tuple[str, ...]
    carried: Mapping[int, int] = dataclasses.field(default_factory=dict)
    by_slices: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        """The path of every array among the arguments, its argument's name first."""
        return [
            "/".join(filter(None, (name, path)))
            for name, part in zip(self.names, self.arguments, strict=True)
            for path in part.paths
        ]

    @property
    def donated(self) -> list[bool]:
        """Whether each array among the arguments is donated."""
        return [
            number in self.donate_argnums
            for number, part in enumerate(self.arguments)
            for _ in part.arrays
        ]


# In: a function and its arguments, trees with any leaves. Out: its jaxpr over the arrays among
# them. What is no array is a part of the program. NNX modules are changed in place: what the step
# leaves in their variables is a result. Example: `step(model, x)`, which updates `model.w` in place
# and returns a loss, gives a jaxpr (w, x) -> (loss, w) with `in_place == (0,)`.
def trace_step(
    function: Callable[..., Any],
    parts: Sequence[Split],
    names: Sequence[str],
    donate_argnums: tuple[int, ...],
) -> TracedStep:
    """Trace a step of these arguments; what the function raises comes through as it is."""
    seen: list[tuple[Split, tuple[int, ...]]] = []

    def flat(*operands: Any) -> list[Any]:
        values = jax.tree.leaves(operands)
        rebuilt = rebuild_all(parts, operands)
        out = function(*rebuilt)
        _check_returned(out, function)
        returned = split_arrays(out)
        in_place: list[int] = []
        changed: list[Any] = []
        first = 0
        for part, arg in zip(parts, rebuilt, strict=True):
            if variables_of(arg):
                for number, new in enumerate(arrays_at(part, arg), first):
                    if new is not values[number]:
                        in_place.append(number)
                        changed.append(new)
            first += len(part.positions)
        seen.append((dataclasses.replace(returned, arrays=()), tuple(in_place)))
        return [*returned.arrays, *changed]

    given = jax.make_jaxpr(called_as(flat, function))(*by_path(parts))
    closed = in_better_form(given)
    returned, in_place = seen[-1]
    shapes = [(aval.shape, aval.dtype) for aval in closed.out_avals]
    carried = next_arguments(
        parts,
        [(aval.shape, aval.dtype) for aval in closed.in_avals],
        returned,
        shapes[: len(returned.positions)],
        {0, *donate_argnums},
    )
    carried.update(
        (len(returned.positions) + number, argument) for number, argument in enumerate(in_place)
    )
    return TracedStep(
        function,
        closed,
        tuple(parts),
        returned,
        in_place,
        donate_argnums,
        tuple(names),
        carried,
        rows_by_slices(given),
    )


def _check_returned(out: Any, function: Callable[..., Any]) -> None:
    """Refuse what has not run yet: a generator, a coroutine."""
    late = (Iterator, Awaitable)
    for leaf in jax.tree.leaves(out, is_leaf=lambda node: isinstance(node, late)):
        if isinstance(leaf, late):
            raise PlanningError(
                f"plan: {getattr(function, '__name__', 'the step')} returns a "
                f"{type(leaf).__name__}, which computes nothing by itself. Return arrays."
            )


# A function is traced over the arrays of its arguments alone. What JAX says of it names the user's
# function and line, and its arguments with the paths in them: `state['params/w']`.


def called_as(flat: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of `by_path`'s arguments go by a user's function in what JAX says of it."""
    known: Any = flat
    known.__name__ = known.__qualname__ = getattr(function, "__name__", "step")
    with contextlib.suppress(TypeError, ValueError):  # odd callables have no signature
        known.__signature__ = inspect.signature(function)
    while isinstance(function, functools.partial):
        function = function.func
    bare = inspect.unwrap(function)
    known.__wrapped__ = bare if hasattr(bare, "__code__") else type(bare).__call__
    return flat


def by_path(parts: Sequence[Split]) -> list[Any]:
    """The arrays of arguments as shapes: by their paths, or one that is an argument itself."""
    operands: list[Any] = []
    for part in parts:
        shapes = list(map(as_shape, part.arrays))
        if part.paths == ("",):
            operands += shapes
        elif len(set(part.paths)) < len(shapes):
            operands.append(shapes)
        else:
            operands.append(collections.OrderedDict(zip(part.paths, shapes, strict=True)))
    return operands


def rebuild_all(parts: Sequence[Split], operands: Sequence[Any]) -> list[Any]:
    """Return the arguments that a function traced with those of `by_path` stands for."""
    pairs = zip(parts, operands, strict=True)
    return [part.rebuild(jax.tree.leaves(operand)) for part, operand in pairs]


def arrays_at(part: Split, tree: Any) -> list[Any]:
    """Return the leaves of a tree that are arrays in one of its structure."""
    leaves = jax.tree.leaves(tree)
    return [leaves[position] for position in part.positions]
