"""What a kernel is, in a dozen classes: rows of tables that people read.

`modelled_kernels` lists a program's kernels, `kernel_class` says what one is, `class_seconds` sums
up the model's time of a program by class.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from meshwright.hlo.instructions import Instruction
from meshwright.hlo.program import Program
from meshwright.rehearsal.kernel_speeds import Speeds
from meshwright.rehearsal.kernels import Kernel, kernels, running


def modelled_kernels(program: Program) -> Iterator[tuple[Kernel, int, bool]]:
    """The kernels of a program, how often each runs, and whether a loop only asks it to go on."""
    conditions = {
        name
        for computation in program.computations.values()
        for instruction in computation.instructions
        for how, name in instruction.called
        if how == "condition"
    }
    for computation in running(program):
        times = program.run_count(computation.name).count
        for kernel in kernels(program, computation):
            yield kernel, times, computation.name in conditions


PRODUCTS, CUSTOM = "matrix products", "custom kernels"
ATTENTION = "attention kernels"


def kernel_class(program: Program, kernel: Kernel) -> str:
    """What a kernel is, for a table of a dozen rows."""
    if kernel.custom is not None:
        return ATTENTION if "attention" in kernel.custom.kind else CUSTOM
    if kernel.flops:
        return PRODUCTS
    if any(name.startswith("sorted") for name in kernel.slow):  # a library's have no opcode
        return "sorts"
    opcodes = set(_opcodes(program, kernel.instruction))
    for name, members in _CLASSES.items():
        if opcodes & members:
            return name
    return "elementwise"


# In the order in which they are looked for: a fusion of a scatter and a sum is a scatter.
_CLASSES = {
    "scatters": {"scatter"},
    "gathers": {"gather"},
    "Fourier transforms": {"fft"},
    "reductions": {"reduce", "reduce-window"},
    "copies and transposes": {"copy", "transpose", "copy-start"},
    "slices and updates": {"dynamic-slice", "dynamic-update-slice", "slice", "concatenate", "pad"},
}


def _opcodes(program: Program, instruction: Instruction) -> Iterator[str]:
    yield instruction.opcode
    if instruction.opcode == "fusion":
        for _, name in instruction.called:
            for inner in program.computations[name].instructions:
                yield from _opcodes(program, inner)


def class_seconds(program: Program, speed: Speeds) -> dict[str, float]:
    """Modelled seconds of a program's kernels in a step, by class."""
    seconds: dict[str, float] = collections.defaultdict(float)
    speed = speed.in_step(program)
    for kernel, times, _ in modelled_kernels(program):
        seconds[kernel_class(program, kernel)] += max(speed.kernel(kernel)) * times
    return dict(seconds)
