"""Patterns over leaf paths: globs with `**`, or regular expressions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from meshwright.errors import PartitionError, short
from meshwright.partitioning.globs import Globs

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
