"""Patterns over leaf paths: globs with `**`, or regular expressions."""

from __future__ import annotations

import functools
import re
from typing import Any

from meshwright.errors import PartitionError, short

# What a glob never needs and a regular expression rarely lacks.
_REGULAR = re.compile(r"[\^$()|+\\\[\]{}]|\.\*|\.\?")


@functools.lru_cache(maxsize=4096)
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
    if isinstance(pattern, re.Pattern):
        return pattern
    if not isinstance(pattern, str) or not pattern:
        raise PartitionError(f"pattern {short(pattern)} is not a string or a compiled expression.")
    if _REGULAR.search(pattern):
        try:
            return re.compile(pattern)
        except re.error as error:
            raise PartitionError(f"pattern {short(pattern)} does not compile: {error}.") from error
    anchor = "^" if pattern.startswith("/") else "(?:^|/)"
    return re.compile(anchor + _glob(pattern.strip("/")) + "$")


def _glob(pattern: str) -> str:
    words = pattern.split("/")
    text = ""
    for place, word in enumerate(words):
        last = place == len(words) - 1
        if word == "**":
            text += "(?:[^/]+(?:/[^/]+)*)?" if last else "(?:[^/]+/)*"
            continue
        text += re.escape(word).replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
        if not last:
            text += "/?" if words[place + 1 :] == ["**"] else "/"
    return text


def matches(pattern: Any, path: str) -> bool:
    return compile_pattern(pattern).search(path) is not None
