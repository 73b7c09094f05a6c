"""Join a trace with the program that ran: measured seconds beside modelled ones.

Two parts: `record_device` sums up what one device did in the traced steps, as plain data that
processes can exchange; `join` sets the records of all devices beside the program and the model.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.calibration.measurement import (
    MeasuredCollective,
    MeasuredDevice,
    MeasuredKernel,
    Part,
    kernel_class,
    modelled_kernels,
)
from meshwright.calibration.trace import Event, length, outside, union
from meshwright.hlo.instructions import Instruction
from meshwright.hlo.program import Program
from meshwright.placement.placement import Placement
from meshwright.rehearsal.collectives.types import Collective, Collectives
from meshwright.rehearsal.kernel_speeds import Speeds


@dataclasses.dataclass(frozen=True)
class DeviceRecord:
    """What one device did in the traced steps.

    `position` is its place in the mesh, row by row. `runs` and `seconds` are by instruction.
    `durations` are those of collectives, run by run; `exposed` is the time of a collective in
    which no kernel ran beside it. `busy` is the time in which anything ran, `window` that from the
    first event to the last.
    """

    position: int
    name: str
    process: int
    runs: dict[str, int]
    seconds: dict[str, float]
    durations: dict[str, list[float]]
    exposed: dict[str, float]
    busy: float
    window: float
    peak: int | None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Instructions:
    """The instructions of a program by name, and which of them take time of their own."""

    def __init__(self, program: Program, collectives: Collectives):
        self.program = program
        self.by_name: dict[str, Instruction] = {}
        for computation in program.computations.values():
            for instruction in computation.instructions:
                self.by_name[instruction.name] = instruction
        # What runs asynchronously has events of what its start calls: `{inner: start}`.
        self.start_of = {
            inner.name: instruction.name
            for instruction in self.by_name.values()
            if instruction.opcode.endswith("-start")
            for _, called in instruction.called
            for inner in program.computations[called].instructions
        }
        # By the name of any of its instructions; an asynchronous one has a start and an end.
        self.collective = {name: entry for entry in collectives for name in entry.instructions}

    def told_as(self, name: str) -> str:
        """The instruction that an event counts for."""
        return name if name in self.collective else self.start_of.get(name, name)

    def contains(self, name: str) -> bool:
        """Whether an instruction only runs others: its time is theirs."""
        instruction = self.by_name.get(name)
        return instruction is not None and instruction.only_calls


def own_records(
    mesh: Mesh, events: Sequence[Event], instructions: Instructions
) -> list[DeviceRecord]:
    """What the devices of this process did of a program that runs on a mesh."""
    by_device: dict[int, list[Event]] = collections.defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
    records = []
    for position, device in enumerate(mesh.devices.flat):
        if device.process_index != jax.process_index():
            continue
        # Simulated devices are noted by their number in the job, others by that on their host.
        noted = device.id if device.platform == "cpu" else device.local_hardware_id
        name, peak = f"{device.platform}:{device.id}", device.memory_stats() or {}
        most = peak.get("peak_bytes_in_use")
        own = by_device[noted]
        records.append(record_device(own, instructions, position, name, device.process_index, most))
    return records


def record_device(
    events: Sequence[Event],
    instructions: Instructions,
    position: int,
    name: str,
    process: int,
    peak: int | None,
) -> DeviceRecord:
    """Sum up the events of one device."""
    leaves = [
        dataclasses.replace(event, instruction=instructions.told_as(event.instruction))
        for event in events
        if not instructions.contains(event.instruction)
    ]
    runs: collections.Counter[str] = collections.Counter()
    seconds: dict[str, float] = collections.defaultdict(float)
    durations: dict[str, list[float]] = collections.defaultdict(list)
    exposed: dict[str, float] = collections.defaultdict(float)
    working = union(
        [
            (event.start, event.end)
            for event in leaves
            if event.instruction not in instructions.collective
        ]
    )
    for event in leaves:
        runs[event.instruction] += 1
        seconds[event.instruction] += event.seconds
        if (entry := instructions.collective.get(event.instruction)) is not None:
            first = entry.instructions[0]
            durations[first].append(event.seconds)
            exposed[first] += outside((event.start, event.end), _near(working, event))
    everything = union([(event.start, event.end) for event in leaves])
    window = everything[-1][1] - everything[0][0] if everything else 0.0
    return DeviceRecord(
        position,
        name,
        process,
        dict(runs),
        dict(seconds),
        dict(durations),
        dict(exposed),
        length(everything),
        window,
        peak,
    )


def _near(spans: list[tuple[float, float]], event: Event) -> list[tuple[float, float]]:
    """The spans that may cover an event: the lists are long, and an event meets few of them."""
    first = max(0, bisect.bisect_left(spans, (event.start,)) - 1)
    return spans[first : bisect.bisect_left(spans, (event.end,))]


@dataclasses.dataclass(frozen=True)
class Joined:
    """Measured beside modelled: classes of kernels, kernels, collectives, devices.

    `unknown` are names in the trace that the program does not have, with their seconds a step;
    `silent` are kernels of the program that left no event.
    """

    parts: tuple[Part, ...]
    kernels: tuple[MeasuredKernel, ...]
    collectives: tuple[MeasuredCollective, ...]
    devices: tuple[MeasuredDevice, ...]
    unknown: dict[str, float]
    silent: tuple[str, ...]


# In: the records of all devices, of the program's collectives and kernels. Out: rows. Invariant:
# every second of the trace is in one row: that of its kernel, of its collective, or in `unknown`.
# Example: a dot that ran 4 times a step on 8 devices, 0.5 ms each, is one row of 2 ms.
def join(
    records: Sequence[DeviceRecord],
    instructions: Instructions,
    collectives: Collectives,
    placement: Placement,
    speed: Speeds,
    steps: int,
) -> Joined:
    """Set what was measured beside the model of the same program."""
    speed = speed.in_step(instructions.program)
    rows = list(_kernel_rows(records, instructions.program, speed, steps))
    known = {row.name for row in rows} | set(instructions.collective)
    unknown: dict[str, float] = collections.defaultdict(float)
    for record in records:
        for name, seconds in record.seconds.items():
            if name not in known and not _is_bookkeeping(instructions.by_name.get(name)):
                unknown[name] += seconds / steps / len(records)
    rows, unknown = _with_started_fusions(rows, unknown, instructions)
    skew = _Skew(records, placement, steps)
    return Joined(
        classes(rows),
        tuple(sorted(rows, key=lambda row: -row.measured)),
        tuple(_collective_rows(collectives, records, skew, steps)),
        tuple(_device_rows(records, skew, steps)),
        dict(unknown),
        tuple(row.name for row in rows if not row.runs and not row.in_condition),
    )


# Fusions of a GPU that run beside others are written `%fusion-start = fusion-start(...), calls=%f`:
# the fusion's own name, by which its events go, is not in the text, and the model lists what is in
# %f. So all of them are one row. Example: the trace has `loop_dynamic_update_slice_fusion.10`, the
# program `dynamic_update_slice.20.2` inside of the one fusion that is started.
def _with_started_fusions(
    rows: list[MeasuredKernel], unknown: dict[str, float], instructions: Instructions
) -> tuple[list[MeasuredKernel], dict[str, float]]:
    """Join what the trace has of such fusions with what the program has of them."""
    started = [row for row in rows if row.name in instructions.start_of and not row.runs]
    fusions = {name: seconds for name, seconds in unknown.items() if "fusion" in name}
    if not started or not fusions:
        return rows, unknown
    kind = collections.Counter(row.kind for row in started).most_common(1)[0][0]
    row = MeasuredKernel(
        "fusions beside others",
        kind,
        started[0].source,
        len(fusions),
        len(fusions),
        sum(row.modelled for row in started),
        sum(fusions.values()),
    )
    rest = [each for each in rows if each not in started]
    return [*rest, row], {name: s for name, s in unknown.items() if name not in fusions}


def _is_bookkeeping(instruction: Instruction | None) -> bool:
    """Whether a simulated device notes an event for what the model gives no time."""
    return instruction is not None and instruction.opcode in ("partition-id", "replica-id", "call")


def _kernel_rows(
    records: Sequence[DeviceRecord], program: Program, speed: Speeds, steps: int
) -> Iterator[MeasuredKernel]:
    for kernel, times, in_condition in modelled_kernels(program):
        name = kernel.name
        runs = statistics.mean(record.runs.get(name, 0) for record in records) / steps
        yield MeasuredKernel(
            name,
            kernel_class(program, kernel),
            program.source(kernel.instruction),
            times,
            # A library's product may take several kernels, each with an event.
            min(times, round(runs)) if kernel.flops or kernel.custom else round(runs),
            max(speed.kernel(kernel)) * times,
            sum(record.seconds.get(name, 0.0) for record in records) / steps / len(records),
            in_condition,
        )


def classes(rows: Iterable[MeasuredKernel]) -> tuple[Part, ...]:
    """Sum up kernels by what they are, the longest first."""
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    for row in rows:
        entry = sums[row.kind]
        entry[0] += row.runs
        entry[1] += row.modelled
        entry[2] += row.measured
    parts = [Part(name, round(runs), model, real) for name, (runs, model, real) in sums.items()]
    return tuple(sorted(parts, key=lambda part: -part.measured))


class _Skew:
    """Who was late to each collective: the last to arrive waits least, so its run is shortest."""

    def __init__(self, records: Sequence[DeviceRecord], placement: Placement, steps: int):
        self.records = {record.position: record for record in records}
        self.steps = steps
        self.sizes = dict(zip(placement.spec.names, placement.spec.sizes, strict=True))
        # By device: how much the others waited for it, and how often it was last, of how often.
        self.waited: dict[int, float] = collections.defaultdict(float)
        self.last: collections.Counter[int] = collections.Counter()
        self.met: collections.Counter[int] = collections.Counter()

    def of(self, entry: Collective) -> tuple[float, float, int | None]:
        """Seconds a step of moving, of waiting, and the position of the device that is late."""
        moving, waiting, groups = 0.0, 0.0, 0
        last: collections.Counter[int] = collections.Counter()
        met = 0
        for members in self._groups(entry):
            runs = self._runs(entry, members)
            if not len(runs):
                continue
            groups += 1
            least = runs.min(axis=1)
            wait = (runs - least[:, None]).mean(axis=1)
            moving += float(least.sum()) / self.steps
            waiting += float(wait.sum()) / self.steps
            for row, late in zip(wait, runs.argmin(axis=1), strict=True):
                last[members[late]] += 1
                self.last[members[late]] += 1
                self.waited[members[late]] += float(row) / self.steps
            for member in members:
                self.met[member] += len(runs)
            met += len(runs)
        if not groups:
            return 0.0, 0.0, None
        position, count = last.most_common(1)[0]
        often = count >= _OFTEN * met / groups and waiting / groups >= _MUCH * moving / groups
        return moving / groups, waiting / groups, position if often else None

    def _runs(self, entry: Collective, members: Sequence[int]) -> np.ndarray:
        """Durations of a collective, `(runs, members)`; empty if they do not match up."""
        name = entry.instructions[0]
        lists = [self.records[member].durations.get(name, []) for member in members]
        if len(members) < 2 or len({len(each) for each in lists}) != 1:
            return np.empty((0, len(members)))
        return np.array(lists).T

    def _groups(self, entry: Collective) -> list[list[int]]:
        """Positions that a collective joins, of devices that were recorded."""
        positions = np.arange(int(np.prod(list(self.sizes.values()), dtype=np.int64)))
        grid = positions.reshape(list(self.sizes.values()))
        whole = entry.axes is not None and all(part.whole for part in entry.axes)
        if whole and entry.axes:
            names = list(self.sizes)
            along = [names.index(part.name) for part in entry.axes]
            rest = [number for number in range(grid.ndim) if number not in along]
            grid = grid.transpose(rest + along).reshape(-1, entry.group_size)
        else:  # groups that follow no axes: all are taken for one
            grid = grid.reshape(1, -1)
        groups = ([int(member) for member in row if int(member) in self.records] for row in grid)
        return [group for group in groups if group]


_OFTEN, _MUCH = 0.8, 1.0  # of the runs it was last in; of the moving that others waited for it


def _collective_rows(
    entries: Collectives, records: Sequence[DeviceRecord], skew: _Skew, steps: int
) -> Iterator[MeasuredCollective]:
    by_position = {record.position: record.name for record in records}
    for entry in entries:
        name = entry.instructions[0]
        runs = [len(record.durations.get(name, [])) for record in records]
        moving, waiting, late = skew.of(entry)
        measured = _mean(sum(record.durations.get(name, [])) for record in records) / steps
        exposed = _mean(record.exposed.get(name, 0.0) for record in records) / steps
        yield MeasuredCollective(
            entry,
            round(_mean(runs) / steps),
            measured,
            moving,
            waiting,
            exposed,
            None if late is None else by_position[late],
        )


def _device_rows(
    records: Sequence[DeviceRecord], skew: _Skew, steps: int
) -> Iterator[MeasuredDevice]:
    for record in sorted(records, key=lambda record: record.position):
        here = record.position
        yield MeasuredDevice(
            record.name,
            record.process,
            here,
            record.busy / steps,
            max(0.0, record.window - record.busy) / steps,
            sum(sum(times) for times in record.durations.values()) / steps,
            skew.waited.get(here, 0.0),
            skew.last[here] / skew.met[here] if skew.met[here] else 0.0,
            record.peak,
        )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def read_records(data: Iterable[Mapping[str, Any]]) -> list[DeviceRecord]:
    """Records of other processes."""
    return [DeviceRecord(**each) for each in data]
