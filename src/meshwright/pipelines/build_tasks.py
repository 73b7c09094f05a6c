"""The tasks of the schedule as operations, with the transfers between them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshwright._compat import is_literal
from meshwright.errors import PipelineError
from meshwright.pipelines.mesh_rewrite import rewrite_to_group_mesh
from meshwright.pipelines.outer_program import Node
from meshwright.pipelines.staged_program import NO_STAGE
from meshwright.pipelines.stages import StageProgram
from meshwright.pipelines.step_graph import StepBuilder, TaskFunction
from meshwright.pipelines.task_programs import Program, Sum, TaskKey, all_sums, recomputed
from meshwright.pipelines.tracing import Traced, equations_as_function
from meshwright.schedules.validation import Proof


class Tasks:
    """Writes the tasks onto the builder, in the order in which the schedule was proved."""

    def __init__(
        self,
        builder: StepBuilder,
        cut: StageProgram,
        programs: dict[TaskKey, Program],
        proof: Proof,
        traced: Traced,
        sums: Sums,
    ):
        self.builder, self.cut, self.programs, self.proof = builder, cut, programs, proof
        self.traced, self.sums = traced, sums
        self.schedule = proof.schedule
        self.values: dict[tuple[Any, int, int], int] = {}  # (variable, microbatch, group)
        self.operand = dict(zip(cut.invars, traced.operands, strict=True))
        roles = zip(cut.invars, cut.region.roles, strict=True)
        split = {var: self.operand[var] for var, role in roles if role == "split"}
        self.batch = Microbatches(builder, split, self.schedule.microbatches)
        self.carried = self._carried()
        self.readers: dict[Any, set[int]] = {}  # a variable, and the groups whose tasks take it
        for key, program in programs.items():
            for var in program.ins:
                self.readers.setdefault(var, set()).add(self.group(key))

    def group(self, key: TaskKey) -> int:
        return self.schedule.group_of[key[1]]

    def bring_batch(self) -> None:
        """To each group what its tasks need."""
        for group in range(self.schedule.groups):
            used = [var for var in self.batch.split if group in self.readers.get(var, ())]
            self.batch.bring(group, used)

    def write(self) -> None:
        codes = {key: self._code(key) for key in self.programs}
        for group, task in self.proof.order:
            program = self.programs[task.kind, task.stage]
            if not program.eqns and not program.sums:
                continue
            i = task.microbatch
            adding = [self.sums.slots[number] for number in program.sums]
            own = [var for var in program.ins if var not in self.batch.split]
            ins = [self._input(var, i, group) for var in own]
            ins += self.batch.inputs(program.ins, i, group)
            avals = [var.aval for var in (*program.outs, *program.sums.values())]
            code = codes[task.kind, task.stage]
            outs = self.builder.run(group, code, [*adding, *ins], avals, task)
            given = len(program.outs)
            for var, slot in zip(program.outs, outs[:given], strict=True):
                self.values[var, i, group] = slot
            self.sums.slots.update(zip(program.sums, outs[given:], strict=True))
            self._hand_over(program, i, group)

    def _hand_over(self, program: Program, microbatch: int, group: int) -> None:
        """Send what other groups need, together for each of them."""
        for target in range(self.schedule.groups):
            used = [v for v in program.outs if target in self.readers.get(v, ())]
            if target != group and used:
                layouts = [self.builder.layouts.rows(target, var.aval.shape) for var in used]
                slots = [self.values[var, microbatch, group] for var in used]
                for var, slot in zip(used, self.builder.send(slots, target, layouts), strict=True):
                    self.values[var, microbatch, target] = slot

    def _input(self, var: Any, microbatch: int, group: int) -> int:
        if (var, microbatch, group) in self.values:
            return self.values[var, microbatch, group]
        if var in self.cut.consts:
            if (var, group) not in self.builder.slot_of:
                self.builder.slot_of[var, group] = self.builder.constant(
                    self.cut.consts[var], group
                )
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

    def _carried(self) -> dict[Any, Any]:
        """A carried operand, and the variable that holds it after a microbatch."""
        region = self.cut.region
        into = [v for v, role in zip(self.cut.invars, region.roles, strict=True) if role == "carry"]
        out = [v for v, how in zip(self.cut.outs, region.reductions, strict=True) if how == "carry"]
        return dict(zip(into, out, strict=True))

    def _code(self, key: TaskKey) -> TaskFunction:
        """The program of a task, with what it adds up: sums come first, and are given up."""
        program, group = self.programs[key], self.group(key)
        eqns = rewrite_to_group_mesh(program.eqns, self.builder.layouts.groups, group)
        run = equations_as_function(program.ins, [*program.outs, *program.sums.values()], eqns)
        run = self.batch.picking(run, program.ins)
        adds = [self.sums.add(number) for number in program.sums]
        count, given = len(adds), len(program.outs)

        def task(*values: Any) -> list[Any]:
            results = run(*values[count:])
            return [
                *results[:given],
                *(
                    add(total, more)
                    for add, total, more in zip(adds, values[:count], results[given:], strict=True)
                ),
            ]

        task.__name__ = task.__qualname__ = program.name
        outs = [self._layout(var, key) for var in program.outs]
        outs += [self.sums.layout(number, group) for number in program.sums]
        return TaskFunction(program.name, task, outs, tuple(range(count)))

    def _layout(self, var: Any, key: TaskKey) -> NamedSharding | None:
        """Rows cut over data axes where a value leaves its stage; else as the compiler likes.

        What is carried lies as it came, since it takes that place.
        """
        for before, after in self.carried.items():
            if after is var:
                return self.builder.layout(self.operand[before], self.group(key))
        leaves = any(var in other.ins for at, other in self.programs.items() if at[1] != key[1])
        group = self.group(key)
        single = len(self.builder.layouts.meshes[group].devices.flat) == 1
        if not leaves and not single:
            return None
        return self.builder.layouts.rows(group, var.aval.shape)


# What is added up over microbatches, and how results come of it.


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A value between the microbatches and a result: a part of a sum, or one item of a stack."""

    aval: Any


class Sums:
    """The accumulators of a step: each is a slot that moves on with every task that adds to it."""

    def __init__(
        self, builder: StepBuilder, cut: StageProgram, traced: Traced, group_of: Sequence[int]
    ):
        self.builder, self.cut = builder, cut
        self.operands = [
            operand
            for operand, role in zip(traced.operands, cut.region.roles, strict=True)
            if role == "params"
        ]
        self.vars = {number: var for number, (_, var) in all_sums(cut).items()}
        self.group = {number: group_of[home[1]] for number, (home, _) in all_sums(cut).items()}
        self.slots: dict[Sum, int] = {}

    def begin(self) -> None:
        """Zeros, or the least number where the largest is sought; one program per group."""
        for group in sorted(set(self.group.values())):
            numbers = [number for number, at in self.group.items() if at == group]
            wanted = [(self.how(number), self.vars[number].aval) for number in numbers]
            code = TaskFunction(
                f"group {group}: zeros",
                functools.partial(_beginnings, wanted),
                [self.layout(number, group) for number in numbers],
            )
            slots = self.builder.run(group, code, (), [aval for _, aval in wanted])
            self.slots.update(zip(numbers, slots, strict=True))

    def how(self, number: Sum) -> str:
        return self.cut.region.all_reductions[number[0]]

    def layout(self, number: Sum, group: int) -> NamedSharding:
        """A gradient lies as its parameter does; other sums lie whole."""
        place = number[0] - len(self.cut.outs)
        if place < 0 or self.operands[place] not in self.builder.arguments:
            return self.builder.layouts.whole(group)
        return self.builder.layout(self.operands[place], group)

    def add(self, number: Sum) -> Callable[[Any, Any], Any]:
        return jnp.maximum if self.how(number) == "max" else jnp.add

    def result(self, number: int, var: Any, home: int | None) -> Node:
        """From the parts of a sum to the result, in the group where it belongs."""
        numbers = [key for key in self.vars if key[0] == number]
        how, times = self.cut.region.all_reductions[number], self.cut.region.microbatches
        groups = [self.group[key] for key in numbers]
        home = min(groups, default=0) if home is None else home
        parts = [Part(self.vars[key].aval) for key in numbers]
        for key, part, group in zip(numbers, parts, groups, strict=True):
            self.builder.slot_of[part, group] = self.slots[key]
            self.builder.layout_of[part, home] = self.layout(key, home)
        fixed = self._fixed(number)

        def finish(values: dict[Any, Any]) -> list[Any]:
            found = [values[part] for part in parts]
            same = [self._constant(var, home) for var in fixed]
            found += [x if how == "max" else x * times for x in same]
            total = functools.reduce(self.add((number, 0)), found)
            return [(total / times).astype(var.aval.dtype) if how == "mean" else total]

        return Node(tuple(parts), (var,), finish, home)

    def _fixed(self, number: int) -> list[Any]:
        """The parts of a result that are the same for every microbatch."""
        place = number - len(self.cut.outs)
        if place >= 0:
            return [var for home, var in self.cut.grads[place] if home == NO_STAGE]
        return [] if (number, 0) in self.vars else [self.cut.outs[number]]

    def _constant(self, var: Any, group: int) -> Any:
        if is_literal(var):
            return jnp.full(var.aval.shape, var.val, var.aval.dtype)
        eqns = recomputed(self.cut, [var])
        made = {v for eqn in eqns for v in eqn.outvars}
        used = {v for e in eqns for v in e.invars if not is_literal(v)}
        if var not in made or used - made:
            raise PipelineError(
                "a result depends on parameters, constants or keys alone, not on the batch. "
                "Compute it outside of the differentiated function."
            )
        return equations_as_function(
            (), (var,), rewrite_to_group_mesh(eqns, self.builder.layouts.groups, group)
        )()[0]


def _beginnings(wanted: Sequence[tuple[str, Any]]) -> list[Any]:
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


# The batch in each group that needs it; every task picks the rows of its own microbatch.


Run = Callable[..., list[Any]]


class Microbatches:
    """`split` are the variables of one microbatch, each with the step's variable for the batch."""

    def __init__(self, builder: StepBuilder, split: Mapping[Any, Any], count: int):
        self.builder, self.split, self.count = builder, split, count
        self._cells: dict[tuple[Any, int], int] = {}
        self._numbers: dict[tuple[int, int], int] = {}

    def bring(self, group: int, used: Sequence[Any]) -> None:
        """What the tasks of a group need; each of several devices holds a part of every row."""
        layouts = self.builder.layouts
        batches = [self.split[var] for var in used]
        for batch in batches:
            self.builder.layout_of[batch, group] = layouts.rows(group, batch.aval.shape)
        slots = [self.builder.slot_in_group(batch, group) for batch in batches]
        if used and layouts.meshes[group].size > 1:
            avals = [var.aval.update(shape=(self.count, *var.aval.shape)) for var in used]
            outs = [layouts.rows(group, aval.shape, 1) for aval in avals]
            rows = functools.partial(_rows, [aval.shape for aval in avals])
            code = TaskFunction(f"group {group}: microbatches", rows, outs)
            slots = self.builder.run(group, code, slots, avals)
        self._cells.update(((var, group), slot) for var, slot in zip(used, slots, strict=True))

    def inputs(self, variables: Sequence[Any], microbatch: int, group: int) -> list[int]:
        """Cells of the batch for a task with these inputs, then that of its microbatch's number."""
        found = [self._cells[var, group] for var in variables if var in self.split]
        return [*found, self._number(microbatch, group)] if found else []

    def picking(self, run: Run, variables: Sequence[Any]) -> Run:
        """The program with what `inputs` gives at its end, in the place of the microbatch."""
        places = [n for n, var in enumerate(variables) if var in self.split]
        shapes = [(self.count, *variables[n].aval.shape) for n in places]

        def picked(*values: Any) -> list[Any]:
            whole = list(values[: len(variables) - len(places)])
            *batches, number = values[len(whole) :]
            for place, rows in zip(places, _rows(shapes, *batches), strict=True):
                whole.insert(place, jax.lax.dynamic_index_in_dim(rows, number, keepdims=False))
            return run(*whole)

        return picked if places else run

    def _number(self, microbatch: int, group: int) -> int:
        if (microbatch, group) not in self._numbers:
            self._numbers[microbatch, group] = self.builder.constant(jnp.int32(microbatch), group)
        return self._numbers[microbatch, group]


def _rows(shapes: Sequence[tuple[int, ...]], *batches: Any) -> list[Any]:
    return [batch.reshape(shape) for batch, shape in zip(batches, shapes, strict=True)]
