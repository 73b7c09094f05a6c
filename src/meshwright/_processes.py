"""A word from every process to process 0, and one answer to all, through the key-value store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# The watch ends a process whose peers do not come; the store itself need not.
_LONG = 1000 * 60 * 60 * 24 * 7

Combine = Callable[[Sequence[str]], str]


def confer(
    client: Any,
    room: str,
    process: int,
    count: int,
    text: str,
    combine: Combine,
    waits: Callable[[int], None],
) -> str:
    """What `combine` makes of all texts, by process. `waits` hears for which process."""
    if process:
        client.key_value_set(f"{room}/{process}", text)
        waits(0)
        return str(client.blocking_key_value_get(f"{room}/answer", _LONG))
    texts = [text]
    for other in range(1, count):
        waits(other)
        texts.append(str(client.blocking_key_value_get(f"{room}/{other}", _LONG)))
    answer = combine(texts)
    client.key_value_set(f"{room}/answer", answer)
    return answer
