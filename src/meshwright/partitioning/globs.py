"""Globs over paths, any number of them at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# A place in a glob: which one, and how many of its words are behind.
_Place = tuple[int, int]


class Globs:
    """An ordered list of globs, asked which of them match a path.

    All are followed together, word by word. A state is the set of places that the words so far
    may lead to. The next state depends on which words of the globs the next word fits, and each
    such step is worked out once. So the time grows with the length of the path, neither with the
    ways to read it nor, for paths alike, with the number of globs.

    >>> globs = Globs(["up", "layers/*/w?", "**"])
    >>> globs.matching("layers/12/wq")
    (1, 2)
    """

    def __init__(self, globs: Sequence[str]):
        self._globs = [_words(glob) for glob in globs]
        words = {word for glob in self._globs for word in glob if word not in ("*", "**")}
        self._plain = frozenset(word for word in words if not re.search("[*?]", word))
        self._fits = [(word, _expression(word)) for word in sorted(words - self._plain)]
        self._kinds: dict[str, int] = {}
        self._kind_ids: dict[frozenset[str], int] = {}
        self._kind_fits: list[frozenset[str]] = []
        self._states: dict[frozenset[_Place], int] = {}
        self._places: list[frozenset[_Place]] = []
        self._steps: list[dict[int, int]] = []
        self._ends: list[tuple[int, ...]] = []
        self._start = self._state(frozenset(self._open((n, 0) for n in range(len(globs)))))

    def matching(self, path: str) -> tuple[int, ...]:
        """The places in the list of all globs that match, in order."""
        state, kinds, steps = self._start, self._kinds, self._steps
        for word in path.split("/"):
            kind = kinds.get(word)
            if kind is None:
                kind = self._kind(word)
            after = steps[state].get(kind)
            state = self._step(state, kind) if after is None else after
        return self._ends[state]

    def _kind(self, word: str) -> int:
        """Which words of the globs a word fits, as a number."""
        plain = {word} & self._plain
        fits = frozenset(plain | {glob for glob, expr in self._fits if expr.fullmatch(word)})
        if fits not in self._kind_ids:
            self._kind_ids[fits] = len(self._kind_fits)
            self._kind_fits.append(fits)
        self._kinds[word] = self._kind_ids[fits]
        return self._kinds[word]

    def _step(self, state: int, kind: int) -> int:
        fits = self._kind_fits[kind]
        found: set[_Place] = set()
        for glob, behind in self._places[state]:
            words = self._globs[glob]
            if behind < len(words):
                word = words[behind]
                if word == "**":
                    found.add((glob, behind))
                elif word == "*" or word in fits:
                    found.add((glob, behind + 1))
        self._steps[state][kind] = self._state(frozenset(self._open(found)))
        return self._steps[state][kind]

    def _open(self, places: Iterable[_Place]) -> Iterable[_Place]:
        """The places, and those behind a `**`, which may stand for no word."""
        for glob, behind in places:
            yield glob, behind
            while self._globs[glob][behind : behind + 1] == ["**"]:
                behind += 1
                yield glob, behind

    def _state(self, places: frozenset[_Place]) -> int:
        if places not in self._states:
            self._states[places] = len(self._places)
            self._places.append(places)
            self._steps.append({})
            ends = {glob for glob, behind in places if behind == len(self._globs[glob])}
            self._ends.append(tuple(sorted(ends)))
        return self._states[places]


def _words(glob: str) -> list[str]:
    """The words of a glob; one that is not tied to the beginning may have any words before."""
    words = glob.strip("/").split("/")
    return words if glob.startswith("/") else ["**", *words]


def _expression(word: str) -> re.Pattern[str]:
    """A word with `*` and `?` in it as a regular expression.

    What stands between two `*` is taken where it first fits, which is as good as any later place:
    the atomic groups `(?>...)` keep it from being tried there.
    """
    pieces = [re.escape(piece).replace(r"\?", ".") for piece in re.split(r"\*+", word)]
    if len(pieces) == 1:
        return re.compile(pieces[0], re.DOTALL)
    first, *between, last = pieces
    middle = "".join(f"(?>.*?{piece})" for piece in between)
    return re.compile(f"{first}{middle}.*{last}", re.DOTALL)
