"""`Calibration`: speeds of devices, measured or of a table, as a JSON file that others read.

A file has a figure for each kind of work of one device, a line (latency and bandwidth) for each
collective over each kind of group, and what they were measured on; no names of hosts. `calibrate`
writes one, `topology`, `place`, `rehearse` and the command line take one as `speeds`. What is used
without any is of the same format, one file for each chip in `speeds/`, every value with its source.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright._checks import JsonFields
from meshwright._show import Sheet, Shown, Table
from meshwright._text import amount, duration, plural, ranges, write_text
from meshwright.errors import CalibrationError, short

FORMAT, VERSION = "meshwright calibration", 1
DEFAULT = "default"  # as `speeds`: the user's own file for the kind of chip


@dataclasses.dataclass(frozen=True)
class Figure:
    """One speed or time of a device: the median of all devices and runs.

    `spread` is half of what lies between the slowest and the fastest tenth of the runs, as a part
    of `value`; 0 where it is not known. `each` has the median of every device, in the order of the
    file's `processes`. `source` says where it is from, if it was not measured on them.
    """

    name: str
    value: float
    unit: str
    spread: float
    each: tuple[float, ...] = ()
    source: str = ""


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

    `processes` has the process of every device, none in a table. `left_out` says what was not
    measured and why; `interrupted`, that it ended early. `file` is where it was read from or
    written to; a table of meshwright's own has none.

    >>> import meshwright as mw
    >>> table = mw.topology("h200:8").speeds
    >>> table
    <Calibration h200: a table of 2026-11-16>
    >>> table["part memory"], table.figure("part memory").source
    (0.88, 'measured on one H200: copies, reductions and updates, 4.0 to 4.6 of 4.8 TB/s')
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

    def figure(self, name: str) -> Figure | None:
        """The figure of a name, or `None` where there is none."""
        return self._by_name.get(name)

    def value(self, name: str) -> float | None:
        """The value of a figure, or `None` where it was not measured."""
        figure = self._by_name.get(name)
        return None if figure is None else figure.value

    def __getitem__(self, name: str) -> float:
        return self._by_name[name].value

    @functools.cached_property
    def _groups(self) -> dict[str, dict[str, float]]:
        return {}

    def values(self, group: str) -> Mapping[str, float]:
        """The figures whose name begins with a word, by the rest of their names."""
        if group not in self._groups:
            start = f"{group} "
            self._groups[group] = {
                name.removeprefix(start): figure.value
                for name, figure in self._by_name.items()
                if name.startswith(start)
            }
        return self._groups[group]

    def over(self, table: Calibration) -> Calibration:
        """Return these figures, and those of a table where there is none of a name."""
        rest = tuple(each for each in table.figures if each.name not in self._by_name)
        return dataclasses.replace(self, figures=(*self.figures, *rest))

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

    @property
    def is_table(self) -> bool:
        """Whether it is a table: nothing in it was measured on devices that it names."""
        return not self.processes

    def note(self, devices: int) -> str:
        """Whose speeds a result for so many devices has, in words."""
        if self.is_table:
            name = Path(self.file).name
            return (
                f"{name}, a table of {self.date}" if name else f"meshwright's table of {self.chip}"
            )
        name = Path(self.file).name if self.file else "a calibration"
        words = f"{name}, measured {self.date[:10]} on {plural(self.devices, 'device')}"
        words += f" of {self.topology}"
        if self.links and devices != self.devices:
            words += f"; collectives of {plural(devices, 'device')} are scaled from them"
        known = shipped_speeds(self.chip)  # what the table has none of either is no loss
        missing = [
            part
            for start, part in _USED.items()
            if not self.values(start) and (start not in _KNOWN_OF_SOME or known.values(start))
        ]
        missing += ["collectives"] * (devices > 1 and not self.links)
        if missing:
            words += f"; the table's: {', '.join(missing)}"
        return words + ("; it was interrupted, the rest is the table's" * self.interrupted)

    def _sheet(self) -> Sheet:
        parts: list[str | Table] = []
        if not self.is_table:
            parts.append(", ".join([f"measured {self.date}", *self._with()]))
        if self.figures:
            parts.append(_figure_table(self.figures))
        if self.links:
            heading = ["collective", "members", "by", "latency", "GB/s", "fit", "sizes"]
            right = [False, True, False, True, True, True, False]
            parts.append(Table(heading, [_link_cells(row) for row in self.links], right))
        if self.interrupted:
            parts.append("It was interrupted: what is not here was not measured.")
        parts += [f"left out: {words}" for words in self.left_out]
        devices = f"{plural(self.devices, 'device')} of {self.kind}"
        if self.is_table:
            devices = f"a table of {self.date}"
        return Sheet(f"{self.topology}: {devices}", parts)

    def _with(self) -> Iterator[str]:
        yield from (f"{name} {version}" for name, version in self.versions.items())
        if self.driver:
            yield f"driver {self.driver}"
        yield from (f"{name} {mhz:g} MHz" for name, mhz in self.clocks.items())

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
            write_text(path, _file_text(self.to_json()))
        except OSError as error:
            raise CalibrationError(f"out: {path}: {error.strerror}.", option="out") from error
        return path


# What rehearsals look up, by the first word of a figure's name: what a file has none of is said.
_USED = {
    "product": "products",
    "memory": "memory",
    "start": "launches",
    "function": "functions",
    "irregular": "sorts, gathers and scatters",
}


_KNOWN_OF_SOME = ("function", "irregular")


def _figure_table(figures: Sequence[Figure]) -> Table:
    """Every figure with its spread, and its source where one has any."""
    rows = [[each.name, measured_text(each.value, each.unit), _part(each)] for each in figures]
    heading, right = ["figure", "value", "spread"], [False, True, True]
    if any(each.source for each in figures):
        rows = [[*row, each.source] for row, each in zip(rows, figures, strict=True)]
        heading, right = [*heading, "source"], [*right, False]
    return Table(heading, rows, right)


def _part(figure: Figure) -> str:
    return f"{figure.spread:.0%}" if figure.spread or not figure.source else "-"


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
        path = default_file(chip) if speeds == DEFAULT else _given_path(speeds)
        if not path.exists():
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
    _check_nominal(calibration)
    return calibration


def _check_nominal(calibration: Calibration) -> None:
    """Refuse other figures of the machine itself: its links are built before a file is read."""
    for figure in calibration.figures:
        if figure.name.startswith(("nominal ", "capacity ")):
            usual = shipped_speeds(calibration.chip).value(figure.name)
            if figure.value != usual:
                words = [measured_text(each or 0.0, figure.unit) for each in (figure.value, usual)]
                raise CalibrationError(
                    f"speeds: {calibration.file or 'this calibration'}: {figure.name!r} is "
                    f"{words[0]}, and {words[1]} in meshwright's table. Leave it out, and give it "
                    "where the machine is named: topology(name, speeds={'link': ...}).",
                    option="speeds",
                )


def _given_path(given: str | os.PathLike[str]) -> Path:
    try:
        return Path(given).expanduser()
    except RuntimeError as error:  # of `~name`, where there is no such user
        raise CalibrationError(f"speeds: {short(given)}: {error}", option="speeds") from error


@functools.cache
def shipped_speeds(chip: str) -> Calibration:
    """Return meshwright's own table of a chip, which is a file of the package."""
    file = resources.files("meshwright.hardware") / "speeds" / f"{chip}.json"
    return dataclasses.replace(_parse(file.read_text(encoding="utf-8"), file.name), file="")


# A figure of every device of 50,000 takes less.
_MOST_BYTES = 64 * 2**20


def load(path: str | os.PathLike[str]) -> Calibration:
    """Read a file; raises `CalibrationError` if it is damaged, newer, or something else."""
    path = Path(path)
    try:
        if not path.is_file() and path.exists():  # a pipe would be waited for
            raise CalibrationError(f"speeds: {path} is not a file.", option="speeds")
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise CalibrationError(
                f"speeds: {path} has {amount(size)}; a calibration has at most "
                f"{amount(_MOST_BYTES)}. It is something else.",
                option="speeds",
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"speeds: {path}: {error.strerror}.", option="speeds") from error
    except ValueError as error:  # bytes that are no text, or a path that is none
        raise _damaged(str(path), f"not JSON ({error})") from error
    return _parse(text, str(path))


def _parse(text: str, file: str) -> Calibration:
    try:
        data = json.loads(text, parse_constant=_no_number, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CalibrationError(
            f"speeds: {file} is not a calibration: it has no "
            f'"format": "{FORMAT}". `meshwright calibrate` writes one.',
            option="speeds",
        )
    version = data.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CalibrationError(
            f"speeds: {file} is of version {short(version)}, and this meshwright reads up to "
            f"{VERSION}. Update meshwright, or calibrate again.",
            option="speeds",
        )
    try:
        return _calibration(JsonFields(data, "the file"), file)
    except ValueError as error:
        raise _damaged(file, str(error)) from error


def _damaged(file: str, why: str) -> CalibrationError:
    return CalibrationError(
        f"speeds: {file} is damaged: {why}. Calibrate again, or take a copy of it.",
        option="speeds",
    )


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{short(double)} is there twice")
    return data


_LEAST = 1e-15  # of a speed or a time in its unit


def _calibration(data: JsonFields, file: str) -> Calibration:
    data.count("version", 1)
    figures = tuple(map(_figure, data.rows("figures")))
    if len({each.name for each in figures}) < len(figures):
        names = [each.name for each in figures]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"there are two figures {short(double)}")
    date = data.text("date")
    try:
        datetime.datetime.fromisoformat(date)
    except ValueError:
        raise data.wrong("date", date, "a date such as 2026-11-16") from None
    if not isinstance(interrupted := data.get("interrupted"), bool):
        raise data.wrong("interrupted", interrupted, "true or false")
    versions, clocks = data.object_of("versions"), data.object_of("clocks")
    return Calibration(
        data.text("chip"),
        data.text("kind"),
        data.text("topology"),
        tuple(data.as_count("processes", each, 0) for each in data.list_of("processes")),
        date,
        data.text("driver"),
        {data.as_text("versions", name): data.as_text(name, versions[name]) for name in versions},
        {data.as_text("clocks", name): data.as_number(name, clocks[name]) for name in clocks},
        figures,
        tuple(map(_link, data.rows("links"))),
        tuple(data.as_text("left_out", each) for each in data.list_of("left_out")),
        interrupted,
        file,
    )


# The unit of figures that rehearsals look up, by the first word of their names.
_UNITS = {
    **dict.fromkeys(("product", "sustained", "kernel"), "FLOP/s"),
    **dict.fromkeys(("memory", "bus"), "B/s"),
    **dict.fromkeys(("function", "irregular", "apart", "loop"), "elements/s"),
    **dict.fromkeys(("start", "latency", "fill"), "s"),
}


def _figure(row: JsonFields) -> Figure:
    name, unit = row.text("name"), row.text("unit")
    row = JsonFields(row.data, f"figure {short(name)}")
    first, *rest = name.split() or [""]
    if unit != (usual := _UNITS.get(first, unit)):
        raise row.wrong("unit", unit, repr(usual))
    if first == "product" and not (len(rest) == 2 and rest[1].isdecimal() and int(rest[1][:9])):
        raise row.wrong("name", name, "a dtype and a side, as 'product bf16 4096'")
    each = row.numbers("each", _LEAST) if "each" in row.data else ()
    source = row.text("source") if "source" in row.data else ""
    return Figure(name, row.number("value", _LEAST), unit, row.number("spread"), each, source)


def _link(row: JsonFields) -> LinkFigure:
    kind, axis, links = (row.text(name) for name in ("kind", "axis", "links"))
    row = JsonFields(row.data, f"{short(kind)} over {short(axis)}")
    points = []
    for point in row.list_of("points"):
        if not isinstance(point, list) or len(point) != 3:
            raise row.wrong("points", point, "bytes, seconds and their spread")
        size, seconds, spread = (row.as_number("points", value) for value in point)
        points.append((size, seconds, spread))
    return LinkFigure(
        *(kind, axis, links, row.count("members", 2), row.count("slices", 1)),
        *(row.number("latency"), row.number("bandwidth", _LEAST), row.number("error")),
        *(tuple(points), row.numbers("each")),
    )


def _file_text(data: Mapping[str, Any]) -> str:
    """The text of a file: JSON with a line for each figure and each collective."""
    lines = []
    for name, value in data.items():
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        text = (
            "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if rows else json.dumps(value)
        )
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def processes_text(processes: tuple[int, ...], process: int) -> str:
    """A process with its devices: `process 2 (devices 16-23)`."""
    own = [device for device, owner in enumerate(processes) if owner == process]
    return f"process {process} ({'device' if len(own) == 1 else 'devices'} {ranges(own)})"
