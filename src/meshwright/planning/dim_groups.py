"""`DimGroups`: which dims of a program are cut together, and which of them play the same part.

Two dims are in one group if some operation iterates over both as one. Groups that play the same
part (the hidden width of every layer of an unrolled model) are one *kind*; a plan chooses kinds.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence

from meshwright.planning.iteration_dims import IterationDim
from meshwright.planning.traced_program import Operation, Position, TracedProgram

# Products, convolutions, lookups, kernels: around these the layout is written down, and they say
# what part a group plays.
PINNED = frozenset(
    {
        "dot_general",
        "conv_general_dilated",
        "gather",
        "scatter-add",
        "ragged_dot",
        "ragged_dot_general",
        "pallas_call",
    }
)
# Operations that read and write memory by themselves; others are computed where they are used.
HEAVY = PINNED | {
    "scatter",
    "sort",
    "cumsum",
    "cumlogsumexp",
    "dynamic_slice",
    "dynamic_update_slice",
    "concatenate",
    "reduce_window_sum",
    "reduce_window_max",
    "select_and_scatter_add",
    "top_k",
    "fft",
}
# Reductions read what they reduce, but where that is computed.
REDUCING = frozenset({"reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"})
# What changes how an array is seen, and mostly nothing in memory.
VIEWS = frozenset({"reshape", "transpose", "squeeze", "expand_dims", "name", "copy"})
MOST_KINDS = 12
_MOST_OTHERS = 48  # kinds of weights that a plan cuts all together or not at all
_ROUNDS = 2  # of refinement: what a group meets, and what those meet
_WEIGHTLESS = 0.002  # kinds with less than this part of the largest weight are left whole
_NEARLY_ALL = 0.9  # of the bytes of weights
WHOLE = -1  # the kind of dims that no plan cuts; those below are kinds of weights without a number
# FLOP and byte weigh as on a chip with 140 TFLOP/s and 0.65 TB/s: only the order of kinds matters.
FLOPS, BYTES, _ARGUMENT = 1.4e14, 6.5e11, 8

Layout = tuple[tuple[int, int], ...]  # kind and size of every dim of a value


@dataclasses.dataclass(frozen=True)
class DimGroups:
    """The groups of a program, by kind.

    `layout[value]`: kind and size of every dim. `sizes`: the sizes at which a kind occurs. `roots`:
    the group of every dim, for explanations. `weights`: the kinds of dims that weights have, in the
    order of their weight. A net of convolutions has dozens of them: beyond the first few they have
    no number of their own (but one below `WHOLE`), and a plan lists them all as one, `every`.
    `queries`: the kinds, after all others, of dims whose group is in the array once more, whole;
    each with the kind that the group has elsewhere.
    """

    layout: tuple[Layout, ...]
    sizes: tuple[tuple[int, ...], ...]
    roots: dict[Position, int]
    weights: tuple[int, ...] = ()
    queries: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many kinds there are to list, with `every`."""
        return len(self.sizes)

    @property
    def every(self) -> int:
        """The kind that stands for those of all weights; `WHOLE` where there is none."""
        return len(self.sizes) - len(self.queries) - 1 if self.weights else WHOLE

    def of_loop(self, dims: Iterable[Position]) -> int:
        """The kind by which a loop over these dims is cut: the queries', where it has one of these.

        A dim that is whole in one of its arrays is so in the loop.
        """
        kinds = {self.layout[value][dim][0] for value, dim in dims}
        return WHOLE if WHOLE in kinds else max(kinds)


class _Union:
    """Union-find over the dims of all values; the smallest member stands for a group."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        self.first = [0]
        for shape in shapes:
            self.first.append(self.first[-1] + len(shape))
        self.parent = list(range(self.first[-1]))

    def find(self, position: Position) -> int:
        node = self.first[position[0]] + position[1]
        parent = self.parent
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    def join(self, one: Position, other: Position) -> None:
        low, high = sorted((self.find(one), self.find(other)))
        self.parent[high] = low


# In: a traced program. Out: its groups and their kinds. Invariant: deterministic, whatever Python's
# hashes are, so that all processes agree. Example: x[b, k] @ w[k, n] has the groups b, k and n.
def find_groups(
    program: TracedProgram, data: Collection[int] = (), most: int = MOST_KINDS
) -> DimGroups:
    """Find the groups of dims of a program, and tie those that play the same part.

    `data`: the arguments that are no weights.
    """
    union = _Union(program.shapes)
    for one, other in program.ties:
        if 1 not in (_size(program, one), _size(program, other)):
            union.join(one, other)
    roots = {
        (value, dim): union.find((value, dim))
        for value, shape in enumerate(program.shapes)
        for dim in range(len(shape))
    }
    left_whole, queries = _double_dims(program, roots)
    kinds = _kinds(program, roots, most, _spatial_dims(program, roots))

    def kind_of(value: int, dim: int) -> int:
        if program.shapes[value][dim] == 1 or (value, dim) in left_whole:
            return WHOLE
        return kinds.get(roots[value, dim], WHOLE)

    weights = _kinds_of_weights(program, kind_of, data)
    if not weights:  # no plan lists those without a number
        kinds = {root: kind for root, kind in kinds.items() if kind > WHOLE}
    count = 1 + max(kinds.values(), default=WHOLE) + bool(weights)
    twice = sorted({kinds.get(roots[at], WHOLE) for at in queries})
    of_queries = {kind: n for n, kind in enumerate((k for k in twice if k > WHOLE), count)}
    layout = tuple(
        tuple(
            (of_queries.get(kind, WHOLE) if (value, dim) in queries else kind, size)
            for dim, size in enumerate(shape)
            for kind in [kind_of(value, dim)]
        )
        for value, shape in enumerate(program.shapes)
    )
    every = count - 1 if weights else WHOLE
    sizes = kind_sizes(layout, count + len(of_queries), weights, every)
    return DimGroups(layout, sizes, roots, weights, {n: kind for kind, n in of_queries.items()})


def kind_sizes(
    layout: Iterable[Layout], count: int, weights: Sequence[int], every: int
) -> tuple[tuple[int, ...], ...]:
    """Return the sizes at which each kind occurs; of `every` those of all weights."""
    sizes: dict[int, set[int]] = collections.defaultdict(set)
    for dims in layout:
        for kind, size in dims:
            sizes[kind].add(size)
    sizes[every] = set().union(*(sizes[kind] for kind in weights))
    return tuple(tuple(sorted(sizes[kind])) for kind in range(count))


def _kinds_of_weights(
    program: TracedProgram, kind_of: Callable[[int, int], int], data: Collection[int]
) -> tuple[int, ...]:
    """The kinds of dims that weights have and data have not, the weightiest first.

    None where nearly all weights have one dim in common, as a transformer's: a plan lists that.
    """

    def kinds(value: int) -> set[int]:
        return {kind_of(value, dim) for dim in range(len(program.shapes[value]))}

    of_data = set[int]().union(*map(kinds, data))
    held: collections.Counter[int] = collections.Counter()
    total = 0
    for value in program.arguments:
        if value not in data:
            total += program.bytes[value]
            for kind in kinds(value) - {WHOLE}:
                held[kind] += program.bytes[value]
    if max(held.values(), default=total) > _NEARLY_ALL * total:
        return ()
    # Numbered kinds come first, rising; those below fall.
    return tuple(sorted(held.keys() - of_data, key=lambda kind: (kind < 0, abs(kind))))


def _size(program: TracedProgram, position: Position) -> int:
    return program.shapes[position[0]][position[1]]


# A group that is twice in an array: queries and keys in the scores of attention, both sides of a
# square weight. Both are followed through the arrays that have the group twice. Of a weight the
# same side is cut everywhere. Of activations the one that is summed over first in the program, by
# a softmax or a product, is the keys', and left whole; the other one is the queries', a kind by
# itself, so that a plan may cut rows along `seq` and leave scores whole, or cut these, too.
def _double_dims(
    program: TracedProgram, roots: dict[Position, int]
) -> tuple[frozenset[Position], frozenset[Position]]:
    """Return the dims that are left whole because their group is in the array already, and the
    queries'."""
    double: set[Position] = set()
    for value, shape in enumerate(program.shapes):
        here = [roots[value, dim] for dim in range(len(shape))]
        double.update(
            (value, dim) for dim, size in enumerate(shape) if size > 1 and here.count(here[dim]) > 1
        )
    if not double:
        return frozenset(), frozenset()
    union = _Union(program.shapes)
    for one, other in program.ties:
        if one in double and other in double:
            union.join(one, other)
    arguments = set(program.arguments)
    held = {union.find(position) for position in double if position[0] in arguments}
    others = {
        (value, dim): {
            union.find((value, other))
            for other in range(len(program.shapes[value]))
            if other != dim and roots[value, other] == roots[value, dim]
        }
        for value, dim in double
    }
    facing: dict[int, set[int]] = collections.defaultdict(set)
    for position, sides in others.items():
        facing[union.find(position)] |= sides
    keys: set[int] = set()
    for operation in program.operations:
        values = operation.values
        for loop in operation.dims:
            summed = {(values[w], d) for w, d in loop.at} & double if loop.kind == "sum" else ()
            keys |= {side for side in map(union.find, summed) if not facing[side] & keys}
    queries = {side for side in facing.keys() - keys - held if facing[side] <= keys}
    of_queries = frozenset(position for position in double if union.find(position) in queries)
    weights = {
        position
        for position, sides in others.items()
        if union.find(position) in held and union.find(position) >= max(sides)
    }
    return frozenset(double - of_queries - weights), of_queries


def _spatial_dims(program: TracedProgram, roots: dict[Position, int]) -> set[int]:
    """The groups of the spatial dims of convolutions, of images and of windows: none is cut.

    XLA's partitioner computed other numbers where one axis cut an image and its window along such a
    dim, and where one cut the image along it and another the channels of the result (patches of a
    ViT, float64, jax 0.10).
    """
    found: set[int] = set()
    for operation in program.operations:
        if operation.primitive == "conv_general_dilated":
            numbers = operation.eqn.params["dimension_numbers"]
            specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
            for value, spec in zip(operation.values, specs, strict=True):
                found.update(roots[value, dim] for dim in spec[2:])
    return found


# Colour refinement. A group begins with its size, and twice takes on what the products that it
# iterates in look like: their primitive, trip count, and the colours of all their dims.
def _kinds(
    program: TracedProgram, roots: dict[Position, int], most: int, spatial: Collection[int]
) -> dict[int, int]:
    """Number the groups that are worth cutting by kind, the weightiest first.

    Further ones that arguments have get numbers below `WHOLE`.
    """
    size_of: dict[int, int] = {}
    for position, root in roots.items():
        size_of[root] = math.gcd(size_of.get(root, 0), _size(program, position))
    stacked = {roots[position] for position in program.stacked}
    color = _numbered({root: (size, root in stacked) for root, size in size_of.items()})
    products = [each for each in program.operations if each.primitive in PINNED]
    for _ in range(_ROUNDS):
        parts: dict[int, set[object]] = collections.defaultdict(set)
        for operation in products:
            dims = [(dim.kind, dim.at, root) for dim, root in _dims(operation, roots)]
            around = tuple(sorted((kind, at, color[root]) for kind, at, root in dims))
            for kind, at, root in dims:
                parts[root].add((operation.primitive, operation.times, kind, at, around))
        color = _numbered(
            {root: (old, tuple(sorted(parts[root], key=repr))) for root, old in color.items()}
        )
    whole = stacked.union(spatial, (root for root, size in size_of.items() if size == 1))
    weight = _weights(program, roots, color)
    usable = {color[root] for root in color if root not in whole}
    least = _WEIGHTLESS * max(weight.values(), default=0.0)
    ranked = sorted((c for c in weight if c in usable), key=lambda c: (-weight[c], c))
    rank = {c: n for n, c in enumerate([c for c in ranked if weight[c] > least][:most])}
    held = {
        color[roots[value, dim]]
        for value in program.arguments
        for dim in range(len(program.shapes[value]))
    }
    others = [c for c in ranked if c in held and c not in rank][:_MOST_OTHERS]
    rank.update((c, WHOLE - 1 - n) for n, c in enumerate(others))
    return {root: rank[c] for root, c in color.items() if root not in whole and c in rank}


def _dims(operation: Operation, roots: dict[Position, int]) -> Iterable[tuple[IterationDim, int]]:
    """The iteration dims of an operation that have a member, each with its group."""
    values = operation.values
    for dim in operation.dims:
        if dim.at:
            value, at = dim.at[0]
            yield dim, roots[values[value], at]


def _numbered(keys: dict[int, object]) -> dict[int, int]:
    """Give equal keys equal numbers, in the order in which they are met."""
    numbers: dict[object, int] = {}
    return {root: numbers.setdefault(key, len(numbers)) for root, key in keys.items()}


def _weights(
    program: TracedProgram, roots: dict[Position, int], color: dict[int, int]
) -> dict[int, float]:
    """How much time and memory depends on the groups of each colour, roughly."""
    weight: dict[int, float] = collections.defaultdict(float)
    for operation in program.operations:
        if operation.primitive not in HEAVY:
            continue
        moved = sum(program.bytes[value] for value in operation.values)
        seconds = operation.times * max(operation.flops / FLOPS, moved / BYTES)
        cut = {root for dim, root in _dims(operation, roots) if dim.kind != "whole"}
        for c in sorted({color[root] for root in cut}):
            weight[c] += seconds * sum(color[root] == c for root in cut)
    for value in program.arguments:
        for dim in range(len(program.shapes[value])):
            weight[color[roots[value, dim]]] += _ARGUMENT * program.bytes[value] / BYTES
    return weight
