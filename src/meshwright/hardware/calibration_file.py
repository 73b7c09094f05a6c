"""`Calibration`: speeds that were measured on real devices, as a JSON file that others read.

A file has a figure for each kind of work of one device, a line (latency and bandwidth) for each
collective over each kind of group, and what they were measured on; no names of hosts. `calibrate`
writes one, `topology`, `place`, `rehearse` and the command line take one as `speeds`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright._show import Sheet, Shown, Table
from meshwright._text import amount, duration, plural, ranges, write_text
from meshwright.errors import CalibrationError, short

FORMAT, VERSION = "meshwright calibration", 1
DEFAULT = "default"  # as `speeds`: the user's own file for the kind of chip


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured speed or time of a device: the median of all devices and runs.

    `spread` is half of what lies between the slowest and the fastest tenth of the runs, as a part
    of `value`. `each` has the median of every device, in the order of the file's `processes`.
    """

    name: str
    value: float
    unit: str
    spread: float
    each: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class LinkFigure:
    """One collective over groups of `members` devices: `latency + bytes / bandwidth` seconds.

    `links` says what joins them, as in a rehearsal; `slices` how many parts of the machine that
    DCN joins they span. `error` is the mean error of the line, as a part of the time; `points` are
    what it is fitted to: bytes, seconds and their spread. `each`: every device's seconds at the
    most bytes, without waiting for others of its group.
    """

    kind: str
    axis: str
    links: str
    members: int
    slices: int
    latency: float
    bandwidth: float
    error: float
    points: tuple[tuple[float, float, float], ...]
    each: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """What was measured, over which links."""
        return f"{self.kind} over {self.members} by {self.links}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Calibration(Shown):
    """What devices were measured to do. Prints itself; HTML in a notebook; `to_json()`, `save()`.

    `processes` has the process of every device. `left_out` says what was not measured and why;
    `interrupted`, that it ended early. `file` is where it was read from or written to.
    """

    chip: str
    kind: str
    topology: str
    processes: tuple[int, ...]
    date: str
    driver: str
    versions: Mapping[str, str]
    clocks: Mapping[str, float]
    figures: tuple[Figure, ...]
    links: tuple[LinkFigure, ...]
    left_out: tuple[str, ...] = ()
    interrupted: bool = False
    file: str = ""

    @property
    def devices(self) -> int:
        """How many devices it was measured on."""
        return len(self.processes)

    @functools.cached_property
    def _by_name(self) -> dict[str, Figure]:
        return {figure.name: figure for figure in self.figures}

    def value(self, name: str) -> float | None:
        """The value of a figure, or `None` where it was not measured."""
        figure = self._by_name.get(name)
        return None if figure is None else figure.value

    def values(self, group: str) -> dict[str, float]:
        """The figures whose name begins with a word, by the rest of their names."""
        start = f"{group} "
        return {
            name.removeprefix(start): figure.value
            for name, figure in self._by_name.items()
            if name.startswith(start)
        }

    # A ring of n devices passes (n - 1) / n of the bytes over each link, in n - 1 steps: so another
    # size of group by the same links is that much faster or slower.
    def collective(self, kind: str, links: str, members: int) -> tuple[float, float] | None:
        """Latency (s) and bandwidth (bytes/s) of a collective; `None` for links not measured.

        Of groups with another number of members it is scaled from the nearest one.
        """
        rows = self._by_links.get((kind, links))
        if not rows:
            return None
        row = min(rows, key=lambda each: abs(math.log(each.members / members)))
        if row.members == members or kind == "collective-permute":
            return row.latency, row.bandwidth
        ring = (members / (members - 1)) / (row.members / (row.members - 1))
        return row.latency * members / row.members, row.bandwidth * ring

    @functools.cached_property
    def _by_links(self) -> dict[tuple[str, str], list[LinkFigure]]:
        by_links: dict[tuple[str, str], list[LinkFigure]] = {}
        for row in self.links:
            by_links.setdefault((row.kind, row.links), []).append(row)
        return by_links

    def note(self, devices: int) -> str:
        """Whose speeds a result for so many devices has, in words."""
        name = Path(self.file).name if self.file else "a calibration"
        words = f"{name}, measured {self.date[:10]} on {plural(self.devices, 'device')}"
        words += f" of {self.topology}"
        if devices != self.devices:
            words += (
                f"; collectives of {plural(devices, 'device')} are scaled from them"
                if self.links
                else "; collectives are the table's"
            )
        return words + ("; it was interrupted, the rest is the table's" * self.interrupted)

    def _sheet(self) -> Sheet:
        parts: list[str | Table] = [f"measured {self.date}, {self._with()}"]
        if self.figures:
            rows = [_figure_cells(figure) for figure in self.figures]
            parts.append(Table(["figure", "measured", "spread"], rows, [False, True, True]))
        if self.links:
            heading = ["collective", "members", "by", "latency", "GB/s", "fit", "sizes"]
            right = [False, True, False, True, True, True, False]
            parts.append(Table(heading, [_link_cells(row) for row in self.links], right))
        if self.interrupted:
            parts.append("It was interrupted: what is not here was not measured.")
        parts += [f"left out: {words}" for words in self.left_out]
        return Sheet(f"{self.topology}: {plural(self.devices, 'device')} of {self.kind}", parts)

    def _with(self) -> str:
        words = [f"{name} {version}" for name, version in self.versions.items()]
        words += [f"driver {self.driver}"] if self.driver else []
        words += [f"{name} {mhz:g} MHz" for name, mhz in self.clocks.items()]
        return ", ".join(words)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data: what the file holds."""
        data = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if each.name not in ("figures", "links", "file")
        }
        data |= {"figures": [dataclasses.asdict(each) for each in self.figures]}
        data |= {"links": [dataclasses.asdict(each) for each in self.links]}
        plain: dict[str, Any] = json.loads(json.dumps(data))  # tuples as lists
        return {"format": FORMAT, "version": VERSION, **plain}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it to a JSON file; returns its path. Raises `CalibrationError` where it cannot."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            raise CalibrationError(f"out: {path}: {error.strerror}.", option="out") from error
        return path


def _figure_cells(figure: Figure) -> list[str]:
    return [figure.name, measured_text(figure.value, figure.unit), f"{figure.spread:.0%}"]


def measured_text(value: float, unit: str) -> str:
    """A value with its unit, in words: `692 TFLOP/s`, `4.25 TB/s`, `2.5 us`."""
    if unit == "s":
        return duration(value)
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


def _link_cells(row: LinkFigure) -> list[str]:
    sizes = f"{amount(row.points[0][0])} to {amount(row.points[-1][0])}" if row.points else ""
    speed = "-" if math.isinf(row.bandwidth) else f"{row.bandwidth / 1e9:.3g}"
    cells = [f"{row.kind}, {row.axis}", str(row.members), row.links, duration(row.latency), speed]
    return [*cells, f"{row.error:.0%}", sizes]


def default_file(chip: str) -> Path:
    """The user's own calibration of a kind of chip: below `$XDG_CONFIG_HOME` on Linux."""
    from platformdirs import user_config_path  # in the function: a file may be given

    return user_config_path("meshwright", appauthor=False) / f"{chip}.json"


def read_speeds(speeds: object, chip: str) -> Calibration:
    """Return the calibration that `speeds` means, and check that it is of this kind of chip."""
    if isinstance(speeds, Calibration):
        calibration = speeds
    elif isinstance(speeds, (str, os.PathLike)):
        path = default_file(chip) if speeds == DEFAULT else Path(speeds).expanduser()
        if not path.is_file():
            raise CalibrationError(
                f"speeds: there is no file {path}. `meshwright calibrate` writes one, on the "
                "devices.",
                option="speeds",
            )
        calibration = load(path)
    else:
        raise CalibrationError(
            f"speeds: {short(speeds)} is not a file of `meshwright calibrate`, nor what "
            "mw.calibrate() returns.",
            option="speeds",
        )
    if calibration.chip != chip:
        raise CalibrationError(
            f"speeds: {calibration.file or 'this calibration'} was measured on "
            f"{calibration.chip} ({calibration.kind}), not on {chip}. Leave it out to use the "
            f"table, or calibrate on {chip}.",
            option="speeds",
        )
    return calibration


def load(path: str | os.PathLike[str]) -> Calibration:
    """Read a file; raises `CalibrationError` if it is damaged, newer, or something else."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibrationError(f"speeds: {path}: {error.strerror}.", option="speeds") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CalibrationError(
            f"speeds: {path} is not a calibration: it has no "
            f'"format": "{FORMAT}". `meshwright calibrate` writes one.',
            option="speeds",
        )
    version = data.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CalibrationError(
            f"speeds: {path} is of version {short(version)}, and this meshwright reads up to "
            f"{VERSION}. Update meshwright, or calibrate again.",
            option="speeds",
        )
    try:
        return _from_json(data, str(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        missing = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise _damaged(path, missing) from error


def _damaged(path: Path, why: str) -> CalibrationError:
    return CalibrationError(
        f"speeds: {path} is damaged: {why}. Calibrate again, or take a copy of it.",
        option="speeds",
    )


def _from_json(data: Mapping[str, Any], file: str) -> Calibration:
    figures = tuple(
        Figure(
            _text(each["name"]),
            _positive(each["value"], each["name"]),
            _text(each["unit"]),
            _number(each["spread"]),
            tuple(_positive(value, each["name"]) for value in each["each"]),
        )
        for each in data["figures"]
    )
    links = tuple(
        LinkFigure(
            _text(each["kind"]),
            _text(each["axis"]),
            _text(each["links"]),
            _count(each["members"], 2),
            _count(each["slices"], 1),
            _number(each["latency"]),
            _positive(each["bandwidth"], "bandwidth"),
            _number(each["error"]),
            tuple((_number(a), _number(b), _number(c)) for a, b, c in each["points"]),
            tuple(map(_number, each["each"])),
        )
        for each in data["links"]
    )
    names = ("chip", "kind", "topology")
    chip, kind, topology = (_text(data[name]) for name in names)
    return Calibration(
        chip,
        kind,
        topology,
        tuple(_count(each, 0) for each in data["processes"]),
        _text(data["date"]),
        _text(data["driver"]),
        {_text(name): _text(version) for name, version in data["versions"].items()},
        {_text(name): _number(mhz) for name, mhz in data["clocks"].items()},
        figures,
        links,
        tuple(map(_text, data["left_out"])),
        bool(data["interrupted"]),
        file,
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{short(value)} is not text")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{short(value)} is not a number of at least 0")
    return float(value)


def _positive(value: object, what: object) -> float:
    if not (number := _number(value)) or math.isinf(number):
        raise ValueError(f"{what}: {short(value)} is not above 0")
    return number


def _count(value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{short(value)} is not an integer of at least {least}")
    return value


def processes_text(processes: tuple[int, ...], process: int) -> str:
    """A process with its devices: `process 2 (devices 16-23)`."""
    own = [device for device, owner in enumerate(processes) if owner == process]
    return f"process {process} ({'device' if len(own) == 1 else 'devices'} {ranges(own)})"
