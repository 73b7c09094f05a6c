"""Specs by rules: ordered (pattern, spec) pairs over leaf paths, of which the first match wins.

A pattern is a glob (`attn/w*`, `/layers/**/bias`) or a regular expression. A model has tens of
thousands of leaves and a table a hundred rules, so the globs are compiled into one automaton that
reads each path once, whatever the number of rules.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec

from meshwright.errors import PartitionError, option_text, short
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import Leaf, shown_path

Rules = Mapping[str, Any] | Sequence[tuple[Any, Any]]
Unmatched = Literal["error", "replicate", "shape"]
Unused = Literal["error", "allow"]


def read_rules(rules: Any) -> list[tuple[Any, PartitionSpec]]:
    """Read rules into patterns and specs; the error names the entry that is not a rule."""
    if isinstance(rules, Mapping):
        rules = list(rules.items())
    if isinstance(rules, str) or not isinstance(rules, (list, tuple)):
        raise PartitionError(
            f"rules: {short(rules)} is not a table. Pass pairs such as "
            "[('attn/*', ('fsdp', 'tp')), ('**', None)] or a dict.",
            option="rules",
        )
    pairs = []
    for place, rule in enumerate(rules):
        if not isinstance(rule, (list, tuple)) or len(rule) != 2:
            raise PartitionError(
                f"rules: entry {place}, {short(rule)}, is not a (pattern, spec) pair.",
                option="rules",
            )
        pattern, spec = rule
        compile_pattern(pattern, option="rules")  # raises now, before any leaf is looked at
        where = f"rules: entry {place}, {short(pattern)}"
        pairs.append((pattern, read_spec(spec, where, option="rules")))
    return pairs


def read_spec(value: Any, where: str, option: str | None = None) -> PartitionSpec:
    """Read a spec from a `PartitionSpec`, `None`, one axis name, or a list of entries (as in JSON).

    It is as long as it was written, replicated dims at the end included, so that one with too many
    entries for its array is reported. `where` begins the message of an error about `option`.
    """
    if isinstance(value, PartitionSpec):
        return value
    if value is None:
        return make_spec()
    if isinstance(value, str) and value:
        return make_spec([value])
    if not isinstance(value, (list, tuple)):
        raise PartitionError(
            f"{where}: {short(value)} is not a spec, e.g. ('fsdp', None, 'tp').", option=option
        )
    entries: list[Any] = []
    for entry in value:
        names = tuple(entry) if isinstance(entry, (list, tuple)) else (entry,)
        named = bool(names) and all(isinstance(name, str) and name for name in names)
        if entry is not None and not named:
            raise PartitionError(
                f"{where}: {short(entry)} is not an axis name, a list of them, or None for a dim "
                "that is not sharded.",
                option=option,
            )
        entries.append(names if isinstance(entry, (list, tuple)) else entry)
    return PartitionSpec(*entries)  # type: ignore[no-untyped-call]


def match_rules(
    leaves: Sequence[Leaf], rules: list[tuple[Any, PartitionSpec]]
) -> tuple[list[PartitionSpec | None], Iterator[str]]:
    """Return the spec of the first rule that matches each leaf, and problems of unused rules."""
    patterns = [pattern for pattern, _ in rules]
    pattern_list = PatternList(patterns)
    taken_by = [pattern_list.first(leaf.path) for leaf in leaves]
    specs = [None if rule is None else rules[rule][1] for rule in taken_by]
    return specs, _unused_problems(leaves, taken_by, patterns)


def _unused_problems(
    leaves: Sequence[Leaf], taken_by: Sequence[int | None], patterns: Sequence[Any]
) -> Iterator[str]:
    """Yield why each rule without a leaf has none: it matches none, or another rule comes first.

    `taken_by` has the index of the rule that took each leaf.
    """
    used = set(taken_by)
    unused = [rule for rule in range(len(patterns)) if rule not in used]
    unused_list = PatternList([patterns[rule] for rule in unused])
    # For an unused rule that does match a leaf: that leaf's path, and the rule that took it.
    overtaken: dict[int, tuple[str, int]] = {}
    for leaf, rule in zip(leaves, taken_by, strict=True):
        if unused and rule is not None:
            for hit in unused_list.matching(leaf.path):
                overtaken.setdefault(unused[hit], (leaf.path, rule))
    for rule in unused:
        if rule not in overtaken:
            yield (
                f"rule {_pattern_text(patterns[rule])} matches no leaf. Fix or remove it, or pass "
                f"{option_text('unused', 'allow')}."
            )
            continue
        path, first = overtaken[rule]
        yield (
            f"rule {_pattern_text(patterns[rule])} is never reached: rule "
            f"{_pattern_text(patterns[first])} comes first and takes {shown_path(path)}. "
            f"Move it up, drop it, or pass {option_text('unused', 'allow')}."
        )


def _pattern_text(pattern: Any) -> str:
    return short(str(getattr(pattern, "pattern", pattern)))


# One pattern: a glob with `**`, or a regular expression.

# What a glob never needs and a regular expression rarely lacks.
_REGULAR = re.compile(r"[\^$()|+\\\[\]{}]|\.\*|\.\?")

Matcher = Callable[[str], bool]


def is_glob(pattern: Any) -> bool:
    """Whether a pattern is a glob; with any of ``^ $ ( ) | + \\ [ ] { }`` or ``.*`` it is not."""
    return isinstance(pattern, str) and not _REGULAR.search(pattern)


def compile_pattern(pattern: str | re.Pattern[str], option: str | None = None) -> Matcher:
    """Compile a pattern into a function that says whether it matches a path.

    A glob is matched word by word against the end of the path: `*` is a part of one word, `**`
    any number of words; a leading `/` ties it to the beginning. A regular expression is searched
    in the path. `option` is the option that holds the pattern, for errors.

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
        raise PartitionError(
            f"pattern {short(pattern)} is not a string or a compiled expression.", option=option
        )
    try:
        return _compile(pattern)
    except re.error as error:
        raise PartitionError(
            f"pattern {short(pattern)} does not compile: {error}.", option=option
        ) from error


@functools.lru_cache(maxsize=4096)
def _compile(pattern: str) -> Matcher:
    if is_glob(pattern):
        globs = Globs([pattern])
        return lambda path: bool(globs.matching(path))
    return _searching(re.compile(pattern))


def _searching(expression: re.Pattern[str]) -> Matcher:
    return lambda path: expression.search(path) is not None


def matches(pattern: Any, path: str) -> bool:
    """Whether one pattern matches one path."""
    return compile_pattern(pattern)(path)


# Which patterns of an ordered list match a path, and which of them first.

_DIGITS = "0123456789"
# Ranges, back references and character codes: an expression with one of them may tell digits apart
# that it does not write out.
_TELLS_DIGITS = re.compile(r"[0-9]-|-[0-9]|\(\?P=|\\[0-9xuUN]")


class PatternList:
    """An ordered list of patterns. The globs among them are matched all at once.

    Regular expressions are tried one by one. Paths that differ only in digits which no expression
    tells apart (`layers/3/w`, `layers/7/w`) share one answer, so a deep model costs one layer.

    >>> patterns = PatternList(["up", "layers/*/w*", "q$", "**"])
    >>> patterns.first("layers/12/wq"), patterns.matching("layers/12/wq")
    (1, [1, 2, 3])
    """

    def __init__(self, patterns: Sequence[Any]):
        self._glob_places = [place for place, pattern in enumerate(patterns) if is_glob(pattern)]
        self._globs = Globs([patterns[place] for place in self._glob_places])
        self._expressions = [
            (place, compile_pattern(pattern))
            for place, pattern in enumerate(patterns)
            if not is_glob(pattern)
        ]
        texts = [
            getattr(patterns[place], "pattern", patterns[place]) for place, _ in self._expressions
        ]
        alike = [digit for digit in _DIGITS if not any(_tells(text, digit) for text in texts)]
        # For `str.translate`: every digit that makes no difference becomes the same one.
        self._alike = {ord(digit): alike[0] for digit in alike}
        self._first_by_kind: dict[str, int | None] = {}

    def first(self, path: str) -> int | None:
        """Return the place of the first pattern that matches, or `None`."""
        globs = [hits[0] for name in _names(path) if (hits := self._globs.matching(name))]
        places = [self._glob_places[place] for place in globs]
        if self._expressions and (place := self._first_expression(path)) is not None:
            places.append(place)
        return min(places, default=None)

    def _first_expression(self, path: str) -> int | None:
        kind = path.translate(self._alike)
        if kind not in self._first_by_kind:
            names = _names(path)
            hits = (place for place, matches in self._expressions if any(map(matches, names)))
            self._first_by_kind[kind] = next(hits, None)
        return self._first_by_kind[kind]

    def matching(self, path: str) -> list[int]:
        """Return the places of all patterns that match."""
        names = _names(path)
        globs = [self._glob_places[hit] for name in names for hit in self._globs.matching(name)]
        others = [place for place, matches in self._expressions if any(map(matches, names))]
        return sorted({*globs, *others})


def _tells(expression: str, digit: str) -> bool:
    return digit in expression or bool(_TELLS_DIGITS.search(expression))


def _names(path: str) -> list[str]:
    """Return the names a path may be matched by: itself, and without a `value` at its end.

    Flax's variables hold their array under `value`; a rule is written for the variable.
    """
    named = path.removesuffix("/value")
    return [path] if named == path else [path, named]


# Globs over paths, any number of them at once: a deterministic automaton over the words of a path,
# built lazily. Input: the globs split into words. A state is a set of places, each a glob and how
# many of its words are matched so far; a transition reads one word of the path. Words of a path are
# first reduced to their kind (which words of the globs they fit), so that `0`, `1`, `2` ... of a
# list of layers take the same transition. Example, for the glob `a/*`, stored as `** a *`:
#
#     {0, 1} --a--> {0, 1, 2} --b--> {0, 1, 3}     3 of 3 words are matched: a/b matches
#
# (Number 1 is there from the start because `**` may stand for no word.)

# A place in a glob: which glob, and how many of its words are matched.
_Place = tuple[int, int]


class Globs:
    """An ordered list of globs, asked which of them match a path.

    The time grows with the length of the path, neither with the number of ways to read it nor, for
    paths alike, with the number of globs.

    >>> globs = Globs(["up", "layers/*/w?", "**"])
    >>> globs.matching("layers/12/wq")
    (1, 2)
    """

    def __init__(self, globs: Sequence[str]):
        self._globs = [_words(glob) for glob in globs]
        words = {word for glob in self._globs for word in glob if word not in ("*", "**")}
        self._literals = frozenset(word for word in words if not re.search("[*?]", word))
        self._wildcards = [(word, _expression(word)) for word in sorted(words - self._literals)]
        self._kinds: dict[str, int] = {}  # a path's word -> its kind
        self._kind_ids: dict[frozenset[str], int] = {}  # words of the globs it fits -> kind
        self._kind_fits: list[frozenset[str]] = []  # and back
        self._states: dict[frozenset[_Place], int] = {}
        self._places: list[frozenset[_Place]] = []  # state -> its places
        self._transitions: list[dict[int, int]] = []  # state -> kind -> next state
        self._accepted: list[tuple[int, ...]] = []  # state -> globs that match if the path ends
        self._start = self._state((n, 0) for n in range(len(globs)))

    def matching(self, path: str) -> tuple[int, ...]:
        """Return the places in the list of all globs that match, in order."""
        # The hottest loop of `partition`: locals, and one dict look-up per word once warm.
        state, kinds, transitions = self._start, self._kinds, self._transitions
        for word in path.split("/"):
            kind = kinds.get(word)
            if kind is None:
                kind = self._kind(word)
            after = transitions[state].get(kind)
            state = self._step(state, kind) if after is None else after
        return self._accepted[state]

    def _kind(self, word: str) -> int:
        """Return which words of the globs a word fits, as a number."""
        literal = {word} & self._literals
        fits = frozenset(literal | {glob for glob, expr in self._wildcards if expr.fullmatch(word)})
        if fits not in self._kind_ids:
            self._kind_ids[fits] = len(self._kind_fits)
            self._kind_fits.append(fits)
        self._kinds[word] = self._kind_ids[fits]
        return self._kinds[word]

    def _step(self, state: int, kind: int) -> int:
        """Work out and store the state after `state` for words of a kind."""
        fits = self._kind_fits[kind]
        reached: set[_Place] = set()
        for glob, matched in self._places[state]:
            words = self._globs[glob]
            if matched < len(words):
                word = words[matched]
                if word == "**":
                    reached.add((glob, matched))
                elif word == "*" or word in fits:
                    reached.add((glob, matched + 1))
        self._transitions[state][kind] = self._state(reached)
        return self._transitions[state][kind]

    def _state(self, reached: Iterable[_Place]) -> int:
        """Return the state of these places and those behind a `**`, which may be no word."""
        places = frozenset(self._past_double_stars(reached))
        if places not in self._states:
            self._states[places] = len(self._places)
            self._places.append(places)
            self._transitions.append({})
            accepted = {glob for glob, matched in places if matched == len(self._globs[glob])}
            self._accepted.append(tuple(sorted(accepted)))
        return self._states[places]

    def _past_double_stars(self, places: Iterable[_Place]) -> Iterator[_Place]:
        for glob, matched in places:
            yield glob, matched
            while self._globs[glob][matched : matched + 1] == ["**"]:
                matched += 1
                yield glob, matched


def _words(glob: str) -> list[str]:
    """Split a glob into words; one that is not tied to the beginning may have any words before."""
    words = glob.strip("/").split("/")
    return words if glob.startswith("/") else ["**", *words]


def _expression(word: str) -> re.Pattern[str]:
    """Translate a word with `*` and `?` in it into a regular expression.

    Text between two `*` is taken where it first fits, which is as good as any later place: the
    atomic groups `(?>...)` (Python 3.11) forbid to try the later ones. Tried, they would take time
    in the order of the word's length to the power of its stars.
    """
    parts = [re.escape(part).replace(r"\?", ".") for part in re.split(r"\*+", word)]
    if len(parts) == 1:
        return re.compile(parts[0], re.DOTALL)
    first, *between, last = parts
    middle = "".join(f"(?>.*?{part})" for part in between)
    return re.compile(f"{first}{middle}.*{last}", re.DOTALL)
