"""`Speeds`: what one device does in a second, by kind of work, and how long a kernel takes with it.

A kernel takes the longest of what its parts take: products, bytes of main memory, and, where they
were measured, transcendental functions, sorts, gathers and scatters. Every figure has its source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshwright.hardware.chips import Chip
from meshwright.rehearsal.kernels import Kernel

# A single large product reaches 0.79 of an H200's nominal speed and a copy 0.9; these come
# closest to whole train steps there (benchmarks/rehearsal_gpu.py).
_COMPUTE, _MEMORY = 0.7, 0.8
_LAUNCH = {"gpu": 3e-6, "tpu": 1e-6, "cpu": 5e-6}  # seconds

# Speed of multiplications by dtype against bf16. TPUs multiply float32 in bf16 by default.
_DTYPE_SPEED = {
    "gpu": {"f32": 0.5, "f64": 0.067, "f8e4m3fn": 2.0, "f8e5m2": 2.0, "s8": 2.0},
    "tpu": {"f64": 0.05, "s8": 2.0},
    "cpu": {"f64": 0.5},
}

# The part of a GPU's nominal speed that whole kernels reach, their exponentials and bytes included.
# Measured on one H200, bf16, useful products of causal and full attention, lengths 4,096 to 32,768:
# cuDNN at head 128 reaches 527 to 663 TFLOP/s of 990 forward and 450 to 568 backward, at head 64
# 402 to 460 and 354 to 434; Triton's 285 to 346 forward and 250 to 346 backward.
# Kernels of TPUs have not been measured: they go at the speed of products.
_KERNEL_SPEED = {
    "cudnn attention forward 128": 0.58,
    "cudnn attention backward 128": 0.52,
    "cudnn attention forward 64": 0.43,
    "cudnn attention backward 64": 0.40,
    "triton": 0.32,
}

# Elements a second of functions that no multiplier computes. Measured on one H200 in float32, many
# in a row so that memory does not bound them; bfloat16 is within 10 %. An H100 has the same
# multiprocessors and clock. Those after the comment were not measured: they are computed alike.
_HOPPER_FUNCTIONS = {
    "exponential": 3.18e12,
    "rsqrt": 4.06e12,
    "divide": 3.32e12,
    "logistic": 1.70e12,
    "tanh": 1.40e12,
    "erf": 1.29e12,
    "log": 1.15e12,
    "sine": 1.0e12,
    "power": 0.355e12,
    # as the one that they are made of
    "cosine": 1.0e12,
    "log-plus-one": 1.15e12,
    "sqrt": 4.06e12,
}
# Keys, rows or elements a second, measured on one H200. Sorts: 2^24 and 2^26 float32 keys; rows of
# 1,024 (22e9) and 16,384 (14e9) keys; keys with their places. Gathers: 2^26 of 2^28 elements, and
# from a table in cache. Scatter-adds: rows of 4,096, and single elements.
_HOPPER_IRREGULAR = {
    "sorted": 29e9,
    "sorted pairs": 21e9,
    "sorted in rows": 18e9,
    "gathered": 39e9,
    "gathered in cache": 139e9,
    "scattered f32": 0.30e12,
    "scattered bf16": 0.13e12,
    "scattered elements": 16e9,
}
# Seconds that a sort of few keys takes (2^16 float32 keys: 46 us on one H200).
_SORT_START = 40e-6
_HOPPER = frozenset({"h100", "h200"})


@dataclasses.dataclass(frozen=True)
class Speeds:
    """What one device does in a second, and the seconds that a kernel takes to start.

    `functions` and `irregular`: elements a second of transcendental functions, and of sorts,
    gathers and scatters, where they are known.
    """

    flops: float
    bytes: float
    start: float
    family: str
    functions: Mapping[str, float] = dataclasses.field(default_factory=dict)
    irregular: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def compute(self, flops: float, dtype: str, kind: str = "") -> float:
        """Seconds for this many operations on values of this dtype, in a kernel of a kind."""
        relative = _KERNEL_SPEED.get(kind, _COMPUTE) / _COMPUTE
        return flops / (self.flops * relative * _DTYPE_SPEED[self.family].get(dtype, 1.0))

    def kernel(self, kernel: Kernel) -> tuple[float, float]:
        """Seconds that a kernel computes, and that it waits for memory: the longer one counts."""
        kind = kernel.custom.speed if kernel.custom else ""
        compute = self.compute(kernel.flops, kernel.dtype, kind)
        memory = kernel.bytes / self.bytes
        if kind not in _KERNEL_SPEED:  # else they are in its efficiency
            compute = max(compute, _seconds(kernel.slow, self.functions))
        sorts = any(name.startswith("sorted") for name in kernel.slow) and bool(self.irregular)
        irregular = _seconds(kernel.slow, self.irregular) + (_SORT_START if sorts else 0.0)
        return compute, max(memory, irregular)


def _seconds(counts: Mapping[str, float], rates: Mapping[str, float]) -> float:
    return sum(count / rates[name] for name, count in counts.items() if name in rates)


def speeds(chip: Chip) -> Speeds:
    """Return the speeds of one device; the cores of a chip share the chip's."""
    hopper = chip.name in _HOPPER
    return Speeds(
        chip.tflops * 1e12 / chip.cores * _COMPUTE,
        chip.memory_tbps * 1e12 / chip.cores * _MEMORY,
        _LAUNCH[chip.family],
        chip.family,
        _HOPPER_FUNCTIONS if hopper else {},
        _HOPPER_IRREGULAR if hopper else {},
    )
