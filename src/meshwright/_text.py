"""Text that a person reads: tables, bytes, durations, plurals, ranges of ids."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterable, Sequence

from meshwright.errors import listing


def table(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Lay out rows of text in columns; the first row is the heading, `right` are flush right.

    >>> print(table([["axis", "size"], ["dp", "2"]], [False, True]))
    axis  size
    dp       2
    """
    widths = [max(len(row[c]) for row in rows) for c in range(len(right))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    )


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
