"""Walk a pytree: which leaves are arrays, their paths and sizes, and errors that name a leaf."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from meshwright._show import short_repr
from meshwright._text import plural, plural_noun
from meshwright.errors import PartitionError, listing, short

# Longer paths lose their middle, so that a message has room for what is wrong with the leaf.
_LONGEST_PATH = 120
# These calls move data; when `refuse` stops one of them, it says that nothing has moved yet.
_PLACING = frozenset(
    "shard shard_like shard_array auto_shard_pytree init reshard to_groups".split()
)
Value = TypeVar("Value")


class Leaf(NamedTuple):
    """One array of a tree, or the shape of one.

    `position` is its index among all leaves of the tree, those that are no arrays included.
    """

    path: str
    position: int
    shape: tuple[int, ...]
    dtype: Any
    value: Any

    @property
    def where(self) -> str:
        """The path as messages show it."""
        return shown_path(self.path)

    @property
    def size(self) -> int:
        # In Python integers: numpy's product would overflow for arrays of 2**63 elements.
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return math.ceil(self.size * bits(self.dtype) / 8)

    def __repr__(self) -> str:
        # Not the value: its repr would print the array, and copy it from the device first.
        return short_repr(self, f"{self.where}: {self.dtype}{list(self.shape)}")


@dataclasses.dataclass(frozen=True, repr=False)
class Walk:
    """A flattened tree: every leaf, and the arrays among them."""

    leaves: tuple[Any, ...]
    arrays: tuple[Leaf, ...]
    treedef: Any

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Return the tree with `values` in place of its arrays; other leaves pass through."""
        leaves = list(self.leaves)
        for leaf, value in zip(self.arrays, values, strict=True):
            leaves[leaf.position] = value
        return unflatten(self.treedef, leaves)

    def __repr__(self) -> str:
        return short_repr(self, f"{plural(len(self.arrays), 'array')} of {len(self.leaves):,}")


def walk(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Walk:
    """Flatten a tree once; a path is the keys joined by `/`.

    >>> [leaf.path for leaf in walk({"b": [jnp.ones(2), "text"], "a": jnp.ones(3)}).arrays]
    ['a', 'b/0']
    """
    flat, treedef = flatten(tree, is_leaf)
    if "penzai" in sys.modules:
        _refuse_live_variables(flat)
    arrays = tuple(
        Leaf(path_text(path), position, tuple(value.shape), value.dtype, value)
        for position, (path, value) in enumerate(flat)
        if is_array(value)
    )
    return Walk(tuple(value for _, value in flat), arrays, treedef)


def _refuse_live_variables(flat: Sequence[tuple[Any, Any]]) -> None:
    """Refuse penzai's variables that hold their values by reference: JAX sees no arrays in them."""
    live = [
        shown_path(path_text(path))
        for path, value in flat
        if any(base.__name__ == "AbstractVariable" for base in type(value).__mro__)
    ]
    if live:
        raise PartitionError(
            f"{listing(live, 3)}: variables of penzai, in which JAX sees no arrays. Take them out "
            "of the model: model, values = pz.unbind_params(model, freeze=True), pass the values, "
            "and bind them again inside of the step with pz.bind_variables(model, values)."
        )


def is_array(value: Any) -> bool:
    """Whether a leaf is an array of JAX or numpy, an abstract one, or a key.

    Python numbers, strings and functions are not. By attributes and not by type, so that tracers,
    `ShapeDtypeStruct`s and the arrays of other libraries count; `np.float32` itself, a type, has
    both attributes too.
    """
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


def is_shape(value: Any) -> bool:
    """Whether a value is a tuple or list of sizes."""
    return isinstance(value, (tuple, list)) and all(
        isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size >= 0
        for size in value
    )


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys (`jax.random.key`), which numpy does not know.

    >>> is_key(jax.random.key(0).dtype), is_key("uint32")
    (True, False)
    """
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


@functools.cache
def bits(dtype: Any) -> int:
    """Return the bits per element, for keys and types of less than a byte too.

    >>> bits("bfloat16"), bits("int4"), bits(jax.random.key(0).dtype)
    (16, 4, 64)
    """
    if is_key(dtype):
        return 8 * int(dtype.itemsize)
    name = np.dtype(dtype).name
    # numpy keeps one of these to a byte, so `itemsize` says 1 for them.
    if name in ("int4", "uint4", "float4_e2m1fn"):
        return 4
    if name in ("int2", "uint2"):
        return 2
    return 8 * int(np.dtype(dtype).itemsize)


def path_text(path: Sequence[Any]) -> str:
    """Return a path of JAX's keys as text.

    >>> path_text(jax.tree_util.tree_flatten_with_path({"a": [1]})[0][0][0])
    'a/0'
    """
    return printable(str(jax.tree_util.keystr(tuple(path), simple=True, separator="/")))


def printable(text: str) -> str:
    """Write out line breaks and escape sequences, since keys may hold anything.

    >>> printable("a" + chr(10) + "b")
    'a\\\\nb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown_path(path: str) -> str:
    """Return a path for a message: words when the tree is one array, no middle when it is long."""
    if len(path) <= _LONGEST_PATH:
        return path or "(the array)"
    half = _LONGEST_PATH // 2 - 3
    return f"{path[:half]} ... {path[-half:]}"


def refuse(what: str, problems: Sequence[str], option: str | None = None) -> None:
    """Raise one error for all problems of a tree, or return when there are none.

    `what` is the call or argument that is wrong. `option` is the option that all the problems are
    about, if there is one.

    >>> refuse("shard", ["w: is traced.", "b: is traced."])
    Traceback (most recent call last):
    ...
    meshwright.errors.PartitionError: shard: 2 problems, nothing was placed.
      w: is traced.
      b: is traced.
    """
    if problems:
        assured = ", nothing was placed" if what in _PLACING else ""
        count = f"{len(problems)} {plural_noun(len(problems), 'problem')}"
        raise PartitionError(f"{what}: {count}{assured}.{problem_lines(problems)}", option=option)


def problem_lines(problems: Sequence[str]) -> str:
    """Return problems as indented lines, and how many more there are."""
    return listing((f"\n  {problem}" for problem in problems), 6).replace(", \n", "\n")


# JAX's own flatten and unflatten, with messages that name the node that cannot be flattened or
# rebuilt. JAX says neither, and a user's node may raise anything.

Paths = list[tuple[Any, Any]]  # every leaf with its path, as JAX writes it


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[Paths, Any]:
    """Call `jax.tree_util.tree_flatten_with_path`; explain trees that it cannot walk."""
    try:
        return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    # JAX's C++ walker reports a spent stack as either of the two.
    except (RecursionError, SystemError) as error:
        raise PartitionError(
            "tree: nested too deeply, or inside itself, so it cannot be walked. Put the layers "
            "side by side, in a list or a dict."
        ) from error
    except (ValueError, TypeError) as error:
        unsortable = _find_unsortable(tree)
        if unsortable is None:
            raise
        path, keys = unsortable
        raise PartitionError(
            f"{path or '(the tree)'}: a dict with keys that have no order, "
            f"{short(keys)}. Use keys of one kind, e.g. strings."
        ) from error


def unflatten(treedef: Any, leaves: Sequence[Any]) -> Any:
    """Call `jax.tree.unflatten`; name the node that does not take these leaves."""
    try:
        return jax.tree.unflatten(treedef, leaves)
    except Exception as error:  # a node's own code raises whatever it likes
        node, given = _find_refusing_node(treedef, list(leaves))
        kinds = sorted({type(leaf).__name__ for leaf in given})
        raise PartitionError(
            f"tree: a node of type {node} refuses leaves of type {short(', '.join(kinds))} "
            f"({type(error).__name__}: {short(str(error))}). Pass its arrays as a plain dict."
        ) from error


def _find_unsortable(tree: Any) -> tuple[str, list[Any]] | None:
    """Return path and keys of the first dict, in plain containers, that cannot be sorted.

    JAX flattens a dict in the order of its sorted keys.
    """
    waiting = [("", tree)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, Mapping):
            try:
                sorted(node)
            except TypeError:
                return path, list(node)
            children = list(node.items())
        else:
            children = list(enumerate(node)) if isinstance(node, (list, tuple)) else []
        # Reversed, because the last is popped first: the tree is walked from left to right.
        waiting += [(f"{path}/{key}".lstrip("/"), value) for key, value in reversed(children)]
    return None


def _find_refusing_node(treedef: Any, leaves: list[Any]) -> tuple[str, list[Any]]:
    """Return the type of the innermost node that cannot be rebuilt, and the leaves it was given."""
    start = 0
    for child in treedef.children():
        part = leaves[start : start + child.num_leaves]
        start += child.num_leaves
        try:
            jax.tree.unflatten(child, part)
        except Exception:
            return _find_refusing_node(child, part)
    data = treedef.node_data()
    return (data[0].__name__ if data else "?"), leaves


def for_distinct(
    keys: Sequence[Hashable], values: Sequence[Value], function: Callable[[list[Value]], list[Any]]
) -> list[Any]:
    """Call `function` with one value for each distinct key; return a result for every key.

    Keys are identities of leaves: an array that a tree holds twice is moved once, and stays one.
    """
    distinct = dict(zip(keys, values, strict=True))
    results = dict(zip(distinct, function(list(distinct.values())), strict=True))
    return [results[key] for key in keys]


# Flax NNX variables that a tree holds twice (tied weights). A pytree has no references, so the
# rebuilt tree would hold two variables where the model had one. Flax is never imported here: if
# `flax.nnx` is not loaded, the tree cannot hold any of its variables.


def tie_problems(tree: Any) -> list[str]:
    """Return a problem for every NNX variable that stands at two places of a tree."""
    if "flax.nnx" not in sys.modules:
        return []
    flat, _ = flatten(tree, is_variable)
    first_path: dict[int, str] = {}
    problems = []
    for path, value in flat:
        if is_variable(value):
            here = shown_path(path_text(path))
            there = first_path.setdefault(id(value), here)
            if there != here:
                problems.append(
                    f"{here}: the same variable as {there}, and two would come back. Pass "
                    "nnx.state(model), which holds it once, then nnx.update(model, state)."
                )
    return problems


def variables_of(tree: Any) -> list[Any]:
    """Return the NNX variables of a tree, one that stands at two places once.

    >>> variables_of({"w": jnp.ones(2)})
    []
    """
    if "flax.nnx" not in sys.modules:
        return []
    flat, _ = flatten(tree, is_variable)
    return list({id(value): value for _, value in flat if is_variable(value)}.values())


def retie(rebuilt: Any, tree: Any) -> Any:
    """Return a rebuilt tree with one NNX variable wherever the tree it was made from has one."""
    if not variables_of(tree):
        return rebuilt
    flat, _ = flatten(tree, is_variable)
    copies, treedef = flatten(rebuilt, is_variable)
    first: dict[int, Any] = {}
    tied = [
        first.setdefault(id(value), copy) if is_variable(value) else copy
        for (_, value), (_, copy) in zip(flat, copies, strict=True)
    ]
    return unflatten(treedef, tied)


def is_variable(node: Any) -> bool:
    """Whether a node of a tree is a variable of Flax NNX."""
    kind: Any = type(node)
    return _is_variable_type(kind)


@functools.cache
def _is_variable_type(kind: Any) -> bool:
    return any(
        base.__name__ == "Variable" and base.__module__.startswith("flax.nnx")
        for base in kind.__mro__
    )
