"""Specs by shape: a scored choice, the same for the same shape but in chains and in attention.

Every assignment of the weight axes to the dims is scored; axes that do not divide a dim and axes of
size one are never used. The score compares, in this order:

1. bytes per device, the fewest first;
2. waste, in doublings: padding as the chip stores the shard, in tiles of 8 rows (of 32 bits) by 128
   lanes (below a half it counts as none, and so in convolutions and attention), and one for each
   further group of axes on one dim, since axes that belong together (`fsdp` and `sp`) should share
   a dim and others have dims of their own. Two kinds of array are the other way round, one dim
   takes all axes (`_shared_dim`): the rows of a table of embeddings, and a convolution's outputs;
3. each axis where it is wanted: tensor axes on what a product makes (`_made_by_product`), else on
   the largest dim, the last of equals (`turned_kernels`: the first), expert axes on the first dim,
   the others on the largest that is left.

Where several axes share a dim, tensor and expert axes come first: what is gathered over the others
is then one piece. The other way round it is a strided set, so that XLA gathers over all of them
and every device of a tensor axis does the work of all.

All assignments are scored where there are at most `MOST_SCORED` of them, as for five axes on four
dims. Beyond that it is a beam search: the axes are assigned one by one, the largest first, and the
best `BEAM_WIDTH` partial assignments are kept.
"""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec

from meshwright.axes import role
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import Leaf

# (axis name, size, group): axes of one group share a dim if they can.
Axis = tuple[str, int, int]
# For each axis the dim that it cuts, or `None`.
Assignment = tuple[int | None, ...]

MOST_SCORED = 4096
BEAM_WIDTH = 32

# A matrix with so many times more rows than columns is a table of embeddings unless its name says
# that it is a kernel (Gemma's feed-forwards narrow 8 times), and so is any with a table's name.
# Cutting its columns over an axis that cuts the batch too costs most: XLA then exchanges
# activations in place of gathering the table (FlaxGPT2 on 8 x 8 H100s: 78 ms against 19).
TABLE_RATIO = 6
_TABLE = re.compile(
    r"(.*[/_])?(embeddings?|embed|embedder|embed_tokens|table|wte|wpe)(/(embedding|table|weight))?",
    re.IGNORECASE,
)
_PRODUCT = re.compile(
    r"(.*[/_])?(kernel|mlp|ffn?|feed_?forward|dense|linear|down|proj|fc)[0-9]*([/_].*)?",
    re.IGNORECASE,
)
# Sides of a convolution's window: patches of vision transformers are the largest.
_LARGEST_WINDOW = 32
# Head sizes in use end at 256; the dims of experts and of feed-forwards are larger than this.
_LARGEST_HEAD = 512
# `params/hidden_1` and `layers/1`: the number of a layer among others.
_LAST_NUMBER = re.compile(r"(.*?)([0-9]+)")
# The projections of attention: what goes into it, side by side, and what comes out of it.
_INTO_ATTENTION = re.compile(
    r"(q|k|v|w[qkv]|to_[qkv]|query|key|value|qkv|query_key_value|c_attn)(_proj|_projection)?"
)
_OUT_OF_ATTENTION = re.compile(r"(o|wo|out|output|to_out|c|dense)(_proj|_projection)?|proj")
# What the array of a layer is called, as against the layer.
_ARRAY_NAMES = ("kernel", "weight", "weights", "w", "value")
_EXPERTS = re.compile("expert|moe", re.IGNORECASE)
_CONVOLUTION = re.compile("conv", re.IGNORECASE)


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


def kind_of(path: str) -> str:
    """Return what a path says of its array: "experts", "table", "convolution", "product", or "".

    >>> kind_of("params/wte/embedding"), kind_of("patch_embedding/linear/weight"), kind_of("w")
    ('table', 'product', '')
    """
    if _EXPERTS.search(path):
        return "experts"
    if _TABLE.fullmatch(path):
        return "table"
    # Flax and Equinox call the kernels of both so; `Conv1D` of GPT-2 has two dims, and is none.
    if _CONVOLUTION.search(path):
        return "convolution"
    return "product" if _PRODUCT.fullmatch(path) else ""


# Cached, since a model has few distinct shapes: the layers of a list all ask the same question.
@functools.lru_cache(maxsize=65536)
def choose_spec(
    shape: tuple[int, ...],
    bits: int,
    axes: tuple[Axis, ...],
    first_dim: int = 0,
    kind: str = "",
    turned: bool = False,
) -> PartitionSpec:
    """Return the best spec for a shape with elements of `bits`; dims before `first_dim` are left.

    `kind` is what the path says (`kind_of`); experts are counted by the first dim. `turned`: tensor
    axes want the first of two equal dims, not the last (`turned_kernels`).

    >>> choose_spec((1024, 4096), 32, (("fsdp", 4, 0), ("tp", 2, 1)))
    P('fsdp', 'tp')
    >>> choose_spec((512, 8, 64), 32, (("fsdp", 4, 0), ("tp", 2, 1)))
    P('fsdp', 'tp')
    >>> choose_spec((6, 4096), 32, (("fsdp", 4, 0), ("tp", 2, 1)))
    P(None, ('tp', 'fsdp'))
    """
    made = _made_by_product(shape[first_dim:], kind)
    shared = _shared_dim(shape[first_dim:], kind)
    made = None if made is None else first_dim + made
    shared = None if shared is None else first_dim + shared
    ranks = _dim_ranks(shape, made, turned)
    score = functools.partial(_score, shape, bits, axes, ranks, made, shared)
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


# In: the arrays of a tree. Out: the paths of square kernels whose tensor axis belongs on the first
# dim. Invariant: along a chain of plain layers the axis alternates between what a kernel makes and
# what it takes, so that two products share one sum. Example, `hidden_0` to `hidden_3` of shapes
# (256, 1024), (1024, 1024), (1024, 1024), (1024, 64): the largest dims say last and first for the
# two at the ends, and `hidden_1` is turned. (A policy network on 16 chips: 7.6 ms, turned 5.6.)
def turned_kernels(leaves: Sequence[Leaf]) -> set[str]:
    """Find square kernels in chains of layers and in attention that want it so."""
    return _turned_in_chains(leaves) | _turned_in_attention(leaves)


def _turned_in_chains(leaves: Sequence[Leaf]) -> set[str]:
    """Find chains of layers (`hidden_0`, `layers/1`) of one matrix each, the first not square."""
    matrices = [leaf for leaf in leaves if len(leaf.shape) > 1]
    per_layer = collections.Counter(leaf.path.rpartition("/")[0] for leaf in matrices)
    chains: dict[tuple[str, str], list[tuple[int, Leaf]]] = collections.defaultdict(list)
    for leaf in matrices:
        layer, _, name = leaf.path.rpartition("/")
        match = _LAST_NUMBER.fullmatch(layer)
        if match and per_layer[layer] == 1 and len(leaf.shape) == 2:
            chains[match[1], name].append((int(match[2]), leaf))
    turned: set[str] = set()
    for numbered in chains.values():
        chain = [leaf for _, leaf in sorted(numbered, key=lambda pair: pair[0])]
        rows, columns = chain[0].shape
        for place, leaf in enumerate(chain) if rows != columns else ():
            is_made = place % 2 == 0
            if leaf.shape[0] == leaf.shape[1] and (rows > columns) == is_made:
                turned.add(leaf.path)
    return turned


# The same invariant in attention: queries, keys and values are made, so that each device has heads
# of its own, and what comes out of it is taken. (A ViT on 16 chips: 4.6 ms, turned 3.9.)
def _turned_in_attention(leaves: Sequence[Leaf]) -> set[str]:
    words = {leaf.path: _layer_and_name(leaf.path) for leaf in leaves if len(leaf.shape) > 1}
    blocks = {block for block, layer, _ in words.values() if _INTO_ATTENTION.fullmatch(layer)}
    makes_first = _names_that_make_first(leaves) if blocks else {}
    turned: set[str] = set()
    for leaf in leaves:
        block, layer, name = words.get(leaf.path, ("", "", ""))
        if block in blocks and leaf.shape[-2:-1] == leaf.shape[-1:]:
            is_made = bool(_INTO_ATTENTION.fullmatch(layer))
            if is_made or _OUT_OF_ATTENTION.fullmatch(layer):
                if is_made == makes_first.get(name, name == "weight"):
                    turned.add(leaf.path)
    return turned


def _layer_and_name(path: str) -> tuple[str, str, str]:
    """Split a path into the block around a layer, the layer, and the name of its array.

    >>> _layer_and_name("h/0/attn/q_proj/kernel"), _layer_and_name("attn/q")
    (('h/0/attn', 'q_proj', 'kernel'), ('attn', 'q', ''))
    """
    layer, _, name = path.rpartition("/")
    if name.lower() not in _ARRAY_NAMES:
        layer, name = path, ""
    block, _, word = layer.rpartition("/")
    return block, word.lower(), name.lower()


def _names_that_make_first(leaves: Sequence[Leaf]) -> dict[str, bool]:
    """Return whether kernels of a name are (out, in), where most biases beside them say so.

    The others go by their library: `weight` is (out, in) in Equinox and in PyTorch.
    """
    biases = {
        leaf.path.rpartition("/")[0]: leaf.shape[-1]
        for leaf in leaves
        if leaf.shape and leaf.path.rpartition("/")[2] == "bias"
    }
    votes: collections.Counter[str] = collections.Counter()
    for leaf in leaves:
        layer, _, name = leaf.path.rpartition("/")
        if len(leaf.shape) > 1 and leaf.shape[-2] != leaf.shape[-1]:
            votes[name.lower()] += (biases.get(layer) == leaf.shape[-2]) - (
                biases.get(layer) == leaf.shape[-1]
            )
    return {name: vote > 0 for name, vote in votes.items() if vote}


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


def _dim_ranks(shape: tuple[int, ...], made: int | None, turned: bool) -> tuple[int, ...]:
    """Return how much a tensor axis wants each dim, 0 the most; other axes take what is left."""
    order = sorted(range(len(shape)), key=lambda d: (d != made, -shape[d], d if turned else -d))
    return tuple(order.index(d) for d in range(len(shape)))


def _made_by_product(kernel: tuple[int, ...], kind: str = "") -> int | None:
    """Return the dim that the product with a kernel of three dims or more makes, or `None`.

    A kernel of a convolution has a window and two dims of channels, of which the output's is meant.
    In a kernel of attention the heads are, the first of two small dims beside the model's own.

    >>> _made_by_product((3, 3, 64, 128)), _made_by_product((128, 64, 3, 3))
    (3, 0)
    >>> _made_by_product((512, 8, 64)), _made_by_product((8, 64, 512)), _made_by_product((512, 64))
    (1, 0, None)
    """
    if len(kernel) < 3 or kind == "experts":
        return None
    outputs = _output_channels(kernel, kind)
    if outputs is not None:
        return outputs
    largest = kernel.index(max(kernel))
    # Three arrays stacked into one, as queries, keys and values are, have no heads to cut.
    small = [d for d, size in enumerate(kernel) if d != largest and 3 < size <= _LARGEST_HEAD]
    return small[0] if len(small) > 1 else None


def _output_channels(kernel: tuple[int, ...], kind: str) -> int | None:
    """Return the dim of a convolution's output channels, `None` for other arrays.

    It is the last behind the window, as Flax has it, or the first before it, as Equinox has it.
    """
    if len(kernel) < 3 or kind == "experts":
        return None
    if kind == "convolution":  # whatever its window
        return len(kernel) - 1 if math.prod(kernel[:-2]) <= math.prod(kernel[2:]) else 0
    if _is_window(kernel[:-2]):
        return len(kernel) - 1
    # Two or three in front of equal sides are rather keys and values in one: (2, 512, 16, 16).
    return 0 if _is_window(kernel[2:]) and kernel[0] > 3 else None


# Convolutions with their inputs cut too are slower (a ResNet on 16 chips: 4.8 ms against 3.7), and
# XLA computes them wrongly on some meshes: with `tp` on the inputs the values, with `fsdp` there
# the gradients (tools/shardy_convolution.py).
def _shared_dim(sides: tuple[int, ...], kind: str) -> int | None:
    """Return the dim that all axes share: rows of a table, outputs of a convolution, or `None`."""
    return 0 if is_table(sides, kind) else _output_channels(sides, kind)


def _is_window(sides: tuple[int, ...]) -> bool:
    """Whether these are the sides of a window: alike, or one that is odd, since heads are even."""
    if len(sides) == 1:
        return sides[0] % 2 == 1 and sides[0] <= _LARGEST_WINDOW
    return len(set(sides)) == 1 and sides[0] <= _LARGEST_WINDOW


def is_table(sides: tuple[int, ...], kind: str) -> bool:
    """Whether a matrix is a table of embeddings: by its name, or since it is long and narrow."""
    if kind == "product" or len(sides) != 2:
        return False
    return kind == "table" or sides[0] >= TABLE_RATIO * sides[1]


def _score(
    shape: tuple[int, ...],
    bits: int,
    axes: tuple[Axis, ...],
    dim_ranks: tuple[int, ...],
    made: int | None,
    shared: int | None,
    assignment: Assignment,
) -> tuple[float, ...]:
    """Score an assignment, the least is the best; see the module for the order.

    `made` is the dim that a product makes, `shared` the one for all axes; None in other arrays.
    """
    local = list(shape)
    used = [(axis, dim) for axis, dim in zip(axes, assignment, strict=True) if dim is not None]
    for (_, size, _), dim in used:
        local[dim] //= size
    # A group on two dims counts once, and so does a dim with two groups.
    pairs = {(group, dim) for (_, _, group), dim in used}
    split_groups = len(pairs) - len({group for group, _ in pairs})
    if shared is None:
        crowded = split_groups + len(pairs) - len({dim for _, dim in pairs})
    else:
        crowded = split_groups + sum(dim != shared for _, dim in pairs)
    unwanted = sum(
        dim if role(name).name == "expert" else dim_ranks[dim] * _weight(name)
        for (name, _, _), dim in used
    )
    # Last the assignment itself: equal scores must not depend on the order of a search.
    order = [-1 if dim is None else dim for dim in assignment]
    if made is None:
        waste = crowded + _padding(local, bits)
    else:  # the compiler lays such kernels out as their products need it
        tensor = [dim for (name, _, _), dim in used if role(name).name == "tensor"]
        waste = crowded + 2 * sum(dim != made for dim in tensor)
    return (math.prod(local), waste, crowded, unwanted, *order)


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
    return 0 if ratio < 1.5 else math.ceil(math.log2(ratio))


def _spec(axes: tuple[Axis, ...], assignment: Assignment, rank: int) -> PartitionSpec:
    entries: list[str | tuple[str, ...] | None] = []
    for dim in range(rank):
        names = tuple(name for (name, _, _), at in zip(axes, assignment, strict=True) if at == dim)
        names = tuple(sorted(names, key=lambda name: role(name).name not in ("tensor", "expert")))
        entries.append(names if len(names) > 1 else (names[0] if names else None))
    return make_spec(entries)
