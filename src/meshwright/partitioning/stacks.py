"""Stacked layers: arrays with a dim that counts the layers of a `lax.scan`, and is not sharded.

It is not sharded because every device needs its part of each layer in turn, and is nearly always
the first. Nothing in an array says what a dim counts, so it is inferred from the tree. A subtree is
a stack if all its arrays have the same first dim, and

- its name is a word for it (`layers`, `blocks`, ..., or with `scan` in it) and its children are not
  the layers themselves (`0`, `_0`, `layer_0`, `block0`, `h_3`), and the arrays are not matrices
  alone with more than `MOST_LAYERS` rows; or
- whatever its name, all have two dims or more, not all the same number of them, as a scan over
  weights and biases gives, and each holds more per layer than there are layers. Experts, and the
  heads of an attention, are stacked in the same way, and are recognised by their name.

In a subtree with such a name the second dim may count the layers, as MaxText stacks them: if all
arrays, four at least and of several ranks, share it and not the first.

Where no subtree holds the layers and nothing else, they are recognised by their number: more than
two thirds of all arrays of two dims and more, of several ranks, share a first dim of at most
`MOST_LAYERS`.

Paths that differ in numbers alone are decided together, so that all layers of a list are cut the
same way.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from meshwright.errors import PartitionError, option_text, short
from meshwright.partitioning.by_shape import kind_of
from meshwright.partitioning.rules import compile_pattern
from meshwright.trees.walk import Leaf

STACKS = frozenset({"layers", "blocks", "stack", "stacked", "scan", "scanned", "repeats"})
_NUMBER = re.compile(r"\d+")
_ONE_LAYER = re.compile(r"(\w*(layer|block|stage|cell|group)s?|blk|h|l)?[_-]?\d+", re.IGNORECASE)

# A subtree with such a name alone may have its heads first: not layers, unless more is stacked.
_HEADS = re.compile("att|head|mha", re.IGNORECASE)

MOST_LAYERS = 256
# Fewer arrays than these may share a first dim by chance; a layer of a transformer has more.
_FEWEST_ARRAYS = 4


def find_stacks(leaves: Sequence[Leaf], stacked: Any = None) -> tuple[dict[str, int], list[str]]:
    """Return the dim that counts layers, by path of a leaf; and patterns that match no leaf.

    `None` or `True` infers it from the tree, patterns say it by hand, `False` switches it off.
    """
    if not isinstance(stacked, (str, list, tuple, bool, type(None))):
        raise PartitionError(
            f"stacked: {short(stacked)} is not a pattern or a list of patterns.", option="stacked"
        )
    if stacked is False:
        return {}, []
    if stacked is None or stacked is True:
        return _infer_stacks(leaves), []
    stacks: dict[str, int] = {}
    unused = []
    for pattern in [stacked] if isinstance(stacked, str) else stacked:
        matches = compile_pattern(pattern, option="stacked")
        matched = {leaf.path: 0 for leaf in leaves if matches(leaf.path)}
        stacks |= matched
        if not matched:
            unused.append(
                f"stacked: {short(pattern)} matches no leaf. Fix or remove it, or pass "
                f"{option_text('unused', 'allow')}."
            )
    return stacks, unused


class _SubtreeShapes(NamedTuple):
    """The shapes of all arrays of a subtree, as far as they matter.

    `large_layers`: whether each array holds more elements per layer than there are layers.
    """

    first_sizes: frozenset[int]
    second_sizes: frozenset[int]
    ranks: frozenset[int]
    large_layers: bool
    arrays: int = 1

    def merge(self, other: _SubtreeShapes) -> _SubtreeShapes:
        return _SubtreeShapes(
            self.first_sizes | other.first_sizes,
            self.second_sizes | other.second_sizes,
            self.ranks | other.ranks,
            self.large_layers and other.large_layers,
            self.arrays + other.arrays,
        )


def _infer_stacks(leaves: Sequence[Leaf]) -> dict[str, int]:
    # The kind of a path: all its numbers are 0. A list of 100 layers is looked at once.
    kinds = [_NUMBER.sub("0", leaf.path) for leaf in leaves]
    shapes: dict[str, _SubtreeShapes] = {}
    shapes_by_kind = {(kind, leaf.shape) for kind, leaf in zip(kinds, leaves, strict=True)}
    for kind, shape in shapes_by_kind:
        if shape:
            own = _SubtreeShapes(
                frozenset(shape[:1]),
                frozenset(shape[1:2]),
                frozenset({len(shape)}),
                math.prod(shape[1:]) > shape[0],
            )
            for subtree, _ in _subtrees(kind):
                seen = shapes.get(subtree)
                shapes[subtree] = own if seen is None else own.merge(seen)
    stacks: dict[str, int] = {}
    for kind in set(kinds):
        for subtree, child in _subtrees(kind):
            if kind not in stacks and subtree in shapes:
                if _is_stack(subtree, child, shapes[subtree]):
                    stacks[kind] = 0
                elif _is_stack_of_second_dims(subtree, child, shapes[subtree]):
                    stacks[kind] = 1
    pairs = list(zip(kinds, leaves, strict=True))
    if stacks:
        return {leaf.path: stacks[kind] for kind, leaf in pairs if kind in stacks}
    members = _most_common_first_dim(shapes_by_kind)
    # By shape too: in a tuple without a word in its paths, a table of words is of the same kind.
    return {leaf.path: 0 for kind, leaf in pairs if (kind, leaf.shape) in members}


Kind = tuple[str, tuple[int, ...]]


def _most_common_first_dim(shapes_by_kind: Iterable[Kind]) -> set[Kind]:
    """Return the arrays whose first dim is that of most arrays, if it can only count layers."""
    arrays = [
        (kind, shape)
        for kind, shape in shapes_by_kind
        if len(shape) > 1 and kind_of(kind) != "experts"
    ]
    layers = collections.Counter(
        shape[0] for _, shape in arrays if math.prod(shape[1:]) > shape[0] > 1
    )
    for count, number in layers.most_common(1):
        members = [(kind, shape) for kind, shape in arrays if shape[0] == count]
        ranks = {len(shape) for _, shape in members}
        if (
            count <= MOST_LAYERS
            and number == len(members) >= _FEWEST_ARRAYS
            and 3 * number > 2 * len(arrays)
            and len(ranks) > 1
        ):
            return set(members)
    return set()


def _subtrees(path: str) -> Iterator[tuple[str, str]]:
    """Yield the subtrees around a leaf, each with its child towards the leaf; last the leaf itself.

    >>> list(_subtrees("a/b"))
    [('a', 'b'), ('a/b', '')]
    """
    words = path.split("/")
    for count in range(1, len(words) + 1):
        yield "/".join(words[:count]), words[count] if count < len(words) else ""


def _is_stack(subtree: str, child: str, shapes: _SubtreeShapes) -> bool:
    if len(shapes.first_sizes) > 1:
        return False
    word = subtree.rpartition("/")[2].lower()
    if _is_called_stack(subtree, child):
        # Matrices alone with many rows are weights of one block, not vectors of that many layers.
        return max(shapes.ranks) != 2 or max(shapes.first_sizes) <= MOST_LAYERS
    if _HEADS.search(word) or kind_of(subtree) == "experts":
        return False
    return len(shapes.ranks) > 1 and min(shapes.ranks) > 1 and shapes.large_layers


def _is_stack_of_second_dims(subtree: str, child: str, shapes: _SubtreeShapes) -> bool:
    """Whether all arrays of a subtree that is called a stack share their second dim alone."""
    return (
        _is_called_stack(subtree, child)
        and len(shapes.second_sizes) == 1 < len(shapes.first_sizes)
        and 1 < max(shapes.second_sizes) <= MOST_LAYERS
        and len(shapes.ranks) > 1 < min(shapes.ranks)
        and shapes.arrays >= _FEWEST_ARRAYS
    )


def _is_called_stack(subtree: str, child: str) -> bool:
    word = subtree.rpartition("/")[2].lower()
    return (word in STACKS or "scan" in word) and not _ONE_LAYER.fullmatch(child)
