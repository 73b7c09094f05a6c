"""How a GPU's fusions go over memory, and what they do beside what their operations say.

A fusion that reduces rows, transposes or updates a slice reads slower than one that goes over
memory from end to end; products in tiles, by a library, or of zeros have costs of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from meshwright.hlo.instructions import Computation, Instruction, Leaf, integers
from meshwright.hlo.program import Program


def memory_access(program: Program, instruction: Instruction) -> str:
    """How a fusion of a GPU goes over memory, where it is slower than from end to end.

    `"rows"`: Triton's, which keep rows on chip while they reduce them; `"row reduction"`: others
    that reduce long rows, `"reduction"`: columns and short rows; `"windows"`: cumulative sums;
    `"transpose"`; `"update"`: a slice is written; `"gather"`: rows of a table are read.
    """
    if instruction.opcode != "fusion" or "kind=k" not in instruction.attributes:
        return ""
    if "dynamic_update_slice" in instruction.name:
        return "update"
    opcodes = {
        each.opcode
        for _, name in instruction.called
        for each in program.computations[name].instructions
    }
    if "gather" in opcodes:
        return "gather"
    if "reduce" in opcodes:
        if '"kind":"__triton"' in instruction.attributes:
            return "rows"
        return "row reduction" if _reduces_long_rows(program, instruction) else "reduction"
    if "reduce-window" in opcodes:
        return "windows"
    return "transpose" if "transpose" in opcodes and "transpose" in instruction.name else ""


_LONG_ROW = 2048  # elements; of rows of 200 half as much is read in a second


def _reduces_long_rows(program: Program, fusion: Instruction) -> bool:
    """Whether every reduction of a fusion goes along rows that lie in memory from end to end."""
    body = program.computations[fusion.called[0][1]]
    reductions = [each for each in body.instructions if each.opcode == "reduce"]
    for reduction in reductions:
        dims = body.operands(reduction)[0].shape.leaves[0].dims
        if integers(reduction.attribute("dimensions")) != (len(dims) - 1,) or dims[-1] < _LONG_ROW:
            return False
    return bool(reductions)


def fused_product(program: Program, fusion: Instruction) -> Instruction | None:
    """The first product in a fusion, or `None`."""
    if fusion.opcode != "fusion":
        return None
    inner = program.computations[fusion.called[0][1]]
    return next((each for each in inner.instructions if each.opcode == "dot"), None)


# Operations from which on a GPU's products go to its library, if the compiler can try it: on one
# H200 those of 2,048 x 2,048 x 2,048 did not, those of 4,096 x 2,048 x 2,048 did.
LIBRARY_PRODUCTS = 2e10


def goes_to_library(program: Program, instruction: Instruction) -> bool:
    """Whether a fused product is Triton's only since there was no GPU to try a library's on."""
    return (
        '"kind":"__triton' in instruction.attributes
        and program.flops_of(instruction) >= LIBRARY_PRODUCTS
        and not program.has_library_products
        and fused_product(program, instruction) is not None
    )


# In: a fusion with a product. Out: bytes that kernels move which make its operands, or something of
# its result, where a library multiplies. Example: `relu(x) @ w` with x of 8 MB: x is read, and
# written again, before the product reads it; in Triton's fusion neither is.
def fused_before(program: Program, fusion: Instruction) -> float:
    dot = fused_product(program, fusion) if goes_to_library(program, fusion) else None
    if dot is None:
        return 0.0
    inner = program.computations[dot.computation]
    moved = 0.0
    for operand in inner.operands(dot):
        leaf = operand.shape.leaves[0]
        if is_eight_bit(leaf):  # of which the library's kernels are counted apart
            return 0.0
        sources = _sources(inner, operand)
        if sources:
            read = [each for each in sources if each.elements >= leaf.elements // 2]
            moved += leaf.bytes + sum(each.bytes for each in read)
    root = inner.root
    while root.opcode in _SAME_VALUES:
        root = inner.operands(root)[0]
    if root is not dot and not beside_result(program, fusion):
        moved += 2.0 * fusion.shape.leaves[0].bytes
    return moved


def _sources(inner: Computation, operand: Instruction) -> list[Leaf]:
    """What an operand is computed from; empty if it is only brought into another order."""
    value = operand
    while value.opcode in ("bitcast", "transpose", "reshape", "copy"):
        value = inner.operands(value)[0]
    if value.opcode in ("parameter", "constant", "broadcast"):
        return []
    found: dict[str, Leaf] = {}
    pending, seen = [value], {value.name}
    while pending:
        each = pending.pop()
        if each.opcode in ("parameter", "dynamic-slice"):
            found[each.name] = each.shape.leaves[0]
            continue
        for more in inner.operands(each):
            if more.name not in seen:
                seen.add(more.name)
                pending.append(more)
    return list(found.values())


_TILE = 64  # at least, of a GPU's products


def tile_traffic(program: Program, computation: Computation, instruction: Instruction) -> float:
    """How much more of its arrays a product goes over than they have, as it does in tiles.

    Scores of 196 x 196 are as slow as 256 x 256 ones; large products hardly notice.
    """
    dot = fused_product(program, instruction)
    if dot is None and "__cublas$" not in instruction.attributes:
        return 1.0
    inner = computation if dot is None else program.computations[dot.computation]
    dot = dot or instruction
    leaves = [each.shape.leaves[0] for each in (*inner.operands(dot)[:2], dot)]
    tiles = sum(leaf.bytes * _rounded_up(leaf.dims[-2:]) for leaf in leaves)
    return tiles / max(1, sum(leaf.bytes for leaf in leaves))


def _rounded_up(dims: Sequence[int]) -> float:
    return math.prod(-(-dim // _TILE) * _TILE / dim for dim in dims if dim > _TILE)


# In: a product, of a library or in a fusion. Out: whether an operand is what a relu has made, or
# the gradient of one: `maximum(x, 0)` and `select(x > 0, g, 0)`, seen through fusions.
def multiplies_zeros(program: Program, computation: Computation, instruction: Instruction) -> bool:
    dot = fused_product(program, instruction)
    if dot is None:
        operands = computation.operands(instruction)[:2]
        return any(_rectified(program, computation, each) for each in operands)
    inner = program.computations[dot.computation]
    return any(
        _rectified(program, inner, each, (computation, instruction)) for each in inner.operands(dot)
    )


_SAME_VALUES = frozenset("bitcast convert copy transpose reshape".split())


def _rectified(
    program: Program,
    computation: Computation,
    value: Instruction,
    caller: tuple[Computation, Instruction] | None = None,
) -> bool:
    """Whether a value is 0 where another is negative; `caller` is the fusion that it is in."""
    while value.opcode in _SAME_VALUES:
        value = computation.operands(value)[0]
    operands = computation.operands(value)
    if value.opcode == "maximum":
        return any(_is_zero(computation, each) for each in operands)
    if value.opcode == "select":
        (tested, *chosen) = operands
        signs = tested.opcode == "compare" and any(
            _is_zero(computation, each) for each in computation.operands(tested)
        )
        return signs and any(_is_zero(computation, each) for each in chosen)
    if value.opcode == "fusion":
        inner = program.computations[value.called[0][1]]
        return _rectified(program, inner, inner.root, (computation, value))
    if value.opcode == "parameter" and caller is not None:
        outside, fusion = caller
        return _rectified(program, outside, outside.operands(fusion)[int(value.operand_text)])
    return False


def _is_zero(computation: Computation, value: Instruction) -> bool:
    while value.opcode in ("broadcast", *_SAME_VALUES):
        value = computation.operands(value)[0]
    return value.opcode == "constant" and value.operand_text.strip() in ("0", "-0")


def beside_result(program: Program, fusion: Instruction) -> float:
    """Bytes of a product's result and of operands of its size that meet it after the product.

    A GPU does not read and write those while it multiplies; 0 where nothing meets the result.
    """
    dot = fused_product(program, fusion)
    if dot is None:
        return 0.0
    inner = program.computations[dot.computation]
    multiplied, pending = {dot.name}, [dot]
    while pending:
        for operand in inner.operands(pending.pop()):
            if operand.name not in multiplied:
                multiplied.add(operand.name)
                pending.append(operand)
    size = dot.shape.leaves[0].elements
    met = sum(
        parameter.shape.bytes
        for parameter in inner.parameters.values()
        if parameter.name not in multiplied and parameter.shape.leaves[0].elements == size
    )
    return float(met + fusion.shape.bytes) if met else 0.0


# A Triton fusion keeps rows in registers while it reduces them. With 64 elements a thread, what is
# computed of them after a reduction leaves room for one block of threads at a time, so that nothing
# hides its waiting: that takes as long as so many operations on each element, and more for each of
# its own. Rows that are padded to a power of two leave room for a second block where a tile has two
# to four of them and little is read (rows of 2,560 to 6,144); one row alone is waited for at each
# reduction. A mask that chooses among elements slows down what is computed, with any number of
# them. (200 kernels of norms and softmaxes of 1,024 to 16,384 on one H200, 11 with masks.)
_HIDDEN_OPERATIONS, _HIDDEN_BEFORE_MASKS = 3, 4
_CROWDED = 64  # elements a thread
_ONE_BLOCK, _OPERATION = 3.6, 0.56
_SECOND_BLOCK, _REDUCTION_ALONE, _MASK = 0.4, 0.2, 1.65
# Of columns that are reduced, by what is not Triton's (14 kernels with more than these).
_HIDDEN_IN_COLUMNS, _IN_COLUMNS = 7, 0.28
_NO_OPERATIONS = frozenset(
    "parameter constant broadcast bitcast tuple get-tuple-element iota reshape reduce".split()
)


def row_operations(program: Program, fusion: Instruction, access: str) -> float:
    """Operations on elements that are reduced, beyond what is hidden: elements times operations."""
    inner = program.computations[fusion.called[0][1]]
    body = inner.instructions
    sizes = {
        each.name: max((leaf.elements for leaf in each.shape.leaves), default=0) for each in body
    }
    whole = max(sizes.values(), default=0)
    reduced: set[str] = set()  # what depends on a reduction
    before = after = masks = 0
    for each in body:
        depends = not reduced.isdisjoint(each.operands)
        if depends or each.opcode == "reduce":
            reduced.add(each.name)
        if sizes[each.name] == whole and each.opcode not in _NO_OPERATIONS:
            after, before = after + depends, before + (not depends)
            masks += each.opcode == "select"
    if access == "reduction":
        return whole * _IN_COLUMNS * max(0, before + after - _HIDDEN_IN_COLUMNS)
    padded = _padded(body)
    rows, threads = _tile(fusion)
    if masks:
        hidden = max(0, before + after - _HIDDEN_BEFORE_MASKS)
        return padded * whole * hidden * (1 + _MASK * masks)
    row = whole / max(1, _rows(body))
    if after <= _HIDDEN_OPERATIONS or rows * row * padded < _CROWDED * threads:
        return 0.0
    more = math.sqrt(padded) * (_ONE_BLOCK + _OPERATION * after)
    moved = fusion.shape.bytes + sum(each.shape.bytes for each in inner.parameters.values())
    if rows in (2, 4) and padded >= 4 / 3 and moved < 5 * whole:
        more *= _SECOND_BLOCK
    if rows == 1 and fusion.shape.bytes > whole:
        reductions = sum(each.opcode == "reduce" for each in body)
        more *= 1 + _REDUCTION_ALONE * (reductions - 1)
    return whole * more


def _padded(body: Sequence[Instruction]) -> float:
    """How many times as long Triton makes rows: up to a power of two.

    >>> _padded([])
    1.0
    """
    by_name = {each.name: each for each in body}
    row = 1.0
    for reduced in [each for each in body if each.opcode == "reduce"][:1]:
        dims = by_name[reduced.operands[0]].shape.leaves[0].dims
        for axis in integers(reduced.attribute("dimensions")):
            row *= (1 << (dims[axis] - 1).bit_length()) / dims[axis]
    return row


def _rows(body: Sequence[Instruction]) -> int:
    """How many rows a fusion reduces."""
    reduction = next((each for each in body if each.opcode == "reduce"), None)
    return reduction.shape.leaves[0].elements if reduction else 1


_ROW_TILE = re.compile(r'"num_warps":"(\d+)".*"output_tiles":\[\{"sizes":\["(\d+)"')


def _tile(fusion: Instruction) -> tuple[int, int]:
    """How many rows a block takes at once, and its threads; 1, 256 where the compiler is silent."""
    tile = _ROW_TILE.search(fusion.attributes)
    return (int(tile[2]), 32 * int(tile[1])) if tile else (1, 256)


def is_eight_bit(leaf: Leaf) -> bool:
    """Whether its elements are numbers of 8 bits, as products take them."""
    return leaf.dtype.startswith("f8") or leaf.dtype == "s8"


def transposed_sizes(computation: Computation, dot: Instruction) -> list[int]:
    """Elements of 8 bits that a GPU's library wants in another order: the contracted one last."""
    sizes = []
    for side, operand in zip(("lhs", "rhs"), computation.operands(dot), strict=True):
        leaf = operand.shape.leaves[0]
        along = (dot.attribute(f"{side}_contracting_dims") or "").strip("{}")
        if is_eight_bit(leaf) and along != str(len(leaf.dims) - 1):
            sizes.append(leaf.elements)
    return sizes
