"""Values of attributes, read when asked for: `name=value` behind an instruction's operands."""

from __future__ import annotations

import re

_OPEN, _CLOSE = "({[", ")}]"
_MARK = re.compile(r'[(){}\[\],"]')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def attribute(text: str, name: str) -> str | None:
    """The value of an attribute as it is written, or `None`.

    >>> attribute(", replica_groups={{0,1},{2,3}}, to_apply=%add", "replica_groups")
    '{{0,1},{2,3}}'
    """
    start = text.find(f", {name}=")
    if start < 0:
        return None
    start += len(name) + 3
    return text[start : end_of_value(text, start)]


def end_of_value(text: str, start: int) -> int:
    """Where a value ends: at a comma or a closing bracket that does not belong to it."""
    depth, at = 0, start
    while found := _MARK.search(text, at):
        mark, at = found[0], found.end()
        if mark == '"':
            quoted = _QUOTED.match(text, found.start())
            at = quoted.end() if quoted else at
        elif mark in _OPEN:
            depth += 1
        elif depth == 0:
            return found.start()
        elif mark in _CLOSE:
            depth -= 1
    return len(text)


def whole_numbers(text: str | None) -> tuple[int, ...]:
    """
    >>> whole_numbers("{0,2}")
    (0, 2)
    """
    return tuple(int(number) for number in re.findall(r"-?\d+", text or ""))
