"""How much memory a program may take on a device."""

from __future__ import annotations

from meshwright.hardware import Chip

_GIB = 2**30

# GiB a device, as the TPU compiler itself says when it refuses ("available HBM"; libtpu 0.0.42).
_AVAILABLE = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}

# What JAX takes of a GPU unless told otherwise (XLA_PYTHON_CLIENT_MEM_FRACTION).
GPU_FRACTION = 0.75


def available(chip: Chip) -> int:
    """Bytes a program may take: what the compiler lets it, or the memory a device has."""
    if chip.name in _AVAILABLE:
        return int(_AVAILABLE[chip.name] * _GIB)
    return int(chip.memory_gb * 1e9) // chip.cores
