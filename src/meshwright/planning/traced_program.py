"""`TracedProgram`: a step as a flat list of operations, with the dims over which each iterates.

Bodies of `scan` are read once, with their trip counts; `jit`, `remat` and
functions with derivatives of their own are read as if they were written out.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from meshwright._compat import Atom, Eqn, Jaxpr, Var, is_literal, scan_counts, source_line
from meshwright._compat_lowering import is_on_host
from meshwright.planning.iteration_dims import IterationDim, Loops
from meshwright.planning.kernel_rules import kernel
from meshwright.planning.primitive_rules import rule_of
from meshwright.trees.walk import bits

# Primitives that hold the program they run, and the parameter that has it.
INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # of jax 0.12: loops under a checkpoint, in the backward pass
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
_LARGEST_TABLE = 2**22  # bytes of a constant that a kernel may look up its blocks in
LOOP_SCOPE = "<loop>"
# What a sum may go through before it is added to a running total.
_SEEN_OTHERWISE = frozenset({"transpose", "reshape", "convert_element_type", "squeeze", "copy"})

Position = tuple[int, int]  # a value and one of its dims


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One primitive: the values it reads and makes, and its iteration dims.

    `times`: how often a step runs it. `body`: the innermost loop that it is in, 0 for none.
    `scope`: name scopes around it, the outermost first; those in a loop come after `LOOP_SCOPE`.
    """

    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dims: tuple[IterationDim, ...]
    flops: float
    times: int
    body: int
    known: bool
    eqn: Eqn
    exponentials: float = 0.0
    scope: str = ""

    @property
    def values(self) -> tuple[int, ...]:
        """Inputs and outputs, which the iteration dims count through."""
        return self.inputs + self.outputs


@dataclasses.dataclass
class TracedProgram:
    """A step, flat: values by number, operations in order.

    `shapes`, `bytes` and `dtypes` are those of the values. `ties`: dims of two values that are one
    in some operation. `stacked`: dims that a loop goes along. `events`: for the memory of a step,
    what is read and made, in order; a loop is one event before its body and one after. `carried`:
    what a body hands to its next run. `accumulated`: what all runs of a body only add up, and how
    many these are. `stack_of`: what a body takes a part of in each run.
    `rematted`: for what `jax.checkpoint` computes again in the backward pass, outside of loops, the
    numbers of the first operation and of the one after, and what it is computed from.
    """

    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    bytes: list[int] = dataclasses.field(default_factory=list)
    dtypes: list[str] = dataclasses.field(default_factory=list)
    operations: list[Operation] = dataclasses.field(default_factory=list)
    ties: list[tuple[Position, Position]] = dataclasses.field(default_factory=list)
    stacked: set[Position] = dataclasses.field(default_factory=set)
    events: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = dataclasses.field(
        default_factory=list
    )
    maker: dict[int, str] = dataclasses.field(default_factory=dict)
    carried: set[int] = dataclasses.field(default_factory=set)
    accumulated: dict[int, int] = dataclasses.field(default_factory=dict)
    stack_of: dict[int, int] = dataclasses.field(default_factory=dict)
    rematted: list[tuple[int, int, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    arguments: list[int] = dataclasses.field(default_factory=list)
    results: list[int] = dataclasses.field(default_factory=list)

    def unknown(self) -> dict[str, str]:
        """Primitives without a rule of their own, each with the first line that uses it."""
        lines: dict[str, str] = {}
        for operation in self.operations:
            if not operation.known and operation.primitive not in lines:
                lines[operation.primitive] = source_line(operation.eqn)
        return lines


def read_program(closed: Any, wide: bool = False) -> TracedProgram:
    """Read a closed jaxpr as a flat program.

    `wide` counts 16-bit numbers as 32-bit ones, which the CPU's compiler computes them in.
    """
    reader = _Reader(wide)
    jaxpr = closed.jaxpr
    reader.program.arguments = [reader.new(var.aval) for var in jaxpr.invars]
    env = reader.run(jaxpr, reader.program.arguments, 1, closed.consts)
    reader.program.results = [reader.read(env, atom) for atom in jaxpr.outvars]
    return reader.program


def inlined_program(eqn: Eqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the jaxpr and constants that an equation stands for; `None` for other equations."""
    held = eqn.params.get(INLINED.get(eqn.primitive.name, ""))
    if held is None:
        return None
    return getattr(held, "jaxpr", held), getattr(held, "consts", ())


class _Reader:
    """One pass over a jaxpr, in order; `apply_plan` walks equations in the same order."""

    def __init__(self, wide: bool):
        self.program = TracedProgram()
        self.wide = wide
        self.body = 0
        self.used: set[Var] = set()  # variables that something reads, of the jaxprs being read
        self.tables: dict[int, np.ndarray] = {}  # small constants: kernels look blocks up in them
        self.scope = ""

    def new(self, aval: Any) -> int:
        """Add a value and return its number."""
        shape = tuple(getattr(aval, "shape", ()))
        dtype = getattr(aval, "dtype", None)
        size = 4.0 if dtype is None else bits(dtype) / 8
        if self.wide and size == 2:
            size = 4.0
        if is_on_host(aval):  # needs none of a device's memory
            size = 0.0
        count = 1
        for side in shape:
            count *= side
        self.program.shapes.append(shape)
        self.program.bytes.append(int(count * size))
        self.program.dtypes.append(str(dtype))
        return len(self.program.shapes) - 1

    def read(self, env: dict[Var, int], atom: Atom) -> int:
        return self.new(atom.aval) if is_literal(atom) else env[atom]

    def note(self, env: dict[Var, int], constvars: Sequence[Var], consts: Sequence[Any]) -> None:
        """Keep constants that are small enough to be tables of a kernel."""
        for var, const in zip(constvars, consts, strict=False):
            if self.program.bytes[env[var]] <= _LARGEST_TABLE and not isinstance(
                const, jax.core.Tracer
            ):
                self.tables[env[var]] = np.asarray(const)

    def run(
        self, jaxpr: Jaxpr, inputs: Sequence[int], times: int, consts: Sequence[Any] = ()
    ) -> dict[Var, int]:
        env: dict[Var, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update((var, self.new(var.aval)) for var in jaxpr.constvars)
        self.note(env, jaxpr.constvars, consts)
        self.used.update(atom for atom in jaxpr.outvars if not is_literal(atom))
        for eqn in jaxpr.eqns:
            self.used.update(atom for atom in eqn.invars if not is_literal(atom))
        for eqn in jaxpr.eqns:
            values = [self.read(env, atom) for atom in eqn.invars]
            held = inlined_program(eqn)
            outer, self.scope = self.scope, _inner_scope(self.scope, eqn)
            if held is not None:
                start = len(self.program.operations)
                inner = self.run(held[0], values, times, held[1])
                outputs = [self.read(inner, atom) for atom in held[0].outvars]
                if eqn.params.get("differentiated") and not self.body:
                    span = (start, len(self.program.operations))
                    self.program.rematted.append((*span, tuple(values)))
            else:
                outputs = [self.new(var.aval) for var in eqn.outvars]
                self._equation(eqn, values, outputs, times)
            self.scope = outer
            env.update(zip(eqn.outvars, outputs, strict=True))
        return env

    def _equation(
        self, eqn: Eqn, inputs: Sequence[int], outputs: Sequence[int], times: int
    ) -> None:
        name = eqn.primitive.name
        if name == "scan":
            self._scan(eqn.params, inputs, outputs, times)
        elif name == "cond":
            self._branches(eqn.params["branches"], inputs[1:], outputs, times)
        elif name == "while":
            params = eqn.params
            tests, constants = params["cond_nconsts"], params["body_nconsts"]
            carried = inputs[tests + constants :]
            self._branches([params["body_jaxpr"]], inputs[tests:], outputs, times)
            for value, out in zip(carried, outputs, strict=True):
                self._same(out, value)
        else:
            self._operation(eqn, inputs, outputs, times)

    def _scan(self, params: Any, inputs: Sequence[int], outputs: Sequence[int], times: int) -> None:
        """Read the body once; a stack has all dims of its parts but the first."""
        body = params["jaxpr"].jaxpr
        constants, carried = scan_counts(params)
        inside = [self.new(var.aval) for var in body.invars]
        for value, within in zip(inputs[:constants], inside, strict=False):
            if value in self.tables:
                self.tables[within] = self.tables[value]
        outer, self.body = self.body, len(self.program.operations) + 1
        self.scope = f"{self.scope}/{LOOP_SCOPE}"
        self.program.events.append(("scan", tuple(inputs), tuple(outputs)))
        env = self.run(body, inside, times * params["length"], params["jaxpr"].consts)
        first, self.body = self.body - 1, outer
        self.program.events.append(("scan", tuple(inputs), tuple(outputs)))
        results = [self.read(env, atom) for atom in body.outvars]
        self.program.carried.update(results[:carried])
        whole = constants + carried
        given = inside[constants:whole]
        for value in accumulated(self.program.operations[first:], given, results):
            self.program.accumulated[value] = params["length"]
        pairs = [*zip(inputs[:whole], inside[:whole], strict=True)]
        pairs += zip(outputs[:carried], results[:carried], strict=True)
        pairs += zip(outputs[:carried], inside[constants:whole], strict=True)
        for outside, within in pairs:
            self._same(outside, within)
        stacks = [*zip(inputs[whole:], inside[whole:], strict=True)]
        self.program.stack_of.update((part, stack) for stack, part in stacks)
        stacks += zip(outputs[carried:], results[carried:], strict=True)
        for stack, part in stacks:
            self._same(stack, part, skip=1)
            self.program.stacked.add((stack, 0))

    def _branches(
        self, branches: Sequence[Any], inputs: Sequence[int], outputs: Sequence[int], times: int
    ) -> None:
        for branch in branches:
            inner = self.run(branch.jaxpr, inputs, times, branch.consts)
            for out, atom in zip(outputs, branch.jaxpr.outvars, strict=True):
                self._same(out, self.read(inner, atom))

    def _same(self, value: int, other: int, skip: int = 0) -> None:
        """Tie all dims of two values; `skip` more of the first have no counterpart."""
        for dim, size in enumerate(self.program.shapes[other]):
            if self.program.shapes[value][dim + skip] == size > 1:
                self.program.ties.append(((value, dim + skip), (other, dim)))

    def _operation(
        self, eqn: Eqn, inputs: Sequence[int], outputs: Sequence[int], times: int
    ) -> None:
        program, name = self.program, eqn.primitive.name
        shapes = program.shapes
        around = [shapes[v] for v in inputs], [shapes[v] for v in outputs]
        if name == "pallas_call":
            tables = {n: self.tables[v] for n, v in enumerate(inputs) if v in self.tables}
            unused = [n for n, var in enumerate(eqn.outvars) if var not in self.used]
            rule = kernel(Loops(*around), eqn.params, unused, tables)
        else:
            rule = rule_of(name, eqn.params, *around)
        operation = Operation(
            name,
            tuple(inputs),
            tuple(outputs),
            rule.dims,
            rule.flops,
            times,
            self.body,
            rule.known,
            eqn,
            rule.exponentials,
            self.scope,
        )
        values = operation.values
        for dim in rule.dims:
            if dim.tied:
                for (w, d), (x, e) in zip(dim.at, dim.at[1:], strict=False):
                    program.ties.append(((values[w], d), (values[x], e)))
        program.events.append(("op", operation.inputs, operation.outputs))
        program.maker.update((out, name) for out in outputs)
        program.operations.append(operation)


# In: the operations of a loop's body, what it takes from the run before, and what it results in.
# Out: sums in it that only go into running totals. Compilers exchange the parts of such sums once,
# after the loop, if nothing but order or dtype changes before they are added. Example: gradients of
# a recurrent net's weights, or of microbatches.
def accumulated(
    operations: Sequence[Operation], given: Sequence[int], results: Sequence[int]
) -> Iterator[int]:
    """Yield the results of operations that a loop adds up, and uses for nothing else."""
    made = {operation.outputs[0]: operation for operation in operations if operation.outputs}
    uses = collections.Counter(value for each in operations for value in each.inputs)
    uses.update(results)
    for total, result in zip(given, results, strict=False):
        adds = made.get(result)
        if adds is None or adds.primitive not in ("add", "add_any") or total not in adds.inputs:
            continue
        if uses[total] > 1 or uses[result] > 1:
            continue
        (value,) = [each for each in adds.inputs if each != total] or [total]
        while uses[value] == 1 and value in made and made[value].primitive in _SEEN_OTHERWISE:
            value = made[value].inputs[0]
        if uses[value] == 1 and value in made:
            yield value


def _inner_scope(outer: str, eqn: Eqn) -> str:
    """The scopes inside of an equation: those of the programs around it come first."""
    own = str(eqn.source_info.name_stack)
    return f"{outer}/{own}" if outer and own else outer or own
