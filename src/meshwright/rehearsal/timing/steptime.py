"""`StepTime`: how long a step takes by the model, and what it waits for.

Every kernel takes the longer of computing and moving its bytes. A collective takes its modelled
time; what runs between its start and its end hides that much of it, the rest is exposed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright._tables import duration, table
from meshwright.hardware import Chip
from meshwright.rehearsal.ledger import Collective, Ledger
from meshwright.rehearsal.programs.instructions import Computation
from meshwright.rehearsal.programs.program import Program
from meshwright.rehearsal.timing.kernels import kernels, running
from meshwright.rehearsal.timing.speeds import Speeds, speeds

# GHz: the peak of each chip divided by what its multipliers do in a cycle.
_CLOCK = {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one device.

    `compute` and `memory`: kernels that wait for the one or the other. `exposed`: communication
    that nothing hides; `hidden` runs beside kernels and is not in the total. `compiler` is the
    compiler's own estimate of its kernels, where it gives one.
    """

    compute: float
    memory: float
    start: float
    exposed: float
    hidden: float
    flops: float
    bytes: float
    peak_flops: float
    compiler: float | None = None

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.start + self.exposed

    @property
    def utilisation(self) -> float:
        """The part of the chip's nominal speed that goes into the program's multiplications."""
        return self.flops / self.peak_flops / self.total if self.total else 0.0

    def parts(self) -> dict[str, float]:
        return {
            "compute": self.compute,
            "memory": self.memory,
            "starting kernels": self.start,
            "exposed communication": self.exposed,
        }

    def __str__(self) -> str:
        rows = [["modelled time of a step", "", ""]]
        rows += [
            [name, duration(seconds), f"{seconds / (self.total or 1):.0%}"]
            for name, seconds in self.parts().items()
        ]
        rows.append(["total", duration(self.total), f"utilisation {self.utilisation:.0%}"])
        if self.hidden:
            rows.append(["hidden communication", duration(self.hidden), "not in the total"])
        if self.compiler is not None:
            rows.append(["kernels as the compiler sees it", duration(self.compiler), ""])
        return table(rows, [False, True, True])

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.total,
            "parts": self.parts(),
            "hidden": self.hidden,
            "flops": self.flops,
            "bytes": self.bytes,
            "utilisation": self.utilisation,
            "compiler": self.compiler,
        }


def step_time(program: Program, collectives: Ledger, chip: Chip) -> StepTime:
    """The model's verdict on a program."""
    speed = speeds(chip)
    by_name = {name: entry for entry in collectives for name in entry.instructions}
    parts = dict.fromkeys(
        ("compute", "memory", "start", "exposed", "hidden", "flops", "bytes"), 0.0
    )
    met: set[int] = set()
    for computation in running(program):
        times = program.times(computation.name).count
        for name, value in _walk(program, computation, speed, by_name, met).items():
            parts[name] += value * times
    for entry in collectives:
        if id(entry) not in met:  # it runs inside kernels, in pieces
            hidden = min(entry.seconds, speed.compute(entry.meanwhile, "bf16"))
            parts["hidden"] += hidden * entry.times.count
            parts["exposed"] += (entry.seconds - hidden) * entry.times.count
    cycles = program.estimated_cycles
    clock = _CLOCK.get(chip.name)
    return StepTime(
        **parts,
        peak_flops=chip.tflops * 1e12 / chip.cores,
        compiler=None if cycles is None or clock is None else cycles / (clock * 1e9),
    )


def _walk(
    program: Program,
    computation: Computation,
    speed: Speeds,
    by_name: dict[str, Collective],
    met: set[int],
) -> dict[str, float]:
    """The parts of one run of a computation."""
    found = dict.fromkeys(
        ("compute", "memory", "start", "exposed", "hidden", "flops", "bytes"), 0.0
    )
    work = {kernel.instruction.name: kernel for kernel in kernels(program, computation)}
    open_since: dict[int, float] = {}
    passed = 0.0
    for instruction in computation.instructions:
        entry = by_name.get(instruction.name)
        if entry is not None:
            met.add(id(entry))
            if id(entry) not in open_since:
                open_since[id(entry)] = passed
            if instruction.name == entry.instructions[-1]:
                hidden = min(entry.seconds, passed - open_since.pop(id(entry)))
                found["hidden"] += hidden
                found["exposed"] += entry.seconds - hidden
            continue
        kernel = work.get(instruction.name)
        if kernel is None:
            continue
        compute = speed.compute(kernel.flops, kernel.type)
        memory = kernel.bytes / speed.bytes
        found["compute" if compute > memory else "memory"] += max(compute, memory)
        found["start"] += speed.start if max(compute, memory) > 0 else 0.0
        found["flops"] += kernel.flops
        found["bytes"] += kernel.bytes
        passed += max(compute, memory)
    return found
