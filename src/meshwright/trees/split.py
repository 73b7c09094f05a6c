"""Separate the arrays of a tree from its static leaves; broadcast a prefix tree to all leaves.

Arrays are data and enter a program as operands. All other leaves (functions, strings, flags) are
part of the program itself: with others in their place it is another program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright._show import short_repr
from meshwright._text import plural
from meshwright.errors import GroupError, short
from meshwright.trees.walk import is_array, path_text


@dataclasses.dataclass(frozen=True, repr=False)
class Split:
    """A tree taken apart: its `arrays`, where they stand, and its `static` leaves.

    `positions` are the arrays' indices among all leaves and `paths` their paths; `static` has a
    `None` at these positions. Two splits are equal if the same program can run both, so `arrays`
    are not compared.
    """

    treedef: Any
    positions: tuple[int, ...]
    static: tuple[Any, ...]
    paths: tuple[str, ...]
    arrays: tuple[Any, ...] = dataclasses.field(compare=False)

    def rebuild(self, arrays: Sequence[Any], other: Any = "static") -> Any:
        """Return the tree with `arrays` in place of its own; with `other` for all static leaves."""
        leaves: list[Any] = list(self.static) if other == "static" else [other] * len(self.static)
        for position, array in zip(self.positions, arrays, strict=True):
            leaves[position] = array
        return jax.tree.unflatten(self.treedef, leaves)

    def __repr__(self) -> str:
        return short_repr(self, f"{plural(len(self.arrays), 'array')} of {len(self.static):,}")


def split_arrays(tree: Any, depth: int = 0, data: Collection[int] = ()) -> Split:
    """Separate the arrays of a tree from functions, flags and other leaves.

    A Python number is data where it stands alone, at most `depth` keys into the tree: a learning
    rate. Deeper inside it is a setting, like a module's rate of dropout, unless its position among
    all leaves is one of `data`.

    >>> parts = split_arrays(({"w": jnp.ones(2), "rate": 0.1}, 0.5), depth=1)
    >>> parts.paths, parts.static
    (('0/w', '1'), (0.1, None, None))
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    positions = tuple(
        position
        for position, (path, leaf) in enumerate(flat)
        if is_array(leaf) or (is_number(leaf) and (len(path) <= depth or position in data))
    )
    chosen = set(positions)
    return Split(
        treedef,
        positions,
        tuple(None if n in chosen else leaf for n, (_, leaf) in enumerate(flat)),
        tuple(path_text(flat[n][0]) for n in positions),
        tuple(flat[n][1] for n in positions),
    )


EMPTY = split_arrays(None)


def changed_numbers(before: Split, after: Split) -> frozenset[int]:
    """Return the positions of Python numbers in `before` that `after` holds changed.

    A node of `before` is compared with the nodes of `after` that have its structure, such as the
    training state that a step takes and the one that it returns; the largest such node decides.

    >>> old = split_arrays(({"step": 0, "rate": 0.1, "w": jnp.ones(2)}, jnp.ones(3)))
    >>> new = split_arrays((jnp.ones(()), {"step": 1, "rate": 0.1, "w": jnp.zeros(2)}))
    >>> before = jax.tree.leaves(({"step": 0, "rate": 0.1, "w": "w"}, "x"))
    >>> [before[n] for n in changed_numbers(old, new)]
    [0]
    """
    # By their sizes first: comparing every pair of nodes would take long for large trees.
    nodes: dict[tuple[int, int], list[tuple[int, Any]]] = {}
    for start, node in _nodes(0, after.treedef):
        nodes.setdefault((node.num_nodes, node.num_leaves), []).append((start, node))
    changed: set[int] = set()
    queue: list[tuple[int, Any]] = [(0, before.treedef)]
    while queue:
        start, node = queue.pop()
        leaves = before.static[start : start + node.num_leaves]
        if node.num_nodes < 2 or not any(map(is_number, leaves)):
            continue
        alike = [
            at for at, other in nodes.get((node.num_nodes, node.num_leaves), ()) if other == node
        ]
        for at in alike:
            pairs = zip(leaves, after.static[at : at + node.num_leaves], strict=True)
            # An array, which is None among the static leaves, is another value than a number.
            changed.update(
                start + n for n, (old, new) in enumerate(pairs) if is_number(old) and old != new
            )
        if not alike:
            queue += children_of(start, node)
    return frozenset(changed)


def _nodes(start: int, treedef: Any) -> Iterator[tuple[int, Any]]:
    """Yield every node of a structure with the position of its first leaf."""
    queue = [(start, treedef)]
    while queue:
        at, node = queue.pop()
        yield at, node
        queue += children_of(at, node)


def children_of(start: int, treedef: Any) -> list[tuple[int, Any]]:
    """Return the children of a structure, each with the position of its first leaf."""
    children = []
    for child in treedef.children():
        children.append((start, child))
        start += child.num_leaves
    return children


def as_data(tree: Any) -> Any:
    """Return the tree with its numbers and flags as arrays, at any depth: the results of a step."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, bool) or is_number(leaf) else leaf, tree
    )


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number; a `bool` is a flag, although Python calls it an `int`."""
    return isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)


def as_shape(leaf: Any) -> Any:
    """Return what tracing must know of an array: shape, dtype, and whether it is weakly typed.

    Python numbers stay as they are, since JAX gives them a weak type itself.
    """
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            tuple(leaf.shape),
            # A float64 numpy array is traced as float32 unless x64 is enabled; keys are extended
            # dtypes, which are refused by default.
            jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True),
            weak_type=weak,
        )
    return leaf


# Prefix trees: one value for every leaf of a tree, as `jit` takes its `in_shardings`. JAX's own
# `tree_util.broadcast_prefix` cannot be used: a value here may itself be a container (the groups
# `[0, 2]` of an array), and only the tree below it tells whether it is one value or a list of them.

Path = tuple[Any, ...]
# `is_value(container of the prefix, node of the tree)`: whether the container is one value there.
IsValue = Callable[[Any, Any], bool]


def broadcast_prefix(
    what: str, prefix: Any, tree: Any, is_value: IsValue, hint: str = ""
) -> list[Any]:
    """Return a value for each leaf of `tree` from `prefix`, a tree that may end higher up.

    A container of the prefix that is like the tree's own is walked further. Where the tree has a
    leaf, or another node that `is_value` allows, the container is a value itself.

    >>> def numbers(value, node):
    ...     return isinstance(value, list) and not isinstance(node, list)
    >>> tree = {"a": ["x", "y"], "b": ["z", "w"]}
    >>> broadcast_prefix("where", {"a": 0, "b": [1, 2]}, tree, numbers)
    [0, 0, 1, 2]
    >>> tree = {"a": ["x", "y"], "b": {"c": "z"}}
    >>> broadcast_prefix("where", {"a": 0, "b": [1, 2]}, tree, numbers)
    [0, 0, [1, 2]]
    """
    return list(_broadcast(what, prefix, tree, is_value, hint, ()))


def _broadcast(
    what: str, prefix: Any, tree: Any, is_value: IsValue, hint: str, path: Path
) -> Iterator[Any]:
    children, structure = _one_level(tree)
    values, prefix_structure = _one_level(prefix)
    if _is_leaf(tree, children) or _is_leaf(prefix, values):
        yield from [prefix] * len(jax.tree.leaves(tree))
    # Before `is_value`: a list for a list is one value per child, as everywhere in JAX.
    elif structure == prefix_structure:
        for (keys, child), (_, value) in zip(children, values, strict=True):
            yield from _broadcast(what, value, child, is_value, hint, (*path, *keys))
    elif is_value(prefix, tree):
        yield from [prefix] * len(jax.tree.leaves(tree))
    else:
        raise GroupError(
            f"{what}: {path_text(path) or '(the tree)'}: {short(prefix)} is not like the "
            f"{type(tree).__name__} of {len(children)} there. Use the same containers, or one "
            f"value for all that is below{hint}."
        )


def _one_level(tree: Any) -> tuple[list[tuple[Path, Any]], Any]:
    """Return a node's children with their keys, and its structure; a leaf is its own child."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)


def _is_leaf(tree: Any, children: list[tuple[Path, Any]]) -> bool:
    return len(children) == 1 and not children[0][0] and children[0][1] is tree
