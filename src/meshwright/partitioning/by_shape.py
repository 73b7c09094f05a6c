"""Specs by shape: a scored choice that is the same for the same shape; stacks of layers.

Every assignment of the weight axes to the dims is scored; axes that do not divide a dim and axes of
size one are never used. The score compares, in this order:

1. bytes per device, the fewest first;
2. padding as the chip stores the shard, in tiles of 8 rows (of 32 bits) by 128 lanes: cutting a
   dim below its tile saves nothing (up to a quarter of padding counts as none);
3. axes that belong together (`fsdp` and `sp`) on one dim, others on dims of their own;
4. each axis where it is wanted: tensor axes on the largest dim (the last among equals), expert
   axes on the first, the others on the largest that is left.

All assignments are scored where there are at most `MOST_SCORED` of them, as for five axes on four
dims. Beyond that it is a beam search: the axes are assigned one by one, the largest first, and the
best `BEAM_WIDTH` partial assignments are kept.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from meshwright.axes import role
from meshwright.errors import PartitionError, option_text, short
from meshwright.partitioning.rules import compile_pattern
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import Leaf

# (axis name, size, group): axes of one group share a dim if they can.
Axis = tuple[str, int, int]
# For each axis the dim that it cuts, or `None`.
Assignment = tuple[int | None, ...]

MOST_SCORED = 4096
BEAM_WIDTH = 32


def weight_axes(sizes: Mapping[str, int], asked: Sequence[str] | None = None) -> tuple[Axis, ...]:
    """Return the mesh axes that may cut weights, in the mesh's order, or those `asked` for.

    By default those whose role says so (`fsdp`, `tp`, `ep` and their like); all of them on a mesh
    without any known name.
    """
    names = list(asked) if asked is not None else [n for n in sizes if _cuts_weights(n)]
    if asked is None and not any(role(name).name != "custom" for name in sizes):
        names = list(sizes)
    groups: dict[str, int] = {}
    return tuple(
        (name, sizes[name], groups.setdefault(axis_group(name), len(groups)))
        for name in names
        if sizes[name] > 1
    )


def axis_group(name: str) -> str:
    """Return the group of an axis; sequence axes hold weights as `fsdp` does, so they join it."""
    kind = role(name).name
    if kind == "custom":
        return name
    return "fsdp" if kind in ("sequence", "context") else kind


def _cuts_weights(name: str) -> bool:
    # A pipeline axis cuts weights too, but by stage: no array is cut along it.
    return role(name).shards_weights and role(name).name != "pipeline"


# Cached, since a model has few distinct shapes: the layers of a list all ask the same question.
@functools.lru_cache(maxsize=65536)
def choose_spec(
    shape: tuple[int, ...], bits: int, axes: tuple[Axis, ...], first_dim: int
) -> PartitionSpec:
    """Return the best spec for a shape with elements of `bits`; dims before `first_dim` stay whole.

    >>> choose_spec((1024, 4096), 32, (("fsdp", 4, 0), ("tp", 2, 1)), 0)
    P('fsdp', 'tp')
    >>> choose_spec((6, 4096), 32, (("fsdp", 4, 0), ("tp", 2, 1)), 0)
    P(None, ('fsdp', 'tp'))
    """
    score = functools.partial(_score, shape, bits, axes, _size_ranks(shape))
    dims = [dim for dim in range(first_dim, len(shape)) if shape[dim] > 1]
    # An upper bound: axes that divide a dim one by one may not divide it together.
    count = math.prod(1 + sum(not shape[dim] % size for dim in dims) for _, size, _ in axes)
    candidates: list[Assignment] = [(None,) * len(axes)]
    for axis in sorted(range(len(axes)), key=lambda axis: -axes[axis][1]):
        candidates = [
            longer
            for assignment in candidates
            for longer in _extended(shape, axes, assignment, axis, dims)
        ]
        if count > MOST_SCORED:
            candidates = sorted(candidates, key=score)[:BEAM_WIDTH]
    return _spec(axes, min(candidates, key=score), len(shape))


def _extended(
    shape: tuple[int, ...],
    axes: tuple[Axis, ...],
    assignment: Assignment,
    axis: int,
    dims: Sequence[int],
) -> Iterator[Assignment]:
    """Yield the assignments with one more axis: unused, and on each dim that it still divides."""
    yield assignment
    for dim in dims:
        cut = math.prod(
            size for (_, size, _), at in zip(axes, assignment, strict=True) if at == dim
        )
        if shape[dim] % (cut * axes[axis][1]) == 0:
            yield (*assignment[:axis], dim, *assignment[axis + 1 :])


def _size_ranks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return each dim's rank from the largest down; of equal dims the last comes first."""
    order = sorted(range(len(shape)), key=lambda d: (-shape[d], -d))
    return tuple(order.index(d) for d in range(len(shape)))


def _score(
    shape: tuple[int, ...],
    bits: int,
    axes: tuple[Axis, ...],
    size_ranks: tuple[int, ...],
    assignment: Assignment,
) -> tuple[float, ...]:
    """Score an assignment, the least is the best; see the module for the order."""
    local = list(shape)
    used = [(axis, dim) for axis, dim in zip(axes, assignment, strict=True) if dim is not None]
    for (_, size, _), dim in used:
        local[dim] //= size
    # A group on two dims counts once, and so does a dim with two groups.
    pairs = {(group, dim) for (_, _, group), dim in used}
    split_groups = len(pairs) - len({group for group, _ in pairs})
    shared_dims = len(pairs) - len({dim for _, dim in pairs})
    unwanted = sum(
        dim if role(name).name == "expert" else size_ranks[dim] * _weight(name)
        for (name, _, _), dim in used
    )
    # Last the assignment itself: equal scores must not depend on the order of a search.
    order = [-1 if dim is None else dim for dim in assignment]
    return (math.prod(local), _padding(local, bits), split_groups + shared_dims, unwanted, *order)


def _weight(name: str) -> int:
    """Return how much an axis counts in the contest for the largest dim; tensor axes win it."""
    return 4 if role(name).name == "tensor" else 1


def _padding(local: Sequence[int], bits: int) -> int:
    """Return how much larger a shard is as stored, in doublings: its last two dims fill tiles."""
    # A TPU register has 8 rows of 128 lanes of 32 bits; narrower types pack several rows into one.
    rows = max(1, 8 * 32 // bits)
    tiles = [1] * max(0, len(local) - 2) + [rows, 128][max(0, 2 - len(local)) :]
    stored = math.prod(-(-size // tile) * tile for size, tile in zip(local, tiles, strict=True))
    ratio = stored / max(1, math.prod(local))
    return 0 if ratio < 1.25 else math.ceil(math.log2(ratio))


def _spec(axes: tuple[Axis, ...], assignment: Assignment, rank: int) -> PartitionSpec:
    entries: list[str | tuple[str, ...] | None] = []
    for dim in range(rank):
        names = tuple(name for (name, _, _), at in zip(axes, assignment, strict=True) if at == dim)
        entries.append(names if len(names) > 1 else (names[0] if names else None))
    return make_spec(entries)


# Stacked layers: arrays whose first dim counts the layers of a `lax.scan`, and stays whole, because
# every device needs its part of each layer in turn.
#
# Nothing in an array says what its first dim counts, so it is inferred from the tree. A subtree is
# a stack if all its arrays have the same first dim, and
#
# - its name is a word for it (`layers`, `blocks`, ...) and its children are not the layers
#   themselves (`0`, `_0`, `layer_0`, `block0`, `h_3`); or
# - whatever its name, all have two dims or more, not all the same number of them, as a scan over
#   weights and biases gives, and each holds more per layer than there are layers. Experts are
#   stacked in the same way, and are recognised by their name.
#
# Paths that differ in numbers alone are decided together, so that all layers of a list are cut the
# same way.

STACKS = frozenset({"layers", "blocks", "stack", "stacked", "scan", "scanned", "repeats"})
_NUMBER = re.compile(r"\d+")
_ONE_LAYER = re.compile(r"(\w*(layer|block|stage|cell|group)s?|blk|h|l)?[_-]?\d+", re.IGNORECASE)
_EXPERTS = re.compile("expert|moe", re.IGNORECASE)


def find_stacks(leaves: Sequence[Leaf], stacked: Any = None) -> tuple[set[str], list[str]]:
    """Return the paths of leaves whose first dim counts layers; and patterns that match no leaf.

    `None` or `True` infers it from the tree, patterns say it by hand, `False` switches it off.
    """
    if not isinstance(stacked, (str, list, tuple, bool, type(None))):
        raise PartitionError(
            f"stacked: {short(stacked)} is not a pattern or a list of patterns.", option="stacked"
        )
    if stacked is False:
        return set(), []
    if stacked is None or stacked is True:
        return _infer_stacks(leaves), []
    stacks: set[str] = set()
    unused = []
    for pattern in [stacked] if isinstance(stacked, str) else stacked:
        matches = compile_pattern(pattern, option="stacked")
        matched = {leaf.path for leaf in leaves if matches(leaf.path)}
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
    ranks: frozenset[int]
    large_layers: bool

    def merge(self, other: _SubtreeShapes) -> _SubtreeShapes:
        return _SubtreeShapes(
            self.first_sizes | other.first_sizes,
            self.ranks | other.ranks,
            self.large_layers and other.large_layers,
        )


def _infer_stacks(leaves: Sequence[Leaf]) -> set[str]:
    # The kind of a path: all its numbers are 0. A list of 100 layers is looked at once.
    kinds = [_NUMBER.sub("0", leaf.path) for leaf in leaves]
    shapes: dict[str, _SubtreeShapes] = {}
    for kind, shape in {(kind, leaf.shape) for kind, leaf in zip(kinds, leaves, strict=True)}:
        if shape:
            own = _SubtreeShapes(
                frozenset(shape[:1]), frozenset({len(shape)}), math.prod(shape[1:]) > shape[0]
            )
            for subtree, _ in _subtrees(kind):
                shapes[subtree] = own.merge(shapes.get(subtree, own))
    stacks = {
        kind
        for kind in set(kinds)
        if any(
            subtree in shapes and _is_stack(subtree, child, shapes[subtree])
            for subtree, child in _subtrees(kind)
        )
    }
    return {leaf.path for kind, leaf in zip(kinds, leaves, strict=True) if kind in stacks}


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
    if subtree.rpartition("/")[2].lower() in STACKS and not _ONE_LAYER.fullmatch(child):
        return True
    several_ranks = len(shapes.ranks) > 1 and min(shapes.ranks) > 1
    return several_ranks and shapes.large_layers and not _EXPERTS.search(subtree)
