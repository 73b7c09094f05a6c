"""Stacked layers: arrays whose first dim counts the layers of a scan, and stays whole."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import PartitionError, short
from meshwright.partitioning.patterns import matches

# Words that name a stack when no layer number follows them.
STACKS = frozenset({"layers", "blocks", "stack", "stacked", "scan", "scanned", "repeats"})


def is_stacked(path: str, rank: int, stacked: str | Sequence[str] | bool | None) -> bool:
    """Whether the first dim of a leaf counts layers.

    `None` reads it off the path: `layers/mlp/up` is a stack, `layers/0/mlp/up` is one layer of a
    list. Patterns say it by hand, `False` switches it off.

    >>> is_stacked("layers/mlp/up", 3, None), is_stacked("layers/0/mlp/up", 2, None)
    (True, False)
    """
    if not isinstance(stacked, (str, list, tuple, bool, type(None))):
        raise PartitionError(f"stacked: {short(stacked)} is not a pattern or a list of patterns.")
    if rank < 2 or stacked is False:
        return False
    if stacked is None or stacked is True:
        return _by_words(path)
    patterns = [stacked] if isinstance(stacked, str) else stacked
    return any(matches(pattern, path) for pattern in patterns)


def _by_words(path: str) -> bool:
    words = path.split("/")
    for place, word in enumerate(words):
        if word.lower() in STACKS:
            return not (place + 1 < len(words) and words[place + 1].lstrip("_").isdigit())
    return False
