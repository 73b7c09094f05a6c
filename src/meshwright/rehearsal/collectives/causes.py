"""`Causes`: why a collective is there, by rules of thumb in the order in which they are tried.

1. The partitioner complained of this operation (`conflicts`): **implicit resharding**.
2. It gathers an argument of the program, looked at through casts, copies, slices and loops, or
   makes a result that leaves the program in an argument's shape: **parameter gathers**. Integer
   arguments of more than 8 bits are data (tokens, positions), not parameters. An argument that is
   known to be data is gathered as an **activation exchange**.
3. It sums in the backward pass, over data axes or something of a parameter's shape (whole, or a
   layer of a stack, sharded further by at most its own group): **gradient sums**. So are sums of
   that shape over data axes that the user wrote, or whose name the compiler lost, outside the
   forward pass of a program that has a backward pass. Parameters are arguments whose shape is also
   that of a result; where there are none, all arguments. An array with all rows of the batch that
   has no parameter's shape is none.
4. Any other sum, whatever is written as a collective by the user (`psum`, `all_gather`,
   `ppermute`, ...) or by a sharding constraint, and gathers for an operation that needs all of its
   operand (a dot, a sum, a sort, a lookup): **activation exchanges**.
5. A permutation at a dot, within a slice, is a step of a gather or a sum that the compiler spread
   over the dot's pieces (a windowed einsum). An argument, also one that a loop hands round, makes
   it a **parameter gather**. What a loop hands round is otherwise an **activation exchange**. The
   rest is judged as sums are, by rule 3 in exactly a parameter's shape: a **gradient sum**, or
   else an **activation exchange**.
6. The rest moves arrays from one sharding to another on behalf of operations that need no such
   thing, as an addition or a reshape: **implicit resharding**.

Where the compiler lost the name of an operation, as in programs for several slices, that of a
neighbouring instruction is used.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Sequence

from meshwright.axes import role
from meshwright.hlo.dataflow import Origin
from meshwright.hlo.instructions import Instruction, Leaf, Source, bits, primitives
from meshwright.hlo.program import Program
from meshwright.rehearsal.collectives.find import HloCollective
from meshwright.rehearsal.collectives.types import (
    ACTIVATION_EXCHANGES,
    GRADIENT_SUMS,
    IMPLICIT_RESHARDING,
    PARAMETER_GATHERS,
    AxisPart,
    ShardingConflict,
)

_SUMS = ("all-reduce", "reduce-scatter")
# Primitives of JAX that are collectives, or that ask for a sharding by name.
BY_HAND = frozenset(
    "psum pmax pmin psum2 psum_invariant pmean all_gather all_gather_invariant all_to_all "
    "ppermute pbroadcast psend precv reduce_scatter psum_scatter ragged_all_to_all pcast".split()
)
_WRITTEN = BY_HAND | {"sharding_constraint", "reshard"}
# Primitives that need all of an operand along some dim, so that a sharded one must be gathered.
_NEEDS_ALL = re.compile(
    r"dot_general|conv_general_dilated|reduce|arg(max|min)|cum|sort|top_k|gather|scatter|"
    r"dynamic_(update_)?slice|concatenate|custom_call|fft|cholesky|triangular_solve|svd|eigh|qr"
)
# Of an op_name such as jit(step)/transpose(jvp(loss))/dot_general, as autodiff names operations.
_FORWARD, _BACKWARD = "jvp(", "transpose("
# Primitives for which a permutation between neighbours (a halo exchange) is enough.
_SHIFTS = re.compile(r"slice|pad|concatenate|roll|rev|conv_general_dilated|cum|reduce_window")


@dataclasses.dataclass(frozen=True)
class Cause:
    """One of `CAUSES`, and why in a few words."""

    name: str
    why: str
    conflict: ShardingConflict | None = None


@dataclasses.dataclass(frozen=True)
class Batch:
    """What is known of the data, on all devices together.

    `names` of arguments, their `rows`; rows and positions as one dim (`merged`); and the shapes of
    `parameters`, which hold no rows whatever their sizes.
    """

    names: frozenset[str] = frozenset()
    rows: frozenset[int] = frozenset()
    merged: frozenset[int] = frozenset()
    parameters: frozenset[tuple[int, ...]] = frozenset()

    def has(self, argument: str) -> bool:
        """Whether an argument of a program, such as `batch['image']`, is data."""
        return bool(self.names) and re.split(r"\W", argument, maxsplit=1)[0] in self.names

    def dim(self, dims: Sequence[int]) -> int | None:
        """Which dim of an array holds all rows of the batch; `None` if none does.

        >>> batch = Batch(rows=frozenset({64}), merged=frozenset({64 * 256}))
        >>> batch.dim((64, 256, 512)), batch.dim((16384, 512)), batch.dim((16, 256, 512))
        (0, 0, None)
        """
        if len(dims) < 2 or tuple(dims) in self.parameters:
            return None
        if dims[0] in self.merged:
            return 0
        return next((at for at, size in enumerate(dims) if size in self.rows), None)


NO_BATCH = Batch()


@dataclasses.dataclass(frozen=True, eq=False)
class Causes:
    """The rules, for one program. `of(...)` tries them in order.

    In: a collective as `find` sees it, the operation it serves and the mesh axes of its groups.
    Out: exactly one cause. The rules look at names and shapes alone and may be wrong; bytes, axes
    and counts never depend on them. Example: an all-reduce over `fsdp` whose op_name holds
    `transpose(jvp())` is a gradient sum by rule 3.
    """

    program: Program
    conflicts: Sequence[ShardingConflict] = ()
    batch: Batch = NO_BATCH

    def of(
        self, collective: HloCollective, op_name: str, axes: tuple[AxisPart, ...] | None, size: int
    ) -> Cause:
        """Return the cause of a collective for `op_name` over `axes`, in groups of `size`."""
        conflict = self._conflict(collective, op_name)  # rule 1
        if conflict is not None:
            why = "the partitioner found no way between two shardings"
            return Cause(IMPLICIT_RESHARDING, why, conflict)
        operations = primitives(op_name)
        at = " and ".join(operations) or "an operation without a name"
        argument = self._argument(collective)  # rule 2
        if argument is not None and collective.kind == "all-gather":
            if self.batch.has(argument):
                return Cause(ACTIVATION_EXCHANGES, f"gathers {argument}, which is data")
            return Cause(PARAMETER_GATHERS, f"gathers {argument}")
        if collective.kind == "all-gather" and self._leaves_as_argument(collective):
            return Cause(PARAMETER_GATHERS, "gathers a result that replaces an argument")
        if collective.kind in _SUMS:  # rules 3 and 4
            if self._sums_gradients(collective, op_name, axes, size):
                return Cause(GRADIENT_SUMS, f"sums gradients of {at}")
            return Cause(ACTIVATION_EXCHANGES, f"sums for {at}")
        if any(operation in _WRITTEN for operation in operations):
            return Cause(ACTIVATION_EXCHANGES, f"asked for by {at}")
        if _may_be_a_piece(collective) and any(map(_is_dot, operations)):  # rule 5
            return self._piece_by_piece(collective, op_name, axes)
        needed = _SHIFTS if collective.kind == "collective-permute" else _NEEDS_ALL
        if any(needed.search(operation) for operation in operations):
            return Cause(ACTIVATION_EXCHANGES, f"needed by {at}")
        return Cause(IMPLICIT_RESHARDING, f"moved to another sharding at {at}")  # rule 6

    def _piece_by_piece(
        self, collective: HloCollective, op_name: str, axes: tuple[AxisPart, ...] | None
    ) -> Cause:
        """Return the cause of one step of a windowed einsum."""
        pieces = f"piece by piece for {' and '.join(filter(_is_dot, primitives(op_name)))}"
        argument = self._argument(collective)
        if argument is not None and not self.batch.has(argument):
            return Cause(PARAMETER_GATHERS, f"gathers {argument} {pieces}")
        if not handed_round(self.program, collective.instruction) and self._sums_gradients(
            collective, op_name, axes, 1
        ):
            return Cause(GRADIENT_SUMS, f"sums gradients {pieces}")
        return Cause(ACTIVATION_EXCHANGES, f"exchanged {pieces}")

    def _conflict(self, collective: HloCollective, op_name: str) -> ShardingConflict | None:
        """Return the conflict at the operation it serves; one without a name goes by its shape."""
        if collective.kind in _SUMS:
            return None
        moved = (*collective.operands, collective.results)
        shapes = {str(leaf) for shape in moved for leaf in shape.leaves}
        for conflict in self.conflicts:
            if conflict.op_name == op_name if conflict.op_name else conflict.shape in shapes:
                return conflict
        return None

    def _argument(self, collective: HloCollective) -> str | None:
        """Return the name of the argument that is moved, if it is one."""
        where = self.program.computations[collective.instruction.computation]
        for operand in where.operands(collective.instruction)[:1]:
            origin = first_origin(self.program, operand).instruction
            if origin.opcode == "parameter" and origin.computation == self.program.entry.name:
                if _may_be_parameter(origin.shape.leaves[0]):
                    return origin.op_name or f"argument {origin.operand_text}"
        return None

    def _leaves_as_argument(self, collective: HloCollective) -> bool:
        """Whether the result goes straight out of the program in an argument's shape."""
        entry = self.program.entry
        shapes = {str(leaf) for leaf in self._arguments}
        if collective.instruction.computation != entry.name or entry.root.opcode != "tuple":
            return False
        return str(collective.results.leaves[0]) in shapes and any(
            self._uncopied(result).name in collective.parts for result in entry.operands(entry.root)
        )

    def _uncopied(self, result: Instruction) -> Instruction:
        while result.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
            result = self.program.entry.by_name[result.operands[0]]
        return result

    @functools.cached_property
    def _arguments(self) -> tuple[Leaf, ...]:
        """Arguments that may be parameters; scalars are none."""
        return tuple(
            leaf
            for parameter in self.program.entry.parameters.values()
            for leaf in parameter.shape.leaves
            if leaf.dims and _may_be_parameter(leaf)
        )

    def _sums_gradients(
        self, collective: HloCollective, op_name: str, axes: tuple[AxisPart, ...] | None, size: int
    ) -> bool:
        """Whether a sum is of gradients: rule 3."""
        backward = _BACKWARD in op_name
        data = bool(axes) and all(role(part.name).moves == "weights" for part in axes or ())
        if backward and data and not self._holds_the_batch(collective):
            return True
        if not backward and not (data and self._may_be_of_gradients(collective, op_name)):
            return False
        leaves = [leaf for shape in collective.operands for leaf in shape.leaves]
        if collective.transfer:
            fitting = [leaf for leaf in leaves if self._as_large_as_a_parameter(leaf)]
        else:
            fitting = [leaf for leaf in leaves if self._like_a_parameter(leaf, size)]
        # Compilers combine several sums into one: most of its bytes decide.
        return 2 * sum(leaf.bytes for leaf in fitting) > sum(leaf.bytes for leaf in leaves)

    def _holds_the_batch(self, collective: HloCollective) -> bool:
        """Whether the largest array summed has all rows of the batch, and no parameter's shape."""
        leaves = [leaf for shape in collective.operands for leaf in shape.leaves]
        largest = max(leaves, key=lambda leaf: leaf.bytes)
        return self.batch.dim(largest.dims) is not None and not self._like_a_parameter(largest, 1)

    def _may_be_of_gradients(self, collective: HloCollective, op_name: str) -> bool:
        """Whether a sum outside the backward pass may be of what that pass made.

        It may where the user wrote it (`psum` of the gradients) or the compiler lost its name, and
        where there is a backward pass at all.
        """
        if _FORWARD in op_name or not self._has_backward:
            return False
        written = any(operation in _WRITTEN for operation in primitives(op_name))
        return written or not collective.instruction.op_name

    @functools.cached_property
    def _has_backward(self) -> bool:
        return any(
            _BACKWARD in instruction.op_name
            for computation in self.program.computations.values()
            for instruction in computation.instructions
        )

    @functools.cached_property
    def _parameters(self) -> tuple[Leaf, ...]:
        """Arguments that come out again, new or as gradients; all of them where none does.

        A batch does not come out.
        """
        results = {tuple(_sorted_dims(leaf.dims)) for leaf in self.program.entry.root.shape.leaves}
        again = tuple(leaf for leaf in self._arguments if tuple(_sorted_dims(leaf.dims)) in results)
        return again or self._arguments

    def _as_large_as_a_parameter(self, leaf: Leaf) -> bool:
        """Whether a leaf has the elements of a parameter, or of a layer of a stack.

        Between slices arrays are sent in another layout, so their dims say nothing.
        """
        return any(
            leaf.elements in (argument.elements, argument.elements // argument.dims[0])
            for argument in self._parameters
            if len(argument.dims) > 1
        )

    def _like_a_parameter(self, leaf: Leaf, size: int) -> bool:
        """Whether a leaf has the shape of a parameter, or of a layer of a stack, but for shards."""
        dims = _sorted_dims(leaf.dims)
        return bool(dims) and any(
            _is_shard_of(_sorted_dims(given), dims, size)
            for argument in self._parameters
            for given in (argument.dims, argument.dims[1:])
        )


def _may_be_a_piece(collective: HloCollective) -> bool:
    """Whether it permutes within a slice: dots are not spread over slices."""
    between = collective.transfer is not None and collective.transfer.between_slices
    return collective.kind == "collective-permute" and not between


def _is_dot(operation: str) -> bool:
    return "dot_general" in operation


def _may_be_parameter(leaf: Leaf) -> bool:
    """Whether its dtype is a parameter's: no integer (s, u) but 8-bit ones and booleans (pred)."""
    return leaf.dtype[0] not in "sup" or bits(leaf.dtype) <= 8


def _sorted_dims(dims: tuple[int, ...]) -> list[int]:
    """Dims in an order of their own: a gradient may come transposed, or with dims of size 1."""
    return sorted(dim for dim in dims if dim > 1)


def _is_shard_of(given: list[int], dims: list[int], size: int) -> bool:
    """Whether two shapes differ only by sharding that the group of `size` may have made."""
    if len(given) != len(dims):
        return False
    ratio = 1
    for pair in zip(given, dims, strict=True):
        small, large = sorted(pair)
        if large % small:
            return False
        ratio *= large // small
    return size % ratio == 0


_STEPS = 4  # how far away a neighbour may be
# What stands between a collective and the operation it serves, with the name of something else.
_SAYS_NOTHING = frozenset("parameter constant while tuple get-tuple-element conditional".split())


# In: a collective. Out: the user's operation that it serves and its source line, or ("", None).
# Compilers lose the name of a collective now and then, and of most of them in programs for several
# slices, or call it by the argument it moves. The next best is a neighbour: for a gather what reads
# it, for anything else what made it, fusions looked into. Example: a nameless all-gather read by
# a fusion of jit(f)/dot_general at model.py:4 is named so.
def operation_served(program: Program, collective: HloCollective) -> tuple[str, Source | None]:
    """Name the operation that a collective serves, and where the user wrote it."""
    makers, readers = _makers(program, collective.first), _readers(program, collective.last)
    around = (readers, makers) if collective.kind == "all-gather" else (makers, readers)
    own = (collective.instruction, collective.last, collective.first)
    for witness in itertools.chain(_largest(program, collective), own, *around):
        name = witness.op_name
        if name and name not in program.arguments and witness.opcode not in _SAYS_NOTHING:
            return name, program.source(witness)
    return "", None


def _largest(program: Program, collective: HloCollective) -> Iterator[Instruction]:
    """What makes the largest array of a collective that was combined of several.

    Its own name is that of any of them, often of the smallest.
    """
    where = program.computations[collective.instruction.computation]
    operands = where.operands(collective.instruction)
    if len({operand.shape.bytes for operand in operands}) > 1:
        largest = max(operands, key=lambda operand: operand.shape.bytes)
        yield largest
        yield program.dataflow.origin(largest).instruction


def _makers(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """Instructions whose results it uses, nearest first."""
    where = program.computations[instruction.computation]
    front = list(where.operands(instruction))
    for _ in range(_STEPS):
        for maker in front:
            yield from _with_inside(program, maker)
        front = [earlier for maker in front for earlier in where.operands(maker)]


def _readers(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """Instructions that use its result, nearest first."""
    where = program.computations[instruction.computation]
    front = where.users.get(instruction.name, [])
    for _ in range(_STEPS):
        for reader in front:
            yield from _with_inside(program, reader)
        front = [later for reader in front for later in where.users.get(reader.name, [])]


def _with_inside(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """An instruction and, for a fusion, what it holds, the root first."""
    yield instruction
    if instruction.opcode == "fusion":
        for _, name in instruction.called:
            yield from reversed(program.computations[name].instructions)


# Loops that hand a value from device to device, and add nothing to it: so a compiler gathers an
# array piece by piece while it works on the pieces that have come. In: a value in such a loop. Out:
# what went into the loop. Example: with body (x, acc) -> (collective-permute(x), acc + dot(x)), x
# in the body comes from the first element of the tuple that the `while` is given.
def first_origin(program: Program, value: Instruction) -> Origin:
    """Trace where a value comes from, also through loops that hand it round."""
    origin = program.dataflow.origin(value)
    while (loop := _loop(program, origin)) is not None and _goes_round(
        program, loop, origin.path[0]
    ):
        (given,) = program.computations[loop.computation].operands(loop)
        origin = program.dataflow.origin(given, origin.path)
    return origin


def handed_round(program: Program, moving: Instruction) -> bool:
    """Whether what an instruction moves is handed round by a loop."""
    where = program.computations[moving.computation]
    origin = program.dataflow.origin(where.operands(moving)[0])
    loop = _loop(program, origin)
    return loop is not None and _goes_round(program, loop, origin.path[0])


def _loop(program: Program, origin: Origin) -> Instruction | None:
    """Return the loop whose state a value is, within the loop or after it."""
    instruction = origin.instruction
    if not origin.path:
        return None
    if instruction.opcode == "parameter":
        callers = program.dataflow.callers.get(instruction.computation, [])
        instruction = callers[0] if len(callers) == 1 else instruction
    return instruction if instruction.opcode == "while" else None


def _goes_round(program: Program, loop: Instruction, index: int) -> bool:
    """Whether every round of a loop hands an element of its state on, changing nothing."""
    body = program.computations[dict(loop.called)["body"]]
    before = program.dataflow.origin(body.root, (index,))
    return before == Origin(body.parameters[0], (index,))
