"""Text that a person reads: tables, bytes, durations, plurals, ranges of ids, files of it."""

from __future__ import annotations

import itertools
import numbers
import os
import re
import secrets
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from meshwright.errors import listing

# Tables. In: rows of cells. Out: lines that fit the screen. Where they are too long, cells of text
# are cut: first what stands beside a source line (`model.py:12`, which is never cut), then the
# longest. Where that is not enough, a row goes on in lines below, so that no column is lost.

_SOURCE = re.compile(r"(?:[\w.-]+\.\w+|<[^>\s]+>):\d+")
_LEAST = 8  # columns that a cell of text keeps; and half of its own
_GAP = 2


def table(rows: Sequence[Sequence[str]], right: Sequence[bool], columns: int | None = None) -> str:
    """Lay out rows of text in columns; the first row is the heading, `right` are flush right.

    Lines are at most `columns` long, by default those of the terminal that is printed to.

    >>> rows = [["axis", "size", "from"], ["dp", "2", "dot_general model.py:12"]]
    >>> print(table(rows, [False, True, False]))
    axis  size  from
    dp       2  dot_general model.py:12
    >>> print(table(rows, [False, True, False], columns=30))
    axis  size  from
    dp       2  dot_.. model.py:12
    """
    width = columns or screen_columns()
    rows = _fitted(rows, right, width)
    if width is not None:  # a cell is no longer than a line
        rows = [[_cut(cell, width - _GAP) for cell in row] for row in rows]
    widths = [max(len(row[c]) for row in rows) for c in range(len(right))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(size) if flush else cell.ljust(size)
            for cell, size, flush in zip(row, widths, right, strict=True)
        ]
        lines += _folded(cells, widths, width)
    return "\n".join(lines)


def _fitted(
    rows: Sequence[Sequence[str]], right: Sequence[bool], width: int | None
) -> Sequence[Sequence[str]]:
    """Cut cells of text until lines fit; the rows as they are where that is not enough."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(right))]
    if width is None or _total(widths) <= width:
        return rows
    texts = [c for c, flush in enumerate(right) if not flush]
    sources = {c: _longest_source(rows, c) for c in texts}
    least = {c: sources[c] or max(min(widths[c], _LEAST), widths[c] // 2) for c in texts}
    while _total(widths) > width:
        first = [c for c in texts if sources[c] and widths[c] > least[c]]
        may = first or [c for c in texts if widths[c] > least[c]]
        if not may:
            return rows
        widths[max(may, key=lambda c: widths[c])] -= 1
    return [
        [_cut(cell, size) if c in least else cell for c, (cell, size) in enumerate(pairs)]
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _longest_source(rows: Sequence[Sequence[str]], column: int) -> int:
    matches = (_SOURCE.search(row[column]) for row in rows)
    return max((len(match[0]) for match in matches if match), default=0)


def _cut(cell: str, width: int) -> str:
    """Cut a cell, but not its source line."""
    if len(cell) <= width:
        return cell
    source = _SOURCE.search(cell)
    if source is None:
        is_path = " " not in cell and ("/" in cell or "['" in cell)
        return f"..{cell[2 - width :]}" if is_path else f"{cell[: width - 2]}.."
    if len(source[0]) > width:  # a screen is narrower than the name of the file: its end tells more
        return f"..{source[0][2 - width :]}"
    before, after = cell[: source.start()].rstrip(), cell[source.end() :].lstrip()
    room = width - len(source[0]) - 1
    if room < 4:  # too little to tell one operation from another
        return source[0]
    if before:
        return (
            f"{before[: room - 2]}.. {source[0]}" if len(before) > room else f"{before} {source[0]}"
        )
    return f"{source[0]} {after[: room - 2]}.."


def _folded(cells: Sequence[str], widths: Sequence[int], width: int | None) -> list[str]:
    """A row in as many lines as it takes; those after the first are indented."""
    lines, used = [""], 0
    for cell, size in zip(cells, widths, strict=True):
        gap = _GAP if used else 0
        if width is not None and used and used + gap + size > width:
            lines.append("")
            used, gap = 0, _GAP
        lines[-1] += " " * gap + cell
        used += gap + size
    return [line.rstrip() for line in lines]


def screen_columns() -> int | None:
    """Columns of the terminal that is printed to; `None` for files and pipes.

    `COLUMNS` is not asked: GNU readline leaves it to the children of any Python that loaded it.
    """
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (AttributeError, OSError, ValueError):  # no terminal, or nothing that has one
        return None


def text_width() -> int:
    """Columns at which prose is broken: the terminal's, or 100."""
    return screen_columns() or 100


def duration(seconds: float) -> str:
    """Write a time in the unit that fits it.

    >>> duration(0.0211), duration(0.0000042), duration(2.5)
    ('21.1 ms', '4.20 us', '2.50 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:#.3g} {unit}".replace(". ", " ")
    raise AssertionError


def number(value: float) -> str:
    """Write a number with three digits.

    >>> number(12.0), number(0.75), number(0.0039)
    ('12', '0.75', '0.0039')
    """
    return f"{value:.3g}"


def amount(size: float) -> str:
    """Write a number of bytes in the unit that fits it.

    >>> amount(16 * 2**20), amount(1536), amount(-12)
    ('16 MiB', '1.5 KiB', '-12 B')
    """
    if size < 0:
        return f"-{amount(-size)}"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def tidy(value: float) -> str:
    """Write a time in any unit, without the noise of its last bits.

    >>> tidy(0.1 + 0.2), tidy(1581.0), tidy(1e-16)
    ('0.3', '1581', '0')
    """
    return f"{round(value, 9):.6g}"


def plural(count: float, noun: str) -> str:
    """Count things: the number and the noun, in the plural unless there is one.

    >>> plural(1, "host"), plural(1200, "device"), plural(4.5, "microbatch"), plural(2, "process")
    ('1 host', '1,200 devices', '4.5 microbatches', '2 processes')
    """
    number = f"{count:,}" if isinstance(count, numbers.Integral) else f"{count:g}"
    return f"{number} {plural_noun(count, noun)}"


def plural_noun(count: float, noun: str) -> str:
    """Return the noun alone, in the plural unless `count` is one.

    >>> plural_noun(1, "process"), plural_noun(3, "process"), plural_noun(0, "entry")
    ('process', 'processes', 'entries')
    >>> plural_noun(2, "array"), plural_noun(2, "axis")
    ('arrays', 'axes')
    """
    if count == 1:
        return noun
    if noun.endswith("axis"):
        return f"{noun[:-2]}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":  # entries, but arrays
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("h", "s", "x")) else f"{noun}s"


def ranges(ids: Iterable[int]) -> str:
    """Write integers with runs drawn together, as device ids are read best.

    >>> ranges([0, 1, 2, 3, 8, 10, 11])
    '0-3, 8, 10-11'
    """
    runs = []
    for _, run in itertools.groupby(enumerate(sorted(ids)), lambda pair: pair[1] - pair[0]):
        inside = [number for _, number in run]
        runs.append(f"{inside[0]}-{inside[-1]}" if len(inside) > 1 else f"{inside[0]}")
    return listing(runs, 6)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write all of a file or nothing: to a file beside it, which is then renamed over it."""
    target = Path(path).resolve()
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        if target.exists() and not target.is_file():  # a device or a pipe: written, never replaced
            target.write_text(text, encoding="utf-8")
            return
        with beside.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
