"""Specs by rules: ordered (pattern, spec) pairs over leaf paths, first match wins."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec

from meshwright.errors import PartitionError, short
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import Leaf, shown

Rules = Mapping[str, Any] | Sequence[tuple[Any, Any]]
Unmatched = Literal["error", "replicate", "shape"]


def read_rules(rules: Any) -> list[tuple[Any, PartitionSpec]]:
    """Rules as patterns and specs; says which entry is not one."""
    if isinstance(rules, Mapping):
        rules = list(rules.items())
    if isinstance(rules, str) or not isinstance(rules, (list, tuple)):
        raise PartitionError(
            f"rules: {short(rules)} is not a table. Pass pairs such as "
            "[('attn/*', ('fsdp', 'tp')), ('**', None)] or a dict."
        )
    found = []
    for place, rule in enumerate(rules):
        if not isinstance(rule, (list, tuple)) or len(rule) != 2:
            raise PartitionError(
                f"rules: entry {place}, {short(rule)}, is not a (pattern, spec) pair."
            )
        compile_pattern(rule[0])
        found.append((rule[0], read_spec(rule[1], f"rules: entry {place}, {short(rule[0])}")))
    return found


def read_spec(value: Any, where: str) -> PartitionSpec:
    """A spec from a `PartitionSpec`, `None`, one axis name, or a list of entries (as in JSON).

    It is as long as it was written, whole dims at the end included.
    """
    if isinstance(value, PartitionSpec):
        return value
    if value is None:
        return make_spec()
    if isinstance(value, str) and value:
        return make_spec([value])
    if not isinstance(value, (list, tuple)):
        raise PartitionError(f"{where}: {short(value)} is not a spec, e.g. ('fsdp', None, 'tp').")
    entries: list[Any] = []
    for entry in value:
        names = tuple(entry) if isinstance(entry, (list, tuple)) else (entry,)
        named = bool(names) and all(isinstance(name, str) and name for name in names)
        if entry is not None and not named:
            raise PartitionError(
                f"{where}: {short(entry)} is not an axis name, a list of them, or None for a whole "
                "dim."
            )
        entries.append(names if isinstance(entry, (list, tuple)) else entry)
    return PartitionSpec(*entries)  # type: ignore[no-untyped-call]


def match_rules(
    leaves: Sequence[Leaf], rules: list[tuple[Any, PartitionSpec]]
) -> tuple[list[PartitionSpec | None], Iterator[str]]:
    """The spec of the first rule that matches each leaf, and what is wrong with unused rules."""
    patterns = PatternList([pattern for pattern, _ in rules])
    places = [patterns.first(leaf.path) for leaf in leaves]
    specs = [None if place is None else rules[place][1] for place in places]
    return specs, _unused(leaves, places, [pattern for pattern, _ in rules])


def _unused(
    leaves: Sequence[Leaf], places: Sequence[int | None], patterns: Sequence[Any]
) -> Iterator[str]:
    """What is wrong with rules that take no leaf: they match none, or another comes first."""
    used = set(places)
    never = [place for place in range(len(patterns)) if place not in used]
    late = PatternList([patterns[place] for place in never])
    before: dict[int, tuple[str, int]] = {}
    for leaf, place in zip(leaves, places, strict=True):
        if never and place is not None:
            for hit in late.matching(leaf.path):
                before.setdefault(never[hit], (leaf.path, place))
    for rule in never:
        if rule not in before:
            yield (
                f"rule {_text(patterns[rule])} matches no leaf. Mend or drop it, or pass "
                "unused='allow'."
            )
            continue
        path, first = before[rule]
        yield (
            f"rule {_text(patterns[rule])} is never reached: rule {_text(patterns[first])} comes "
            f"first and takes {shown(path)}. Move it up, drop it, or pass unused='allow'."
        )


def _text(pattern: Any) -> str:
    return short(str(getattr(pattern, "pattern", pattern)))


# Patterns over leaf paths: globs with `**`, or regular expressions.


# What a glob never needs and a regular expression rarely lacks.
_REGULAR = re.compile(r"[\^$()|+\\\[\]{}]|\.\*|\.\?")

Matcher = Callable[[str], bool]


def is_glob(pattern: Any) -> bool:
    """Whether a pattern is a glob; with any of ``^ $ ( ) | + \\ [ ] { }`` or ``.*`` it is not."""
    return isinstance(pattern, str) and not _REGULAR.search(pattern)


def compile_pattern(pattern: str | re.Pattern[str]) -> Matcher:
    """A pattern as a function that says whether it matches a path.

    A glob is matched word by word against the end of the path: `*` is a piece of one word, `**`
    any number of words; a leading `/` ties it to the beginning. A regular expression is searched
    in the path.

    >>> compile_pattern("attn/w*")("layers/0/attn/wq")
    True
    >>> compile_pattern("/layers/*/mlp/**")("layers/0/mlp/up/kernel")
    True
    >>> compile_pattern("(wq|wk)$")("layers/0/attn/wq")
    True
    """
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return _searching(pattern)
    if not isinstance(pattern, str) or not pattern:
        raise PartitionError(f"pattern {short(pattern)} is not a string or a compiled expression.")
    return _compile(pattern)


@functools.lru_cache(maxsize=4096)
def _compile(pattern: str) -> Matcher:
    if is_glob(pattern):
        globs = Globs([pattern])
        return lambda path: bool(globs.matching(path))
    try:
        return _searching(re.compile(pattern))
    except re.error as error:
        raise PartitionError(f"pattern {short(pattern)} does not compile: {error}.") from error


def _searching(expression: re.Pattern[str]) -> Matcher:
    return lambda path: expression.search(path) is not None


def matches(pattern: Any, path: str) -> bool:
    return compile_pattern(pattern)(path)


# Which patterns of an ordered list match a path, and which of them first.


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


# Globs over paths, any number of them at once.


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
