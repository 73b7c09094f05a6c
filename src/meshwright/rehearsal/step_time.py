"""`StepTime`: how long a step takes by a roofline model, and what it waits for.

Every kernel (`kernels`) takes the longer of computing and moving its bytes, at its own speed
(`kernel_speeds`). A collective, and a transfer to or from the host, takes its modelled time; what
runs between its start and its end hides that much of it, the rest is exposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshwright._html import TIME, Html, Lane, Part, bars, join, legend
from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import amount, duration, table
from meshwright.hardware.chips import Chip
from meshwright.hlo.kernel_work import Trust
from meshwright.hlo.program import Program
from meshwright.rehearsal.collectives.types import Collectives
from meshwright.rehearsal.gpu_fusions import goes_to_library
from meshwright.rehearsal.kernel_speeds import Speeds, speeds
from meshwright.rehearsal.kernels import Kernel, running
from meshwright.rehearsal.memory import CPU_ESTIMATE
from meshwright.rehearsal.program_runs import PARTS, ProgramRuns
from meshwright.rehearsal.repeated_work import RepeatedWork, work_inside

# In the names of operations that `jax.checkpoint` has computed again for the backward pass.
RECOMPUTED = "rematted_computation"


@dataclasses.dataclass(frozen=True, repr=False)
class StepTime(Shown):
    """Seconds of a step on one device, by the model. Prints itself; `to_json()`.

    `compute` and `memory`: kernels that wait for the one or the other. `exposed`: communication
    that nothing hides; `hidden` runs beside kernels (or on a TPU, of two permutes to and fro,
    beside the other) and is not in the total. `start`: the launches of kernels. `compiler` is the
    compiler's own estimate of its kernels, where it gives one; it leaves custom kernels out, which
    are added as modelled here, and if `compiler_partial` others too, since it was ended before it
    generated code. `custom` lists those.
    `host_exposed` and `host_hidden` are those of transfers to and from the host. `repeated` are
    products that several devices compute alike, `recomputed` the operations that rematerialisation
    does again; both are in `flops` and in the times. `recomputed_bytes` is what it writes of all
    layers, which a step without it would keep. `cpu_estimate`: of the program for simulated CPU
    devices, in place of the hardware's. `at_most`: every branch of a condition is in it;
    `at_least`: of a loop of unknown trip count one trip is. `speeds` says whose they are: the
    table's, or a calibration's. `library_products`: runs of products that are Triton's in this
    program, and modelled as a library's, which a GPU's compiler takes where it can try both.
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
    custom: tuple[CustomKernel, ...] = ()
    host_exposed: float = 0.0
    host_hidden: float = 0.0
    repeated: tuple[RepeatedWork, ...] = ()
    recomputed: float = 0.0
    recomputed_bytes: float = 0.0
    cpu_estimate: bool = False
    compiler_partial: bool = False
    at_most: bool = False
    at_least: bool = False
    speeds: str = ""
    library_products: int = 0

    @property
    def total(self) -> float:
        """Modelled seconds of one step."""
        return sum(self.parts().values())

    @property
    def useful_flops(self) -> float:
        """Operations of one device without those that other devices do as well."""
        return self.flops - sum(entry.wasted for entry in self.repeated)

    @property
    def model_flops(self) -> float:
        """Operations of one device that the model needs: `useful_flops` without recomputed ones."""
        return self.useful_flops * (1 - self.recomputed / self.flops) if self.flops else 0.0

    @property
    def utilisation(self) -> float:
        """The part of the chip's nominal speed that goes into useful multiplications."""
        return self.useful_flops / self.peak_flops / self.total if self.total else 0.0

    @property
    def hardware_utilisation(self) -> float:
        """`utilisation` with what is repeated: how busy the chip's multipliers are."""
        return self.flops / self.peak_flops / self.total if self.total else 0.0

    def parts(self) -> dict[str, float]:
        """Return the parts of the total, in seconds."""
        return {
            "compute": self.compute,
            "memory": self.memory,
            "starting kernels": self.start,
            "exposed communication": self.exposed,
            "exposed host transfers": self.host_exposed,
        }

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {duration(size)}" for name, size in self.parts().items())
        return short_repr(self, f"{duration(self.total)}: {parts}")

    def __str__(self) -> str:
        mark = f" ({CPU_ESTIMATE})" if self.cpu_estimate else ""
        # The heading is no row of the table: a narrow screen would cut off its mark.
        parts = table(self._rows(), [False, True, True])
        lines = [f"modelled time of a step{mark}, by {self.speeds}\n{parts}"]
        if self.custom:
            lines.append(table([list(CUSTOM_HEADING), *custom_rows(self.custom)], CUSTOM_RIGHT))
        return "\n\n".join(lines + self.repeated_lines() + self.doubts())

    def _rows(self) -> list[list[str]]:
        rows = [
            [name, duration(seconds), f"{seconds / (self.total or 1):.0%}"]
            for name, seconds in self.parts().items()
            if seconds or name != "exposed host transfers" or self.host_hidden
        ]
        rows.append(["total", duration(self.total), f"utilisation {self.utilisation:.0%}"])
        if self.hidden:
            rows.append(["hidden communication", duration(self.hidden), "not in the total"])
        if self.host_hidden:
            hidden = duration(self.host_hidden)
            rows.append(["hidden host transfers", hidden, "not in the total"])
        if self.compiler is not None:
            some, why = ("some ", "no code generated") if self.compiler_partial else ("", "")
            sees = f"{some}kernels as the compiler sees it"
            rows.append([sees, duration(self.compiler), why])
        return rows

    def _sheet(self) -> Sheet:
        mark = f" ({CPU_ESTIMATE})" if self.cpu_estimate else ""
        parts: list[str | Table | Html] = [
            self.drawing(),
            Table(["part of a step", "time", ""], self._rows(), [False, True, True]),
        ]
        if self.custom:
            parts.append(Table(CUSTOM_HEADING, custom_rows(self.custom), CUSTOM_RIGHT))
        headline = f"modelled step{mark}: {duration(self.total)}, by {self.speeds}"
        return Sheet(headline, [*parts, *self.repeated_lines(), *self.doubts()])

    def lane(self) -> Lane:
        """The parts of a step, one after the other."""
        parts = tuple(Part(name, self.parts()[name], colour) for name, colour in TIME.items())
        return Lane(f"a step: {duration(self.total)}", parts)

    def drawing(self) -> Html:
        """Draw the parts, with what their colours mean."""
        lane = self.lane()
        return join([bars([lane], duration), legend(lane.parts, duration, self.total)])

    def repeated_lines(self) -> list[str]:
        """Say which work is done more than once; empty if none is, or next to none."""
        much = [entry for entry in self.repeated if entry.wasted > _LITTLE * self.flops]
        lines = [f"{str(entry)[:1].upper()}{str(entry)[1:]}." for entry in much[:_MOST_REPEATED]]
        if len(much) > _MOST_REPEATED:
            lines.append(f"... and those of {len(much) - _MOST_REPEATED} more lines.")
        if much:
            lines.append(
                "Utilisation counts useful work alone; with what is repeated the multipliers are "
                f"used {self.hardware_utilisation:.0%}."
            )
        return ["\n".join(lines)] if lines else []

    def doubts(self) -> list[str]:
        """Say of what the operations are unknown, or may be more or fewer; empty if of nothing."""
        unknown = [kernel for kernel in self.custom if kernel.trust == "unknown"]
        at_most = [kernel for kernel in self.custom if kernel.trust == "at most"]
        lines = []
        if unknown:
            lines.append(
                f"FLOPs unknown of {_names(unknown)}: their time is that of their bytes alone. "
                "Give pl.pallas_call(cost_estimate=pl.CostEstimate(...)) where they are yours."
            )
        if at_most:
            lines.append(f"FLOPs are an upper bound of {_names(at_most)}: they may skip blocks.")
        if self.at_most:
            lines.append("These are upper bounds: every branch of a condition counts.")
        if self.at_least:
            lines.append("These are lower bounds: a loop of unknown trip count counts as one trip.")
        if self.library_products:
            lines.append(
                f"Large products, {self.library_products:,} a step, are modelled as cuBLASLt's, "
                "with kernels of their own for what is fused into them here: a compiler without a "
                "GPU cannot try out what is faster, and leaves them to Triton."
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the total and its parts as plain data, in seconds."""
        return {
            "seconds": self.total,
            "parts": self.parts(),
            "hidden": self.hidden,
            "host_hidden": self.host_hidden,
            "flops": self.flops,
            "bytes": self.bytes,
            "useful_flops": self.useful_flops,
            "recomputed_flops": self.recomputed,
            "recomputed_bytes": self.recomputed_bytes,
            "model_flops": self.model_flops,
            "cpu_estimate": self.cpu_estimate,
            "utilisation": self.utilisation,
            "hardware_utilisation": self.hardware_utilisation,
            "repeated": [entry.to_json() for entry in self.repeated],
            "compiler": self.compiler,
            "compiler_partial": self.compiler_partial,
            "at_most": self.at_most,
            "at_least": self.at_least,
            "speeds": self.speeds,
            "library_products": self.library_products,
            "custom_kernels": [kernel.to_json() for kernel in self.custom],
        }


@dataclasses.dataclass(frozen=True, repr=False)
class CustomKernel:
    """A kernel that the compiler did not make: what it is, how often it runs, its work in a step.

    `trust` says how `flops` are known: "counted" in the kernel's program, "declared" by its author,
    "at most", or "unknown", in which case they are 0.
    """

    name: str
    kind: str
    trust: Trust
    times: int
    flops: float
    bytes: float
    seconds: float

    def __repr__(self) -> str:
        return short_repr(self, f"{self.name} ({self.kind}), {duration(self.seconds)}")

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return dataclasses.asdict(self)


_MOST_KERNELS = 8  # that are named
_MOST_REPEATED, _LITTLE = 5, 0.01  # lines that are named; the part of all work that is worth it


def _names(entries: Sequence[CustomKernel]) -> str:
    more = f" and {len(entries) - _MOST_KERNELS} more" if len(entries) > _MOST_KERNELS else ""
    return ", ".join(f"{entry.name} ({entry.kind})" for entry in entries[:_MOST_KERNELS]) + more


CUSTOM_HEADING = ("custom kernels", "made by", "runs", "GFLOP", "moved", "time", "FLOPs are")
CUSTOM_RIGHT = (False, False, True, True, True, True, False)


def custom_rows(entries: Sequence[CustomKernel]) -> list[list[str]]:
    """Cells for each custom kernel of a step, the longest first."""
    rows = []
    ordered = sorted(entries, key=lambda entry: -entry.seconds)
    for entry in ordered[:_MOST_KERNELS]:
        work = "-" if entry.trust == "unknown" else f"{entry.flops / 1e9:,.1f}"
        cells = [entry.name, entry.kind, str(entry.times), work, amount(entry.bytes)]
        rows.append([*cells, duration(entry.seconds), entry.trust])
    if len(ordered) > _MOST_KERNELS:
        rest = sum(entry.seconds for entry in ordered[_MOST_KERNELS:])
        rows.append([f"{len(ordered) - _MOST_KERNELS} more", "", "", "", "", duration(rest), ""])
    return rows


# In: a scheduled program, its collectives and a chip. Out: the modelled time of one run on one
# device. Invariant: every kernel, collective and transfer counts once for each time that it runs.
# A transfer to the host reads the device's memory beside the kernels: its bytes are counted, and
# take none of their time. Example: an all-gather of 3 ms whose start and end have a dot of 2 ms
# between them adds 2 ms to `hidden` and 1 ms to `exposed`; the dot adds its 2 ms to `compute`.
def step_time(
    program: Program,
    collectives: Collectives,
    chip: Chip,
    repeated: tuple[RepeatedWork, ...] = (),
    scheduled: bool = False,
) -> StepTime:
    """Model the time of a step; `repeated` is the work in it that is done more than once.

    `scheduled` says that a TPU's compiler was ended before it estimated its kernels.
    """
    speed = speeds(chip, scheduled).in_step(program)
    runs = ProgramRuns(program, collectives, speed)
    parts = dict.fromkeys(PARTS, 0.0)
    custom: list[CustomKernel] = []
    recomputed = written = 0.0
    library = 0
    for computation in running(program):
        if computation.name in runs.bodies:
            continue
        times = program.run_count(computation.name).count
        work = runs.kernels(computation)
        custom += _custom(work, times, speed)
        library += times * sum(goes_to_library(program, each.instruction) for each in work)
        recomputed += times * sum(_recomputed(program, kernel) for kernel in work)
        again = (each.instruction for each in work if RECOMPUTED in each.instruction.op_name)
        written += times * sum(leaf.bytes for each in again for leaf in each.shape.leaves)
        for name, value in runs.parts(computation).items():
            parts[name] += value * times
    for entry in collectives:
        if id(entry) not in runs.met:  # it runs inside of kernels, in pieces
            hidden = min(entry.seconds, speed.compute(entry.meanwhile, "bf16"))
            parts["hidden"] += hidden * entry.times.count
            parts["exposed"] += (entry.seconds - hidden) * entry.times.count
    return StepTime(
        **parts,
        peak_flops=chip.tflops * 1e12 / chip.cores,
        compiler=_compilers_estimate(program, chip, custom),
        compiler_partial=scheduled,
        at_most=any(run.at_most for run in program.runs.values()),
        at_least=any(run.at_least for run in program.runs.values()),
        custom=tuple(custom),
        repeated=repeated,
        recomputed=recomputed,
        recomputed_bytes=written,
        cpu_estimate=False,
        speeds=chip.whose_speeds(program.devices),
        library_products=library,
    )


def _recomputed(program: Program, kernel: Kernel) -> float:
    """Operations of a kernel that rematerialisation does again."""
    if not kernel.flops:
        return 0.0
    inside = work_inside(program, kernel.instruction)
    return sum(work for each, work in inside if RECOMPUTED in each.op_name)


def _custom(work: list[Kernel], times: int, speed: Speeds) -> list[CustomKernel]:
    return [
        CustomKernel(
            kernel.instruction.name,
            kernel.custom.kind,
            kernel.custom.trust,
            times,
            kernel.flops * times,
            kernel.bytes * times,
            max(speed.kernel(kernel)) * times,
        )
        for kernel in work
        if kernel.custom is not None
    ]


def _compilers_estimate(program: Program, chip: Chip, custom: list[CustomKernel]) -> float | None:
    """Seconds of the TPU compiler's own kernels by its estimate, custom kernels added."""
    cycles, clock = program.estimated_cycles, chip.speeds.value("clock")
    if clock is None or (cycles is None and not custom):
        return None
    return (cycles or 0) / clock + sum(kernel.seconds for kernel in custom)
