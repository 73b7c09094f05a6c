"""Walking a tree: which leaves are arrays, where they stand, and what they weigh."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import PartitionError, listing, short

# Paths longer than this lose their middle: what is wrong with the leaf must fit beside them.
_LONGEST_PATH = 120
# Those that `refuse` assures that nothing has happened yet.
_PLACING = frozenset(
    "shard shard_like shard_array auto_shard_pytree init reshard to_groups".split()
)


class Leaf(NamedTuple):
    """An array of the tree, or the shape of one. `place` counts all leaves of the tree."""

    path: str
    place: int
    shape: tuple[int, ...]
    dtype: Any
    value: Any

    @property
    def where(self) -> str:
        """The path as messages show it."""
        return shown(self.path)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return math.ceil(self.size * bits(self.dtype) / 8)


@dataclasses.dataclass(frozen=True)
class Walk:
    """A flattened tree: every leaf, and the arrays among them."""

    leaves: tuple[Any, ...]
    arrays: tuple[Leaf, ...]
    treedef: Any

    def rebuild(self, values: Sequence[Any]) -> Any:
        """The tree with `values` in place of its arrays; other leaves pass through."""
        leaves = list(self.leaves)
        for leaf, value in zip(self.arrays, values, strict=True):
            leaves[leaf.place] = value
        return unflatten(self.treedef, leaves)


def walk(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Walk:
    """Flatten a tree once; paths are words joined by `/`."""
    flat, treedef = flatten(tree, is_leaf)
    arrays = tuple(
        Leaf(path_text(path), place, tuple(value.shape), value.dtype, value)
        for place, (path, value) in enumerate(flat)
        if is_array(value)
    )
    return Walk(tuple(value for _, value in flat), arrays, treedef)


def is_array(value: Any) -> bool:
    """Arrays of JAX or numpy, abstract ones, keys; not Python numbers, strings or functions."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


def is_shape(value: Any) -> bool:
    """A tuple or list of sizes."""
    return isinstance(value, (tuple, list)) and all(
        isinstance(side, (int, np.integer)) and not isinstance(side, bool) and side >= 0
        for side in value
    )


def path_text(path: Sequence[Any]) -> str:
    """
    >>> import jax
    >>> path_text(jax.tree_util.tree_flatten_with_path({"a": [1]})[0][0][0])
    'a/0'
    """
    return printable(str(jax.tree_util.keystr(tuple(path), simple=True, separator="/")))


def printable(text: str) -> str:
    """Keys may hold anything; line breaks and escape sequences are written out.

    >>> printable("a" + chr(10) + "b")
    'a\\\\nb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(path: str) -> str:
    """A path in a message: in words when the tree is one array, without its middle when long."""
    if len(path) <= _LONGEST_PATH:
        return path or "(the array)"
    half = _LONGEST_PATH // 2 - 3
    return f"{path[:half]} ... {path[-half:]}"


@functools.cache
def bits(dtype: Any) -> int:
    """Bits per element, keys and 4-bit integers included."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 8 * int(dtype.itemsize)
    name = np.dtype(dtype).name
    if name in ("int4", "uint4", "float4_e2m1fn"):
        return 4
    if name in ("int2", "uint2"):
        return 2
    return 8 * int(np.dtype(dtype).itemsize)


def refuse(what: str, problems: Sequence[str]) -> None:
    """Raise one error for all problems of a tree, or return when there are none."""
    if problems:
        lines = listing((f"\n  {problem}" for problem in problems), 6).replace(", \n", "\n")
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        assured = ", nothing was placed" if what in _PLACING else ""
        raise PartitionError(f"{what}: {count}{assured}.{lines}")


# Taking trees apart and putting them together; says which node cannot be.


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


# Flax NNX variables that a tree holds twice: rebuilding the tree would make two of one.


def tie_problems(tree: Any) -> list[str]:
    """Every variable of NNX that stands at two places. Nothing of Flax is imported."""
    if "flax.nnx" not in sys.modules:
        return []
    flat, _ = flatten(tree, _is_variable)
    first: dict[int, str] = {}
    wrong = []
    for path, value in flat:
        if _is_variable(value):
            here = shown(path_text(path))
            there = first.setdefault(id(value), here)
            if there != here:
                wrong.append(
                    f"{here}: the same variable as {there}, and two would come back. Pass "
                    "nnx.state(model), which holds it once, then nnx.update(model, state)."
                )
    return wrong


def _is_variable(node: Any) -> bool:
    kind: Any = type(node)
    return _is_variable_type(kind)


@functools.cache
def _is_variable_type(kind: Any) -> bool:
    return any(
        base.__name__ == "Variable" and base.__module__.startswith("flax.nnx")
        for base in kind.__mro__
    )
