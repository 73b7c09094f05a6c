"""Patterns over leaf paths: globs with `**`, or regular expressions."""

from __future__ import annotations

import functools
import re
from typing import Any

from meshwright.errors import PartitionError, short

# What a glob never needs and a regular expression rarely lacks.
_REGULAR = re.compile(r"[\^$()|+\\\[\]{}]|\.\*|\.\?")


def compile_pattern(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """A pattern as a regular expression to be searched in a path.

    A string with any of ``^ $ ( ) | + \\ [ ] { }`` or ``.*`` is a regular expression. Any other
    is a glob, matched word by word against the end of the path: `*` is a piece of one word, `**`
    any number of words; a leading `/` ties it to the beginning.

    >>> bool(compile_pattern("attn/w*").search("layers/0/attn/wq"))
    True
    >>> bool(compile_pattern("/layers/*/mlp/**").search("layers/0/mlp/up/kernel"))
    True
    >>> bool(compile_pattern("(wq|wk)$").search("layers/0/attn/wq"))
    True
    """
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return pattern
    if not isinstance(pattern, str) or not pattern:
        raise PartitionError(f"pattern {short(pattern)} is not a string or a compiled expression.")
    return _compile(pattern)


@functools.lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str]:
    if _REGULAR.search(pattern):
        try:
            return re.compile(pattern)
        except re.error as error:
            raise PartitionError(f"pattern {short(pattern)} does not compile: {error}.") from error
    anchor = "^" if pattern.startswith("/") else ""
    return re.compile(anchor + "".join(map(_glob_word, pattern.strip("/").split("/"))) + "$")


def _glob_word(word: str) -> str:
    """A word with the slash before it, which the first word of a path does not have."""
    if word == "**":
        return "(?:(?:^|/)[^/]+)*"
    text = re.escape(word).replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    return f"(?:^|/){text}(?=/|$)"


def matches(pattern: Any, path: str) -> bool:
    return compile_pattern(pattern).search(path) is not None
