"""Taking trees apart and putting them together; says which node cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshwright.errors import PartitionError, short

Paths = list[tuple[Any, Any]]  # every leaf with its path, as JAX writes it


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[Paths, Any]:
    """`jax.tree_util.tree_flatten_with_path`, with words for trees that it cannot walk."""
    try:
        return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    except (RecursionError, SystemError) as error:
        raise PartitionError(
            "tree: nested too deeply, or inside itself, so it cannot be walked. Put the layers "
            "side by side, in a list or a dict."
        ) from error
    except (ValueError, TypeError) as error:
        found = _unsorted(tree)
        if found is None:
            raise
        raise PartitionError(
            f"{found[0] or '(the tree)'}: a dict with keys that have no order, "
            f"{short(found[1])}. Use keys of one kind, e.g. strings."
        ) from error


def unflatten(treedef: Any, leaves: Sequence[Any]) -> Any:
    """`jax.tree.unflatten`, with words for nodes that do not take these leaves."""
    try:
        return jax.tree.unflatten(treedef, leaves)
    except Exception as error:  # a node's own code raises whatever it likes
        node, given = _refusing(treedef, list(leaves))
        kinds = sorted({type(leaf).__name__ for leaf in given})
        raise PartitionError(
            f"tree: a node of type {node} refuses leaves of type {short(', '.join(kinds))} "
            f"({type(error).__name__}: {short(str(error))}). Pass its arrays as a plain dict."
        ) from error


def _unsorted(tree: Any) -> tuple[str, list[Any]] | None:
    """The first dict, in plain containers, whose keys cannot be sorted: its path and keys."""
    waiting = [("", tree)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, Mapping):
            try:
                sorted(node)
            except TypeError:
                return path, list(node)
            inner = list(node.items())
        else:
            inner = list(enumerate(node)) if isinstance(node, (list, tuple)) else []
        waiting += [(f"{path}/{key}".lstrip("/"), value) for key, value in reversed(inner)]
    return None


def _refusing(treedef: Any, leaves: list[Any]) -> tuple[str, list[Any]]:
    """The type of the innermost node that cannot be put together, and the leaves it was given."""
    start = 0
    for child in treedef.children():
        part = leaves[start : start + child.num_leaves]
        start += child.num_leaves
        try:
            jax.tree.unflatten(child, part)
        except Exception:
            return _refusing(child, part)
    data = treedef.node_data()
    return (data[0].__name__ if data else "?"), leaves
