"""Names of dims that a tree carries itself, as Flax and penzai write them, and trees unboxed.

Linen's `Partitioned` and `LogicallyPartitioned` boxes hold `names`. NNX variables hold them as
metadata (`out_sharding`, or `sharding` in older versions). penzai's `NamedArray` has the names of
its last dims, its `NamedArrayView` a dim for each name. All are recognised by the module of their
class and by attributes, so that neither library is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright.trees.walk import Leaf, Paths, Walk, flatten, is_variable, path_text

# For each dim a name, several, or `None`; dims without an entry have none.
Names = tuple[str | tuple[str, ...] | None, ...]


def read_metadata(tree: Any, leaves: Sequence[Leaf]) -> list[Names | None]:
    """Read names per leaf from the boxes around the arrays; `None` where there are none."""
    boxes, _ = flatten(tree, _has_names)
    named = {path_text(path): names_of(box) for path, box in boxes if _has_names(box)}
    return [_nearest(leaf.path, named) for leaf in leaves]


def _nearest(path: str, named: dict[str, Names | None]) -> Names | None:
    """Return the names of the innermost box around a leaf: at its own path, or above it."""
    while True:
        if path in named:
            return named[path]
        if "/" not in path:
            return named.get("")
        path = path.rpartition("/")[0]


def _has_names(value: Any) -> bool:
    return names_of(value) is not None


def names_of(value: Any) -> Names | None:
    """Return the names that a box of Flax or penzai holds, or `None` for anything else."""
    if isinstance(value, (jax.Array, type)):
        return None
    if _is_of(value, "penzai"):
        return _penzai_names(value)
    if not _is_of(value, "flax"):
        return None
    # A module may have an attribute `names` of its own; only boxes can be unboxed.
    fields = getattr(value, "__dict__", {}) if hasattr(value, "unbox") else {}
    for source in (_metadata(value), fields):
        for key in ("names", "sharding_names", "out_sharding", "sharding"):
            names = source.get(key) if isinstance(source, dict) else None
            # `sharding` may also be a `NamedSharding`, which has no logical names.
            if isinstance(names, (tuple, list, PartitionSpec)) and all(map(_is_entry, names)):
                return tuple(tuple(e) if isinstance(e, list) else e for e in names)
    return None


def _is_of(value: Any, package: str) -> bool:
    modules = (base.__module__ for base in type(value).__mro__)
    return any(module == package or module.startswith(f"{package}.") for module in modules)


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, (tuple, list)):
        return all(isinstance(name, str) for name in entry)
    return entry is None or isinstance(entry, str)


def _metadata(value: Any) -> dict[str, Any]:
    get = getattr(value, "get_metadata", None)
    try:
        return dict(get()) if callable(get) else {}
    except TypeError:  # another library's `get_metadata`, which takes arguments
        return {}


def _penzai_names(value: Any) -> Names | None:
    by_name = getattr(value, "data_axis_for_name", None)
    if isinstance(by_name, Mapping):  # a view, whose names stand at any dims
        at = {dim: str(name) for name, dim in by_name.items()}
        return tuple(at.get(dim) for dim in range(max(at, default=-1) + 1))
    named = getattr(value, "named_axes", None)
    shape = getattr(getattr(value, "data_array", None), "shape", None)
    if not isinstance(named, Mapping) or shape is None:
        return None
    positional: Names = (None,) * (len(shape) - len(named))  # dims without a name come first
    return (*positional, *map(str, named))


# Specs may be written for the tree without its boxes, as `nn.unbox` and `nn.get_partition_spec`
# return it.


def is_box(value: Any) -> bool:
    """Whether a node stands around one array: a Linen box, an NNX variable, a `NamedArray`."""
    if isinstance(value, (jax.Array, type)):
        return False
    linen = hasattr(value, "unbox") and hasattr(value, "replace_boxed") and _is_of(value, "flax")
    named = hasattr(value, "data_array") and _is_of(value, "penzai")
    return linen or named or is_variable(value)


def flatten_like_unboxed(
    walked: Walk, specs: Any, readings: Sequence[Callable[[Any], bool]]
) -> Paths | None:
    """Flatten specs that are like the walked tree without its boxes; `None` if they are not.

    `readings` are ways to tell a spec from a node, tried in their order. The answer has an entry
    for each leaf of the walked tree.
    """
    flat, treedef = flatten(jax.tree.unflatten(walked.treedef, walked.leaves), is_box)
    counts = [len(jax.tree.leaves(value)) if is_box(value) else 1 for _, value in flat]
    if len(set(counts)) > 1 or not any(is_box(value) for _, value in flat):
        return None
    for is_leaf in readings:
        flat_specs, spec_treedef = flatten(specs, is_leaf)
        if spec_treedef == treedef:
            return flat_specs
    return None
