"""`TracedStep`: a step, traced once: its jaxpr over the arrays among its arguments.

Loops that JAX or its compilers write out run after run are written out in the jaxpr, too.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright._compat import Atom, Eqn, Jaxpr, Var, at_equation, is_literal, scan_counts
from meshwright.errors import PlanningError
from meshwright.pipelines.tracing import run_equation
from meshwright.planning.carried_state import next_arguments
from meshwright.planning.traced_program import inlined_program
from meshwright.trees.split import Split, as_shape, split_arrays
from meshwright.trees.walk import variables_of


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step, traced: its jaxpr over the arrays among its arguments, and how to rebuild trees.

    `arguments`: a `Split` for each argument. `returned`: that of what the step returns; arrays that
    it left in NNX variables of its arguments follow in the jaxpr's results, and `in_place` says for
    each which array of the arguments it replaces. `carried`: for results that are the next step's
    arguments (the new state), by number, the array of the arguments that each takes the place of.
    """

    function: Callable[..., Any]
    closed: Any
    arguments: tuple[Split, ...]
    returned: Split
    in_place: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    names: tuple[str, ...]
    carried: Mapping[int, int] = dataclasses.field(default_factory=dict)

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

    closed = write_out_loops(jax.make_jaxpr(called_as(flat, function))(*by_path(parts)))
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
        function, closed, tuple(parts), returned, in_place, donate_argnums, tuple(names), carried
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


# In: a closed jaxpr. Out: the same, where every loop that JAX unrolls in full is written out, as it
# is lowered, and every loop of one run, as compilers do; programs without one come back as they
# are. Its stacks are made for others alone: what another written-out loop takes of them, run by
# run, it takes from the run that made it, as compilers do. Example: scan(body, c, x, unroll=2) of
# length 2 becomes body(body(c, x[0]), x[1]).
def write_out_loops(closed: Any) -> Any:
    """Write out the loops of a jaxpr that are unrolled in full."""
    if not _holds_unrolled(closed.jaxpr):
        return closed

    def run(*args: Any) -> list[Any]:
        return _run_written_out(closed.jaxpr, closed.consts, args)

    return jax.make_jaxpr(run)(*closed.in_avals)


def _is_unrolled(eqn: Eqn) -> bool:
    if eqn.primitive.name != "scan":
        return False
    unroll, length = eqn.params["unroll"], eqn.params["length"]
    return length == 1 or (unroll != 1 and (not unroll or unroll >= length))


def _holds_unrolled(jaxpr: Jaxpr) -> bool:
    """Whether one is in a jaxpr, or in what is called there; not in bodies of control flow."""
    return any(
        _is_unrolled(eqn) or ((held := _called(eqn)) is not None and _holds_unrolled(held[0]))
        for eqn in jaxpr.eqns
    )


def _called(eqn: Eqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """The program of an equation that does nothing but call it, now or in the backward pass."""
    return None if eqn.primitive.name.startswith("custom") else inlined_program(eqn)


def _run_written_out(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with its unrolled loops written out."""
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    stacks: dict[Var, list[Any]] = {}  # by their parts, until something takes all of one

    def read(atom: Atom) -> Any:
        if is_literal(atom):
            return atom.val
        if atom not in env:
            env[atom] = jnp.stack(stacks[atom])
        return env[atom]

    for eqn in jaxpr.eqns:
        with at_equation(eqn):
            if _is_unrolled(eqn):
                _write_out(eqn, read, env, stacks)
                continue
            values = [read(atom) for atom in eqn.invars]
        held = _called(eqn)
        if held is None or not _holds_unrolled(held[0]):
            results = run_equation(eqn, env)
        elif "policy" in eqn.params:  # of a checkpoint
            run = functools.partial(_run_written_out, *held)
            inner: Any = jax.make_jaxpr(lambda *args, run=run: run(args))(*map(jax.typeof, values))
            again = eqn.replace(params={**eqn.params, "jaxpr": inner.jaxpr})
            results = run_equation(again, env)
        else:
            with at_equation(eqn):
                results = _run_written_out(*held, values)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _write_out(
    eqn: Eqn, read: Callable[[Atom], Any], env: dict[Var, Any], stacks: dict[Var, list[Any]]
) -> None:
    """Evaluate an unrolled loop run by run."""
    params, body = eqn.params, eqn.params["jaxpr"]
    constants, count = scan_counts(params)
    whole = constants + count
    fixed = [read(atom) for atom in eqn.invars[:constants]]
    carry = [read(atom) for atom in eqn.invars[constants:whole]]

    def part(atom: Atom, run: int) -> Any:
        if not is_literal(atom) and atom in stacks:
            return stacks[atom][run]
        return jax.lax.index_in_dim(read(atom), run, keepdims=False)

    made: dict[int, list[Any]] = {}
    order = range(params["length"])
    for run in reversed(order) if params["reverse"] else order:
        parts = [part(atom, run) for atom in eqn.invars[whole:]]
        results = _run_written_out(body.jaxpr, body.consts, [*fixed, *carry, *parts])
        carry, made[run] = results[:count], results[count:]
    env.update(zip(eqn.outvars[:count], carry, strict=True))
    for number, var in enumerate(eqn.outvars[count:]):
        stacks[var] = [made[run][number] for run in order]
