"""Blocks of layers in a loss, and a step with a choice of remat for every block.

Where the loss and the optimizer are given, a scan over layers is a block, and so is a function with
`jax.checkpoint` or one that is marked (`marked_blocks`). The jaxpr of the loss is evaluated with
other policies for these before it is differentiated.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

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
from meshwright.errors import PlanningError, short
from meshwright.pipelines.microbatching import value_and_grad
from meshwright.pipelines.tracing import run_equation
from meshwright.planning.marked_blocks import (
    BLOCK_SCOPE,
    WRITTEN,
    Assignment,
    Block,
    Chooser,
    Mark,
    MarkedStep,
    Segments,
    block_scope,
    choosing,
    end_stage,
    policy_of,
    renamed,
)
from meshwright.planning.traced_program import inlined_program
from meshwright.planning.traced_step import TracedStep, by_path, called_as, rebuild_all, trace_step
from meshwright.rehearsal.step_arguments import argument_names
from meshwright.trees.split import as_shape, split_arrays

_CHECKPOINTS = ("checkpoint", "remat2")
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """A loss, traced: its jaxpr, the `Split` of what it returns, and the blocks in it."""

    closed: Any
    returned: Any
    found: tuple[tuple[Eqn, Block], ...]


# In: a loss and an optimizer. Out: a train step `(params, state, *batch) -> (params, state, out)`,
# where `out` is what the loss returns. The loss is traced once, and its blocks are found in the
# jaxpr; a variant evaluates that jaxpr with other policies before it is differentiated.
@dataclasses.dataclass(frozen=True)
class LossStep:
    """A loss with an optimizer; `args` are those of the train step that they make."""

    loss: Callable[..., Any]
    optimizer: Any
    args: tuple[Any, ...]
    traced: TracedLoss

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(each for _, each in self.traced.found)

    def function(self, assignment: Assignment, ends: Collection[int] = ()) -> Callable[..., Any]:
        """Return the train step with a policy for every block, and stages that end after some."""

        def loss(params: Any, *batch: Any) -> Any:
            traced = self.traced
            arrays = split_arrays((params, *batch)).arrays
            if ends:  # in a pipeline it has the rows of a microbatch
                traced = _trace_loss(self.loss, (params, *batch))
            chosen = {
                id(eqn): (each, segments)
                for (eqn, each), segments in zip(traced.found, assignment, strict=True)
            }
            run = _Rematerialized(chosen, ends).run
            return traced.returned.rebuild(run(traced.closed.jaxpr, traced.closed.consts, arrays))

        # What a pipeline makes of the outputs of its microbatches.
        words = ["concat" if aval.shape else "mean" for aval in self.traced.closed.out_avals]
        aux = self.traced.returned.rebuild(words, other=None)
        return renamed(train_step(loss, self.optimizer, aux), self.loss)


def train_step(loss: Callable[..., Any], optimizer: Any, aux: Any) -> Callable[..., Any]:
    """Make a train step of a loss and an optimizer, as an Optax transformation is one.

    `aux`: how what the loss returns is reduced over microbatches, where it runs in a pipeline.
    """

    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, Any]:
        weights = _weights(params)

        def on(weights: Any, *batch: Any) -> tuple[Any, Any]:
            out = loss(_merged(params, weights), *batch)
            return (out[0] if isinstance(out, tuple) else out), out

        (_, out), grads = value_and_grad(on, has_aux=True, aux=aux)(weights, *batch)
        updates, state = optimizer.update(grads, state, weights)
        new = jax.tree.map(lambda w, u: (w + u).astype(w.dtype), weights, updates)
        return _merged(params, new), state, out

    return step


def _weights(params: Any) -> Any:
    """The tree with `None` for all that is not trained, as Optax expects it."""
    return jax.tree.map(lambda leaf: leaf if _is_weight(leaf) else None, params)


def _is_weight(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _merged(params: Any, weights: Any) -> Any:
    """Put trained weights back into their tree."""
    new = iter(jax.tree.leaves(weights))
    return jax.tree.map(lambda leaf: next(new) if _is_weight(leaf) else leaf, params)


def loss_step(loss: Callable[..., Any], args: Sequence[Any], optimizer: Any) -> LossStep:
    """Trace a loss, and find its blocks."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise PlanningError(
            f"optimizer: {short(optimizer)} has no init and update; pass an Optax transformation.",
            option="optimizer",
        )
    if len(args) < 2:
        raise PlanningError(
            "optimizer: with an optimizer the function is a loss of parameters and a batch: "
            "plan(loss, params, batch, optimizer=...)."
        )
    traced = _trace_loss(loss, args)
    value = traced.closed.out_avals[0] if traced.closed.out_avals else None
    if getattr(value, "shape", None) != ():
        raise PlanningError(
            "optimizer: the function returns no scalar first, so it is no loss. Return the loss, "
            "or (loss, anything else); or plan the whole train step without optimizer=."
        )
    state = jax.eval_shape(
        lambda params: optimizer.init(_weights(params)), jax.tree.map(as_shape, args[0])
    )
    return LossStep(loss, optimizer, (args[0], state, *args[1:]), traced)


def _trace_loss(loss: Callable[..., Any], args: Sequence[Any]) -> TracedLoss:
    parts = [split_arrays(arg, depth=-1) for arg in args]  # numbers are a part of the loss
    returned: list[Any] = []

    def flat(*operands: Any) -> Any:
        out = split_arrays(loss(*rebuild_all(parts, operands)))
        returned.append(dataclasses.replace(out, arrays=()))
        return out.arrays

    with choosing(Chooser(find=True)):
        closed = jax.make_jaxpr(called_as(flat, loss))(*by_path(parts))
    return TracedLoss(closed, returned[-1], tuple(_distinct(_blocks_in(closed.jaxpr))))


def _distinct(found: Iterator[tuple[Eqn, Block]]) -> Iterator[tuple[Eqn, Block]]:
    """Join equations that are met several times: JAX traces a function once for all its calls."""
    by_eqn: dict[int, tuple[Eqn, Block]] = {}
    for eqn, each in found:
        before = by_eqn.get(id(eqn))
        runs = each.runs + (before[1].runs if before else 0)
        by_eqn[id(eqn)] = (
            eqn,
            dataclasses.replace(each, runs=runs, splits=each.splits and not before),
        )
    yield from by_eqn.values()


def _blocks_in(jaxpr: Jaxpr, times: int = 1, marked: bool = False) -> Iterator[tuple[Eqn, Block]]:
    """Yield the equations that are blocks; inside of a loop only those that are marked."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _CHECKPOINTS:
            policy = eqn.params.get("policy")
            mark = isinstance(policy, Mark)
            if mark or not marked:
                names = tuple(sorted(_value_names(eqn.params["jaxpr"])))
                line = policy.line if mark else source_line(eqn)
                yield eqn, Block(line, times, False, names, written=not mark)
        elif name == "scan":
            body, length = eqn.params["jaxpr"].jaxpr, eqn.params["length"]
            inside = list(_blocks_in(body, times * length, marked=True))
            yield from inside
            if not inside and not marked and length > 1 and _has_layers(eqn):
                names = tuple(sorted(_value_names(body)))
                line = f"scan of {length} at {source_line(eqn)}"
                own = any(each.primitive.name in _CHECKPOINTS for each in _deep(body))
                yield eqn, Block(line, length, not eqn.params["reverse"], names, own)
        elif (held := inlined_program(eqn)) is not None and not name.startswith("custom"):
            yield from _blocks_in(held[0], times, marked)


def _deep(jaxpr: Jaxpr) -> Iterator[Eqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        if (held := inlined_program(eqn)) is not None:
            yield from _deep(held[0])
        elif eqn.primitive.name == "scan":
            yield from _deep(eqn.params["jaxpr"].jaxpr)


def _has_layers(eqn: Eqn) -> bool:
    """Whether a scan goes along stacked arrays and multiplies: layers, not a recurrence of sums."""
    params = eqn.params
    stacks = len(eqn.invars) > sum(scan_counts(params))
    return stacks and any(each.primitive.name in _PRODUCTS for each in _deep(params["jaxpr"].jaxpr))


def _value_names(jaxpr: Jaxpr) -> set[str]:
    """The names that `checkpoint_name` gave to values in a jaxpr."""
    return {each.params["name"] for each in _deep(jaxpr) if each.primitive.name == "name"}


# In: a jaxpr, and segments for some of its equations. Out: what it computes, under these policies.
# Invariant: other equations run as they are; a `jax.checkpoint` inside of a block gives way to the
# block's. A scan with two segments becomes two scans, one after the other. Stages end after the
# runs of checkpoints whose numbers are in `ends`.
class _Rematerialized:
    """Evaluates the jaxpr of a loss once, with other policies for its blocks."""

    def __init__(self, chosen: Mapping[int, tuple[Block, Segments]], ends: Collection[int] = ()):
        self.chosen, self.ends = chosen, ends
        self.runs = 0

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], inside: bool = False
    ) -> list[Any]:
        """Evaluate a jaxpr; `inside` of a block, checkpoints are written out."""
        env: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Atom) -> Any:
            return atom.val if is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            name = eqn.primitive.name
            held = None if name.startswith("custom") else inlined_program(eqn)
            if id(eqn) in self.chosen:
                results = self._block(eqn, values, env, *self.chosen[id(eqn)])
            elif held is not None and (
                inside or (name not in _CHECKPOINTS and self._holds(held[0]))
            ):
                results = self.run(*held, values, inside)
            elif name == "scan" and self._holds(eqn.params["jaxpr"].jaxpr):
                results = self._scan(eqn, values, None, eqn.params["length"], inside=False)
            else:
                results = run_equation(eqn, env)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _holds(self, jaxpr: Jaxpr) -> bool:
        """Whether a jaxpr has a block in it."""
        return any(id(eqn) in self.chosen for eqn in _deep(jaxpr))

    def _block(
        self,
        eqn: Eqn,
        values: Sequence[Any],
        env: dict[Var, Any],
        each: Block,
        segments: Segments,
    ) -> list[Any]:
        name = segments[0][0]
        if eqn.primitive.name != "scan":
            number, self.runs = self.runs, self.runs + 1
            with block_scope(number):
                results = (
                    run_equation(eqn, env)
                    if name == WRITTEN
                    else self._under(eqn, values, policy=name, names=each.names)
                )
            return end_stage(results, number) if number in self.ends else results
        if name == WRITTEN:
            return run_equation(eqn, env)
        start, carry, stacks = 0, list(values), []
        constants, carried = scan_counts(eqn.params)
        whole = constants + carried
        for name, count in segments:
            part = [*carry[:whole], *(x[start : start + count] for x in values[whole:])]
            if len(segments) == 1:
                part = list(values)
            results = self._scan(eqn, part, (name, each.names), count, inside=True)
            carry = [*values[:constants], *results[:carried]]
            stacks.append(results[carried:])
            start += count
        joined = (
            [jnp.concatenate(parts) for parts in zip(*stacks, strict=True)]
            if len(stacks) > 1
            else stacks[0]
        )
        return [*carry[constants:], *joined]

    def _under(
        self, eqn: Eqn, values: Sequence[Any], policy: str, names: Sequence[str]
    ) -> list[Any]:
        """Run a checkpoint, which holds its program, under another policy."""
        held: Any = inlined_program(eqn)
        run: Callable[..., list[Any]] = functools.partial(self._inside, held)
        if policy != "everything":
            run = jax.checkpoint(
                run,
                policy=policy_of(policy, names),
                prevent_cse=eqn.params.get("prevent_cse", True),
            )
        return run(*values)

    def _inside(self, held: tuple[Jaxpr, Sequence[Any]], *values: Any) -> list[Any]:
        return self.run(*held, values, inside=True)

    def _scan(
        self,
        eqn: Eqn,
        values: Sequence[Any],
        policy: tuple[str, Sequence[str]] | None,
        length: int,
        inside: bool,
    ) -> list[Any]:
        """Run a scan whose body is evaluated by this, under a policy."""
        params = eqn.params
        constants, carried = scan_counts(params)
        body = params["jaxpr"]

        def step(carry: Any, parts: Any) -> tuple[Any, Any]:
            inputs = [*values[:constants], *carry, *parts]
            results = self.run(body.jaxpr, body.consts, inputs, inside)
            return results[:carried], results[carried:]

        if policy is not None and policy[0] != "everything":
            # XLA cannot merge what the body of a scan computes again with the forward pass.
            step = jax.checkpoint(step, policy=policy_of(*policy), prevent_cse=False)
        with at_equation(eqn):
            carry, stacks = jax.lax.scan(
                step,
                list(values[constants : constants + carried]),
                list(values[constants + carried :]),
                length,
                params["reverse"],
                params["unroll"],
            )
        return [*carry, *stacks]


Trace = Callable[
    [Callable[..., Any], Sequence[Any], Sequence[str], Sequence[int] | None], TracedStep
]


@dataclasses.dataclass(frozen=True)
class TracedSource:
    """A step to plan: traced as it is (`plain`), or with blocks whose remat can be chosen."""

    source: MarkedStep | LossStep | None
    plain: TracedStep | None
    trace: Callable[[Callable[..., Any]], TracedStep]

    def variant(self, assignment: Assignment) -> TracedStep:
        """Trace the step with these policies of its blocks; as it is where that is the same."""
        kept = all(name == "everything" for segments in assignment for name, _ in segments)
        if self.source is None or (kept and self.plain is not None):
            return cast(TracedStep, self.plain)
        return self.trace(self.source.function(assignment))


def trace_source(
    function: Callable[..., Any], args: Sequence[Any], optimizer: Any, trace: Trace
) -> TracedSource:
    """Trace what is planned, and find its blocks.

    `trace` takes a function, its arguments, their names, and those donated if no others are said.
    """
    names = argument_names(function, len(args))
    if optimizer is not None:
        source = loss_step(function, args, optimizer)
        step_names = ("params", "state", *names[1:])
        return TracedSource(
            source, None, lambda variant: trace(variant, source.args, step_names, (0, 1))
        )
    with choosing(Chooser()) as chooser:
        plain = trace(function, args, names, None)

    def again(variant: Callable[..., Any]) -> TracedStep:
        return trace_step(variant, plain.arguments, plain.names, plain.donate_argnums)

    if not chooser.blocks:
        return TracedSource(None, plain, again)
    if not _begins_with_block(plain):
        # It was traced before, for the options of its jit or without a mesh, and blocks counted on.
        with choosing(Chooser()) as chooser:
            plain = again(function)
    return TracedSource(MarkedStep(function, tuple(chooser.blocks)), plain, again)


def _begins_with_block(step: TracedStep) -> bool:
    """Whether the first block of a step is number 0: blocks were counted in this trace alone."""
    first = f"{BLOCK_SCOPE}0"
    return any(
        first in re.split(r"\W", str(eqn.source_info.name_stack))
        for eqn, *_ in equations(step.closed)
    )
