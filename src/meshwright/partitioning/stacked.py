"""Stacked layers: arrays whose first dim counts the layers of a scan, and stays whole.

Nothing in an array says what its first dim counts, so it is read off the tree. A subtree is a stack
if all its arrays have the same first dim, and

- its name is a word for it (`layers`, `blocks`, ...) and its children are not the layers themselves
  (`0`, `_0`, `layer_0`, `block0`, `h_3`); or
- whatever its name, all have two dims or more, not all the same number of them, as a scan over
  weights and biases gives, and each holds more per layer than there are layers. Experts are
  stacked in the same way, and are told by their name.

Paths that differ in numbers alone are judged together, so that all layers of a list go one way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from meshwright.errors import PartitionError, short
from meshwright.partitioning.leaves import Leaf
from meshwright.partitioning.patterns import compile_pattern

STACKS = frozenset({"layers", "blocks", "stack", "stacked", "scan", "scanned", "repeats"})
_NUMBER = re.compile(r"\d+")
_ONE_LAYER = re.compile(r"(\w*(layer|block|stage|cell|group)s?|blk|h|l)?[_-]?\d+", re.IGNORECASE)
_EXPERTS = re.compile("expert|moe", re.IGNORECASE)


def find_stacks(leaves: Sequence[Leaf], stacked: Any = None) -> tuple[set[str], list[str]]:
    """The paths of leaves whose first dim counts layers; and patterns that match no leaf.

    `None` or `True` reads it off the tree, patterns say it by hand, `False` switches it off.
    """
    if not isinstance(stacked, (str, list, tuple, bool, type(None))):
        raise PartitionError(f"stacked: {short(stacked)} is not a pattern or a list of patterns.")
    if stacked is False:
        return set(), []
    if stacked is None or stacked is True:
        return _guess(leaves), []
    found: set[str] = set()
    unused = []
    for pattern in [stacked] if isinstance(stacked, str) else stacked:
        matches = compile_pattern(pattern)
        taken = {leaf.path for leaf in leaves if matches(leaf.path)}
        found |= taken
        if not taken:
            unused.append(
                f"stacked: {short(pattern)} matches no leaf. Mend or drop it, or pass "
                "unused='allow'."
            )
    return found, unused


class _Shared(NamedTuple):
    """What the arrays of a subtree have in common."""

    firsts: frozenset[int]
    ranks: frozenset[int]
    roomy: bool

    def __or__(self, other: Any) -> _Shared:
        return _Shared(
            self.firsts | other.firsts, self.ranks | other.ranks, self.roomy and other.roomy
        )


def _guess(leaves: Sequence[Leaf]) -> set[str]:
    kinds = [_NUMBER.sub("0", leaf.path) for leaf in leaves]
    shared: dict[str, _Shared] = {}
    for kind, shape in {(kind, leaf.shape) for kind, leaf in zip(kinds, leaves, strict=True)}:
        if shape:
            own = _Shared(
                frozenset(shape[:1]), frozenset({len(shape)}), math.prod(shape[1:]) > shape[0]
            )
            for subtree, _ in _around(kind):
                shared[subtree] = own | shared.get(subtree, own)
    stacks = {
        kind
        for kind in set(kinds)
        if any(
            subtree in shared and _is_stack(subtree, inside, shared[subtree])
            for subtree, inside in _around(kind)
        )
    }
    return {leaf.path for kind, leaf in zip(kinds, leaves, strict=True) if kind in stacks}


def _around(path: str) -> Iterator[tuple[str, str]]:
    """The subtrees a leaf stands in, with the next word inside; at last the leaf itself."""
    words = path.split("/")
    for count in range(1, len(words) + 1):
        yield "/".join(words[:count]), words[count] if count < len(words) else ""


def _is_stack(subtree: str, inside: str, shared: _Shared) -> bool:
    if len(shared.firsts) > 1:
        return False
    if subtree.rpartition("/")[2].lower() in STACKS and not _ONE_LAYER.fullmatch(inside):
        return True
    several = len(shared.ranks) > 1 and min(shared.ranks) > 1
    return several and shared.roomy and not _EXPERTS.search(subtree)
