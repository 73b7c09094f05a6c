"""`Work`: an operation as costs see it, without its place in the program.

Operations that are alike, as those of all layers, are costed once.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax

from meshwright.planning.dim_groups import HEAVY, DimGroups, Layout
from meshwright.planning.stored_values import looks_up
from meshwright.planning.traced_program import Operation, TracedProgram

# A product with a value so many times larger than all others is cut where that one lies cut, if
# that is cheaper: few rows are exchanged rather than the weights that they meet.
_HEAVIER = 4
# How often a TPU reads or writes a new weight of a convolution, and each of its moments, beside the
# update, to bring it into the order of its gradient and back (a UNet on v6e, 3.2 ms for 149 MB).
_COPIES = 7.0
# A TPU gathers an operand once for the products of a step that need it, and once more for those
# that run later by this part of the step's events, and by so many, as weights for the backward pass
# of users' models (not all of them). In a loop's body it is gathered once.
_LATER, _AT_LEAST = 0.3, 50
_PARTS = frozenset({"split", "slice", "pad"})


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One operation, without its place in the program: equal ones are costed once.

    `values`: layout and bytes of inputs and outputs. `dims`: kind of iteration, kind of dims, the
    size that a cut must divide, and where it is. `uses`: by how many operations of its kind, in the
    loop's body or the step, each input is used; `shared`: for how many of them it is exchanged at
    once, so that it is not counted for all. `multiplies`: a product of matrices, beside which
    compilers exchange its operands; beside a convolution only TPUs' do.
    `scatters`: whether partial sums are scattered where the result lies cut. Those of convolutions
    are added up everywhere, and sliced, but for what a TPU takes in pieces. `looks_up`: a gather or
    a scatter, in `rows` or in one `table`. `looped`: whether it is in a loop's body. `sides`: for
    each value of a product or a convolution, which of its loops every dim is in. `heaviest`: the
    number of a product's value that is much larger than its others together; -1 for none.
    `is_kernel`: a Pallas kernel, which also takes time for its `exponentials`. `copies`: how often
    its result is read or written beside, to bring it from one order in memory to another.
    `only_moves`: it takes time for exchanges alone, and is computed where its result is used.
    `runs`: how many runs of a loop only add its result up, so that it is summed over devices once.
    `one_by_one`: rows that it adds to a table each by itself. `sent_as`: for each input, how many
    times its bytes are sent where it is gathered.
    """

    heavy: bool
    multiplies: bool
    scatters: bool
    looks_up: str
    values: tuple[tuple[Layout, int], ...]
    inputs: int
    dims: tuple[tuple[str, int, int, tuple[tuple[int, int], ...]], ...]
    flops: float
    dtype: str
    shared: tuple[int, ...]
    uses: tuple[int, ...]
    looped: bool = False
    heaviest: int = -1
    sides: tuple[dict[int, str], ...] = dataclasses.field(default=(), compare=False)
    exponentials: float = 0.0
    is_kernel: bool = False
    copies: float = 0.0
    only_moves: bool = False
    runs: int = 1
    one_by_one: int = 0
    sent_as: tuple[float, ...] = ()


class WorkOf:
    """Tells the work of each operation of a program; `tpu`: as a TPU's own compiler makes it.

    `kept`: the values that lie in memory at some time; others are computed where they are used.
    """

    def __init__(self, program: TracedProgram, groups: DimGroups, kept: Collection[int], tpu: bool):
        self._program, self._groups, self._kept = program, groups, frozenset(kept)
        self._copied = _copied_weights(program) if tpu else frozenset()
        self._tpu = tpu
        self._uses = _uses(program, tpu)

    def resized(self, program: TracedProgram, groups: DimGroups) -> WorkOf:
        """Tell the work of the same program where its arrays have other sizes."""
        other = copy.copy(self)
        other._program, other._groups = program, groups
        return other

    def __call__(self, operation: Operation) -> Work:
        layout, sizes = self._groups.layout, self._program.bytes
        values = operation.values
        shapes = self._program.shapes
        dims = tuple(
            (
                dim.kind,
                self._groups.of_loop((values[w], d) for w, d in dim.at),
                math.gcd(dim.blocks, *(shapes[values[w]][d] for w, d in dim.at)),
                dim.at,
            )
            for dim in operation.dims
            if dim.at
        )
        uses = [self._uses.get((operation.outputs, v), _ONE_USE) for v in operation.inputs]
        return Work(
            operation.primitive in HEAVY,
            operation.primitive == "dot_general",
            operation.primitive != "conv_general_dilated",
            looks_up(operation),
            tuple((layout[v], sizes[v]) for v in values),
            len(operation.inputs),
            dims,
            operation.flops,
            _multiplied(self._program, operation) if operation.flops else "",
            tuple(use.shared for use in uses),
            tuple(use.count for use in uses),
            bool(operation.body),
            _heaviest([sizes[v] for v in values]) if operation.primitive == "dot_general" else -1,
            _product_sides(operation),
            operation.exponentials,
            operation.primitive == "pallas_call",
            _COPIES if self._copied.intersection(operation.outputs) else 0.0,
            takes_apart(self._program, operation) and self._kept.isdisjoint(operation.outputs),
            max((self._program.accumulated.get(v, 1) for v in operation.outputs), default=1),
            _rows_one_by_one(self._program, operation) if self._tpu else 0,
            tuple(self._sent_as(operation, value) for value in operation.inputs),
        )

    def _sent_as(self, operation: Operation, value: int) -> float:
        """How many times its bytes an operand is sent: a TPU gathers what it multiplies in bf16."""
        rounded = (
            self._tpu
            and operation.primitive in ("dot_general", "conv_general_dilated")
            and self._program.dtypes[value] == "float32"
            and _by_default(operation.eqn.params.get("precision"))
        )
        return 0.5 if rounded else 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
    """An input of an operation: `uses` and `shared` of its `Work`."""

    count: int
    shared: int


_ONE_USE = _Use(1, 1)


# In: a program. Out: for each input of an operation, by what that makes and by the input, how often
# it is used. Example: a weight of a TPU's step without loops has two uses, forward and backward,
# each for itself if they are far from each other. Memory has it from one to the other all the same,
# since not all programs gather again: measured peaks are nearer so.
def _uses(program: TracedProgram, tpu: bool) -> dict[tuple[tuple[int, ...], int], _Use]:
    readers = collections.defaultdict[tuple[int, int, str], list[tuple[int, tuple[int, ...]]]](list)
    operations = iter(program.operations)
    for time, (kind, _, _) in enumerate(program.events):
        operation = next(operations) if kind == "op" else None
        if operation is not None and operation.primitive in HEAVY:
            for value in set(operation.inputs):
                key = value, operation.body, operation.primitive
                readers[key].append((time, operation.outputs))
    later = max(_AT_LEAST, _LATER * len(program.events))
    uses: dict[tuple[tuple[int, ...], int], _Use] = {}
    for (value, body, _), found in readers.items():
        runs = [found[:1]]
        for reader in found[1:]:
            if tpu and not body and reader[0] - runs[-1][-1][0] > later:
                runs.append([])
            runs[-1].append(reader)
        for run in runs:
            uses.update(((made, value), _Use(len(found), len(run))) for _, made in run)
    return uses


def _by_default(precision: Any) -> bool:
    """Whether a product is as precise as hardware makes it by default."""
    asked = precision if isinstance(precision, tuple) else (precision,)
    return all(each in (None, jax.lax.Precision.DEFAULT) for each in asked)


def takes_apart(program: TracedProgram, operation: Operation) -> bool:
    """Whether an operation takes an array apart along a dim, or is the gradient of one that does.

    A slice of nearly all, as of labels, is not meant: only borders are exchanged for that.
    """
    if operation.primitive not in _PARTS:
        return False
    first, second = (
        math.prod(program.shapes[values[0]]) for values in (operation.inputs, operation.outputs)
    )
    return max(first, second) >= 2 * min(first, second)


def _rows_one_by_one(program: TracedProgram, operation: Operation) -> int:
    """How many rows a TPU adds to a table in a loop, one in a run.

    It does where they keep the dim that says which they are, as those that `vmap` makes of a slice:
    the gradients of `vmap(equinox.nn.Embedding)`, of tables of penzai.
    """
    if not operation.primitive.startswith("scatter"):
        return 0
    dims = operation.eqn.params["dimension_numbers"]
    if set(dims.scatter_dims_to_operand_dims) <= {*dims.inserted_window_dims}:
        return 0
    return math.prod(program.shapes[operation.inputs[1]][:-1])


def _product_sides(operation: Operation) -> tuple[dict[int, str], ...]:
    """For each value of a product or a convolution, the loop of every dim: both operands' and the
    result's (`both`), a sum's, or that of one operand (`left`, `right`)."""
    if operation.primitive not in ("dot_general", "conv_general_dilated"):
        return ()
    loops = {(0, 1): "sum", (0, 1, 2): "both", (0, 2): "left", (1, 2): "right"}
    sides: tuple[dict[int, str], ...] = ({}, {}, {})
    for loop in operation.dims:
        side = loops.get(tuple(sorted({value for value, _ in loop.at})), "")
        for value, dim in loop.at:
            sides[value][dim] = side
    return sides


def _copied_weights(program: TracedProgram) -> frozenset[int]:
    """New weights and moments of convolutions whose windows are their last dims (OIHW).

    A TPU makes the gradient in another order than these lie in.
    """
    windows = {
        program.shapes[operation.inputs[1]]
        for operation in program.operations
        if operation.primitive == "conv_general_dilated"
        for spatial in [operation.eqn.params["dimension_numbers"].rhs_spec[2:]]
        if spatial and sorted(spatial)[0] > 1
    }
    held = {program.shapes[value] for value in program.arguments}
    return frozenset(v for v in program.results if program.shapes[v] in windows & held)


def _heaviest(sizes: Sequence[int]) -> int:
    """The number of the value that outweighs all others together; -1 where none does."""
    most = max(sizes)
    return sizes.index(most) if most > _HEAVIER * (sum(sizes) - most) else -1


_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int8": "s8"}


def _multiplied(program: TracedProgram, operation: Operation) -> str:
    """The dtype of what an operation multiplies; the first operands of a kernel may be tables."""
    names = [program.dtypes[value] for value in operation.inputs]
    if operation.primitive == "pallas_call":
        names = [name for name in names if "float" in name] or ["bfloat16"]
    return _dtype(names[0])


def _dtype(name: str) -> str:
    """The compiler's short name of a dtype."""
    return _DTYPES.get(name, name.replace("float8_", "f8"))
