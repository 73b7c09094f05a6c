"""`Speeds`: what one device does in a second, by kind of work, and how long a kernel takes with it.

A kernel takes the longest of what its parts take: products, bytes of main memory, and, where they
were measured, transcendental functions, sorts, gathers and scatters. Every figure has its source;
those that `calibrate` has measured on the reader's own devices go before them (`_as_measured`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.chips import Chip
from meshwright.hlo.instructions import Instruction, integers
from meshwright.rehearsal.kernels import Kernel

# How long the kernels of a TPU take.
#
# - Products take what their compiler expects of them, in cycles (`estimated_cycles` of a fusion):
#   it knows the windows in which it moves operands to the multipliers. Steps reach a part of that
#   speed.
# - Other kernels move their bytes. The compiler's cycles of these are too many: copies and
#   broadcasts on v5p 2.5 to 10 times the bytes' time, most of a published step's rest.
# - Attention (Pallas kernels with exponentials) keeps multipliers and vector units busy in turn.
# - Copies that start and end apart run beside kernels, between main memory and the memory on chip.
#
# Figures that are a fit are that of `benchmarks/_fit_speeds.py` to the dense rows of
# `benchmarks/data/tpu_recipes.json`.

# GHz: the peak of each chip divided by what its multipliers do in a cycle.
TPU_CLOCK = {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}

# The part of the compiler's expectation that products reach, by the side of the chip's multipliers:
# the fit, to six rows on v5e and v5p and four on v6e (none of v4 and TPU7x).
TPU_MULTIPLIER = {"v4": 128, "v5e": 128, "v5p": 128, "v6e": 256, "tpu7x": 256}
TPU_PRODUCTS = {128: 1.07, 256: 0.84}

# The part of nominal that products reach where no compiler says what it expects (programs that the
# CPU's compiler stands in for): v6e, 8,192^3 in bf16, 827 of 918 TFLOP/s (tpu-recipes,
# microbenchmarks/README); TPU7x 0.83 (microbenchmarks/ironwood).
TPU_NOMINAL = 0.90

# Cycles that the compiler expects of large products against nominal, where it was ended before it
# says: 1.07 forward and 1.09 for the weights' gradients in products of 70B's size on v6e.
TPU_EXPECTED = 1.08
# A fusion with products may carry a collective, whose buffers are then counted among its bytes: up
# to 6.6 times the time of its products (MaxText's rows), where the compiler expects no waiting. A
# product that waits longer than this is a thin one.
_THIN = 8.0

# The part of nominal that kernels without products reach: a copy of 33.5 MB on v6e 1,360 of 1,600
# GB/s, TPU7x 0.87 (tpu-recipes, as above).
TPU_MEMORY = 0.85

# Vector units: 8 x 128 lanes with 4 operations each in a cycle (scaling book, tpus.md).
# How many operations attention needs for each of its exponentials (maximum, difference, sum, mask,
# scaling, conversions), beside its products: the fit.
_LANES = 8 * 128 * 4
_CORES = {"v4": 2, "v5p": 2}  # of one JAX device, with a vector unit each
TPU_OPERATIONS = 11.3


@dataclasses.dataclass(frozen=True)
class TpuSpeeds:
    """What one TPU device does in a second: cycles of products, vector operations, bytes.

    `scheduled` is the part of nominal that products reach in a program that the TPU's own compiler
    has scheduled, and not estimated; 0 for other programs.
    """

    cycles: float
    vectors: float
    bytes: float
    scheduled: float = 0.0

    def kernel(self, kernel: Kernel, multiplying: float) -> tuple[float, float]:
        """Seconds that a kernel computes, and that it waits for memory: the longer one counts.

        `multiplying` is how long its products take where the compiler does not say.
        """
        if kernel.beside:
            return 0.0, 0.0
        memory = kernel.bytes / self.bytes
        if kernel.custom is not None:
            exponentials = kernel.custom.transcendentals.get("exponential", 0.0)
            return multiplying + exponentials * TPU_OPERATIONS / self.vectors, memory
        if kernel.flops and kernel.cycles:
            return kernel.cycles / self.cycles, 0.0
        if not self.scheduled or not kernel.flops:
            return multiplying, memory
        multiplying *= TPU_NOMINAL / self.scheduled
        return multiplying, memory if memory > _THIN * multiplying else 0.0


def tpu_speeds(chip: Chip, scheduled: bool = False) -> TpuSpeeds | None:
    """Return the speeds of one device of a TPU; `None` for other chips.

    `scheduled` is for programs that the TPU's own compiler has scheduled, and not estimated.
    """
    if chip.family != "tpu":
        return None
    clock = TPU_CLOCK[chip.name] * 1e9
    return TpuSpeeds(
        clock * TPU_PRODUCTS[TPU_MULTIPLIER[chip.name]],
        clock * _LANES * _CORES.get(chip.name, 1),
        chip.memory_tbps * 1e12 / chip.cores * TPU_MEMORY,
        TPU_PRODUCTS[TPU_MULTIPLIER[chip.name]] / TPU_EXPECTED if scheduled else 0.0,
    )


# All chips.

# The part of the nominal speed that large products and plain kernels reach. GPU: products of 4,096
# to 16,384 in bf16 and copies, reductions and updates on one H200 (770 to 837 of 990 TFLOP/s, 4.0
# to 4.6 of 4.8 TB/s). TPU: above. CPU: no measurement of our own; what came closest to whole
# steps on a GPU when these two figures were the whole model.
_PRODUCTS = {"gpu": 0.85, "tpu": TPU_NOMINAL, "cpu": 0.7}
# Where it is held down by power: 11 products of 8,192 in a row 685 to 731 TFLOP/s, layers of
# 16,384 x 3,072 x 8,192 675 (one H200).
_SUSTAINED = {"bf16": 0.72, "f16": 0.72}
# The side of a square product that reaches half of that: 0.56 of nominal at 2,048, 0.70 to 0.78 at
# 4,096, 0.80 at 8,192 (one H200).
_HALF_SIDE = {"gpu": 600.0, "tpu": 0.0, "cpu": 0.0}
_MEMORY = {"gpu": 0.88, "tpu": TPU_MEMORY, "cpu": 0.8}
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
    `tpu` has what is different on TPUs. `access`: bytes by how a fusion goes over memory;
    `kernels`: operations of whole kernels, by their kind; `iteration`: seconds from one round of a
    loop to the next, if its kernels take no longer. `products`: measured operations by dtype, at
    sides of a square product; without it they are modelled. `sustained`: the most of them by dtype,
    once power holds the clock down.
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
    access: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kernels: Mapping[str, float] = dataclasses.field(default_factory=dict)
    iteration: float = 0.0
    products: Mapping[str, Sequence[tuple[float, float]]] = dataclasses.field(default_factory=dict)
    bus_to_host: float = 0.0
    sustained: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def compute(self, flops: float, dtype: str, kind: str = "", keys: float = 0.0) -> float:
        """Seconds for this many operations on values of this dtype, in a kernel of a kind.

        `keys`: how many a query meets, in a kernel of attention.
        """
        factor = _DTYPE_SPEED[self.family].get(dtype, 1.0)
        if kind in self.kernels:
            return flops / (self.kernels[kind] * factor * (with_keys(keys) if keys else 1.0))
        side = (flops / 2) ** (1 / 3)
        if self.products and flops:
            # A dtype that was not measured keeps its ratio to one that was.
            near = next((each for each in (dtype, *_ALIKE) if each in self.products), "")
            if near:
                ratio = factor / _DTYPE_SPEED[self.family].get(near, 1.0)
                reached = min(
                    _at_side(self.products[near], side), self.sustained.get(near, math.inf)
                )
                return flops / (reached * ratio)
        relative = side / (side + _HALF_SIDE[self.family]) if flops else 1.0
        if self.family == "gpu":
            relative = min(relative, _SUSTAINED.get(dtype, 1.0) / _PRODUCTS["gpu"])
        return flops / (self.flops * relative * factor)

    def kernel(self, kernel: Kernel) -> tuple[float, float]:
        """Seconds that a kernel computes, and that it waits for memory: the longer one counts."""
        kind = kernel.custom.speed if kernel.custom else ""
        keys = kernel.custom.keys if kernel.custom else 0.0
        compute = self.compute(kernel.flops, kernel.dtype, kind, keys)
        if self.tpu is not None:
            return self.tpu.kernel(kernel, compute)
        if self.family != "gpu":
            slow = _seconds(kernel.slow, {**self.functions, **self.irregular})
            return max(compute, slow), kernel.bytes / self.bytes
        if kernel.instruction.opcode == "fft":
            return 0.0, self._fft(kernel)
        speed = self.access.get(kernel.access, self.bytes)
        memory = max(kernel.bytes / speed, kernel.looped / self.loop)
        memory += kernel.row_operations / self.rows
        if kind not in self.kernels:  # else they are in its efficiency
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

    def host(self, size: float, direction: str = "to device") -> float:
        """Seconds of the bus for this many bytes one way; 0 where its speed is not known."""
        bus = self.bus_to_host or self.bus if direction == "to host" else self.bus
        return size / bus if bus else 0.0

    def next_round(self, seconds: float) -> float:
        """Seconds that starting a round of a loop adds whose kernels take this long."""
        return max(0.0, self.iteration - seconds)

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
    nominal = chip.tflops * 1e12 / chip.cores
    memory = chip.memory_tbps * 1e12 / chip.cores
    table = Speeds(
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
        {access: part * memory for access, part in _ACCESS.items()},
        {kind: part * nominal for kind, part in _KERNEL_SPEED.items()},
    )
    return table if chip.measured is None else _as_measured(table, chip.measured)


# In: the table's speeds and a calibration. Out: the measured ones, and the table's where nothing
# was measured. Names of figures are those that `calibration.probes` gives them.
def _as_measured(table: Speeds, measured: Calibration) -> Speeds:
    products: dict[str, list[tuple[float, float]]] = {}
    for name, value in measured.values("product").items():
        dtype, side = name.split()
        products.setdefault(dtype, []).append((float(side), value))
    copied = measured.value("memory copy") or table.bytes
    to_device = measured.value("bus to device") or table.bus
    return dataclasses.replace(
        table,
        bytes=copied,
        start=measured.value("start kernel") or table.start,
        gap=min(table.gap, measured.value("start kernel") or table.gap),
        functions={**table.functions, **measured.values("function")},
        sustained=measured.values("sustained"),
        irregular={**table.irregular, **measured.values("irregular")},
        loop=measured.value("loop fusion") or table.loop,
        access={name: copied * value / table.bytes for name, value in table.access.items()},
        kernels={**table.kernels, **measured.values("kernel")},
        iteration=measured.value("start iteration") or table.iteration,
        products={dtype: sorted(rates) for dtype, rates in products.items()},
        bus=to_device,
        bus_to_host=measured.value("bus to host") or 0.0,
        tpu=table.tpu and dataclasses.replace(table.tpu, bytes=copied),
    )


_ALIKE = ("bf16", "f16", "f32")  # dtypes whose products others are compared with


def _at_side(rates: Sequence[tuple[float, float]], side: float) -> float:
    """Operations a second at a side: between two that were measured, along the line."""
    sides, values = zip(*rates, strict=True)
    smaller: float = min(1.0, side / sides[0])  # below the smallest, speed falls with the side
    rate = np.interp(math.log(side), [math.log(each) for each in sides], values)
    return smaller * float(rate)


def with_keys(keys: float) -> float:
    """How much of its speed cuDNN's attention reaches with so many keys for a query."""
    return float(_KEYS * math.pow(keys / 1024, _MORE_KEYS))
