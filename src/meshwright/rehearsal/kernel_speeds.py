"""`Speeds`: what one device does in a second, by kind of work, and how long a kernel takes with it.

A kernel takes the longest of what its parts take: products, bytes of main memory, and, where they
were measured, transcendental functions, sorts, gathers and scatters. Every figure has its source.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from meshwright.hardware.chips import Chip
from meshwright.hlo.instructions import Instruction, integers
from meshwright.rehearsal.kernels import Kernel
from meshwright.rehearsal.tpu_speeds import MEMORY, NOMINAL, TpuSpeeds, tpu_speeds

# The part of the nominal speed that large products and plain kernels reach. GPU: products of 4,096
# to 16,384 in bf16 and copies, reductions and updates on one H200 (770 to 837 of 990 TFLOP/s, 4.0
# to 4.6 of 4.8 TB/s). TPU: `tpu_speeds`. CPU: no measurement of our own; what came closest to whole
# steps on a GPU when these two figures were the whole model.
_PRODUCTS = {"gpu": 0.85, "tpu": NOMINAL, "cpu": 0.7}
# Where it is held down by power: 11 products of 8,192 in a row 685 to 731 TFLOP/s, layers of
# 16,384 x 3,072 x 8,192 675 (one H200).
_SUSTAINED = {"bf16": 0.72, "f16": 0.72}
# The side of a square product that reaches half of that: 0.56 of nominal at 2,048, 0.70 to 0.78 at
# 4,096, 0.80 at 8,192 (one H200).
_HALF_SIDE = {"gpu": 600.0, "tpu": 0.0, "cpu": 0.0}
_MEMORY = {"gpu": 0.88, "tpu": MEMORY, "cpu": 0.8}
# The part of memory's nominal speed that fusions of a GPU reach which do not go over it from end to
# end (`Kernel.access`), and the operations a second of those that reduce rows: 300 kernels
# of 31 steps on one H200, the rows by least squares (64 of them, mean error 11 %).
_ACCESS = {"rows": 0.765, "reduction": 0.77, "windows": 0.35, "transpose": 0.7, "update": 0.74}
_HOPPER_ROWS = 7.0e12
# The same of one pass of a Fourier transform by cuFFT, from or to real numbers and of complex ones,
# of the scaling after inverse ones, and of the copy that those to real ones take first. One H200:
# rows of 1,000 and 16,384 2.6 to 3.7 of 4.8 TB/s, complex rows and squares of 512 to 4,096 4.0 to
# 4.1, rows of 262,144 3.6 in each of two passes, of 1,048,576 real ones 2.8 in each of three.
_FFT, _COMPLEX_FFT = 0.62, 0.8
_FFT_SCALE, _COMPLEX_FFT_SCALE, _FFT_COPY = 0.5, 0.775, 0.88
LONGEST_FFT = 1 << 14  # rows that are transformed in one pass
# Seconds from one kernel to the next, if it takes no longer itself; and at the least, if it does.
# GPU: tiny kernels on one H200, 256 in a row 3.0 us each, in loops 2.0 to 2.5; gaps between long
# ones 0.2 to 1.
_LAUNCH = {"gpu": 2.5e-6, "tpu": 1e-6, "cpu": 5e-6}
_GAP = {"gpu": 0.5e-6, "tpu": 1e-6, "cpu": 5e-6}

# The part of the bus between device and host that large transfers reach. GPU: 1 GiB to and from
# pinned memory on one H200, 52.7 and 53.2 of 63 GB/s. TPU: the published figures are taken as they
# are; no measurement of our own.
_BUS = {"gpu": 0.84, "tpu": 1.0, "cpu": 1.0}

# Speed of multiplications by dtype against bf16. TPUs multiply float32 in bf16 by default.
_DTYPE_SPEED = {
    # one H200: 325 to 350 TFLOP/s in tf32, 1,720 to 1,790 in fp8, 1,340 to 1,660 in s8; f64 nominal
    "gpu": {"f32": 0.435, "f64": 0.067, "f8e4m3fn": 2.3, "f8e5m2": 2.3, "s8": 1.85},
    "tpu": {"f64": 0.05, "s8": 2.0},
    "cpu": {"f64": 0.5},
}

# The part of a GPU's nominal speed that whole kernels reach, their exponentials and bytes included.
# Measured on one H200, bf16, useful products of causal and full attention, lengths 4,096 to 32,768:
# cuDNN at head 128 reaches 527 to 663 TFLOP/s of 990 forward and 450 to 568 backward, at head 64
# 402 to 460 and 354 to 434; Triton's 285 to 346 forward and 250 to 346 backward.
_KERNEL_SPEED = {
    "cudnn attention forward 128": 0.58,
    "cudnn attention backward 128": 0.52,
    "cudnn attention forward 64": 0.43,
    "cudnn attention backward 64": 0.40,
    "triton": 0.32,
}
# How much of that cuDNN reaches with so many keys for a query: steps with 2,048 to 32,768 keys.
_KEYS, _MORE_KEYS = 0.96, 0.06

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
    "integer": 40.7e12,  # additions, shifts and the like as HLO has them: threefry, 2^28 words
    # as the one that they are made of
    "cosine": 1.0e12,
    "log-plus-one": 1.15e12,
    "sqrt": 4.06e12,
}
# Keys, rows or elements a second, measured on one H200. Sorts: 2^24 and 2^26 float32 keys; rows of
# 256 to 16,384 keys, times stages of the network; keys with their places. Gathers: 2^26 of 2^28
# elements, and from a table in cache. Scatter-adds: rows of 4,096, and single elements.
_HOPPER_IRREGULAR = {
    "sorted": 31e9,
    "sorted pairs": 21e9,
    "sorted in rows": 1.25e12,
    "gathered": 39e9,
    "gathered in cache": 139e9,
    "scattered f32": 0.30e12,
    "scattered bf16": 0.13e12,
    "scattered elements": 16e9,
    "scattered elements in cache": 60e9,
}
# Elements a second of kernels that products of 8-bit numbers need beside them: operands brought
# into the order that cuBLAS takes, and rounded (fp8 of 8,192 x 4,096 and 16,384 x 8,192, int8).
_HOPPER_APART = {"8 bits transposed": 0.155e12, "8 bits rounded": 0.84e12}
# Seconds that a sort of few keys takes (2^16 float32 keys: 46 us on one H200).
_SORT_START = 40e-6
# Elements a second that a loop fusion writes, whatever their width (one H200: masks, fills, bf16).
_HOPPER_LOOP = 0.84e12
_HOPPER = frozenset({"h100", "h200"})


@dataclasses.dataclass(frozen=True)
class Speeds:
    """What one device does in a second, and the seconds that a kernel takes to start.

    `gap` is what starting a long kernel adds, `loop` the elements that a loop fusion writes.
    `functions` and `irregular`: elements a second of transcendental functions, and of sorts,
    gathers and scatters, where they are known; `rows` operations on rows that are reduced, `apart`
    elements of kernels that products bring along. `bus`: bytes to or from the host, or 0.
    `tpu` has what is different on TPUs.
    """

    flops: float
    bytes: float
    start: float
    family: str
    gap: float
    functions: Mapping[str, float] = dataclasses.field(default_factory=dict)
    irregular: Mapping[str, float] = dataclasses.field(default_factory=dict)
    loop: float = math.inf
    rows: float = math.inf
    apart: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bus: float = 0.0
    tpu: TpuSpeeds | None = None

    def compute(self, flops: float, dtype: str, kind: str = "", keys: float = 0.0) -> float:
        """Seconds for this many operations on values of this dtype, in a kernel of a kind.

        `keys`: how many a query meets, in a kernel of attention.
        """
        products = _PRODUCTS[self.family]
        side = (flops / 2) ** (1 / 3)
        relative = side / (side + _HALF_SIDE[self.family]) if flops else 1.0
        if self.family == "gpu":
            relative = min(relative, _SUSTAINED.get(dtype, 1.0) / products)
        if kind in _KERNEL_SPEED:
            relative = _KERNEL_SPEED[kind] / products
            relative *= _KEYS * (keys / 1024) ** _MORE_KEYS if keys else 1.0
        return flops / (self.flops * relative * _DTYPE_SPEED[self.family].get(dtype, 1.0))

    def kernel(self, kernel: Kernel) -> tuple[float, float]:
        """Seconds that a kernel computes, and that it waits for memory: the longer one counts."""
        kind = kernel.custom.speed if kernel.custom else ""
        keys = kernel.custom.keys if kernel.custom else 0.0
        compute = self.compute(kernel.flops, kernel.dtype, kind, keys)
        if self.tpu is not None:
            return self.tpu.kernel(kernel, compute)
        if self.family != "gpu":
            return compute, kernel.bytes / self.bytes
        if kernel.instruction.opcode == "fft":
            return 0.0, self._fft(kernel)
        slower = _ACCESS.get(kernel.access, _MEMORY["gpu"]) / _MEMORY["gpu"]
        memory = max(kernel.bytes / (self.bytes * slower), kernel.looped / self.loop)
        memory += kernel.row_operations / self.rows
        if kind not in _KERNEL_SPEED:  # else they are in its efficiency
            compute = max(compute, _seconds(kernel.slow, self.functions))
        if kernel.flops:
            compute += _seconds(kernel.slow, self.apart)
            compute += kernel.beside_result / self.bytes
        sorts = any(name.startswith("sorted") for name in kernel.slow) and bool(self.irregular)
        irregular = _seconds(kernel.slow, self.irregular) + (_SORT_START if sorts else 0.0)
        return compute, max(memory, irregular)

    def _fft(self, kernel: Kernel) -> float:
        """Seconds of a Fourier transform; cuFFT's scaling and copying are kernels of their own."""
        attributes = kernel.instruction.attributes
        nominal = self.bytes / _MEMORY["gpu"]
        written = kernel.instruction.shape.bytes
        real = "RFFT" in attributes
        passes = fft_passes(kernel.instruction)
        seconds = passes * kernel.bytes / (nominal * (_FFT if real else _COMPLEX_FFT))
        if "fft_type=I" in attributes:
            seconds += 2 * written / (nominal * (_FFT_SCALE if real else _COMPLEX_FFT_SCALE))
        if "fft_type=IRFFT" in attributes:
            seconds += 2 * (kernel.bytes - written) / (nominal * _FFT_COPY)
        return seconds

    def host(self, size: float) -> float:
        """Seconds of the bus for this many bytes one way; 0 where its speed is not known."""
        return size / self.bus if self.bus else 0.0

    def launch(self, seconds: float) -> float:
        """Seconds that starting a kernel adds: while a long one runs, the next is prepared."""
        return max(self.start - seconds, self.gap) if seconds > 0 else 0.0


def fft_passes(fft: Instruction) -> int:
    """How often a Fourier transform goes over its array: once a dimension, long ones twice."""
    lengths = integers(fft.attribute("fft_length"))
    long = sum(length > LONGEST_FFT for length in lengths)
    return len(lengths) + long + bool(long and "RFFT" in fft.attributes)


def _seconds(counts: Mapping[str, float], rates: Mapping[str, float]) -> float:
    return sum(count / rates[name] for name, count in counts.items() if name in rates)


def speeds(chip: Chip, scheduled: bool = False) -> Speeds:
    """Return the speeds of one device; the cores of a chip share the chip's.

    `scheduled` is for programs of a TPU's compiler that it has not estimated.
    """
    hopper = chip.name in _HOPPER
    return Speeds(
        chip.tflops * 1e12 / chip.cores * _PRODUCTS[chip.family],
        chip.memory_tbps * 1e12 / chip.cores * _MEMORY[chip.family],
        _LAUNCH[chip.family],
        chip.family,
        _GAP[chip.family],
        _HOPPER_FUNCTIONS if hopper else {},
        _HOPPER_IRREGULAR if hopper else {},
        _HOPPER_LOOP if hopper else math.inf,
        _HOPPER_ROWS if hopper else math.inf,
        _HOPPER_APART if hopper else {},
        chip.bus * 1e9 / chip.cores * _BUS[chip.family],
        tpu_speeds(chip, scheduled),
    )
