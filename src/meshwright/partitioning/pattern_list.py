"""Which patterns of an ordered list match a path, and which of them first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from meshwright.partitioning.globs import Globs
from meshwright.partitioning.patterns import compile_pattern, is_glob

_DIGITS = "0123456789"
# Ranges, references and codes: what may tell digits apart that are not written out.
_TELLS_DIGITS = re.compile(r"[0-9]-|-[0-9]|\(\?P=|\\[0-9xuUN]")


class PatternList:
    """An ordered list of patterns. The globs among them are matched all at once.

    Regular expressions are tried one by one, and once for all paths that differ in digits alone
    which no expression tells apart.

    >>> patterns = PatternList(["up", "layers/*/w*", "q$", "**"])
    >>> patterns.first("layers/12/wq"), patterns.matching("layers/12/wq")
    (1, [1, 2, 3])
    """

    def __init__(self, patterns: Sequence[Any]):
        self._globs_at = [place for place, pattern in enumerate(patterns) if is_glob(pattern)]
        self._globs = Globs([patterns[place] for place in self._globs_at])
        self._others = [
            (place, compile_pattern(pattern))
            for place, pattern in enumerate(patterns)
            if not is_glob(pattern)
        ]
        texts = [getattr(patterns[place], "pattern", patterns[place]) for place, _ in self._others]
        alike = [digit for digit in _DIGITS if not any(_tells(text, digit) for text in texts)]
        self._alike = {ord(digit): alike[0] for digit in alike}
        self._found: dict[str, int | None] = {}

    def first(self, path: str) -> int | None:
        """The place of the first pattern that matches, or `None`."""
        globs = [hits[0] for name in _names(path) if (hits := self._globs.matching(name))]
        found = [self._globs_at[place] for place in globs]
        if self._others and (other := self._first_other(path)) is not None:
            found.append(other)
        return min(found, default=None)

    def _first_other(self, path: str) -> int | None:
        alike = path.translate(self._alike)
        if alike not in self._found:
            names = _names(path)
            hits = (place for place, matches in self._others if any(map(matches, names)))
            self._found[alike] = next(hits, None)
        return self._found[alike]

    def matching(self, path: str) -> list[int]:
        """The places of all patterns that match."""
        names = _names(path)
        globs = [self._globs_at[hit] for name in names for hit in self._globs.matching(name)]
        others = [place for place, matches in self._others if any(map(matches, names))]
        return sorted({*globs, *others})


def _tells(expression: str, digit: str) -> bool:
    return digit in expression or bool(_TELLS_DIGITS.search(expression))


def _names(path: str) -> list[str]:
    """A path, and without `value`: so Flax's variables call their array, but nobody else does."""
    named = path.removesuffix("/value")
    return [path] if named == path else [path, named]
