"""Evaluate a traced step with a plan's layouts written in as sharding constraints.

Around every product, convolution and lookup three things are said: how its operands are needed,
how its result is made, and how the result lies from then on. With shardings of arguments alone the
partitioner guesses the rest, and was up to nine times slower. Two are left out: that an operand is
gathered, and that partial sums are added up before they are scattered. The partitioner does both
anyway, and where it may choose how, it does so beside the product (on a TPU, piece by piece). In a
product of scores that are cut by their queries both are said: pieces of the scores would be copied,
and a step take half as long again. Of a product nothing is said that lies as its operands make it,
or that is added up everywhere: compilers merge what follows with it.

Pallas kernels are no business of the partitioner: each device runs them on its part of the grid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright._compat import (
    Atom,
    Eqn,
    Jaxpr,
    Var,
    at_equation,
    is_literal,
    mesh_around,
    scan_counts,
)
from meshwright._text import plural
from meshwright.errors import PlanningError
from meshwright.pipelines.tracing import run_equation
from meshwright.planning.jit_options import wrong_arguments
from meshwright.planning.kernel_rules import run_on_parts
from meshwright.planning.plan_layouts import Layouts, axes_of, local_shape
from meshwright.planning.stored_values import looks_up
from meshwright.planning.traced_program import Operation, inlined_program
from meshwright.planning.traced_step import TracedStep, arrays_at
from meshwright.trees.walk import flatten, is_variable, problem_lines, shown_path

_INDICES = 1  # the number of the operand of a lookup that says which rows


# In: a traced step and the layouts of a plan. Out: a function of the flat arguments that computes
# the same, with constraints. Invariant: equations are walked in the order in which `read_program`
# numbered them; loops are rebuilt with bodies that are walked, and numbered, once; a `remat` that
# the backward pass holds stays one, by the barrier that JAX puts there itself. Example: `x @ w`
# under [batch, embed] becomes
#     constraint(constraint(x, P("fsdp")) @ constraint(w, P()), P("fsdp"))
class PlannedEvaluation:
    """Evaluates the jaxpr of a step with constraints; one call is one trace."""

    def __init__(self, layouts: Layouts, mesh: Mesh | AbstractMesh | None):
        self.layouts, self.mesh = layouts, mesh
        self.program = layouts.costs.program
        self.next = 0  # the number of the next operation

    def constrain(self, value: Any, spec: PartitionSpec, number: int) -> Any:
        """Write a spec down; `None` as mesh leaves it to the mesh that is set when it is traced."""
        if self.program.bytes[number] < self.layouts.smallest:
            return value
        return self.place(value, spec)

    def place(self, value: Any, spec: PartitionSpec) -> Any:
        """Write a spec down, however small the array is."""
        sharding: Any = spec if self.mesh is None else NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(value, sharding)  # type: ignore[no-untyped-call]

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr."""
        env: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Atom) -> Any:
            return atom.val if is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            held = inlined_program(eqn)
            if held is not None:
                # The barrier keeps the compiler from merging what is computed twice on purpose.
                if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
                    values = jax.lax.optimization_barrier(values)  # type: ignore[no-untyped-call]
                with at_equation(eqn):  # its name scopes are around those inside
                    results = self.run(*held, values)
            elif eqn.primitive.name in _CONTROL_FLOW:
                results = _CONTROL_FLOW[eqn.primitive.name](self, eqn, values)
            else:
                results = self._operation(eqn, env)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _operation(self, eqn: Eqn, env: dict[Var, Any]) -> list[Any]:
        number, self.next = self.next, self.next + 1
        if eqn.primitive.name == "sharding_constraint":  # the plan's own take their place
            return [env[atom] for atom in eqn.invars]
        around = self.layouts.around(number)
        if around is None:
            return run_equation(eqn, env)
        if eqn.primitive.name == "pallas_call":
            return self._kernel(eqn, env, number, *around[:2])
        operation = self.program.operations[number]
        needed, made, in_full = around
        with at_equation(eqn):
            operands = {
                atom: self._as_needed(env[atom], operation, at, spec, in_full)
                for at, (atom, spec) in enumerate(zip(eqn.invars, needed, strict=True))
                if not is_literal(atom)
            }
        results = run_equation(eqn, {**env, **operands})
        # A product that lies as its operands make it needs no word, and compilers merge a softmax
        # with one that has none (a tenth less memory, 2 to 4 % less time on TPUs). Neither does one
        # that is added up everywhere need it: what follows is merged with it (up to 15 % less).
        axes = set().union(*map(axes_of, needed))
        is_product = eqn.primitive.name == "dot_general"
        implied = (
            is_product
            and all(
                is_literal(atom) or axes_of(self.layouts.of_value(value)) <= axes_of(spec)
                for atom, spec, value in zip(eqn.invars, needed, operation.inputs, strict=True)
            )
            and bool(axes)
            and axes == axes_of(made[0])
        )
        with at_equation(eqn):
            kept = []
            for result, spec, value in zip(results, made, operation.outputs, strict=True):
                lies = self.layouts.of_value(value)
                summed = is_product and not in_full and not axes_of(lies)
                if lies == spec and (implied or summed):
                    kept.append(result)
                    continue
                for each in self.layouts.of_made(value, spec, in_full):
                    result = self.constrain(result, each, value)
                kept.append(result)
            return kept

    def _as_needed(
        self, operand: Any, operation: Operation, at: int, spec: PartitionSpec, in_full: bool
    ) -> Any:
        # Small indices are said, too, if what they look through is not: the partitioner would else
        # cut it as it happens to find them cut, and send all of it for that.
        large = max(self.program.bytes[value] for value in operation.values)
        indices = at == _INDICES and bool(looks_up(operation)) and large >= self.layouts.smallest
        for each in self.layouts.of_operand(operation, at, spec, in_full):
            number = operation.inputs[at]
            operand = (
                self.place(operand, each) if indices else self.constrain(operand, each, number)
            )
        return operand

    # In: the equation of a Pallas kernel, and how its operands are needed and its results made.
    # Out: its results, as they lie from then on. A `shard_map` runs the same kernel on each
    # device's part: XLA refuses to partition kernels for TPUs, and gathers for those of GPUs.
    # Example: attention over 16 rows, batch on dp:4: on each device the kernel's grid has 4 rows.
    def _kernel(
        self,
        eqn: Eqn,
        env: dict[Var, Any],
        number: int,
        needed: Sequence[PartitionSpec],
        made: Sequence[PartitionSpec],
    ) -> list[Any]:
        mesh = mesh_around() if self.mesh is None else self.mesh
        if mesh.empty or mesh.size == 1:
            return run_equation(eqn, env)
        sizes = dict(mesh.shape)
        shapes = [
            local_shape(var.aval.shape, spec, sizes)
            for var, spec in zip(eqn.outvars, made, strict=True)
        ]
        operands = [atom.val if is_literal(atom) else env[atom] for atom in eqn.invars]
        with at_equation(eqn):
            results = jax.shard_map(
                lambda *parts: run_on_parts(eqn, parts, shapes),
                mesh=mesh,
                in_specs=tuple(needed),
                out_specs=list(made),
                check_vma=False,  # Pallas kernels do not say along which axes their results vary
            )(*operands)
            values = self.program.operations[number].outputs
            return [
                self.constrain(result, self.layouts.of_value(value), value)
                for result, value in zip(results, values, strict=True)
            ]

    def _scan(self, eqn: Eqn, values: Sequence[Any]) -> list[Any]:
        params = eqn.params
        body = params["jaxpr"]
        constants, count = scan_counts(params)
        carried = constants + count
        first, after = self.next, [self.next]

        def step(carry: Any, parts: Any) -> tuple[Any, Any]:
            self.next = first  # JAX may trace a body more than once
            results = self.run(body.jaxpr, body.consts, [*values[:constants], *carry, *parts])
            after[0] = self.next
            return results[:count], results[count:]

        with at_equation(eqn):
            carry, stacks = jax.lax.scan(
                step,
                list(values[constants:carried]),
                list(values[carried:]),
                params["length"],
                params["reverse"],
                params["unroll"],
            )
        self.next = after[0]
        return [*carry, *stacks]

    def _while(self, eqn: Eqn, values: Sequence[Any]) -> list[Any]:
        params = eqn.params
        tests, constants = params["cond_nconsts"], params["body_nconsts"]
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        first, after = self.next, [self.next]

        def goes_on(carry: Any) -> Any:
            return jax.core.eval_jaxpr(test.jaxpr, test.consts, *values[:tests], *carry)[0]

        def step(carry: Any) -> Any:
            self.next = first
            inputs = [*values[tests : tests + constants], *carry]
            results = self.run(body.jaxpr, body.consts, inputs)
            after[0] = self.next
            return results

        with at_equation(eqn):
            results = jax.lax.while_loop(goes_on, step, list(values[tests + constants :]))
        self.next = after[0]
        return list(results)

    def _cond(self, eqn: Eqn, values: Sequence[Any]) -> list[Any]:
        ends: list[int] = []

        def branch(number: int) -> Callable[..., list[Any]]:
            body = eqn.params["branches"][number]

            def run(*operands: Any) -> list[Any]:
                # Branches are numbered one after the other; `starts` has those before this one.
                self.next = starts[number]
                return self.run(body.jaxpr, body.consts, operands)

            return run

        starts = [self.next]
        for each in eqn.params["branches"]:
            starts.append(starts[-1] + count_operations(each.jaxpr))
        ends.append(starts[-1])
        with at_equation(eqn):
            branches = [branch(number) for number in range(len(eqn.params["branches"]))]
            results = jax.lax.switch(values[0], branches, *values[1:])
        self.next = ends[0]
        return list(results)


_CONTROL_FLOW = {
    "scan": PlannedEvaluation._scan,
    "while": PlannedEvaluation._while,
    "cond": PlannedEvaluation._cond,
}


def count_operations(jaxpr: Jaxpr) -> int:
    """Count the operations that `read_program` numbers in a jaxpr."""
    total = 0
    for eqn in jaxpr.eqns:
        held = inlined_program(eqn)
        if held is not None:
            total += count_operations(held[0])
        elif eqn.primitive.name == "scan":
            total += count_operations(eqn.params["jaxpr"].jaxpr)
        elif eqn.primitive.name == "while":
            total += count_operations(eqn.params["body_jaxpr"].jaxpr)
        elif eqn.primitive.name == "cond":
            total += sum(count_operations(each.jaxpr) for each in eqn.params["branches"])
        else:
            total += 1
    return total


def planned_function(
    step: TracedStep, layouts: Layouts, mesh: Mesh | AbstractMesh | None
) -> Callable[..., Any]:
    """Return the step with a plan's constraints, a function of the same arguments.

    Without a mesh the constraints are bare specs, for the mesh that is set around the call.
    """

    @functools.wraps(step.function, updated=())
    def planned(*args: Any) -> Any:
        results, changed = planned_results(step, layouts, mesh, args)
        update_in_place(step, args, changed)
        return step.returned.rebuild(results)

    planned.__name__ = getattr(step.function, "__name__", "step")
    return planned


def planned_results(
    step: TracedStep, layouts: Layouts, mesh: Mesh | AbstractMesh | None, args: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Evaluate the step; return the arrays of its result, and those it leaves in its arguments."""
    check_arguments(step, args)
    parts = zip(step.arguments, args, strict=True)
    flat = [array for part, arg in parts for array in arrays_at(part, arg)]
    _check_shapes(step, flat)
    evaluation = PlannedEvaluation(layouts, mesh)
    results = evaluation.run(step.closed.jaxpr, step.closed.consts, flat)
    count = len(step.returned.positions)
    # What is left in place has no `out_shardings` of a caller's: its layout is said here.
    changed = [
        evaluation.place(value, layouts.of_result(step, number))
        for number, value in enumerate(results[count:], count)
    ]
    return results[:count], changed


def check_arguments(step: TracedStep, args: Sequence[Any]) -> None:
    """Refuse arguments of another structure, or with other settings, than were planned for."""
    if len(args) != len(step.arguments):
        raise PlanningError(
            f"the planned step takes {plural(len(step.arguments), 'argument')} "
            f"({', '.join(step.names)}), not {len(args)}."
        )
    problems = wrong_arguments(step.arguments, args, step.names)
    if problems:
        raise PlanningError(
            f"the step was planned for other arguments.{problem_lines(problems)}\nWhat is no array "
            "is a part of the program: plan again with it, or pass it as an array."
        )


def _check_shapes(step: TracedStep, flat: Sequence[Any]) -> None:
    problems = [
        f"{shown_path(path)}: {jax.typeof(array).str_short()} here, {aval.str_short()} planned."
        for path, array, aval in zip(step.paths, flat, step.closed.in_avals, strict=True)
        if (jax.typeof(array).shape, jax.typeof(array).dtype) != (aval.shape, aval.dtype)
    ]
    if problems:
        raise PlanningError(
            f"the step was planned for other shapes.{problem_lines(problems)}\nPlan again with "
            "these."
        )


def update_in_place(step: TracedStep, args: Sequence[Any], changed: Sequence[Any]) -> None:
    """Leave in NNX variables what the step would have left there."""
    new = dict(zip(step.in_place, changed, strict=True))
    first = 0
    for part, arg in zip(step.arguments, args, strict=True):
        numbers = {position: first + n for n, position in enumerate(part.positions)}
        first += len(part.positions)
        if new.keys().isdisjoint(numbers.values()):
            continue
        position = 0
        for _, node in flatten(arg, is_variable)[0]:
            leaves, treedef = jax.tree.flatten(node)
            here = [numbers.get(position + n) for n in range(len(leaves))]
            position += len(leaves)
            if is_variable(node) and not new.keys().isdisjoint(here):
                after = [
                    leaf if number is None else new.get(number, leaf)
                    for number, leaf in zip(here, leaves, strict=True)
                ]
                node.update_from_state(jax.tree.unflatten(treedef, after))
