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
import re
import stat
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright._checks import JsonFields
from meshwright._show import Sheet, Shown, Table
from meshwright._text import amount, plural, ranges, write_text
from meshwright.errors import CalibrationError, listing, short
from meshwright.hardware.measured_figures import (
    Figure,
    LinkFigure,
    figure_table,
    link_cells,
    link_text,
    measured_text,
    read_figure,
    read_link,
)

FORMAT, VERSION = "meshwright calibration", 1
DEFAULT = "default"  # as `speeds`: the user's own file for the kind of chip


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

    @property
    def count(self) -> int:
        """How many figures and collectives it has."""
        return len(self.figures) + len(self.links)

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
            parts.append(figure_table(self.figures))
        if self.links:
            heading = ["collective", "members", "by", "latency", "GB/s", "rms error", "sizes"]
            right = [False, True, False, True, True, True, False]
            parts.append(Table(heading, [link_cells(row) for row in self.links], right))
            parts += [f"{row.problem}." for row in self.links if row.problem]
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

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read the file that `save` or `meshwright calibrate` has written.

        Raises `CalibrationError` if it is damaged, of a newer meshwright, or something else.
        """
        return load(path, "path")

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


def default_file(chip: str) -> Path:
    """The user's own calibration of a kind of chip: below `$XDG_CONFIG_HOME` on Linux."""
    from platformdirs import user_config_path  # in the function: a file may be given

    return user_config_path("meshwright", appauthor=False) / f"{chip}.json"


def read_speeds(speeds: object, chip: str) -> Calibration:
    """Return the calibration that `speeds` means, and check that it is of this kind of chip."""
    calibration = read_calibration(speeds, "speeds", chip)
    if calibration.chip != chip:
        raise CalibrationError(
            f"speeds: {calibration.file or 'this calibration'} was measured on "
            f"{calibration.chip} ({calibration.kind}), not on {chip}. Leave it out to use the "
            f"table, or calibrate on {chip}.",
            option="speeds",
        )
    _check_nominal(calibration)
    return calibration


def read_calibration(given: object, option: str, chip: str | None) -> Calibration:
    """Return a calibration, or that of a path; `default` is the user's own of a kind of chip.

    Refuses one that has no figure. `option` is whose argument it is, which messages name.
    """
    if isinstance(given, Calibration):
        calibration = given
    elif isinstance(given, (str, os.PathLike)):
        path = _given_path(given, option, chip)
        if not path.exists():
            raise CalibrationError(
                f"{option}: there is no file {path}. `meshwright calibrate` writes one, on the "
                "devices.",
                option=option,
            )
        calibration = load(path, option)
    else:
        raise CalibrationError(
            f"{option}: {short(given)} is not a file of `meshwright calibrate`, nor what "
            "mw.calibrate() returns.",
            option=option,
        )
    if not calibration.count:
        raise CalibrationError(
            f"{option}: {calibration.file or 'this calibration'} is empty: it has no figure and no "
            "collective. Calibrate again, or leave it out to use the table.",
            option=option,
        )
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


def _given_path(given: str | os.PathLike[str], option: str, chip: str | None) -> Path:
    word = os.fspath(given)
    if word == DEFAULT and chip is not None:
        return default_file(chip)
    if word == DEFAULT:
        folder = default_file("").parent
        files = sorted(each.name for each in folder.glob("*.json"))
        raise CalibrationError(
            f"{option}: {DEFAULT!r} is a file for each kind of chip. Name the one you mean; "
            f"{folder} has {listing(files) or 'none yet'}.",
            option=option,
        )
    if not word:
        raise CalibrationError(
            f"{option}: the path is empty. Name a file of `meshwright calibrate`.", option=option
        )
    try:
        return Path(given).expanduser()
    except RuntimeError as error:  # of `~name`, where there is no such user
        raise CalibrationError(f"{option}: {short(given)}: {error}", option=option) from error


@functools.cache
def shipped_speeds(chip: str) -> Calibration:
    """Return meshwright's own table of a chip, which is a file of the package."""
    file = resources.files("meshwright.hardware") / "speeds" / f"{chip}.json"
    return dataclasses.replace(
        _parse(file.read_text(encoding="utf-8"), file.name, "speeds"), file=""
    )


# A figure of every device of 50,000 takes less.
_MOST_BYTES = 64 * 2**20


_KINDS_OF_FILES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def load(path: str | os.PathLike[str], option: str = "speeds") -> Calibration:
    """Read a file; raises `CalibrationError` if it is damaged, newer, or something else."""
    path = Path(path)
    try:
        found = path.stat()
    except OSError as error:
        raise CalibrationError(f"{option}: {path}: {error.strerror}.", option=option) from error
    except ValueError as error:  # a path that is none
        raise CalibrationError(f"{option}: {short(str(path))}: {error}.", option=option) from error
    # Not opened: a pipe would be waited for, and a device has no end.
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS_OF_FILES.get(stat.S_IFMT(found.st_mode), "something else")
        raise CalibrationError(
            f"{option}: {path} is {kind}, not a file. Name a file of `meshwright calibrate`.",
            option=option,
        )
    if found.st_size > _MOST_BYTES:
        raise CalibrationError(
            f"{option}: {path} has {amount(found.st_size)}; a calibration has at most "
            f"{amount(_MOST_BYTES)}. It is something else.",
            option=option,
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"{option}: {path}: {error.strerror}.", option=option) from error
    except ValueError as error:  # bytes that are no text
        raise _damaged(str(path), f"not JSON ({error})", option) from error
    return _parse(text, str(path), option)


def _parse(text: str, file: str, option: str) -> Calibration:
    try:
        data = json.loads(text, parse_constant=_no_number, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"not JSON ({error})", option) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CalibrationError(
            f"{option}: {file} is not a calibration: it has no "
            f'"format": "{FORMAT}". `meshwright calibrate` writes one.',
            option=option,
        )
    version = data.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CalibrationError(
            f"{option}: {file} is of version {short(version)}, and this meshwright reads up to "
            f"{VERSION}. Update meshwright, or calibrate again.",
            option=option,
        )
    try:
        calibration = _calibration(JsonFields(data, "the file"), file)
        _check_counts(calibration)
    except ValueError as error:
        raise _damaged(file, str(error), option) from error
    return calibration


def _damaged(file: str, why: str, option: str) -> CalibrationError:
    return CalibrationError(
        f"{option}: {file} is damaged: {why}. Calibrate again, or take a copy of it.",
        option=option,
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


def _calibration(data: JsonFields, file: str) -> Calibration:
    data.count("version", 1)
    figures = tuple(map(read_figure, data.rows("figures")))
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
        tuple(map(read_link, data.rows("links"))),
        tuple(data.as_text("left_out", each) for each in data.list_of("left_out")),
        interrupted,
        file,
    )


# As `hardware.live` names what is here: a chip, or its kind where there is no table of it, a shape,
# and slices.
_TOPOLOGY = re.compile(r"(.+):(\d{1,9}(?:x\d{1,9}){0,5})(?:_twisted)?(?: x (\d{1,9}) slices)?")


# In: a file whose every field is what it should be. They agree with each other: the name of the
# machine with its devices, and figures and collectives with both. A table names no devices.
def _check_counts(calibration: Calibration) -> None:
    devices = calibration.devices
    if devices:
        _check_topology(calibration)
    lengths = [(f"figure {short(row.name)}", len(row.each)) for row in calibration.figures]
    lengths += [(link_text(row), len(row.each)) for row in calibration.links]
    for where, count in lengths:
        # An interrupted job of several processes had figures of some of its devices.
        partial = calibration.interrupted and count < devices
        if count and count != devices and not partial:
            raise ValueError(
                f"{where}: each has {plural(count, 'value')} of {plural(devices, 'device')}"
            )
    known = set()
    for link in calibration.links:
        key = link.kind, link.axis, link.links, link.members
        if key in known:
            raise ValueError(f"{link_text(link)}: it is there twice")
        known.add(key)
        if devices and devices % link.members:
            raise ValueError(
                f"{link_text(link)}: members is {link.members}, which does not divide the "
                f"{plural(devices, 'device')}"
            )
        if link.slices > link.members:
            raise ValueError(
                f"{link_text(link)}: slices is {link.slices}, more than its {link.members} members"
            )


def _check_topology(calibration: Calibration) -> None:
    name, chip = calibration.topology, calibration.chip
    match = _TOPOLOGY.fullmatch(name)
    if match is None or chip not in (match[1], "unknown"):
        raise ValueError(f"topology is {short(name)}, not a shape of {short(chip)}")
    chips = math.prod(map(int, match[2].split("x"))) * int(match[3] or 1)
    # A TPU's chip may be two devices. By its name: `chips` reads its tables by this file.
    cores = (1, 2) if re.match(r"v\d|tpu", chip) else (1,)
    if calibration.devices not in [chips * each for each in cores]:
        raise ValueError(
            f"topology is {short(name)}, and processes has {plural(calibration.devices, 'device')}"
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
