"""`TpuSpeeds`: how long the kernels of a TPU take.

- Products take what their compiler expects of them, in cycles (`estimated_cycles` of a fusion): it
  knows the windows in which it moves operands to the multipliers. Steps reach a part of that speed.
- Other kernels move their bytes. The compiler's cycles of these are too many: copies and broadcasts
  on v5p 2.5 to 10 times the bytes' time, most of a published step's rest.
- Attention (Pallas kernels with exponentials) keeps multipliers and vector units busy in turn.
- Copies that start and end apart run beside kernels, between main memory and the memory on chip.

Figures that are a fit are that of `benchmarks/_fit_speeds.py` to the dense rows of
`benchmarks/data/tpu_recipes.json`.
"""

from __future__ import annotations

import dataclasses

from meshwright.hardware.chips import Chip
from meshwright.rehearsal.kernels import Kernel

# GHz: the peak of each chip divided by what its multipliers do in a cycle.
CLOCK = {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}

# The part of the compiler's expectation that products reach, by the side of the chip's multipliers:
# the fit, to six rows on v5e and v5p and four on v6e (none of v4 and TPU7x).
MULTIPLIER = {"v4": 128, "v5e": 128, "v5p": 128, "v6e": 256, "tpu7x": 256}
PRODUCTS = {128: 1.07, 256: 0.84}

# The part of nominal that products reach where no compiler says what it expects (programs that the
# CPU's compiler stands in for): v6e, 8,192^3 in bf16, 827 of 918 TFLOP/s (tpu-recipes,
# microbenchmarks/README); TPU7x 0.83 (microbenchmarks/ironwood).
NOMINAL = 0.90

# Cycles that the compiler expects of large products against nominal, where it was ended before it
# says: 1.07 forward and 1.09 for the weights' gradients in products of 70B's size on v6e.
EXPECTED = 1.08
# A fusion with products may carry a collective, whose buffers are then counted among its bytes: up
# to 6.6 times the time of its products (MaxText's rows), where the compiler expects no waiting. A
# product that waits longer than this is a thin one.
_THIN = 8.0

# The part of nominal that kernels without products reach: a copy of 33.5 MB on v6e 1,360 of 1,600
# GB/s, TPU7x 0.87 (tpu-recipes, as above).
MEMORY = 0.85

# Vector units: 8 x 128 lanes with 4 operations each in a cycle (scaling book, tpus.md).
# How many operations attention needs for each of its exponentials (maximum, difference, sum, mask,
# scaling, conversions), beside its products: the fit.
_LANES = 8 * 128 * 4
_CORES = {"v4": 2, "v5p": 2}  # of one JAX device, with a vector unit each
OPERATIONS = 11.3


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
            return multiplying + exponentials * OPERATIONS / self.vectors, memory
        if kernel.flops and kernel.cycles:
            return kernel.cycles / self.cycles, 0.0
        if not self.scheduled or not kernel.flops:
            return multiplying, memory
        multiplying *= NOMINAL / self.scheduled
        return multiplying, memory if memory > _THIN * multiplying else 0.0


def tpu_speeds(chip: Chip, scheduled: bool = False) -> TpuSpeeds | None:
    """Return the speeds of one device of a TPU; `None` for other chips.

    `scheduled` is for programs that the TPU's own compiler has scheduled, and not estimated.
    """
    if chip.family != "tpu":
        return None
    clock = CLOCK[chip.name] * 1e9
    return TpuSpeeds(
        clock * PRODUCTS[MULTIPLIER[chip.name]],
        clock * _LANES * _CORES.get(chip.name, 1),
        chip.memory_tbps * 1e12 / chip.cores * MEMORY,
        PRODUCTS[MULTIPLIER[chip.name]] / EXPECTED if scheduled else 0.0,
    )
