"""Pass 6: write the tasks of the schedule as operations, with the transfers between them."""

# Input: the programs of all kinds of tasks, and a schedule with the order in which it was proved.
# Output: operations on the builder; `TaskWriter.values` has the slots of what single microbatches
# give, `Accumulators.slots` those of what is added up. Invariant: an operation stands after those
# that fill its slots, and what a task makes is sent right after it, so that it is on its way while
# the group goes on. For two stages and one microbatch:
#
#     0F0; send its output to group 1; 1F0; 1BW0; send the cotangent to group 0; 0BW0

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshwright._compat import Atom, Aval, Var, is_literal
from meshwright.errors import PipelineError
from meshwright.pipelines.outer_program import Node
from meshwright.pipelines.staged_program import NO_STAGE, StageKey, variables_read
from meshwright.pipelines.stages import StageProgram
from meshwright.pipelines.step_graph import StepBuilder, TaskFunction
from meshwright.pipelines.task_programs import (
    Program,
    Sum,
    TaskKey,
    all_sums,
    recomputed,
    rewrite_to_group_mesh,
)
from meshwright.pipelines.trace_marks import Reduction
from meshwright.pipelines.tracing import Traced, equations_as_function
from meshwright.schedules.validation import Proof

Run = Callable[..., list[Any]]


class TaskWriter:
    """Writes the tasks onto the builder, in the order in which the schedule was proved."""

    def __init__(
        self,
        builder: StepBuilder,
        stage_program: StageProgram,
        programs: dict[TaskKey, Program],
        proof: Proof,
        traced: Traced,
        accumulators: Accumulators,
    ):
        self.builder, self.stage_program, self.programs = builder, stage_program, programs
        self.proof, self.schedule = proof, proof.schedule
        self.accumulators = accumulators
        self.values: dict[tuple[Var, int, int], int] = {}  # slots by (variable, microbatch, group)
        self.operand = dict(zip(stage_program.invars, traced.operands, strict=True))
        region = stage_program.region
        inputs = zip(stage_program.invars, region.roles, region.dims, strict=True)
        dims = {var: dim for var, role, dim in inputs if role == "split"}
        split = {var: self.operand[var] for var in dims}
        self.batch = Microbatches(builder, split, dims, self.schedule.microbatches)
        self.carried = self._carried()
        self.readers: dict[Var, set[int]] = {}  # a variable, and the groups whose tasks read it
        for key, program in programs.items():
            for var in program.ins:
                self.readers.setdefault(var, set()).add(self.group(key))

    def group(self, key: TaskKey) -> int:
        return self.schedule.group_of[key[1]]

    def place_batch(self) -> None:
        """Place in each group the arguments of the batch that its tasks read."""
        for group in range(self.schedule.groups):
            used = [var for var in self.batch.split if group in self.readers.get(var, ())]
            self.batch.place(group, used)

    def write(self) -> None:
        """Write all tasks, each followed by the transfers of its results."""
        functions = {key: self._function(key) for key in self.programs}
        for group, task in self.proof.order:
            program = self.programs[task.kind, task.stage]
            # A stage may have nothing to do in a B or W that its schedule names.
            if not program.eqns and not program.sums:
                continue
            microbatch = task.microbatch
            totals = [self.accumulators.slots[number] for number in program.sums]
            own = [var for var in program.ins if var not in self.batch.split]
            ins = [self._input(var, microbatch, group) for var in own]
            ins += self.batch.inputs(program.ins, microbatch, group)
            avals = [var.aval for var in (*program.outs, *program.sums.values())]
            function = functions[task.kind, task.stage]
            outs = self.builder.add_call(group, function, [*totals, *ins], avals, task)
            count = len(program.outs)
            for var, slot in zip(program.outs, outs[:count], strict=True):
                self.values[var, microbatch, group] = slot
            self.accumulators.slots.update(zip(program.sums, outs[count:], strict=True))
            self._send_results(program, microbatch, group)

    def _send_results(self, program: Program, microbatch: int, group: int) -> None:
        """Send what other groups read: one transfer for each of them, with all its values."""
        for target in range(self.schedule.groups):
            used = [var for var in program.outs if target in self.readers.get(var, ())]
            if target != group and used:
                shardings = [
                    self.builder.shardings.over_data_axes(target, var.aval.shape) for var in used
                ]
                slots = [self.values[var, microbatch, group] for var in used]
                arrived = self.builder.add_transfer(slots, target, shardings)
                for var, slot in zip(used, arrived, strict=True):
                    self.values[var, microbatch, target] = slot

    def _input(self, var: Var, microbatch: int, group: int) -> int:
        """Return the slot of a task's input: made by a task, a constant, carried, or an operand."""
        if (var, microbatch, group) in self.values:
            return self.values[var, microbatch, group]
        if var in self.stage_program.consts:
            if (var, group) not in self.builder.slot_of:
                value = self.stage_program.consts[var]
                self.builder.slot_of[var, group] = self.builder.constant(value, group)
            return self.builder.slot_of[var, group]
        if var in self.carried and microbatch:
            before = (self.carried[var], microbatch - 1, group)
            if before not in self.values:
                raise PipelineError(
                    "a carried value is made in a later stage than it is used in, or in another "
                    "group, so that every microbatch would wait for the one before it. Keep what "
                    "is carried within one stage."
                )
            return self.values[before]
        return self.builder.slot_in_group(self.operand[var], group)

    def _carried(self) -> dict[Var, Var]:
        """Map a carried operand to the variable that holds it after a microbatch."""
        program, region = self.stage_program, self.stage_program.region
        before = [
            var for var, role in zip(program.invars, region.roles, strict=True) if role == "carry"
        ]
        after = [
            var for var, how in zip(program.outs, region.reductions, strict=True) if how == "carry"
        ]
        return dict(zip(before, after, strict=True))

    def _function(self, key: TaskKey) -> TaskFunction:
        """Make the function of a task, which adds to totals: they come first, and are donated."""
        program, group = self.programs[key], self.group(key)
        eqns = rewrite_to_group_mesh(program.eqns, self.builder.shardings.groups, group)
        run = equations_as_function(program.ins, [*program.outs, *program.sums.values()], eqns)
        run = self.batch.with_index(run, program.ins, group)
        combines = [self.accumulators.combine(number) for number in program.sums]
        num_totals, num_outs = len(combines), len(program.outs)

        def task(*values: Any) -> list[Any]:
            results = run(*values[num_totals:])
            terms = zip(combines, values[:num_totals], results[num_outs:], strict=True)
            return [*results[:num_outs], *(combine(total, x) for combine, total, x in terms)]

        out_shardings = [self._out_sharding(var, key) for var in program.outs]
        out_shardings += [self.accumulators.sharding(number, group) for number in program.sums]
        return TaskFunction(program.name, task, out_shardings, tuple(range(num_totals)))

    def _out_sharding(self, var: Var, key: TaskKey) -> NamedSharding | None:
        """Shard over the data axes if the value leaves its stage; return None to let XLA choose."""
        group = self.group(key)
        for before, after in self.carried.items():
            if after is var:
                # The next microbatch reads it in the place of the operand: same program, same
                # sharding.
                return self.builder.sharding(self.operand[before], group)
        leaves = any(var in other.ins for at, other in self.programs.items() if at[1] != key[1])
        # On one device there is nothing to choose, and with a sharding given all programs can be
        # compiled at once, instead of in waves.
        if leaves or self.builder.shardings.meshes[group].size == 1:
            return self.builder.shardings.over_data_axes(group, var.aval.shape)
        return None


# Reductions over microbatches: each task adds its part to a total that it is given and gives back;
# after the last task the totals become the region's results.


@dataclasses.dataclass(frozen=True, eq=False)
class PartialResult:
    """A value between the tasks and a result: the total of one stage, or one item of a stack.

    It takes the place of a variable: the traced step has none for it.
    """

    aval: Aval


class Accumulators:
    """The totals of a step. The slot of each changes with every task that adds to it.

    A `Sum` numbers them: (result of the region, part), since a gradient may have a part per stage.
    """

    def __init__(
        self,
        builder: StepBuilder,
        stage_program: StageProgram,
        traced: Traced,
        group_of: Sequence[int],
    ):
        self.builder, self.stage_program = builder, stage_program
        self.parameters = [
            operand
            for operand, role in zip(traced.operands, stage_program.region.roles, strict=True)
            if role == "params"
        ]
        sums = all_sums(stage_program)
        self.vars: dict[Sum, Var] = {number: var for number, (_, var) in sums.items()}
        self.group = {number: group_of[stage] for number, ((_, stage), _) in sums.items()}
        self.slots: dict[Sum, int] = {}

    def write_initial_values(self) -> None:
        """Write one program per group that makes its totals: zeros, or the least value for max."""
        for group in sorted(set(self.group.values())):
            numbers = [number for number, at in self.group.items() if at == group]
            wanted = [(self.reduction(number), self.vars[number].aval) for number in numbers]
            function = TaskFunction(
                f"group {group}: zeros",
                functools.partial(_initial_values, wanted),
                [self.sharding(number, group) for number in numbers],
            )
            slots = self.builder.add_call(group, function, (), [aval for _, aval in wanted])
            self.slots.update(zip(numbers, slots, strict=True))

    def reduction(self, number: Sum) -> Reduction:
        return self.stage_program.region.all_reductions[number[0]]

    def combine(self, number: Sum) -> Callable[[Any, Any], Any]:
        return jnp.maximum if self.reduction(number) == "max" else jnp.add

    def sharding(self, number: Sum, group: int) -> NamedSharding:
        """Return the sharding of a total: that of the parameter for a gradient, else replicated."""
        index = self._gradient_index(number[0])
        if index is None or self.parameters[index] not in self.builder.arguments:
            return self.builder.shardings.replicated(group)
        return self.builder.sharding(self.parameters[index], group)

    def parameter(self, number: int) -> Var | None:
        """Return the parameter of which a result is the gradient; None for other results."""
        index = self._gradient_index(number)
        return None if index is None else self.parameters[index]

    def _gradient_index(self, number: int) -> int | None:
        # Results of a region are its values, then one gradient per parameter.
        index = number - len(self.stage_program.outs)
        return index if index >= 0 else None

    def result_node(self, number: int, var: Var, group: int | None) -> Node:
        """Make the node that sums up a result, in `group` or the first that has a total."""
        numbers = [key for key in self.vars if key[0] == number]
        region = self.stage_program.region
        how, count = region.all_reductions[number], region.microbatches
        groups = [self.group[key] for key in numbers]
        target = min(groups, default=0) if group is None else group
        parts = [PartialResult(self.vars[key].aval) for key in numbers]
        for key, part, at in zip(numbers, parts, groups, strict=True):
            self.builder.slot_of[part, at] = self.slots[key]
            self.builder.var_shardings[part, target] = self.sharding(key, target)
        constant = self.constant_parts(number)

        def finish(values: dict[Var, Any]) -> list[Any]:
            terms = [values[part] for part in parts]
            # What is the same for every microbatch is no part of the totals: added `count` times.
            fixed = [self.evaluate(part, target) for part in constant]
            terms += [x if how == "max" else x * count for x in fixed]
            total = functools.reduce(self.combine((number, 0)), terms)
            return [(total / count).astype(var.aval.dtype) if how == "mean" else total]

        return Node(tuple(parts), (var,), finish, target)

    def gradient_parts(self, number: int) -> list[tuple[StageKey, Var]]:
        """Return the parts of a gradient that differ between microbatches, and their stages."""
        index = number - len(self.stage_program.outs)
        return [part for part in self.stage_program.grads[index] if part[0] != NO_STAGE]

    def constant_parts(self, number: int) -> list[Atom]:
        """Return the parts of a result that are the same for every microbatch."""
        index = self._gradient_index(number)
        if index is not None:
            return [var for key, var in self.stage_program.grads[index] if key == NO_STAGE]
        return [] if (number, 0) in self.vars else [self.stage_program.outs[number]]

    def evaluate(self, var: Atom, group: int) -> Any:
        """Compute what depends on no operand, inside the program that needs it."""
        if is_literal(var):
            return jnp.full(var.aval.shape, var.val, var.aval.dtype)
        eqns = recomputed(self.stage_program, [var])
        computed = {result for eqn in eqns for result in eqn.outvars}
        if var not in computed or set(variables_read(eqns)) - computed:
            raise PipelineError(
                "a result depends on parameters, constants or keys alone, not on the batch. "
                "Compute it outside of the differentiated function."
            )
        local = rewrite_to_group_mesh(eqns, self.builder.shardings.groups, group)
        return equations_as_function((), (var,), local)()[0]


def _initial_values(wanted: Sequence[tuple[Reduction, Aval]]) -> list[Any]:
    return [
        jnp.full(aval.shape, _least(aval.dtype), aval.dtype)
        if how == "max"
        else jnp.zeros(aval.shape, aval.dtype)
        for how, aval in wanted
    ]


def _least(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf
    return False if dtype == jnp.bool_ else np.iinfo(dtype).min


class Microbatches:
    """The whole batch in each group that reads it; every task picks the rows of its microbatch.

    The index of the microbatch is an operand, so that all microbatches run the same program.
    `split` maps the variables of one microbatch to the step's variables for the whole batch, `dims`
    to the dim along which that is cut.
    """

    def __init__(
        self, builder: StepBuilder, split: Mapping[Var, Var], dims: Mapping[Var, int], count: int
    ):
        self.builder, self.split, self.dims, self.count = builder, split, dims, count
        self._slots: dict[tuple[Var, int], int] = {}
        self._indices: dict[tuple[int, int], int] = {}  # slots by (microbatch, group)

    def place(self, group: int, used: Sequence[Var]) -> None:
        """Place the arguments of the batch that the tasks of a group read."""
        shardings = self.builder.shardings
        for var in used:
            self.builder.var_shardings[self.split[var], group] = shardings.over_data_axes(
                group, self.split[var].aval.shape, self.dims[var]
            )
        slots = [self.builder.slot_in_group(self.split[var], group) for var in used]
        if used and self._is_cut(group):
            avals = [var.aval.update(shape=(self.count, *var.aval.shape)) for var in used]
            outs = [
                shardings.over_data_axes(group, aval.shape, 1 + self.dims[var])
                for var, aval in zip(used, avals, strict=True)
            ]
            dims = [self.dims[var] for var in used]

            def cut(*batches: Any) -> list[Any]:
                return [
                    jnp.moveaxis(_by_microbatch(batch, dim, self.count), dim, 0)
                    for batch, dim in zip(batches, dims, strict=True)
                ]

            function = TaskFunction(f"group {group}: microbatches", cut, outs)
            slots = self.builder.add_call(group, function, slots, avals)
        self._slots.update(((var, group), slot) for var, slot in zip(used, slots, strict=True))

    def _is_cut(self, group: int) -> bool:
        """Whether the batch is cut once, before the tasks, in this group.

        Rows are sharded over the devices in order, so that a microbatch, a range of rows, is on
        some devices only. Reshaped to (microbatches, rows) and sharded along the rows, each device
        holds a part of every microbatch.
        """
        return self.builder.shardings.meshes[group].size > 1

    def inputs(self, variables: Sequence[Var], microbatch: int, group: int) -> list[int]:
        """Return the slots of the batches that a task reads, then that of its index."""
        slots = [self._slots[var, group] for var in variables if var in self.split]
        return [*slots, self._index(microbatch, group)] if slots else []

    def with_index(self, run: Run, variables: Sequence[Var], group: int) -> Run:
        """Change a function of one microbatch into one of the batches and an index.

        Those are its last arguments, as `inputs` gives them: `run(w, x)` becomes
        `indexed(w, batch, index)` where `x` is split.
        """
        places = [n for n, var in enumerate(variables) if var in self.split]
        is_cut = self._is_cut(group)

        def indexed(*values: Any) -> list[Any]:
            operands = list(values[: len(variables) - len(places)])
            *batches, index = values[len(operands) :]
            for place, batch in zip(places, batches, strict=True):
                dim = self.dims[variables[place]]
                rows = batch if is_cut else _by_microbatch(batch, dim, self.count)
                axis = 0 if is_cut else dim
                row = jax.lax.dynamic_index_in_dim(rows, index, axis, keepdims=False)
                operands.insert(place, row)
            return run(*operands)

        return indexed if places else run

    def _index(self, microbatch: int, group: int) -> int:
        if (microbatch, group) not in self._indices:
            self._indices[microbatch, group] = self.builder.constant(jnp.int32(microbatch), group)
        return self._indices[microbatch, group]


def _by_microbatch(batch: Any, dim: int, count: int) -> Any:
    """Reshape a batch so that dim `dim` numbers the microbatches and the next one their rows."""
    shape = batch.shape
    return batch.reshape((*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]))
