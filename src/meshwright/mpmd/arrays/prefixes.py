"""One value for every leaf of a tree, from a prefix of that tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from meshwright.errors import GroupError, short
from meshwright.partitioning.leaves import path_text

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
