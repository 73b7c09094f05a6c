"""`KernelWork`: what a custom kernel does, which the compiler's own text does not say.

In order of trust: counted from the kernel's own program over its grid (`kernel_counting`), as the
author declared it (`pl.CostEstimate`), an upper bound where a condition is not known, or unknown,
with no more than the bytes of its operands and results. Kernels are Pallas on TPU (Mosaic), Triton,
Mosaic for GPUs, cuDNN's attention, and custom calls of any other target.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from meshwright import _compat_lowering
from meshwright.hlo.dataflow import Dataflow
from meshwright.hlo.instructions import Computation, Instruction
from meshwright.hlo.kernel_counting import Count, count_kernel
from meshwright.hlo.mosaic_gpu_counting import count_mosaic_gpu

Trust = Literal["counted", "declared", "at most", "unknown"]

# Custom calls of compilers that are no kernels, multiply nothing, or are counted as dots and
# convolutions (`flops` in `program`).
_NOT_KERNELS = re.compile(
    r"__cublas\$(?!triangularSolve)|__cudnn\$conv|__cub\$|.*TopK|cu_threefry|AllocateBuffer|ConcatBitcast"
    r"|Sharding$|SPMD|X64|xla\.|annotate_|MoveTo|PadToStatic|SliceToDynamic|GetDimensionSize|AssumeGather"
    r"|LayoutConstraint|BoundedConcat|InspectSharding|.*callback|PartitionId|__nop"
)


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """One run of a custom kernel.

    `kind` is what made it, e.g. "Pallas TPU". `flops` counts two for each product of numbers of
    type `dtype`, 0 if `trust` is "unknown". `bytes` are those of main memory, `None` if they are
    its operands and results. `transcendentals` are counted by HLO's name. `speed` names the class
    of kernels whose efficiency it has, `keys` how many keys a query of attention meets on average.
    `apart`: bytes that small kernels move before and after it, at the speed of a copy.
    """

    kind: str
    trust: Trust
    flops: float = 0.0
    bytes: float | None = None
    dtype: str = "bf16"
    transcendentals: Mapping[str, float] = dataclasses.field(default_factory=dict)
    speed: str = ""
    keys: float = 0.0
    apart: float = 0.0


# In: a custom call, its computation, and what is known of values (for the tables that a kernel
# reads). Out: its work, or `None` for what is no kernel. Invariant: nothing is guessed; what a
# kernel's program does not tell is "at most" or "unknown".
# Example: splash attention with a causal mask of 4 x 4 blocks: its program has one product of
# blocks for the scores and one for the values, under a condition on the mask; the mask is a
# constant with ten blocks that are not empty: 2 * 10 products of blocks for each head.
def kernel_work(
    instruction: Instruction,
    computation: Computation,
    dataflow: Dataflow,
    constants: Mapping[str, np.ndarray],
) -> KernelWork | None:
    """Return the work of a custom call, or `None` if it is no kernel."""
    target = (instruction.attribute("custom_call_target") or "").strip('"')
    if instruction.opcode != "custom-call" or not target or _NOT_KERNELS.match(target):
        return None
    if target == "tpu_custom_call":
        return _mosaic(instruction, computation, dataflow, constants)
    if target == "__gpu$xla.gpu.triton":
        return _triton(instruction)
    if target.startswith("__cudnn$fmha"):
        return _cudnn_attention(instruction, computation, "Backward" in target)
    if target.startswith("mosaic_gpu"):
        return _mosaic_gpu(instruction)
    return KernelWork(target, "unknown")


# Pallas on TPU: the program is in the configuration, with its grid and blocks.


def _mosaic(
    instruction: Instruction,
    computation: Computation,
    dataflow: Dataflow,
    constants: Mapping[str, np.ndarray],
) -> KernelWork:
    kind = "Pallas TPU"
    config = json.loads(instruction.attribute("backend_config") or "{}")
    config = config.get("custom_call_config", {})
    module = _compat_lowering.read_kernel(base64.b64decode(config.get("body", "")), "mosaic")
    tables = _tables(instruction, computation, dataflow, constants)
    count = None if module is None else count_kernel(module, tables=tables)
    counted = None
    if count is not None:
        moved = _block_bytes(count, instruction, computation)
        trust: Trust = "at most" if count.at_most else "counted"
        slow = count.transcendentals
        counted = KernelWork(kind, trust, count.flops, moved, count.dtype, slow, "pallas tpu")
    estimate = config.get("cost_estimate")
    if estimate and (counted is None or counted.trust == "at most"):
        return KernelWork(
            kind,
            "declared",
            float(estimate.get("flops", 0)),
            float(estimate.get("bytes_accessed", 0)) or None,
            count.dtype if count else _first_dtype(instruction, computation),
            {"exponential": float(estimate.get("transcendentals", 0))},
            "pallas tpu",
        )
    return counted or KernelWork(kind, "unknown")


def _tables(
    instruction: Instruction,
    computation: Computation,
    dataflow: Dataflow,
    constants: Mapping[str, np.ndarray],
) -> dict[int, np.ndarray]:
    """The constants among the leading operands, which a kernel may read scalars from."""
    tables = {}
    for number, operand in enumerate(computation.operands(instruction)):
        leaf = operand.shape.leaves[0]
        if leaf.dtype[0] not in "sup":  # floating-point numbers decide nothing
            break
        table = constants.get(dataflow.origin(operand).instruction.name)
        table = None if table is None else _as_seen_here(table, leaf.dims)
        if table is not None:
            tables[number] = table
    return tables


def _as_seen_here(table: np.ndarray, dims: tuple[int, ...]) -> np.ndarray | None:
    """A constant as an operand of these dims: itself, or a slice if all slices are alike."""
    if table.shape == dims:
        return table
    if table.size == math.prod(dims):
        return table.reshape(dims)
    if len(dims) != table.ndim or any(n % d for n, d in zip(table.shape, dims, strict=True)):
        return None
    part = table[tuple(slice(0, size) for size in dims)]
    times = [n // d for n, d in zip(table.shape, dims, strict=True)]
    return part if np.array_equal(np.tile(part, times), table) else None


def _block_bytes(count: Count, instruction: Instruction, computation: Computation) -> float | None:
    """Bytes of main memory that the blocks and the kernel's own copies move; `None` if unknown."""
    if not count.blocks and not count.copied:
        return None
    operands = computation.operands(instruction)
    leaves = [
        (leaf, space)
        for shape in (*(operand.shape for operand in operands), instruction.shape)
        for leaf, space in zip(shape.leaves, shape.spaces, strict=True)
    ]
    # Tables come before what has blocks. (A kernel's semaphores and scratch are no operands.)
    leaves = leaves[len(leaves) - len(count.blocks) :] if count.blocks else []
    total = count.copied
    for (leaf, space), moved in zip(leaves, count.blocks, strict=False):
        if space == 0:
            total += leaf.bytes if math.isnan(moved) else moved
    return total


def _first_dtype(instruction: Instruction, computation: Computation) -> str:
    """The type of the first operand that is not of integers of an index's size."""
    dtypes = [operand.shape.leaves[0].dtype for operand in computation.operands(instruction)]
    return next((dtype for dtype in dtypes if dtype not in ("s32", "u32", "pred")), "bf16")


# Triton: the program is a string of the configuration, the grid beside it.

_ESCAPED = re.compile(rb'\\([0-9A-Fa-f]{2}|[\\"nt])')
_PLAIN = {b"\\": b"\\", b'"': b'"', b"n": b"\n", b"t": b"\t"}
_TRITON_CODE = re.compile(r' ir = "([^"\\]*(?:\\.[^"\\]*)*)"', re.S)
_MOSAIC_GPU_CODE = re.compile(r' module = "([^"\\]*(?:\\.[^"\\]*)*)"', re.S)


def _triton(instruction: Instruction) -> KernelWork:
    config = instruction.attributes
    code = _TRITON_CODE.search(config)
    sizes = [re.search(rf"grid_{axis} = (\d+)", config) for axis in "xyz"]
    module = None if code is None else _compat_lowering.read_kernel(_unescape(code[1]), "triton")
    if module is None:
        return KernelWork("Pallas GPU (Triton)", "unknown")
    count = count_kernel(module, [int(size[1]) if size else 1 for size in sizes])
    if count is None:
        return KernelWork("Pallas GPU (Triton)", "unknown")
    return KernelWork(
        "Pallas GPU (Triton)",
        "at most" if count.at_most else "counted",
        count.flops,
        None,
        count.dtype,
        count.transcendentals,
        "triton",
    )


def _mosaic_gpu(instruction: Instruction) -> KernelWork:
    kind = "Pallas GPU (Mosaic)"
    code = _MOSAIC_GPU_CODE.search(instruction.attributes)
    module = (
        None if code is None else _compat_lowering.read_kernel(_unescape(code[1]), "mosaic_gpu")
    )
    count = None if module is None else count_mosaic_gpu(module)
    if count is None:
        return KernelWork(kind, "unknown")
    trust: Trust = "at most" if count.at_most else "counted"
    slow = count.transcendentals
    return KernelWork(kind, trust, count.flops, None, count.dtype, slow, "mosaic gpu")


def _unescape(text: str) -> bytes:
    """The bytes of a string as MLIR writes it: `\\EF` is one byte."""
    return _ESCAPED.sub(
        lambda match: _PLAIN.get(match[1]) or bytes([int(match[1], 16)]),
        text.encode("latin-1", "replace"),
    )


# cuDNN's attention: its configuration has the sizes and the kind of mask.

_HALF = frozenset({"CAUSAL", "PADDING_CAUSAL", "CAUSAL_BOTTOM_RIGHT"})
_SMALL_HEAD = 64  # at most: efficiency was measured at 64 and at 128
# Products of gradients and outputs, row by row, are read at 1.96 TB/s where a copy has 4.3.
_ROW_PRODUCTS = 2.2


def _cudnn_attention(
    instruction: Instruction, computation: Computation, backward: bool
) -> KernelWork:
    """Two products of the scores' size forward, five backward (it computes the scores again)."""
    config: dict[str, Any] = json.loads(instruction.attribute("backend_config") or "{}")
    config = config.get("cudnn_fmha_backend_config", {})
    dims = config.get("intermediate_tensor_shape", {}).get("dimensions", [])
    query = computation.operands(instruction)[0].shape.leaves[0]
    if len(dims) != 4:
        return KernelWork("cuDNN attention", "unknown")
    batch, heads, queries, keys = map(int, dims)
    pairs = queries * keys * (0.5 if config.get("mask_type") in _HALF else 1.0)
    window = int(config.get("sliding_window_length") or 0)
    pairs = min(pairs, float(queries * window)) if window > 0 else pairs
    head = query.dims[-1]
    size = "64" if head <= _SMALL_HEAD else "128"
    width = query.bytes / max(1, query.elements)
    grads = width * batch * keys * head * _key_heads(instruction, computation, batch * keys * head)
    apart = _around_attention(query.bytes, grads, grads < width * batch * heads * keys * head)
    return KernelWork(
        "cuDNN attention",
        "counted",
        (5 if backward else 2) * 2.0 * batch * heads * pairs * head,
        None,
        query.dtype,
        {},
        f"cudnn attention {'backward' if backward else 'forward'} {size}",
        pairs / max(1, queries),
        apart if backward else float(query.bytes),
    )


def _key_heads(instruction: Instruction, computation: Computation, one: float) -> float:
    """How many heads of keys there are, each of so many elements."""
    return computation.operands(instruction)[1].shape.leaves[0].elements / max(1.0, one)


# cuDNN's kernels around the one that multiplies, six shapes on one H200. All results are cleared
# before, forward the output alone. Backward there is a float32 copy of the queries' gradient, and,
# where heads share keys, the keys' and values' gradients of every head: they are cleared, the one
# is rounded, the others are summed up. In: bytes of the queries and of the keys.
def _around_attention(queries: float, keys: float, shared: bool) -> float:
    cleared = 3 * queries + 2 * keys + (2 * queries if shared else 0)
    rounded = 3 * queries
    summed = 2 * (queries + keys) if shared else 0
    return cleared + 2 * queries * _ROW_PRODUCTS + rounded + summed
