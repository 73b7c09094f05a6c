"""What a device reaches of its nominal speeds."""

from __future__ import annotations

import dataclasses

from meshwright.hardware import Chip

# A single large product reaches 0.79 of an H200's nominal speed and a copy 0.9; these come
# closest to whole train steps there (benchmarks/rehearsal_gpu.py).
_COMPUTE, _MEMORY = 0.7, 0.8
_LAUNCH = {"gpu": 3e-6, "tpu": 1e-6, "cpu": 5e-6}

# Speed of multiplications by type against bf16. TPUs multiply float32 in bf16 by default.
_TYPES = {
    "gpu": {"f32": 0.5, "f64": 0.067, "f8e4m3fn": 2.0, "f8e5m2": 2.0, "s8": 2.0},
    "tpu": {"f64": 0.05, "s8": 2.0},
    "cpu": {"f64": 0.5},
}


@dataclasses.dataclass(frozen=True)
class Speeds:
    """What one device does in a second, and how long a kernel takes to start."""

    flops: float
    bytes: float
    start: float
    family: str

    def compute(self, flops: float, type: str) -> float:
        """Seconds for this many operations on values of this type."""
        return flops / (self.flops * _TYPES[self.family].get(type, 1.0))


def speeds(chip: Chip) -> Speeds:
    """Of one device of this kind; the cores of a chip share it."""
    return Speeds(
        chip.tflops * 1e12 / chip.cores * _COMPUTE,
        chip.memory_tbps * 1e12 / chip.cores * _MEMORY,
        _LAUNCH[chip.family],
        chip.family,
    )
