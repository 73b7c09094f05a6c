"""Which values of a step lie in memory, and as how many bytes, before it is known how it is cut.

What a product, a loop or a lookup reads or makes is written; what is computed elementwise is not,
since compilers compute it where it is used.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import jax

from meshwright._compat_lowering import equations, is_on_host
from meshwright.planning.dim_groups import HEAVY, REDUCING, VIEWS
from meshwright.planning.traced_program import Operation, TracedProgram
from meshwright.trees.walk import bits

_NEARLY_ALL = 0.9  # of a product's result
_MUCH, _MOST_SOURCES = 4, 3  # a source is at least a fourth of what is computed from it
# Made anywhere, or another array seen otherwise.
_NOT_WRITTEN = VIEWS | {"broadcast_in_dim", "iota"}
_EXPENSIVE = frozenset({"logistic", "exp", "tanh", "div", "rsqrt", "erf"})
_ELEMENTWISE = _EXPENSIVE | {"mul", "sub", "add", "integer_pow", "square", "max"}
_FAR = 0.05  # part of a step's events between a forward pass and its backward pass
_NOT_AGAIN = HEAVY | REDUCING | {None}  # not computed again where it is used


def constants_of(closed: Any) -> dict[str, int]:
    """Return what a step closes over: types of the arrays and their bytes, the largest first.

    Compilers write them into the program, and no sharding goes through it: each device has all.
    """
    held = list(closed.consts)
    for eqn, *_ in equations(closed):
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                held += getattr(inner, "consts", ())
    sizes = collections.Counter[str]()
    for const in {id(const): const for const in held}.values():
        aval: Any = jax.typeof(const)
        if hasattr(aval, "dtype") and not is_on_host(aval):
            size = math.prod(aval.shape) * bits(aval.dtype) // 8
            sizes[f"{aval.dtype}{list(aval.shape)}"] += size
    return dict(sizes.most_common())


def kept_values(program: TracedProgram, family: str = "") -> set[int]:
    """Return the values that lie in memory at some time.

    `family`: of the chip whose own compiler it is. A TPU's compares rather than scatters where
    every row of zeros gets one number.
    """
    tpu = family == "tpu"
    kept = {*program.arguments, *program.results}
    views = _product_slices(program)

    def written(values: Iterable[int]) -> Iterator[int]:
        return (
            value
            for value in values
            if program.maker.get(value) not in _NOT_WRITTEN and value not in views
        )

    for kind, inputs, outputs in program.events:
        if kind == "scan":  # a constant mask that a loop takes is made inside of it
            kept.update(written(inputs), outputs)
    for operation in program.operations:
        if operation.primitive in HEAVY and not (tpu and _is_one_hot(program, operation)):
            kept.update(operation.outputs)
            kept.update(written(operation.inputs))
        elif operation.primitive in REDUCING:
            kept.update(operation.outputs)
    return kept | written_images(program) if tpu else kept


def _product_slices(program: TracedProgram) -> set[int]:
    """Slices of nearly all that a product makes: it is made so."""
    return {
        operation.outputs[0]
        for operation in program.operations
        if operation.primitive == "slice"
        and program.maker.get(operation.inputs[0]) == "dot_general"
        and program.bytes[operation.outputs[0]] > _NEARLY_ALL * program.bytes[operation.inputs[0]]
    }


# In: a program. Out: elementwise results of images that a TPU writes once, and reads in the
# backward pass, where it would compute others again: those seen in groups of channels (GroupNorm),
# which lie otherwise than what convolutions read, and what is expensive to compute.
def written_images(program: TracedProgram) -> set[int]:
    shapes = {
        program.shapes[value]
        for operation in program.operations
        if operation.primitive == "conv_general_dilated"
        for value in (operation.inputs[0], operation.outputs[0])
    }
    counts = {math.prod(shape) for shape in shapes}
    dtypes = {
        program.dtypes[operation.outputs[0]]
        for operation in program.operations
        if operation.primitive == "conv_general_dilated"
    }
    uses: collections.Counter[int] = collections.Counter()
    last: dict[int, int] = {}
    for time, (_, inputs, _) in enumerate(program.events if shapes else ()):
        uses.update(set(inputs))
        last.update((value, time) for value in inputs)
    far = len(program.events) * _FAR
    return {
        value
        for time, (kind, _, outputs) in enumerate(program.events if shapes else ())
        for value in outputs
        if kind == "op" and uses[value] > 1 and last[value] - time > far
        if program.maker[value] in (_EXPENSIVE if program.shapes[value] in shapes else _ELEMENTWISE)
        if math.prod(program.shapes[value]) in counts and program.dtypes[value] in dtypes
    }


def _is_one_hot(program: TracedProgram, operation: Operation) -> bool:
    """Whether an operation puts one number into every row of zeros: the gradient of a choice."""
    if operation.primitive != "scatter-add":
        return False
    zeros, _, updates = operation.inputs
    dims = operation.eqn.params["dimension_numbers"]
    return (
        program.maker.get(zeros) == "broadcast_in_dim"
        and not dims.update_window_dims
        and program.bytes[updates] * 16 <= program.bytes[operation.outputs[0]]
    )


def values_behind(program: TracedProgram, kept: set[int], readers: Collection[int]) -> set[int]:
    """Return the values in memory that some operations read, or compute from what they read."""
    sources, number = Sources(program, kept), 0
    behind: set[int] = set()
    for kind, inputs, outputs in program.events:
        if kind == "op":
            if number in readers:
                behind.update(source for value in inputs for source in sources.of(value))
            number += 1
        for value in outputs:
            sources.add(value, inputs)
    return behind


def looks_up(operation: Operation) -> str:
    """Whether an operation looks up in, or adds to, every row by itself, or a table for all."""
    if operation.primitive not in ("gather", "scatter-add", "scatter"):
        return ""
    dims = operation.eqn.params["dimension_numbers"]
    return "rows" if dims.operand_batching_dims else "table"


class Sources:
    """What must be in memory for each value: itself, or what it is computed from where it is used.

    Of a chain of elementwise operations only the end is written; its beginning stays until then.
    """

    def __init__(self, program: TracedProgram, kept: set[int], once: Collection[int] = ()):
        self.bytes, self.kept, self.maker = program.bytes, kept, program.maker
        self.once = once  # kept ones that are never computed again
        self._from: dict[int, tuple[int, ...]] = {}

    def of(self, value: int) -> tuple[int, ...]:
        """The values in memory that one is computed from; a kept one is there itself."""
        return (value,) if value in self.kept else self._from.get(value, ())

    def behind(self, value: int) -> tuple[int, ...]:
        """The values in memory that a kept one could be computed from again, elementwise."""
        if value in self.once or self.maker.get(value) in _NOT_AGAIN:
            return ()
        return self._from.get(value, ())

    def add(self, value: int, inputs: Sequence[int]) -> None:
        """Note what a value is computed from: the largest few."""
        found = {source for each in inputs for source in self.of(each)} - {value}
        large = [each for each in found if self.bytes[each] * _MUCH >= self.bytes[value]]
        large.sort(key=lambda each: (-self.bytes[each], each))
        self._from[value] = tuple(large[:_MOST_SOURCES])


def stored_bytes(program: TracedProgram, kept: set[int], family: str) -> list[int]:
    """Return the bytes of values as the compilers of chips store them.

    A TPU multiplies float32 in bf16, and what is computed for products alone is written as that.
    """
    stored = list(program.bytes)
    if family != "tpu":
        return stored
    others: set[int] = {*program.arguments, *program.results}
    for kind, inputs, outputs in program.events:
        if kind == "scan":
            others.update(inputs, outputs)
    for operation in program.operations:
        if operation.primitive not in ("dot_general", "conv_general_dilated"):
            others.update(operation.inputs)
        if operation.primitive in HEAVY:
            others.update(operation.outputs)
    for value in kept - others:
        if program.dtypes[value] == "float32":
            stored[value] //= 2
    return stored


def converted_stacks(program: TracedProgram) -> dict[int, int]:
    """Return stacked arguments that a TPU converts whole before the loop, and the bytes of that."""
    return {
        stack: program.bytes[stack] * program.bytes[narrow] // program.bytes[part]
        for operation in program.operations
        if operation.primitive == "convert_element_type"
        for part, narrow in [(operation.inputs[0], operation.outputs[0])]
        for stack in [program.stack_of.get(part)]
        if stack in program.arguments and program.bytes[narrow] < program.bytes[part]
    }


LANES, _ROWS = 128, 8  # a TPU's tile
_GROUPED = 5  # dims of images whose channels are seen in groups


@functools.lru_cache(maxsize=65536)
def tile_padding(dims: tuple[int, ...]) -> float:
    """How many times its bytes an array takes on a TPU: in tiles of 8 x 128 of its last two dims.

    The compiler chooses which dims are the last ones, so that the padding is small.

    >>> tile_padding((16, 256, 512))
    1.0
    >>> round(tile_padding((16, 56, 56, 32, 8)), 2)
    2.29
    """
    large = [dim for dim in dims if dim > 1]
    if len(large) < 2:
        return 1.0

    def padded(dim: int, tile: int) -> float:
        return -(-dim // tile) * tile / dim

    # Groups of channels, beside the channels of each, are never the lanes.
    groups = len(large) - 2 if len(large) >= _GROUPED else -1
    return min(
        padded(last, LANES) * padded(second, _ROWS)
        for n, last in enumerate(large)
        for m, second in enumerate(large)
        if n not in (m, groups)
    )
