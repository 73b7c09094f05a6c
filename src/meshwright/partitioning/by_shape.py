"""A spec from a shape alone: a scored choice, the same for the same shape.

The ways to put the weight axes on the dims are scored; axes that do not divide a dim and axes of
size one are never used. In this order:

1. the fewest bytes per device;
2. the least waste as the chip stores it, in tiles of 8 rows (of 32 bits) by 128 lanes: cutting a
   dim below its tile saves nothing (up to a quarter of waste counts as none);
3. axes that belong together (`fsdp` and `sp`) on one dim, others on dims of their own;
4. each axis where it is wanted: tensor axes on the largest dim (the last among equals), expert
   axes on the first, the others on the largest that is left.

All ways are scored where there are at most `EVERY_WAY` of them, as for five axes on four dims.
Beyond that the axes are placed one by one, the largest first, and the best `KEPT` ways so far are
followed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from meshwright.axes import role
from meshwright.errors import PartitionError, short
from meshwright.partitioning.rules import compile_pattern
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import Leaf

# (axis name, size, group): axes of one group like to share a dim.
Axis = tuple[str, int, int]
Owners = tuple[int | None, ...]

EVERY_WAY = 4096
KEPT = 32


def weight_axes(sizes: Mapping[str, int], asked: Sequence[str] | None = None) -> tuple[Axis, ...]:
    """The mesh axes that may cut weights, in the mesh's order.

    By default those whose role says so (`fsdp`, `tp`, `ep` and their like); all of them on a mesh
    without any known name.
    """
    names = list(asked) if asked is not None else [n for n in sizes if _cuts(n)]
    if asked is None and not any(role(name).name != "custom" for name in sizes):
        names = list(sizes)
    groups: dict[str, int] = {}
    return tuple(
        (name, sizes[name], groups.setdefault(together(name), len(groups)))
        for name in names
        if sizes[name] > 1
    )


def together(name: str) -> str:
    """Axes of one word like to share a dim: sequence axes go with `fsdp`."""
    kind = role(name).name
    if kind == "custom":
        return name
    return "fsdp" if kind in ("sequence", "context") else kind


def _cuts(name: str) -> bool:
    return role(name).shards_weights and role(name).name != "pipeline"


@functools.lru_cache(maxsize=65536)
def choose(shape: tuple[int, ...], bits: int, axes: tuple[Axis, ...], first: int) -> PartitionSpec:
    """The best spec for a shape; dims before `first` stay whole.

    >>> choose((1024, 4096), 32, (("fsdp", 4, 0), ("tp", 2, 1)), 0)
    P('fsdp', 'tp')
    >>> choose((6, 4096), 32, (("fsdp", 4, 0), ("tp", 2, 1)), 0)
    P(None, ('fsdp', 'tp'))
    """
    score = functools.partial(_score, shape, bits, axes, _by_size(shape))
    dims = [d for d in range(first, len(shape)) if shape[d] > 1]
    ways = math.prod(1 + sum(not shape[d] % size for d in dims) for _, size, _ in axes)
    found: list[Owners] = [(None,) * len(axes)]
    for place in sorted(range(len(axes)), key=lambda place: -axes[place][1]):
        found = [more for owners in found for more in _placed(shape, axes, owners, place, dims)]
        if ways > EVERY_WAY:
            found = sorted(found, key=score)[:KEPT]
    return _spec(axes, min(found, key=score), len(shape))


def _placed(
    shape: tuple[int, ...], axes: tuple[Axis, ...], owners: Owners, place: int, dims: Sequence[int]
) -> Iterator[Owners]:
    """The ways to put one more axis: nowhere, and on each dim that it still divides."""
    yield owners
    for dim in dims:
        cut = math.prod(axis[1] for axis, owner in zip(axes, owners, strict=True) if owner == dim)
        if shape[dim] % (cut * axes[place][1]) == 0:
            yield (*owners[:place], dim, *owners[place + 1 :])


def _by_size(shape: tuple[int, ...]) -> tuple[int, ...]:
    """For every dim its place among all from the largest down, the last first among equals."""
    order = sorted(range(len(shape)), key=lambda d: (-shape[d], -d))
    return tuple(order.index(d) for d in range(len(shape)))


def _score(
    shape: tuple[int, ...],
    bits: int,
    axes: tuple[Axis, ...],
    by_size: tuple[int, ...],
    owners: Owners,
) -> tuple[float, ...]:
    local = list(shape)
    placed = [(axis, dim) for axis, dim in zip(axes, owners, strict=True) if dim is not None]
    for axis, dim in placed:
        local[dim] //= axis[1]
    together = {(axis[2], dim) for axis, dim in placed}
    spread = len(together) - len({group for group, _ in together})
    crowded = len(together) - len({dim for _, dim in together})
    wanted = sum(
        dim if role(axis[0]).name == "expert" else by_size[dim] * _eagerness(axis[0])
        for axis, dim in placed
    )
    order = [-1 if dim is None else dim for dim in owners]
    return (math.prod(local), _waste(local, bits), spread + crowded, wanted, *order)


def _eagerness(name: str) -> int:
    """Tensor axes choose first."""
    return 4 if role(name).name == "tensor" else 1


def _waste(local: Sequence[int], bits: int) -> int:
    """How much larger a piece is as stored, in doublings: its last two dims fill whole tiles."""
    rows = max(1, 8 * 32 // bits)
    tiles = [1] * max(0, len(local) - 2) + [rows, 128][max(0, 2 - len(local)) :]
    stored = math.prod(-(-side // tile) * tile for side, tile in zip(local, tiles, strict=True))
    ratio = stored / max(1, math.prod(local))
    return 0 if ratio < 1.25 else math.ceil(math.log2(ratio))


def _spec(axes: tuple[Axis, ...], owners: Sequence[int | None], rank: int) -> PartitionSpec:
    entries: list[str | tuple[str, ...] | None] = []
    for dim in range(rank):
        names = tuple(axis[0] for axis, owner in zip(axes, owners, strict=True) if owner == dim)
        entries.append(names if len(names) > 1 else (names[0] if names else None))
    return make_spec(entries)


# Stacked layers: arrays whose first dim counts the layers of a scan, and stays whole.
#
# Nothing in an array says what its first dim counts, so it is read off the tree. A subtree is a
# stack
# if all its arrays have the same first dim, and
#
# - its name is a word for it (`layers`, `blocks`, ...) and its children are not the layers
#   themselves
#   (`0`, `_0`, `layer_0`, `block0`, `h_3`); or
# - whatever its name, all have two dims or more, not all the same number of them, as a scan over
#   weights and biases gives, and each holds more per layer than there are layers. Experts are
#   stacked in the same way, and are told by their name.
#
# Paths that differ in numbers alone are judged together, so that all layers of a list go one way.


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
