"""`count_kernel`: the work of a Pallas kernel, counted in its own program over its whole grid.

In: a kernel's program (MLIR of Mosaic for TPUs or of Triton) and, for Mosaic, the tables that it
reads its blocks from. Out: a `Count`, or `None` where the work hangs on what only a run knows.

Scalars are evaluated for all points of the grid at once, each axis of the grid and each loop an
axis of a NumPy array, so `pl.when` on program ids, loops with computed bounds and block masks count
exactly. A condition that is not known counts as taken, and the count is an upper bound then.
Example: a causal kernel on a grid of 4 x 4 blocks, `pl.when(j <= i)` around a product: the
condition is an array of 4 x 4 with ten ones, so the product counts ten times.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_DEEPEST = 8  # loops inside of each other
_MOST_POINTS = 1 << 23  # of the grid and of loops, evaluated at once

_SHAPE = re.compile(r"(?:vector|memref|tensor)<((?:\d+x)*)([a-zA-Z]\w*)")
_BITS = re.compile(r"\d+")
_MAIN_MEMORY = re.compile(r"memory_space<(?:any|hbm)>")
_CONTRACTED = re.compile(r"dot_dimension_numbers<\[([\d, ]*)\]")
_NUMBERS = re.compile(r"-?\d+")
_PRODUCTS = frozenset({"tpu.matmul", "vector.contract", "tt.dot"})
_COPIES = frozenset({"tpu.enqueue_dma", "tpu.enqueue_indirect_dma"})
# HLO's names for what MLIR computes element by element and slowly.
_TRANSCENDENTAL = {
    **{f"math.{name}": hlo for name, hlo in (
        ("exp", "exponential"), ("exp2", "exponential"), ("log", "log"), ("log2", "log"),
        ("log1p", "log"), ("tanh", "tanh"), ("sin", "sine"), ("cos", "cosine"), ("erf", "erf"),
        ("rsqrt", "rsqrt"), ("sqrt", "sqrt"), ("powf", "power"),
    )},
    "tpu.reciprocal": "divide",
}  # fmt: skip


@dataclasses.dataclass
class Count:
    """Work of one run of a kernel.

    `flops` counts two for each product of numbers, `dtypes` those of each type that is multiplied.
    `blocks` are the bytes that the pipeline moves for each operand and result with blocks,
    `copied` those of copies that the kernel makes itself. `at_most`: some of it may not be done.
    """

    flops: float = 0.0
    dtypes: dict[str, float] = dataclasses.field(default_factory=dict)
    transcendentals: dict[str, float] = dataclasses.field(default_factory=dict)
    copied: float = 0.0
    blocks: tuple[float, ...] = ()
    at_most: bool = False

    @property
    def dtype(self) -> str:
        """The type of which most numbers are multiplied, by HLO's name."""
        return max(self.dtypes, key=lambda name: self.dtypes[name], default="")

    def has_work(self) -> bool:
        return bool(self.flops or self.copied or self.transcendentals)

    def add(self, other: Count) -> None:
        self.flops += other.flops
        self.copied += other.copied
        self.at_most |= other.at_most
        for mine, more in (
            (self.dtypes, other.dtypes),
            (self.transcendentals, other.transcendentals),
        ):
            for name, value in more.items():
                mine[name] = mine.get(name, 0.0) + value


class NotCountable(Exception):
    """Raised inside of this file where the work hangs on what only a run knows."""


def count_kernel(
    module: Any, grid: Sequence[int] | None = None, tables: Mapping[int, np.ndarray] | None = None
) -> Count | None:
    """Count a kernel's work; `None` where that cannot be done.

    Triton kernels are given their `grid`, Mosaic's have it in them. `tables` are the known values
    of operands that a Mosaic kernel reads scalars from (scalar prefetch), by number.
    """
    functions = {
        operation.attributes["sym_name"].value: operation
        for operation in (each.operation for each in module.body.operations)
        if "sym_name" in operation.attributes
    }
    main = next(
        (each for each in functions.values() if "iteration_bounds" in each.attributes),
        next(iter(functions.values())),
    )
    if grid is None:
        grid = _integers(main, "iteration_bounds")
    if any(size < 0 for size in grid):  # decided by a run
        return None
    try:
        evaluation = Evaluation(tuple(grid), functions, dict(tables or {}))
        count = evaluation.run(main, starts_with_grid="iteration_bounds" in main.attributes)
        count.blocks = tuple(evaluation.moved_blocks(main))
    except NotCountable:
        return None
    return count


Values = dict[Any, np.ndarray]


class Evaluation:
    """The scalars of one kernel at every point of its grid."""

    def __init__(
        self, grid: tuple[int, ...], functions: dict[str, Any], tables: dict[int, np.ndarray]
    ):
        self.grid, self.functions, self.tables = grid, functions, tables
        self.rank = len(grid) + _DEEPEST
        self.loops = 0  # how many we are in
        self.prefetched = 0  # operands of a Mosaic kernel that are tables of scalars

    def run(self, function: Any, starts_with_grid: bool) -> Count:
        block = function.regions[0].blocks[0]
        self.prefetched = next(iter(_integers(function, "scalar_prefetch")), 0)
        values = self.arguments(block) if starts_with_grid else {}
        return self.block(block, values, np.ones((1,) * self.rank))

    def arguments(self, block: Any) -> Values:
        """The scalars that a Mosaic function starts with: its place in the grid, and tables."""
        grid = {block.arguments[i]: self.axis(np.arange(n), i) for i, n in enumerate(self.grid)}
        first = len(self.grid)
        known = {
            block.arguments[first + i]: table
            for i, table in self.tables.items()
            if i < self.prefetched
        }
        return {**grid, **known}

    def axis(self, numbers: np.ndarray, axis: int) -> np.ndarray:
        return numbers.astype(np.int64).reshape([-1 if i == axis else 1 for i in range(self.rank)])

    def times(self, weight: np.ndarray) -> float:
        """How often something is done that is done at the points where `weight` is not zero."""
        over_grid = tuple(range(len(self.grid)))
        return float(weight.mean(axis=over_grid).sum() * math.prod(self.grid))

    def block(self, block: Any, values: Values, weight: np.ndarray) -> Count:
        """Count what a block does, and add what its scalars are to `values`."""
        count = Count()
        for each in block.operations:
            operation = each.operation
            if operation.name == "scf.if":
                count.add(self.branches(operation, values, weight))
            elif operation.name == "scf.for":
                count.add(self.loop(operation, values, weight))
            elif operation.name == "scf.index_switch":
                count.add(self.switch(operation, values, weight))
            elif operation.name == "func.call":
                count.add(self.call(operation, values, weight))
            elif operation.name == "scf.while":
                count.add(self.endless(operation, values, weight))
            else:
                for region in operation.regions:
                    for inner in region.blocks:
                        count.add(self.block(inner, values, weight))
                self.count(operation, values, weight, count)
                value = self.scalar(operation, values)
                if value is not None:
                    values[operation.results[0]] = value
        return count

    def count(self, operation: Any, values: Values, weight: np.ndarray, count: Count) -> None:
        """Add what an operation itself does."""
        _count_operation(operation, self.times, weight, count)

    def switch(self, operation: Any, values: Values, weight: np.ndarray) -> Count:
        """Count a choice among cases; its first region is for what is none of them."""
        chosen = values.get(operation.operands[0])
        cases = _integers(operation, "cases")
        total = Count()
        for region, case in zip(operation.regions, (None, *cases), strict=True):
            taken: Any = 1
            if chosen is not None and case is None:
                taken = ~np.isin(chosen, cases)
            elif chosen is not None:
                taken = chosen == case
            total.add(self.block(region.blocks[0], values, weight * taken))
        total.at_most |= chosen is None and total.has_work()
        return total

    def branches(self, operation: Any, values: Values, weight: np.ndarray) -> Count:
        condition = values.get(operation.operands[0])
        counts: list[Count] = []
        ends: list[list[Any]] = []
        for number, region in enumerate(operation.regions):
            for block in region.blocks:
                taken = 1 if condition is None else (condition != 0) == (number == 0)
                counts.append(self.block(block, values, weight * taken))
                ends.append([values.get(end) for end in _last(block).operands])
        if condition is None:
            # The longer branch, if there are two: either may be the one.
            count = max(counts, key=lambda each: (each.flops, each.copied))
            count.at_most |= any(each.has_work() for each in counts)
            return count
        for result, *pair in zip(operation.results, *ends, strict=False):
            if len(pair) == 2 and all(end is not None for end in pair):
                values[result] = _checked(np.where(condition != 0, *pair))
        total = Count()
        for each in counts:
            total.add(each)
        return total

    def loop(self, operation: Any, values: Values, weight: np.ndarray) -> Count:
        start, end, step = (values.get(operation.operands[i]) for i in range(3))
        body = operation.regions[0].blocks[0]
        if start is None or end is None or step is None:
            return _refuse_work(self.block(body, dict(values), weight))
        trips = np.maximum(0, -((start - end) // step))
        if self.loops == _DEEPEST or trips.max(initial=0) * trips.size > _MOST_POINTS:
            raise NotCountable
        numbers = self.axis(np.arange(int(trips.max(initial=0))), len(self.grid) + self.loops)
        self.loops += 1
        values[body.arguments[0]] = _checked(start + numbers * step)
        count = self.block(body, values, _checked(weight * (numbers < trips)))
        self.loops -= 1
        return count

    def endless(self, operation: Any, values: Values, weight: np.ndarray) -> Count:
        """Count a loop that ends by a condition: only a run knows how often it goes round."""
        for region in operation.regions:
            _refuse_work(self.block(region.blocks[0], dict(values), weight))
        return Count()

    def call(self, operation: Any, values: Values, weight: np.ndarray) -> Count:
        function = self.functions[str(operation.attributes["callee"]).lstrip("@")]
        block = function.regions[0].blocks[0]
        given = {
            argument: values[operand]
            for argument, operand in zip(block.arguments, operation.operands, strict=True)
            if operand in values
        }
        count = self.block(block, given, weight)
        for result, end in zip(operation.results, _last(block).operands, strict=True):
            if end in given:
                values[result] = given[end]
        return count

    def scalar(self, operation: Any, values: Values) -> np.ndarray | None:
        """The value of an operation with one result, where it is a known number."""
        if len(operation.results) != 1 or "<" in str(operation.results[0].type):
            return None
        name = operation.name
        if name == "arith.constant":
            value = getattr(operation.attributes["value"], "value", None)
            bit = str(operation.results[0].type) == "i1"
            return np.asarray(int(value) & 1 if bit else value) if isinstance(value, int) else None
        if name in ("tt.get_program_id", "tt.get_num_programs"):
            axis = int(_NUMBERS.search(str(operation.attributes["axis"]))[0])  # type: ignore[index]
            size = self.grid[axis]
            is_id = name == "tt.get_program_id"
            return self.axis(np.arange(size), axis) if is_id else np.asarray(size)
        operands = [values[operand] for operand in operation.operands if operand in values]
        if len(operands) != len(operation.operands):
            return None
        if name == "memref.load":
            table, *place = operands
            if table.ndim != len(place):
                return None
            within = [np.clip(at, 0, size - 1) for at, size in zip(place, table.shape, strict=True)]
            return _checked(table[tuple(np.broadcast_arrays(*within))].astype(np.int64))
        if name == "arith.cmpi":
            predicate = int(operation.attributes["predicate"].value)
            return _checked(_COMPARISONS[predicate](*operands).astype(np.int64))
        compute = _SCALARS.get(name)
        return None if compute is None else _checked(compute(*operands))

    def moved_blocks(self, main: Any) -> Iterator[float]:
        """Bytes that move for each operand and result: a block whose place changed moves again.

        `nan` where that is not known, and for operands without blocks.
        """
        if "window_params" not in main.attributes:
            return
        arguments = main.regions[0].blocks[0].arguments
        # Before the operands with blocks come the grid and the tables.
        first = len(self.grid) + self.prefetched
        for number, window in enumerate(main.attributes["window_params"]):
            text = str(window)
            function = self.functions.get(_after(text, "transform_indices = @"))
            bounds = re.search(r"window_bounds = array<i64: ([^>]*)>", text)
            if function is None or bounds is None:
                yield math.nan
                continue
            elements = math.prod(map(int, bounds[1].split(",")))
            size = elements * _bits(arguments[first + number].type) / 8
            yield size * self.moves(function)

    def moves(self, transform: Any) -> float:
        """How many blocks one operand moves: the first, and each that is not the one before."""
        points = math.prod(self.grid)
        if points > _MOST_POINTS:
            raise NotCountable
        block = transform.regions[0].blocks[0]
        values = self.arguments(block)
        self.block(block, values, np.ones((1,) * self.rank))
        changed = np.zeros(points, bool)
        changed[:1] = True
        for end in _last(block).operands:
            if end not in values:
                return math.nan
            place = values[end]
            flat = place.reshape(place.shape[: len(self.grid)]) if place.ndim else place
            along = np.broadcast_to(flat, self.grid).ravel()
            changed[1:] |= along[1:] != along[:-1]
        return float(changed.sum())


def _refuse_work(count: Count) -> Count:
    """Refuse a loop of unknown trips, unless nothing in it counts."""
    if count.has_work():
        raise NotCountable
    return count


def _checked(value: np.ndarray) -> np.ndarray:
    if value.size > _MOST_POINTS:
        raise NotCountable
    return value


# Operations that count, and what scalars they compute.


def _count_operation(
    operation: Any, times: Callable[[np.ndarray], float], weight: np.ndarray, count: Count
) -> None:
    name = operation.name
    if name in _PRODUCTS:
        more = 2.0 * math.prod(_dims(operation.results[0].type)) * _contracted(operation)
        more *= times(weight)
        count.flops += more
        dtype = _hlo_dtype(operation.operands[0].type)
        count.dtypes[dtype] = count.dtypes.get(dtype, 0.0) + more
    elif name in _TRANSCENDENTAL:
        key = _TRANSCENDENTAL[name]
        more = math.prod(_dims(operation.results[0].type)) * times(weight)
        count.transcendentals[key] = count.transcendentals.get(key, 0.0) + more
    elif name in _COPIES:
        ends = [each.type for each in operation.operands if "memref<" in str(each.type)]
        if any(_MAIN_MEMORY.search(str(end)) for end in ends) and "?" not in str(ends[0]):
            size = math.prod(_dims(ends[0])) * _bits(ends[0]) / 8
            count.copied += size * times(weight)


def _contracted(operation: Any) -> int:
    """How many products are summed for each element of a result."""
    left = _dims(operation.operands[0].type)
    if operation.name == "tt.dot":
        return left[-1]
    if operation.name == "tpu.matmul":
        numbers = _CONTRACTED.search(str(operation.attributes["dimension_numbers"]))
        dims = [int(dim) for dim in _NUMBERS.findall(numbers[1])] if numbers else [1]
        return math.prod(left[dim] for dim in dims)
    iterators = re.findall(r"reduction|parallel", str(operation.attributes["iterator_types"]))
    mapped = re.findall(r"-> \(([^)]*)\)", str(operation.attributes["indexing_maps"]))[0]
    axes = [int(number) for number in _NUMBERS.findall(mapped)]
    pairs = zip(axes, left, strict=True)
    return math.prod(size for axis, size in pairs if iterators[axis] == "reduction")


def _divide(left: np.ndarray, right: np.ndarray) -> Any:
    """Division towards zero; by zero it is never reached where it counts."""
    right = np.where(right == 0, 1, right)
    return np.sign(left) * np.sign(right) * (np.abs(left) // np.abs(right))


def _remainder(left: np.ndarray, right: np.ndarray) -> Any:
    return left - np.where(right == 0, 1, right) * _divide(left, right)


_COMPARISONS: list[Callable[..., Any]] = [
    *(np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal),
    *(np.less, np.less_equal, np.greater, np.greater_equal),  # of unsigned numbers
]
_SCALARS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        [f"arith.{name}" for name in ("index_cast", "index_castui", "extsi", "extui", "trunci")],
        np.asarray,
    ),
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.divsi": _divide,
    "arith.divui": _divide,
    "arith.remsi": _remainder,
    "arith.remui": _remainder,
    "arith.floordivsi": lambda left, right: left // np.where(right == 0, 1, right),
    "arith.ceildivsi": lambda left, right: -(-left // np.where(right == 0, 1, right)),
    "arith.shrui": np.right_shift,
    "arith.shli": np.left_shift,
    "arith.select": lambda condition, yes, no: np.where(condition != 0, yes, no),
}


def _last(block: Any) -> Any:
    """The operation that ends a block, with what it returns."""
    return list(block.operations)[-1].operation


def _integers(operation: Any, name: str) -> tuple[int, ...]:
    """An attribute of integers: `array<i64: 4, 4>` or `2 : i64`."""
    if name not in operation.attributes:
        return ()
    text = str(operation.attributes[name])
    text = text.partition(":")[2] if "<" in text else text.partition(":")[0]
    return tuple(map(int, _NUMBERS.findall(text)))


def _after(text: str, words: str) -> str:
    match = re.search(rf"{re.escape(words)}(\w+)", text)
    return match[1] if match else ""


def _dims(kind: Any) -> list[int]:
    match = _SHAPE.match(str(kind))
    return [int(dim) for dim in match[1].split("x") if dim] if match else []


def _bits(kind: Any) -> int:
    match = _SHAPE.match(str(kind))
    size = _BITS.search(match[2]) if match else None
    return max(8 if match and match[2] == "i1" else 1, int(size[0])) if size else 8


def _hlo_dtype(kind: Any) -> str:
    """HLO's name of an element type: `i8` is `s8`, `f8E4M3FN` is `f8e4m3fn`."""
    match = _SHAPE.match(str(kind))
    name = match[2].lower() if match else ""
    return f"s{name[1:]}" if re.fullmatch(r"i\d+", name) else name
