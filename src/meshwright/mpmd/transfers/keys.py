"""What both ends of a transfer call it: a number made of the route, a key and a turn."""

from __future__ import annotations

import hashlib
import itertools
import operator
from typing import Any

from meshwright.errors import TransferError, short


def key_text(key: Any) -> str:
    """A key as text that is the same in every process.

    >>> key_text((3, "grads")), key_text(7)
    ("(3, 'grads')", '7')
    """
    if isinstance(key, str):
        return repr(str(key))
    if isinstance(key, tuple):
        return f"({', '.join(map(key_text, key))})"
    try:
        return str(operator.index(key))
    except TypeError:
        raise TransferError(
            f"key {short(key)}: a {type(key).__name__} is not told apart alike in every process. "
            "Use an int, a str or a tuple of them, such as (stage, microbatch)."
        ) from None


def number(name: str, key: str, turn: int, sender: int, receiver: int) -> int:
    """63 bits that nobody else uses, the same at both ends.

    >>> number("a", "1", 0, 0, 1) == number("a", "1", 0, 0, 1) != number("a", "1", 1, 0, 1)
    True
    """
    text = f"{name} {key} {turn} {sender} {receiver}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Turns:
    """How often each key was used on each route: the n-th send meets the n-th receive."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], itertools.count[int]] = {}

    def next(self, name: tuple[str, str]) -> int:
        """The turn of a route's name and a key, counted from 0."""
        return next(self._counts.setdefault(name, itertools.count()))
