"""Trees of arrays and other things: the arrays are data, the rest belongs to the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import GroupError, short
from meshwright.trees.walk import path_text


@dataclasses.dataclass(frozen=True)
class Split:
    """A tree taken apart: `arrays` at `places`, `rest` in between, and the paths of the arrays."""

    treedef: Any
    places: tuple[int, ...]
    rest: tuple[Any, ...]
    paths: tuple[str, ...]
    arrays: tuple[Any, ...] = dataclasses.field(compare=False, repr=False)

    def rebuild(self, arrays: Sequence[Any], other: Any = "rest") -> Any:
        """The tree with `arrays` in place of its own; with `other` in place of the rest."""
        leaves: list[Any] = list(self.rest) if other == "rest" else [other] * len(self.rest)
        for place, array in zip(self.places, arrays, strict=True):
            leaves[place] = array
        return jax.tree.unflatten(self.treedef, leaves)


def split_arrays(tree: Any, depth: int = 0) -> Split:
    """Arrays of a tree on one side, functions, flags and other leaves on the other.

    A number is data where it stands alone, `depth` steps into the tree: a learning rate. Deeper
    inside it is a setting, like a module's rate of dropout.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    places = tuple(
        n
        for n, (path, leaf) in enumerate(flat)
        if _is_array(leaf) or (len(path) <= depth and is_number(leaf))
    )
    chosen = set(places)
    return Split(
        treedef,
        places,
        tuple(None if n in chosen else leaf for n, (_, leaf) in enumerate(flat)),
        tuple(path_text(flat[n][0]) for n in places),
        tuple(flat[n][1] for n in places),
    )


EMPTY = split_arrays(None)


def as_data(tree: Any) -> Any:
    """A tree whose numbers and flags are arrays wherever they stand: they are results."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if _is_plain(leaf) else leaf, tree)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, bool) or is_number(leaf)


def is_number(leaf: Any) -> bool:
    return isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)


def as_shape(leaf: Any) -> Any:
    """What tracing must know of an array; numbers stay numbers, which JAX types weakly."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            tuple(leaf.shape),
            jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True),
            weak_type=weak,
        )
    return leaf


# One value for every leaf of a tree, from a prefix of that tree.


Path = tuple[Any, ...]
# Whether a container of the prefix is a value where the tree has another node.
IsValue = Callable[[Any, Any], bool]


def spread(what: str, prefix: Any, tree: Any, is_value: IsValue, hint: str = "") -> list[Any]:
    """A value per leaf. A container of the prefix is the tree's own there, as everywhere in JAX.

    Where the tree has a leaf, or another node that `is_value` allows, it is a value itself.

    >>> def numbers(value, node):
    ...     return isinstance(value, list) and not isinstance(node, list)
    >>> spread("where", {"a": 0, "b": [1, 2]}, {"a": ["x", "y"], "b": ["z", "w"]}, numbers)
    [0, 0, 1, 2]
    >>> spread("where", {"a": 0, "b": [1, 2]}, {"a": ["x", "y"], "b": {"c": "z"}}, numbers)
    [0, 0, [1, 2]]
    """
    return list(_spread(what, prefix, tree, is_value, hint, ()))


def _spread(
    what: str, prefix: Any, tree: Any, is_value: IsValue, hint: str, path: Path
) -> Iterator[Any]:
    ours, structure = _one_level(tree)
    given, other = _one_level(prefix)
    if _is_leaf(tree, ours) or _is_leaf(prefix, given):
        yield from [prefix] * len(jax.tree.leaves(tree))
    elif structure == other:
        for (step, child), (_, below) in zip(ours, given, strict=True):
            yield from _spread(what, below, child, is_value, hint, (*path, *step))
    elif is_value(prefix, tree):
        yield from [prefix] * len(jax.tree.leaves(tree))
    else:
        raise GroupError(
            f"{what}: {path_text(path) or '(the tree)'}: {short(prefix)} is not like the "
            f"{type(tree).__name__} of {len(ours)} there. Use the same containers, or one value "
            f"for all that is below{hint}."
        )


def _one_level(tree: Any) -> tuple[list[tuple[Path, Any]], Any]:
    """The children of a node with their keys, and its kind; a leaf is its own child."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)


def _is_leaf(tree: Any, children: list[tuple[Path, Any]]) -> bool:
    return len(children) == 1 and not children[0][0] and children[0][1] is tree
