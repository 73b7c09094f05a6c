"""`compare_calibrations`: which process, link or kernel is slower than the rest or than before.

A difference counts when it is larger than the spread of both measurements, and than what devices of
a kind differ by anyway.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshwright._show import Sheet, Shown, Table
from meshwright._text import duration, plural
from meshwright.errors import CalibrationError, MeshwrightError
from meshwright.hardware.calibration_file import (
    Calibration,
    processes_text,
    read_calibration,
    shipped_speeds,
)
from meshwright.hardware.chips import CHIPS, Chip
from meshwright.hardware.measured_figures import Figure, LinkFigure, measured_text
from meshwright.hardware.topology import Topology, topology
from meshwright.placement.placer import placement_of
from meshwright.rehearsal.collectives.costs import group_cost, pairs_cost
from meshwright.rehearsal.kernel_speeds import speeds
from meshwright.spec.mesh_spec import MeshSpec

# GPUs of one node differ by up to 5 % (stas00/ml-engineering, compute/accelerator).
_ALIKE = 0.05
_MOST = 20  # rows of a table


@dataclasses.dataclass(frozen=True)
class Slower:
    """One finding: `what` is slower than `than`, `ratio` times its time, in `where`.

    Where two files are compared, `where` names the one that it is in.
    """

    where: str
    what: str
    than: str
    ratio: float
    spread: float
    values: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        return f"{self.where}: {self.what} takes {self.ratio:.2f} times as long as {self.than}"


@dataclasses.dataclass(frozen=True, repr=False)
class CalibrationComparison(Shown):
    """What is slower in either of two calibrations, the worst first. Prints itself; HTML; JSON.

    `processes` are those that are slower than the others of their job in most figures; `slower`
    has single figures and links, against the other file, the table, or others of the job.
    """

    first: Calibration
    second: Calibration | None
    processes: tuple[Slower, ...]
    slower: tuple[Slower, ...]

    def _sheet(self) -> Sheet:
        names = _names(self.first, self.second)
        parts: list[str | Table] = [f"{entry}." for entry in self.processes]
        if not self.slower and not self.processes:
            parts.append("Nothing is slower by more than its spread.")
        if self.slower:
            rows = [
                [entry.where, entry.what, entry.than, *entry.values, f"{entry.ratio:.2f}"]
                for entry in self.slower[:_MOST]
            ]
            heading = ["where", "slower", "than", "it", "the other", "times"]
            right = [False, False, False, True, True, True]
            rest = len(self.slower) - _MOST
            parts.append(Table(heading, rows, right, f"... and {rest} more" if rest > 0 else ""))
        return Sheet(f"{' and '.join(names)}: {plural(len(self.slower), 'slower figure')}", parts)

    def to_json(self) -> dict[str, Any]:
        """Return every finding as plain data, with the names of what was compared."""
        names = _names(self.first, self.second)
        return {
            "first": names[0],
            "second": names[1] if len(names) > 1 else None,
            "processes": [dataclasses.asdict(each) for each in self.processes],
            "slower": [dataclasses.asdict(each) for each in self.slower],
        }


def _name(calibration: Calibration) -> str:
    if calibration.is_table and not calibration.file:
        return f"meshwright's table of {calibration.chip}"
    return calibration.file or f"a calibration of {calibration.topology}"


def _names(first: Calibration, second: Calibration | None) -> list[str]:
    """What both are called; apart, though neither may be a file, or both of one."""
    names = [_name(each) for each in (first, second) if each is not None]
    if len(names) == 2 and names[0] == names[1]:
        return [f"{names[0]} (the first)", f"{names[1]} (the second)"]
    return names


def compare_calibrations(
    first: Calibration | str | os.PathLike[str],
    second: Calibration | str | os.PathLike[str] | None = None,
) -> CalibrationComparison:
    """Find what is slower in one calibration than in another, in both directions.

    Also the devices and processes of each that are slower than the rest of it. Each is a file's
    path or a value; without a second one, the first is compared with the table of its chip. That of
    meshwright, `topology(name).speeds`, is a value like any other. Raises `CalibrationError` for
    two kinds of chips, and for what is not a calibration.

    >>> import meshwright as mw
    >>> measured = mw.calibrate(quick=True, only=["launches"], progress=False)
    >>> mw.compare_calibrations(measured, measured).processes
    ()
    >>> mw.compare_calibrations(measured, mw.topology("cpu:8").speeds).processes
    ()
    """
    first = read_calibration(first, "compare", None)
    if second is not None:
        second = read_calibration(second, "compare", first.chip)
    names = _names(first, second)
    if second is not None and first.chip != second.chip:
        raise CalibrationError(
            f"compare: {names[0]} is of {first.chip}, {names[1]} of {second.chip}. "
            "Compare files of one kind of chip.",
            option="compare",
        )
    both = [first] if second is None else [first, second]
    processes, slower = [], []
    for each, name in zip(both, names, strict=True):
        whose = "" if second is None else f" of {name}"
        processes += list(_slow_processes(each, whose))
        slower += list(_slow_devices(each, whose))
    if second is None or second.is_table != first.is_table:
        table, one = (first, second) if first.is_table else (second, first)
        slower += [] if one is None else _against_table(one, table or shipped_speeds(one.chip))
    else:
        slower += _against(first, second, names[0], names[1])
        slower += _against(second, first, names[1], names[0])
    ordered = (sorted(entries, key=lambda entry: -entry.ratio) for entries in (processes, slower))
    return CalibrationComparison(first, second, *map(tuple, ordered))


def _times(figure: Figure) -> np.ndarray:
    """A time for each device: of a speed, its inverse."""
    each = np.array(figure.each)
    return each if figure.unit == "s" else 1 / each


def _by_process(calibration: Calibration, times: np.ndarray) -> dict[int, float]:
    owners = np.array(calibration.processes)
    return {int(p): float(np.median(times[owners == p])) for p in np.unique(owners)}


# In: a file of several processes. Out: those whose time is above that of the others in most
# figures, by more than their spread. One figure may be an accident; half of them are a slow host.
def _slow_processes(calibration: Calibration, whose: str) -> Iterator[Slower]:
    count = len(set(calibration.processes))
    usable = [each for each in calibration.figures if len(each.each) == calibration.devices]
    if count < 2 or not usable:
        return
    usual = float(np.median([figure.spread for figure in usable]))
    ratios: dict[int, list[float]] = {}
    for figure in usable:
        own = _by_process(calibration, _times(figure))
        for process, seconds in own.items():
            others = np.median([each for other, each in own.items() if other != process])
            ratios.setdefault(process, []).append(seconds / max(float(others), 1e-15))
    for process, every in ratios.items():
        middle = float(np.median(every))
        # The spread of one process's ratios: how sure it is that it is slower, not a figure of it.
        least = float(np.quantile(every, 0.25))
        # The middle of n figures is surer than one of them.
        if middle > 1 + max(_ALIKE, usual / len(every) ** 0.5) and least > 1:
            words = f"{sum(each > 1 for each in every)} of {len(every)} figures"
            where = processes_text(calibration.processes, process) + whose
            yield Slower(where, words, "in the other processes", middle, middle - least)


def _slow_devices(calibration: Calibration, whose: str) -> Iterator[Slower]:
    """Devices whose figure is slower than that of the others by more than the spread."""
    rows: list[tuple[str, str, float, np.ndarray]] = [
        (each.name, each.unit, each.spread, _times(each)) for each in calibration.figures
    ]
    for line in calibration.links:
        error = max((point[2] for point in line.points), default=0.0)
        rows.append((f"{line.name}, {line.axis}", "s", error, np.array(line.each)))
    for name, unit, spread, times in rows:
        if times.size != calibration.devices or times.size < 2:
            continue
        usual = float(np.median(times))
        if usual <= 0:  # shorter than the trace can tell
            continue
        for device in np.flatnonzero(times > usual * (1 + max(_ALIKE, 2 * spread))):
            values = _values(times[device], unit), _values(usual, unit)
            ratio = float(times[device]) / usual
            where = f"device {device} of process {calibration.processes[device]}{whose}"
            yield Slower(where, name, "other devices", ratio, spread, values)


def _values(seconds: float, unit: str) -> str:
    return duration(seconds) if unit == "s" else measured_text(1 / seconds, unit)


def _against(first: Calibration, second: Calibration, where: str, than: str) -> Iterator[Slower]:
    """What is slower in `first` than in `second`."""
    others = {figure.name: figure for figure in second.figures}
    for figure in first.figures:
        other = others.get(figure.name)
        if other is not None:
            spread = math.hypot(figure.spread, other.spread)
            yield from _if_slower(where, figure, other.value, spread, than)
    lines = {(each.kind, each.links, each.members): each for each in second.links}
    for line in first.links:
        match = lines.get((line.kind, line.links, line.members))
        if match is None or not line.points:
            continue
        most = min(line.points[-1][0], match.points[-1][0] if match.points else math.inf)
        own, usual = (each.seconds(most) for each in (line, match))
        spread = math.hypot(line.error, match.error)
        if own > usual * (1 + max(_ALIKE, spread)):
            values = duration(own), duration(usual)
            yield Slower(where, line.name, than, own / usual, spread, values)


def _if_slower(
    where: str, figure: Figure, usual: float, spread: float, than: str
) -> Iterator[Slower]:
    ratio = figure.value / usual if figure.unit == "s" else usual / figure.value
    if ratio > 1 + max(_ALIKE, spread):
        values = measured_text(figure.value, figure.unit), measured_text(usual, figure.unit)
        yield Slower(where, figure.name, than, ratio, spread, values)


def _against_table(calibration: Calibration, table: Calibration) -> Iterator[Slower]:
    """What is slower than a table of the chip has it."""
    chip = CHIPS.get(calibration.chip)
    if chip is None or chip.family == "cpu":  # its table are assumptions
        return
    chip = dataclasses.replace(chip, measured=table)
    speed = speeds(chip)
    known = {"memory copy": speed.bytes, "start kernel": speed.start, "loop fusion": speed.loop}
    known |= {f"function {name}": value for name, value in speed.functions.items()}
    known |= {f"irregular {name}": value for name, value in speed.irregular.items()}
    known |= {f"kernel {name}": value for name, value in speed.kernels.items()}
    known |= {"bus to device": speed.bus, "bus to host": speed.bus}
    for name in (each.name for each in calibration.figures if each.name.startswith("product ")):
        _, dtype, side = name.split()
        work = 2.0 * int(side) ** 3
        known[name] = work / speed.compute(work, dtype)
    for figure in calibration.figures:
        usual = known.get(figure.name)
        if usual and not math.isinf(usual):
            spread = math.hypot(figure.spread, _spread_of(table, figure.name))
            yield from _if_slower(_name(calibration), figure, usual, spread, _name(table))
    yield from _links_against_table(calibration, chip, _name(table))


def _spread_of(table: Calibration, name: str) -> float:
    """The spread of what a table goes by for a figure: itself, or the part of nominal."""
    first = name.split()[0]
    words = {"memory": "part memory", "bus": "part bus", "product": "part products"}
    words |= {"kernel": f"part {name}"}
    figure = table.figure(name) or table.figure(words.get(first, name))
    return figure.spread if figure is not None else 0.0


# Twice the mean error of the modelled collectives against published ones (docs/cost_model.md).
_MODELLED = 0.11


def _links_against_table(calibration: Calibration, chip: Chip, than: str) -> Iterator[Slower]:
    """The links whose largest collective takes longer than it is modelled without the file."""
    try:
        hardware = dataclasses.replace(topology(calibration.topology), chip=chip)
    except MeshwrightError:  # a part of a machine has no name
        return
    for line in calibration.links:
        usual = _modelled(line, hardware)
        size = line.points[-1][0] if line.points else 0.0
        own = line.seconds(size)
        spread = math.hypot(line.error, _MODELLED)
        if usual and own > usual * (1 + spread):
            values = duration(own), duration(usual)
            where = _name(calibration)
            yield Slower(where, f"{line.name}, {line.axis}", than, own / usual, spread, values)


def _modelled(line: LinkFigure, hardware: Topology) -> float | None:
    """Seconds of the largest collective of a line on this hardware, `None` if no group is alike."""
    others, rest = divmod(hardware.num_devices, line.members)
    if rest or not line.points:
        return None
    try:
        spec = MeshSpec.parse([("group", line.members), ("others", others)])
        placed = placement_of(spec, hardware, {"group": line.slices})
    except MeshwrightError:
        return None
    size = int(line.points[-1][0])
    if line.kind == "collective-permute":
        places = np.arange(hardware.num_devices).reshape(line.members, others)
        pairs = np.stack([places, np.roll(places, -1, axis=0)], axis=-1).reshape(-1, 2)
        cost = pairs_cost(size, pairs, placed)
    else:
        cost = group_cost(line.kind, size, placed.axes[0], hardware)
    return cost.seconds if cost.links == line.links else None
