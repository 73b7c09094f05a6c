"""`Speeds`: what one device does in a second, by kind of work, and how long a kernel takes with it.

A kernel takes the longest of what its parts take: products, bytes of main memory, and, where they
were measured, transcendental functions, sorts, gathers and scatters. The figures, each with its
source, are in the file of the chip (`hardware/speeds`); those that `calibrate` has measured on the
reader's own devices go before them (`_as_measured`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.chips import Chip
from meshwright.hlo.instructions import Instruction, integers
from meshwright.hlo.program import Program
from meshwright.rehearsal.kernels import Kernel, kernels, running

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

# `clock` is the peak of a chip divided by what its multipliers do in a cycle; `part cycles` is the
# part of the compiler's expectation that products reach, one fit for each side of multipliers;
# `part products` that of nominal where no compiler says what it expects (programs that the CPU's
# compiler stands in for); `expected cycles` what it expects of large products against nominal,
# where it was ended before it says; `part memory` that of kernels without products.
TPU_MULTIPLIER = {"v4": 128, "v5e": 128, "v5p": 128, "v6e": 256, "tpu7x": 256}
# A fusion with products may carry a collective, whose buffers are then counted among its bytes: up
# to 6.6 times the time of its products (MaxText's rows), where the compiler expects no waiting. A
# product that waits longer than this is a thin one.
_THIN = 8.0

# Vector units: 8 x 128 lanes with 4 operations each in a cycle (scaling book, tpus.md).
# `attention operations` is how many attention needs for each of its exponentials (maximum,
# difference, sum, mask, scaling, conversions), beside its products: the fit.
_LANES = 8 * 128 * 4
_CORES = {"v4": 2, "v5p": 2}  # of one JAX device, with a vector unit each


@dataclasses.dataclass(frozen=True)
class TpuSpeeds:
    """What one TPU device does in a second: cycles of products, vector operations, bytes.

    `scheduled` is the part of nominal that products reach in a program that the TPU's own compiler
    has scheduled, and not estimated; 0 for other programs, where it is `nominal`. `operations`: of
    vectors, for each exponential of attention.
    """

    cycles: float
    vectors: float
    bytes: float
    scheduled: float
    nominal: float
    operations: float

    def kernel(self, kernel: Kernel, multiplying: float) -> tuple[float, float]:
        """Seconds that a kernel computes, and that it waits for memory: the longer one counts.

        `multiplying` is how long its products take where the compiler does not say.
        """
        if kernel.beside:
            return 0.0, 0.0
        memory = kernel.bytes / self.bytes
        if kernel.custom is not None:
            exponentials = kernel.custom.transcendentals.get("exponential", 0.0)
            return multiplying + self.exponentials(exponentials), memory
        if kernel.flops and kernel.cycles:
            return kernel.cycles / self.cycles, 0.0
        if not self.scheduled or not kernel.flops:
            return multiplying, memory
        multiplying *= self.nominal / self.scheduled
        return multiplying, memory if memory > _THIN * multiplying else 0.0

    def exponentials(self, count: float) -> float:
        """Seconds that a kernel takes for so many exponentials, beside its products."""
        return count * self.operations / self.vectors


def tpu_speeds(chip: Chip, scheduled: bool = False) -> TpuSpeeds | None:
    """Return the speeds of one device of a TPU; `None` for other chips.

    `scheduled` is for programs that the TPU's own compiler has scheduled, and not estimated.
    """
    if chip.family != "tpu":
        return None
    table = chip.speeds
    return TpuSpeeds(
        table["clock"] * table["part cycles"],
        table["clock"] * _LANES * _CORES.get(chip.name, 1),
        chip.memory_tbps * 1e12 / chip.cores * table["part memory"],
        table["part cycles"] / table["expected cycles"] if scheduled else 0.0,
        table["part products"],
        table["attention operations"],
    )


# All chips.

# `power` is what a GPU draws at its full clock, as a part of the most that it may draw: by
# products, by other kernels, and by what draws less than other products. `part clock` says how the
# speed of products goes with the clock: they wait for memory, too. Attention and other instructions
# lose as much as the clock. `start product` is what a product takes beside its operations.
# The parts of nominal speeds: `part products`, of large products at the full clock; `part memory`,
# of plain kernels; `part access`, of fusions of a GPU that do not go over memory from end to end
# (`Kernel.access`); `part fft`, of one pass of a Fourier transform by cuFFT, of
# complex ones, of the scaling after inverse ones, and of the copy that those to real ones take.
LONGEST_FFT = 1 << 14  # rows that are transformed in one pass
# `start kernel` is what passes from one kernel to the next, if it takes no longer itself, `start
# long kernel` at the least, if it does, `start reduction` what one that reduces takes beside what
# goes with its size, `start step` what passes between two runs of a program; `part bus`, of large
# transfers from and to the host; `dtype`, products against bf16 (TPUs multiply float32 in bf16);
# `part kernel`, of whole kernels of a GPU, their exponentials and bytes included.

# How much of its part cuDNN reaches with so many keys for a query: steps with 2,048 to 32,768 keys.
_KEYS, _MORE_KEYS = 0.96, 0.08

# `function` are elements a second of what no multiplier computes, `irregular` keys, rows or
# elements of sorts, gathers and scatters, `apart` elements of kernels that products of 8-bit
# numbers need beside them, `loop fusion` those that a loop fusion writes, whatever their width.


@dataclasses.dataclass(frozen=True)
class Speeds:
    """What one device does in a second, and the seconds that a kernel takes to start.

    `gap` is what starting a long kernel adds, `table` has all figures of the chip, `loop` are
    elements that a loop fusion writes.
    `functions` and `irregular`: elements a second of transcendental functions, and of sorts,
    gathers and scatters, where they are known; `rows` operations on rows that are reduced, `apart`
    elements of kernels that products bring along. `bus`: bytes to or from the host, or 0.
    `tpu` has what is different on TPUs. `access`: bytes by how a fusion goes over memory;
    `kernels`: operations of whole kernels, by their kind; `iteration`: seconds from one round of a
    loop to the next, if its kernels take no longer. `products`: measured operations by dtype, at
    sides of a square product; without it they are modelled. All are those of the full clock.
    `clock` is the part of it that a step runs at (`in_step`), `power` what products of a dtype
    draw at the full one, as a part of the most that the device may draw. `step`: seconds that
    starting a program adds to its kernels.
    """

    flops: float
    bytes: float
    start: float
    family: str
    gap: float
    table: Calibration
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
    power: Mapping[str, float] = dataclasses.field(default_factory=dict)
    clock: float = 1.0
    step: float = 0.0

    def compute(self, flops: float, dtype: str, kind: str = "", keys: float = 0.0) -> float:
        """Seconds for this many operations on values of this dtype, in a kernel of a kind.

        `keys`: how many a query meets, in a kernel of attention.
        """
        factors = self.table.values("dtype")
        factor = factors.get(dtype, 1.0)
        if kind in self.kernels:
            reached = self.kernels[kind] * self.clock
            return flops / (reached * factor * (with_keys(keys) if keys else 1.0))
        held = math.pow(self.clock, self.table.value("part clock") or 1.0)
        side = (flops / 2) ** (1 / 3)
        if self.products and flops:
            # A dtype that was not measured keeps its ratio to one that was.
            near = next((each for each in (dtype, *_ALIKE) if each in self.products), "")
            if near:
                ratio = factor / factors.get(near, 1.0)
                return flops / (_at_side(self.products[near], side) * ratio * held)
        start = (self.table.value("start product") or 0.0) if flops else 0.0
        return flops / (self.flops * factor * held) + start

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
        memory += kernel.row_operations / self.rows / self.clock
        if "reduc" in kernel.access or kernel.access == "rows":
            memory += min(memory, self.table.value("start reduction") or 0.0)
        if kind not in self.kernels:  # else they are in its efficiency
            functions = _seconds(kernel.slow, self.functions) / self.clock
            compute = max(compute, functions)
            if not kernel.flops:
                # Neither hides all of the other: a gate in bf16 takes 1.60 ps an element, where
                # its bytes take 1.40 and its functions 0.79.
                both = math.hypot(memory, functions)
                compute, memory = (both, memory) if functions > memory else (0.0, both)
        if kernel.custom is not None:
            compute += kernel.custom.apart / self.bytes
        if kernel.flops:
            compute += _seconds(kernel.slow, self.apart)
            compute += kernel.beside_result / self.bytes
            if compute > memory:  # else Triton's is the faster one on a GPU as well
                compute += kernel.fused_before / self.bytes
        sorts = any(name.startswith("sorted") for name in kernel.slow) and bool(self.irregular)
        irregular = _seconds(kernel.slow, self.irregular) + (
            self.table["start sort"] if sorts else 0.0
        )
        return compute, max(memory, irregular)

    # In: a program. Out: its speeds, with the clock at which a GPU runs it. A step takes no less
    # than the energy of its kernels at the most power that may be drawn. Kernels that multiply take
    # longer for it, and the same energy; those that wait for memory take as long as before.
    # Example: products of 10 ms that draw 1.24 and others of 2 ms that draw 0.72 take at least
    # 12.4 + 1.4 ms, so the products 11.8: 0.85 of their speed is left.
    def in_step(self, program: Program) -> Speeds:
        """Return the speeds at which a program runs as a step in a row of them."""
        if self.family != "gpu":
            return self
        products = attention = energy = others = 0.0
        for computation in running(program):
            times = program.run_count(computation.name).count
            for kernel in kernels(program, computation):
                compute, memory = self.kernel(kernel)
                seconds = max(compute, memory) * times
                if not kernel.flops or compute < memory:
                    others += seconds
                    continue
                energy += seconds * self._power(kernel)
                if kernel.custom is None:
                    products += seconds
                else:
                    attention += seconds
        least = energy - (1 - self.table["power others"]) * others
        low, high = 0.0, 1.0
        while high - low > 1e-6 and products + attention < least:
            clock = (low + high) / 2
            held = math.pow(clock, self.table["part clock"])
            slow = products / held + attention / clock < least
            low, high = (low, clock) if slow else (clock, high)
        return dataclasses.replace(self, clock=high)

    def _power(self, kernel: Kernel) -> float:
        """What a kernel that multiplies draws at the full clock, as a part of the most."""
        near = (each for each in (kernel.dtype, *_ALIKE) if each in self.power)
        power = self.power.get(next(near, ""), self.table["power products"])
        less = "zeros" if kernel.zeros else ""
        if kernel.custom is not None:
            less = "attention 64" if kernel.custom.speed.endswith("64") else "attention 128"
        return power * self.table[f"power {less}"] if less else power

    def _fft(self, kernel: Kernel) -> float:
        """Seconds of a Fourier transform; cuFFT's scaling and copying are kernels of their own."""
        attributes = kernel.instruction.attributes
        nominal, part = self.bytes / self.table["part memory"], self.table.values("part")
        written = kernel.instruction.shape.bytes
        real = "RFFT" in attributes
        passes = fft_passes(kernel.instruction)
        seconds = passes * kernel.bytes / (nominal * part["fft" if real else "complex fft"])
        if "fft_type=I" in attributes:
            scale = part["fft scale" if real else "complex fft scale"]
            seconds += 2 * written / (nominal * scale)
        if "fft_type=IRFFT" in attributes:
            seconds += 2 * (kernel.bytes - written) / (nominal * part["fft copy"])
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
    figures = chip.speeds
    nominal = chip.tflops * 1e12 / chip.cores
    memory = chip.memory_tbps * 1e12 / chip.cores
    table = Speeds(
        chip.tflops * 1e12 / chip.cores * figures["part products"],
        chip.memory_tbps * 1e12 / chip.cores * figures["part memory"],
        figures["start kernel"],
        chip.family,
        figures["start long kernel"],
        figures,
        figures.values("function"),
        figures.values("irregular"),
        figures.value("loop fusion") or math.inf,
        figures.value("row operations") or math.inf,
        figures.values("apart"),
        chip.bus * 1e9 / chip.cores * (figures.value("part bus") or 0.0),
        tpu_speeds(chip, scheduled),
        {access: part * memory for access, part in figures.values("part access").items()},
        {kind: part * nominal for kind, part in figures.values("part kernel").items()},
        step=figures.value("start step") or 0.0,
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
        power={
            dtype: max(1.0, _at_side(sorted(products[dtype]), SUSTAINED_SIDE) / rate)
            for dtype, rate in measured.values("sustained").items()
            if dtype in products
        },
        irregular={**table.irregular, **measured.values("irregular")},
        loop=measured.value("loop fusion") or table.loop,
        access={name: value * (copied / table.bytes) for name, value in table.access.items()},
        kernels={**table.kernels, **measured.values("kernel")},
        iteration=measured.value("start iteration") or table.iteration,
        products={dtype: sorted(rates) for dtype, rates in products.items()},
        bus=to_device,
        bus_to_host=measured.value("bus to host") or 0.0,
        tpu=table.tpu and dataclasses.replace(table.tpu, bytes=copied),
    )


_ALIKE = ("bf16", "f16", "f32")  # dtypes whose products others are compared with
SUSTAINED_SIDE = 8192  # of the products that `calibrate` runs until power holds the clock down


def _at_side(rates: Sequence[tuple[float, float]], side: float) -> float:
    """Operations a second at a side: between two that were measured, along the line."""
    sides, values = zip(*rates, strict=True)
    smaller: float = min(1.0, side / sides[0])  # below the smallest, speed falls with the side
    rate = np.interp(math.log(side), [math.log(each) for each in sides], values)
    return smaller * float(rate)


def with_keys(keys: float) -> float:
    """How much of its speed cuDNN's attention reaches with so many keys for a query."""
    return float(_KEYS * math.pow(keys / 1024, _MORE_KEYS))
