"""`count_mosaic_gpu`: the work of a Pallas kernel for Hopper or Blackwell GPUs, in its own program.

In: the program of a `mosaic_gpu` custom call, MLIR in which multiplications are machine
instructions already, but loops and conditions are not. Out: a `Count`, or `None`.

The grid has four axes: blocks along x, y and z, and the warps of a block (32 threads). Of each
warp the first thread is followed, so that conditions on the thread's number, by which kernels give
warps their roles, are known. Example: a block of 384 threads whose last 128 only copy: a `wgmma`,
which four warps do together, behind `thread / 128 < 2` counts twice.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from meshwright.hlo.kernel_counting import Count, Evaluation, NotCountable, Values

_WARP = 32  # threads
# Hopper's `wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16` names its sizes and the types of
# its result and left operand. Four warps do it together.
_PRODUCT = re.compile(r"wgmma\.mma_async[.\w:]*?\.m(\d+)n(\d+)k(\d+)\.\w+\.(\w+)")
_WARPS_OF_PRODUCT = 4
# Blackwell's `tcgen05.mma.cta_group::1.kind::f16 [$0], $1, $2, $3, $4` names a kind; its third
# operand has the sizes, rows / 16 from bit 24 on and columns / 8 from bit 17 on (PTX, "instruction
# descriptor"). One thread does it. By kind: how many are summed, and a type of that speed.
_TENSOR_PRODUCT = re.compile(r"tcgen05\.mma(?!\.sp)[.\w:]*?\.kind::(\w+)")
_KINDS = {"f16": (16, "bf16"), "tf32": (8, "f32"), "f8f6f4": (32, "f8e4m3fn"), "i8": (32, "s8")}
_DESCRIPTOR = 3
_DTYPES = {"e4m3": "f8e4m3fn", "e5m2": "f8e5m2", "tf32": "f32"}
# PTX's names of functions that are slow, with HLO's.
_FUNCTIONS = {
    "ex2.approx": "exponential",
    "lg2.approx": "log",
    "tanh.approx": "tanh",
    "sin.approx": "sine",
    "cos.approx": "cosine",
    "rsqrt.approx": "rsqrt",
    "sqrt.approx": "sqrt",
}
_UNKNOWN_WORK = re.compile(r"\b(?:tcgen05\.mma\.sp|mma\.sync|wmma\.mma)")


def count_mosaic_gpu(module: Any) -> Count | None:
    """Count a kernel's work; `None` where that cannot be done."""
    launches = [
        (function.operation, each.operation)
        for function in module.body.operations
        for region in function.operation.regions
        for block in region.blocks
        for each in block.operations
        if each.operation.name == "gpu.launch"
    ]
    if len(launches) != 1:
        return None
    function, launch = launches[0]
    try:
        constants = _constants(function)
        sizes = _launch_sizes(launch, constants)
        evaluation = _Launch(sizes[:3], sizes[3:6], sizes[6:9] or [1, 1, 1])
        return evaluation.run_launch(launch, constants)
    except NotCountable:
        return None


def _constants(function: Any) -> Values:
    """The integers of the host's part of the program, which the device's part may use."""
    host = Evaluation((), {}, {})
    values: Values = {}
    for each in function.regions[0].blocks[0].operations:
        if each.operation.name != "gpu.launch":
            value = host.scalar(each.operation, values)
            if value is not None:
                values[each.operation.results[0]] = value
    return values


def _launch_sizes(launch: Any, constants: Values) -> list[int]:
    """Blocks along x, y and z, threads of a block, and blocks of a cluster, if there are any."""
    # Tokens of what it waits for come first, memory last; neither is an index.
    sizes = [constants.get(each) for each in launch.operands if str(each.type) == "index"]
    if len(sizes) not in (6, 9) or any(size is None for size in sizes):
        raise NotCountable
    return [int(size) for size in sizes if size is not None]


class _Launch(Evaluation):
    """The scalars of a launch, for the first thread of every warp of every block."""

    def __init__(self, blocks: list[int], threads: list[int], cluster: list[int]):
        warps = max(1, math.prod(threads) // _WARP)
        super().__init__((*blocks, warps), {}, {})
        first = np.arange(warps) * _WARP
        along_y = first // threads[0]
        places = (first % threads[0], along_y % threads[1], along_y // threads[1])
        names = ("x", "y", "z")
        self.known: dict[tuple[str, str], np.ndarray] = {}
        for axis, name in enumerate(names):
            block = self.axis(np.arange(blocks[axis]), axis)
            self.known["gpu.block_id", name] = block
            self.known["gpu.cluster_block_id", name] = block % cluster[axis]
            self.known["gpu.cluster_id", name] = block // cluster[axis]
            self.known["gpu.grid_dim", name] = np.asarray(blocks[axis])
            self.known["gpu.block_dim", name] = np.asarray(threads[axis])
            self.known["gpu.thread_id", name] = self.axis(places[axis], len(names))

    def run_launch(self, launch: Any, constants: Values) -> Count:
        return self.block(launch.regions[0].blocks[0], dict(constants), np.ones((1,) * self.rank))

    def endless(self, operation: Any, values: Values, weight: np.ndarray) -> Count:
        """Count a loop in which blocks take over the work of others that have not started.

        Who does it only a run knows, but each block's work is done once: as if it did its own.
        """
        before, after = (region.blocks[0] for region in operation.regions)
        if "clusterlaunchcontrol.try_cancel" not in str(after):
            return super().endless(operation, values, weight)
        for argument, operand in zip(before.arguments, operation.operands, strict=True):
            if operand in values:
                values[argument] = values[operand]
        count = self.block(before, values, weight)
        _, *passed = list(before.operations)[-1].operation.operands
        for argument, operand in zip(after.arguments, passed, strict=True):
            if operand in values:
                values[argument] = values[operand]
        count.add(self.block(after, values, weight))
        return count

    def scalar(self, operation: Any, values: Values) -> np.ndarray | None:
        name = operation.name
        if name.startswith("gpu.") and "dimension" in operation.attributes:
            dimension = re.search(r"dim (\w)", str(operation.attributes["dimension"]))
            return self.known.get((name, dimension[1])) if dimension else None
        if name == "nvvm.shfl.sync":  # what another thread has; the first one we know
            first = values.get(operation.operands[2])
            is_first = first is not None and not first.any()
            is_index = "idx" in str(operation.attributes["kind"])
            return values.get(operation.operands[1]) if is_first and is_index else None
        if name == "nvvm.elect.sync":  # one thread of a warp: the one that is followed
            return np.asarray(1)
        return super().scalar(operation, values)

    def count(self, operation: Any, values: Values, weight: np.ndarray, count: Count) -> None:
        if operation.name != "llvm.inline_asm":
            super().count(operation, values, weight, count)
            return
        code = str(operation.attributes["asm_string"])
        if _UNKNOWN_WORK.search(code):
            raise NotCountable
        times = self.times(weight)
        for rows, columns, depth, kind in _PRODUCT.findall(code):
            more = 2.0 * int(rows) * int(columns) * int(depth) * times / _WARPS_OF_PRODUCT
            _add(count, _DTYPES.get(kind, kind), more)
        for kind in _TENSOR_PRODUCT.findall(code):
            descriptor = values.get(operation.operands[_DESCRIPTOR])
            if kind not in _KINDS or descriptor is None or descriptor.size != 1:
                raise NotCountable
            sizes = int(descriptor.ravel()[0])
            rows, columns = (sizes >> 24 & 31) << 4, (sizes >> 17 & 63) << 3
            depth, dtype = _KINDS[kind]
            _add(count, dtype, 2.0 * rows * columns * depth * times)
        function = _FUNCTIONS.get(".".join(code.strip('"').split(".", 2)[:2]))
        if function:
            more = _WARP * times
            count.transcendentals[function] = count.transcendentals.get(function, 0.0) + more


def _add(count: Count, dtype: str, flops: float) -> None:
    count.flops += flops
    count.dtypes[dtype] = count.dtypes.get(dtype, 0.0) + flops
