"""`Measurement`: a step as it ran, every kernel class and collective beside its modelled time."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright._html import TIME, Html, Lane, bars, join, legend, page, style
from meshwright._html import Part as Segment
from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import amount, duration, plural, write_text
from meshwright.calibration.step_checks import refuse_rehearsal, with_note
from meshwright.errors import CalibrationError, short
from meshwright.hlo.instructions import Instruction, Source
from meshwright.hlo.program import Program
from meshwright.rehearsal.collectives.types import CAUSES, Collective
from meshwright.rehearsal.kernel_speeds import Speeds, speeds
from meshwright.rehearsal.kernels import Kernel, kernels, running
from meshwright.rehearsal.result import Rehearsal
from meshwright.rehearsal.step_time import StepTime
from meshwright.spec.mesh_spec import MeshSpec

_MOST_KERNELS, _MOST_COLLECTIVES, _MOST_DEVICES = 12, 20, 16


@dataclasses.dataclass(frozen=True)
class Part:
    """Kernels of one class: runs of a step, modelled and measured seconds."""

    name: str
    runs: int
    modelled: float
    measured: float

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class MeasuredKernel:
    """One instruction: how often the program says it runs and how often it did, in a step.

    `modelled` and `measured`: seconds of all its runs in a step, the mean over devices.
    `in_condition`: it only asks whether a loop goes on, which need not be computed.
    """

    name: str
    kind: str
    source: Source | None
    expected: int
    runs: int
    modelled: float
    measured: float
    in_condition: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
    """A collective: seconds of all its runs in a step, the mean over devices.

    `measured` is `moving`, as long as the last one to arrive takes, and `waiting` for it; `exposed`
    is the part of it beside which no kernel ran. `late` is the device that was last nearly always,
    if there is one and the others waited long.
    """

    collective: Collective
    runs: int
    measured: float
    moving: float
    waiting: float
    exposed: float
    late: str | None

    @property
    def modelled(self) -> float:
        """Modelled seconds of all its runs in a step, with nothing to hide behind."""
        return self.collective.total_seconds

    def to_json(self) -> dict[str, Any]:
        """Return the collective and what was measured of it as plain data."""
        own = ("runs", "measured", "moving", "waiting", "exposed", "late")
        measured = {name: getattr(self, name) for name in own}
        return {**self.collective.to_json(), "modelled": self.modelled, **measured}


@dataclasses.dataclass(frozen=True)
class MeasuredDevice:
    """What one device did in a step, in seconds.

    `idle` is the time in which nothing ran on it, `collectives` that in collectives, waiting
    included. `awaited`: how long others waited for it on the mean; `last`: in what part of its
    collectives it was the last to arrive. `peak`: bytes, of the process so far, if it is known.
    """

    name: str
    process: int
    position: int
    busy: float
    idle: float
    collectives: float
    awaited: float
    last: float
    peak: int | None

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Measurement(Shown):
    """A step as it ran. Prints itself; HTML in a notebook; `to_json()`, `save(path)`.

    `seconds` is the time of a step without the profiler, the median of some rounds, between
    `fastest` and `slowest`; `traced` is the same under the profiler, of which all other figures
    are. `time` is the model's time of the program that ran,
    by `speeds` of whom. `results` is what the last step
    returned: a step that donates its arguments has used up those that it was given.
    `unknown` are names in the trace that the program lacks, with their seconds; `silent` kernels of
    the program that left no event. `notes` say what is different from a plain run. `array_types`
    are the shapes and dtypes of the arrays that the step takes.
    """

    name: str
    mesh: str
    on: str
    speeds: str
    steps: int
    seconds: float
    fastest: float
    slowest: float
    traced: float
    time: StepTime
    parts: tuple[Part, ...]
    kernels: tuple[MeasuredKernel, ...]
    collectives: tuple[MeasuredCollective, ...]
    devices: tuple[MeasuredDevice, ...]
    unknown: dict[str, float]
    silent: tuple[str, ...]
    notes: tuple[str, ...]
    rehearsal: Rehearsal | None
    results: Any
    array_types: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """The modelled time of the program that ran, divided by the measured one."""
        return self.time.total / self.seconds

    @property
    def overhead(self) -> float:
        """What the profiler added to a step, as a part of it."""
        return self.traced / self.seconds - 1

    @property
    def idle(self) -> float:
        """Seconds of a step in which nothing ran on a device, the mean over devices."""
        return sum(device.idle for device in self.devices) / len(self.devices)

    @property
    def exposed(self) -> float:
        """Seconds of a step in which a device only communicated, the mean over devices."""
        return sum(entry.exposed for entry in self.collectives)

    @property
    def peak(self) -> int | None:
        """The most bytes that any device held, of the process so far; `None` if it is not known."""
        return max((device.peak for device in self.devices if device.peak), default=None)

    def compare(self, rehearsal: Rehearsal) -> Measurement:
        """The same measurement beside this rehearsal: it shows that one's time and memory, too.

        Raises `CalibrationError` where it is of other arguments or another number of devices; a
        note says what was rehearsed where the name, the mesh or the hardware is another.
        """
        if not isinstance(rehearsal, Rehearsal):
            raise CalibrationError(f"compare: {short(rehearsal)} is not a rehearsal.")
        refuse_rehearsal(rehearsal, MeshSpec.parse(self.mesh).size or 1, self.array_types)
        placed = rehearsal.placement
        rehearsed = rehearsal.name, str(placed.spec), placed.topology.name
        notes = with_note(self.notes, rehearsed, (self.name, self.mesh, self.on))
        return dataclasses.replace(self, rehearsal=rehearsal, notes=notes)

    def __repr__(self) -> str:
        return short_repr(
            self,
            f"of {self.name}, {self.mesh} on {self.on}: {duration(self.seconds)}, "
            f"modelled {duration(self.time.total)}",
        )

    def save(self, path: str | Path) -> Path:
        """Write a page that works offline, or JSON where the name ends in `.json`."""
        return save(self, path)

    def page(self) -> str:
        """All of it as one page of HTML that works offline."""
        title = f"{self.name} on {self.on}, measured"
        return page(title, self._sheet().inside(), css=style() + PAGE, body_class="mw")

    def to_json(self) -> dict[str, Any]:
        """Return everything but the results as plain data; times in seconds, sizes in bytes."""
        own = (
            "name",
            "mesh",
            "on",
            "speeds",
            "steps",
            "seconds",
            "fastest",
            "slowest",
            "traced",
            "overhead",
        )
        more = ("ratio", "idle", "exposed", "peak", "unknown")
        rehearsed = self.rehearsal
        return {
            **{name: getattr(self, name) for name in (*own, *more)},
            "modelled": self.time.to_json(),
            "rehearsed": None
            if rehearsed is None
            else {
                "name": rehearsed.name,
                "mesh": str(rehearsed.placement.spec),
                "on": rehearsed.placement.topology.name,
                "seconds": rehearsed.time and rehearsed.time.total,
                "peak": rehearsed.memory.peak,
            },
            "parts": [part.to_json() for part in self.parts],
            "kernels": [kernel.to_json() for kernel in self.kernels],
            "collectives": [entry.to_json() for entry in self.collectives],
            "devices": [device.to_json() for device in self.devices],
            "silent": list(self.silent),
            "notes": list(self.notes),
        }

    # How it shows itself.

    def _sheet(self) -> Sheet:
        spread = f"{duration(self.fastest)} to {duration(self.slowest)}"
        headline = (
            f"{self.name} as {self.mesh} on {self.on}: a step takes {duration(self.seconds)} "
            f"({spread}), modelled {duration(self.time.total)}"
        )
        parts: list[str | Table | Html] = [self._drawing(), self._parts_table()]
        if self.collectives:
            parts.append(self._collectives_table())
        parts.append(self._kernels_table())
        parts.append(self._devices_table())
        return Sheet(headline, [*parts, *self._remarks()])

    def _drawing(self) -> Html:
        model = dataclasses.replace(
            self.time.lane(), title=f"modelled: {duration(self.time.total)}"
        )
        real = Lane(f"measured, under the profiler: {duration(self.traced)}", self._segments())
        return join([bars([model, real], duration), legend(real.parts, duration, self.traced)])

    def _segments(self) -> tuple[Segment, ...]:
        rest = max(0.0, self.traced - self.kernel_seconds - self.exposed)
        return (
            Segment("kernels", self.kernel_seconds, TIME["compute"]),
            Segment("exposed communication", self.exposed, TIME["exposed communication"]),
            Segment("idle and starting", rest, TIME["starting kernels"]),
        )

    @property
    def kernel_seconds(self) -> float:
        """Seconds of all kernels of a step, the mean over devices."""
        return sum(part.measured for part in self.parts) + sum(self.unknown.values())

    def _parts_table(self) -> Table:
        heading = ["part of a step", "runs", "modelled", "measured", "modelled / measured"]
        rehearsed = None if self.rehearsal is None else self.rehearsal.time
        promised = {} if self.rehearsal is None else _class_seconds(self.rehearsal)
        rows = [row(part.name, str(part.runs), part.modelled, part.measured) for part in self.parts]
        # Kernels that only the rehearsed program has: its column adds up with them alone.
        ran = {part.name for part in self.parts}
        rows += [row(name, "0", 0.0, 0.0) for name in promised if name not in ran]
        if self.unknown:
            rows.append(row("not in the program's text", "", 0.0, sum(self.unknown.values())))
        if self.collectives or (rehearsed is not None and rehearsed.exposed + rehearsed.hidden):
            runs = str(sum(entry.runs for entry in self.collectives))
            measured = sum(entry.measured for entry in self.collectives)
            hidden = max(0.0, round(measured - self.exposed, 9))  # not what rounding leaves
            exposed = row("exposed communication", runs, self.time.exposed, self.exposed)
            rows += [exposed, row("hidden communication", "", self.time.hidden, hidden)]
        rows.append(row("idle, starting kernels", "", self.time.start, self.idle))
        rows.append(row("a step", "", self.time.total, self.seconds))
        right = [False, True, True, True, True]
        if rehearsed is None:
            return Table(heading, rows, right)
        told = {
            **promised,
            "exposed communication": rehearsed.exposed,
            "hidden communication": rehearsed.hidden,
            "idle, starting kernels": rehearsed.start,
            "a step": rehearsed.total,
        }
        rows = [
            [*cells[:2], duration(told[cells[0]]) if cells[0] in told else "", *cells[2:]]
            for cells in rows
        ]
        return Table([*heading[:2], "rehearsed", *heading[2:]], rows, [*right, True])

    def _collectives_table(self) -> Table:
        heading = ["collective", "array", "over", "times", "modelled", "measured", "waiting"]
        heading += ["exposed", "late", "source", "cause"]
        entries = _alike(self.collectives)
        rows = []
        for entry in entries[:_MOST_COLLECTIVES]:
            what = entry.collective
            cells = [what.kind.removeprefix("collective-"), what.shape, what.over, str(entry.runs)]
            times = (entry.modelled, entry.measured, entry.waiting, entry.exposed)
            cells += [*map(duration, times), entry.late or ""]
            rows.append([*cells, str(what.source or "unknown"), what.cause])
        more = len(entries) - _MOST_COLLECTIVES
        left_out = f"... and {plural(more, 'more collective')}" if more > 0 else ""
        right = [False] * 3 + [True] * 5 + [False] * 3
        return Table(heading, rows, right, left_out)

    def _kernels_table(self) -> Table:
        heading = ["kernels that took longest", "class", "runs", "modelled", "measured"]
        heading += ["modelled / measured", "source"]
        ran = [kernel for kernel in self.kernels if kernel.runs]
        rows = []
        for kernel in ran[:_MOST_KERNELS]:
            first = [kernel.name, kernel.kind, str(kernel.runs)]
            rows.append(
                [
                    *first,
                    *row("", "", kernel.modelled, kernel.measured)[2:],
                    str(kernel.source or "unknown"),
                ]
            )
        more = len(ran) - _MOST_KERNELS
        left_out = f"... and {plural(more, 'more kernel')}" if more > 0 else ""
        return Table(heading, rows, [False, False, True, True, True, True, False], left_out)

    def _devices_table(self) -> Table:
        heading = ["device", "process", "busy", "idle", "in collectives", "others waited"]
        heading += ["last to arrive", "peak memory"]
        longest = sorted(self.devices, key=lambda device: -device.awaited)
        shown = sorted(longest[:_MOST_DEVICES], key=lambda device: device.position)
        rows = [
            [
                device.name,
                str(device.process),
                duration(device.busy),
                duration(device.idle),
                duration(device.collectives),
                duration(device.awaited),
                f"{device.last:.0%}",
                amount(device.peak) if device.peak else "unknown",
            ]
            for device in shown
        ]
        more = len(longest) - _MOST_DEVICES
        left_out = f"... and {plural(more, 'more device')}, less waited for" if more > 0 else ""
        return Table(heading, rows, [False] + [True] * 7, left_out)

    def _remarks(self) -> list[str]:
        lines = [f"speeds: {self.speeds}"]
        lines += [
            f"{plural(self.steps, 'step')} under the profiler, {duration(self.traced)} each "
            f"({self.overhead:+.1%}); kernels, collectives and idle times are of those."
        ]
        if late := self.late:
            lines.append(
                f"{late.name} (process {late.process}) is late: it is the last to arrive at "
                f"{late.last:.0%} of its collectives, and the others wait {duration(late.awaited)} "
                "a step for it."
            )
        if self.rehearsal is not None and self.peak is not None:
            peak = self.rehearsal.memory.peak
            lines.append(
                f"Peak memory: rehearsed {amount(peak)}, measured {amount(self.peak)} "
                f"({peak / self.peak:.2f}); measured is that of the process so far."
            )
        if self.silent:
            some = ", ".join(self.silent[:4])
            lines.append(
                f"{plural(len(self.silent), 'kernel')} left no event in the trace: {some}."
            )
        return [*lines, *self.notes]

    @property
    def late(self) -> MeasuredDevice | None:
        """The device that the others wait for, if it is nearly always the same and they do."""
        if len(self.devices) < 2:
            return None
        first = max(self.devices, key=lambda device: device.awaited)
        much = first.awaited >= _WAITED * self.seconds and first.last >= _LAST
        return first if much else None


_WAITED, _LAST = 0.05, 0.6  # of a step that others wait; of its collectives that it is last in
PAGE = ":root{color-scheme:light dark}body{margin:0}.mw{padding:20px;min-height:100vh}"


def _alike(entries: Sequence[MeasuredCollective]) -> list[MeasuredCollective]:
    """One entry for all that look alike in a table, by cause, the longest first."""
    groups: dict[tuple[str, ...], list[MeasuredCollective]] = {}
    for entry in entries:
        what = entry.collective
        looks = (what.kind, what.shape, what.over, what.cause, str(what.source), entry.late or "")
        groups.setdefault(looks, []).append(entry)
    merged = [
        dataclasses.replace(
            group[0],
            collective=dataclasses.replace(
                group[0].collective,
                times=sum((each.collective.times for each in group[1:]), group[0].collective.times),
            ),
            **{
                name: sum(getattr(each, name) for each in group)
                for name in ("runs", "measured", "moving", "waiting", "exposed")
            },
        )
        for group in groups.values()
    ]
    order = {cause: number for number, cause in enumerate(CAUSES)}
    return sorted(merged, key=lambda entry: (order[entry.collective.cause], -entry.measured))


def _class_seconds(rehearsal: Rehearsal) -> dict[str, float]:
    if rehearsal.program is None:
        return {}
    return class_seconds(rehearsal.program, speeds(rehearsal.placement.topology.chip))


def save(measured: Any, path: str | Path) -> Path:
    """Write a measurement as a page or as JSON, by the ending of the file's name."""
    path = Path(path)
    if path.suffix not in (".html", ".json"):
        raise CalibrationError(
            f"save: {short(path.name)} ends in neither .html nor .json.", option="path"
        )
    html = path.suffix == ".html"
    text = measured.page() if html else json.dumps(measured.to_json(), indent=2)
    try:
        write_text(path, text)
    except OSError as error:
        raise CalibrationError(f"save: {path}: {error.strerror}.", option="path") from error
    return path


def row(name: str, runs: str, modelled: float, measured: float) -> Sequence[str]:
    """Cells of a table: modelled and measured seconds, and the one by the other."""
    ratio = f"{modelled / measured:.2f}" if measured > 0 and modelled > 0 else "-"
    return [name, runs, duration(modelled), duration(measured), ratio]


# What a kernel is, in a dozen classes: rows of tables that people read.


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
