"""Work: operations of dots and convolutions, and the TPU compiler's estimated cycles."""

from __future__ import annotations

import functools
import math
import re

import numpy as np

from meshwright.rehearsal.programs.attributes import whole_numbers
from meshwright.rehearsal.programs.instructions import Computation, Instruction

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_GEMM_DIMS = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_WINDOW_PART = re.compile(r"(\w+)=([\w\-]+)")
_LIBRARY_GEMM, _LIBRARY_CONVOLUTION = '"__cublas$', '"__cudnn$conv'


def cycles(instruction: Instruction) -> int | None:
    found = _CYCLES.search(instruction.rest)
    return int(found[1]) if found else None


def flops(instruction: Instruction, computation: Computation) -> int:
    """A multiplication and an addition for every product; 0 for what is no dot or convolution.

    Attention kernels and other custom calls are opaque and count nothing.
    """
    opcode, rest = instruction.opcode, instruction.rest
    if opcode == "dot":
        contracted = whole_numbers(instruction.attribute("lhs_contracting_dims"))
        return _dot(instruction, computation, contracted)
    if opcode == "convolution":
        return _convolution(instruction, computation)
    if opcode != "custom-call":
        return 0
    if _LIBRARY_GEMM in rest:
        found = _GEMM_DIMS.search(rest)
        return _dot(instruction, computation, whole_numbers(found[1] if found else ""))
    return _convolution(instruction, computation) if _LIBRARY_CONVOLUTION in rest else 0


def _dot(instruction: Instruction, computation: Computation, contracted: tuple[int, ...]) -> int:
    left = computation.operands(instruction)[0].shape.leaves[0]
    products = math.prod(left.dims[dim] for dim in contracted)
    return 2 * instruction.shape.leaves[0].elements * products


def _convolution(instruction: Instruction, computation: Computation) -> int:
    """Only products with elements that exist: padding and dilation hold none.

    The TPU compiler writes batched dots as convolutions over mostly padding.
    """
    left, right = (
        operand.shape.leaves[0].dims for operand in computation.operands(instruction)[:2]
    )
    result = instruction.shape.leaves[0]
    labels = instruction.attribute("dim_labels") or ""
    lhs, rhs, out = re.split(r"_|->", labels)
    window = dict(_WINDOW_PART.findall(instruction.attribute("window") or ""))
    spatial = [dim for dim in lhs if dim.isdigit()]
    taps = math.prod(
        _taps(left[lhs.index(dim)], result.dims[out.index(dim)], window, int(dim))
        for dim in spatial
    )
    positions = math.prod(result.dims[out.index(dim)] for dim in spatial)
    return 2 * result.elements // positions * taps * right[rhs.index("i")]


def _taps(inputs: int, outputs: int, window: dict[str, str], dim: int) -> int:
    """Pairs of an output position and a place of the window that meet an input."""

    def number(name: str, default: int) -> int:
        entries = window.get(name)
        return int(entries.split("x")[dim].split("_")[0]) if entries else default

    return _meetings(
        inputs,
        outputs,
        number("size", 1),
        number("stride", 1),
        number("pad", 0),
        number("lhs_dilate", 1),
        number("rhs_dilate", 1),
    )


@functools.cache
def _meetings(
    inputs: int, outputs: int, size: int, stride: int, pad: int, apart: int, spread: int
) -> int:
    places = np.add.outer(np.arange(outputs) * stride - pad, np.arange(size) * spread)
    exists = (places >= 0) & (places <= (inputs - 1) * apart) & (places % apart == 0)
    return int(exists.sum())
