"""`in_better_form`: a jaxpr whose operations are written as compilers have them, or do better with.

Loops that JAX unrolls in full, and those of one run, are written out. Rows that `vmap` adds to a
table slice by slice are added at once: a TPU's compiler would make a loop of it, 6 to 8 us a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode, ScatterDimensionNumbers

from meshwright._compat import (
    Atom,
    Eqn,
    Jaxpr,
    Var,
    at_equation,
    is_literal,
    scan_counts,
    source_line,
)
from meshwright._compat_lowering import equations
from meshwright.pipelines.tracing import run_equation
from meshwright.planning.traced_program import inlined_program

_IN_BOUNDS = (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS)
# Calls that stay calls: one says what the backward pass keeps, the other how its arguments lie.
_KEPT_CALLS = ("checkpoint", "remat2", "jit", "pjit")
SLICE_SECONDS = 7e-6  # of a TPU's loop, for one slice (5.6 to 8 us on v5e, v5p and v6e)


# In: a closed jaxpr. Out: the same, written as said above; one without any of it comes back as it
# is. Stacks of written-out loops are made for others alone: what another such loop takes of them,
# run by run, it takes from the run that made it, as compilers do. Examples: scan(body, c, x,
# unroll=2) of length 2 becomes body(body(c, x[0]), x[1]); rows (8, 1, 64) that are added to slices
# (1, 64) of a table become rows (8, 64), added to its rows.
def in_better_form(closed: Any) -> Any:
    """Write out the loops of a jaxpr that are unrolled in full, and add rows to tables at once."""
    return _rewritten(closed) if _has_worse(closed.jaxpr) else closed


def rows_by_slices(closed: Any) -> dict[str, int]:
    """How many rows a jaxpr adds to tables slice by slice, by the lines of their lookups."""
    found: dict[str, int] = {}
    for eqn, *callers in equations(closed):
        if _adds_by_slices(eqn) is not None:
            line = next(filter(None, map(source_line, (eqn, *callers))), "")
            runs = math.prod(each.params.get("length", 1) for each in callers)
            rows = math.prod(eqn.invars[1].aval.shape[:-1])
            found[line] = found.get(line, 0) + runs * rows
    return found


def _rewritten(closed: Any) -> Any:
    return jax.make_jaxpr(lambda *args: _run(closed.jaxpr, closed.consts, args))(*closed.in_avals)


def _is_unrolled(eqn: Eqn) -> bool:
    if eqn.primitive.name != "scan":
        return False
    unroll, length = eqn.params["unroll"], eqn.params["length"]
    return length == 1 or (unroll != 1 and (not unroll or unroll >= length))


def _has_worse(jaxpr: Jaxpr) -> bool:
    """Whether something is to be written otherwise, here or in what is called."""
    return any(
        _is_unrolled(eqn)
        or _adds_by_slices(eqn) is not None
        or _has_slices_in(eqn)
        or ((held := _called(eqn)) is not None and _has_worse(held[0]))
        for eqn in jaxpr.eqns
    )


def _has_slices_in(eqn: Eqn) -> bool:
    """Whether rows are added slice by slice in the body of a loop. What is unrolled there stays."""
    return eqn.primitive.name == "scan" and _has_slices(eqn.params["jaxpr"].jaxpr)


def _has_slices(jaxpr: Jaxpr) -> bool:
    return any(
        _adds_by_slices(eqn) is not None
        or _has_slices_in(eqn)
        or ((held := _called(eqn)) is not None and _has_slices(held[0]))
        for eqn in jaxpr.eqns
    )


def _called(eqn: Eqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """The program of an equation that does nothing but call it, now or in the backward pass."""
    return None if eqn.primitive.name.startswith("custom") else inlined_program(eqn)


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr in its better form."""
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
        if (dims := _adds_by_slices(eqn)) is not None:
            with at_equation(eqn):
                results = [_add_at_once(eqn, dims, *values)]
        elif _has_slices_in(eqn):
            body = _rewritten(eqn.params["jaxpr"])
            kept = eqn if body.consts else eqn.replace(params={**eqn.params, "jaxpr": body})
            results = run_equation(kept, env)
        elif held is None or not _has_worse(held[0]):
            results = run_equation(eqn, env)
        elif eqn.primitive.name in _KEPT_CALLS:
            run = functools.partial(_run, *held)
            inner: Any = jax.make_jaxpr(lambda *args, run=run: run(args))(*map(jax.typeof, values))
            closed = hasattr(eqn.params["jaxpr"], "consts")
            again = eqn.replace(params={**eqn.params, "jaxpr": inner if closed else inner.jaxpr})
            results = run_equation(again if closed or not inner.consts else eqn, env)
        else:
            with at_equation(eqn):
                results = _run(*held, values)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


# In: an equation. Out: if it adds slices of one row to a table, along which of its dims; `None` of
# others. A slice as long as the table in some dim begins at 0 there, since indices are brought
# inside. Example: updates (8, 1, 64) to a table (100, 64) at indices (8, 2) are rows along dim 0.
def _adds_by_slices(eqn: Eqn) -> list[int] | None:
    """The dims of a table to whose rows an equation adds, where it adds slices of one row."""
    if eqn.primitive.name != "scatter-add":
        return None
    numbers = eqn.params["dimension_numbers"]
    if numbers.operand_batching_dims or eqn.params["mode"] not in _IN_BOUNDS:
        return None
    table, _, updates = (atom.aval.shape for atom in eqn.invars)
    windows = [dim for dim in range(len(table)) if dim not in numbers.inserted_window_dims]
    sizes = {dim: updates[at] for dim, at in zip(windows, numbers.update_window_dims, strict=True)}
    found = []
    for dim in numbers.scatter_dims_to_operand_dims:
        if sizes.get(dim, 1) == 1:
            found.append(dim)
        elif sizes[dim] != table[dim]:
            return None
    return found if found and set(found) & set(sizes) else None


def _add_at_once(eqn: Eqn, dims: Sequence[int], table: Any, indices: Any, updates: Any) -> Any:
    """Add rows to a table where slices of one row are added along some dims."""
    numbers = eqn.params["dimension_numbers"]
    windows = [dim for dim in range(table.ndim) if dim not in numbers.inserted_window_dims]
    places = dict(zip(windows, numbers.update_window_dims, strict=True))
    gone = [places[dim] for dim in dims if dim in places]
    columns = [numbers.scatter_dims_to_operand_dims.index(dim) for dim in dims]
    kept = [jax.lax.slice_in_dim(indices, at, at + 1, axis=-1) for at in columns]
    left = [at for at in numbers.update_window_dims if at not in gone]
    # What is promised of whole indices holds for a part of them only so far.
    whole = len(columns) == len(numbers.scatter_dims_to_operand_dims)
    first = columns == list(range(len(columns)))
    return jax.lax.scatter_add(
        table,
        kept[0] if len(kept) == 1 else jnp.concatenate(kept, -1),
        jax.lax.squeeze(updates, gone),
        ScatterDimensionNumbers(
            update_window_dims=tuple(at - sum(each < at for each in gone) for at in left),
            inserted_window_dims=tuple(sorted({*numbers.inserted_window_dims, *dims})),
            scatter_dims_to_operand_dims=tuple(dims),
        ),
        indices_are_sorted=eqn.params["indices_are_sorted"] and first,
        unique_indices=eqn.params["unique_indices"] and whole,
        mode=eqn.params["mode"],
    )


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
        results = _run(body.jaxpr, body.consts, [*fixed, *carry, *parts])
        carry, made[run] = results[:count], results[count:]
    env.update(zip(eqn.outvars[:count], carry, strict=True))
    for number, var in enumerate(eqn.outvars[count:]):
        stacks[var] = [made[run][number] for run in order]
