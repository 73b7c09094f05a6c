"""`partition(...)`: a spec for every array of a tree, by rules, by logical axes, or by shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import PartitionError, listing, near, short
from meshwright.partitioning.by_logical import (
    Table,
    logical_problems,
    logical_spec,
    read_names,
    read_table,
)
from meshwright.partitioning.by_rules import Rules, Unmatched, match_rules, read_rules
from meshwright.partitioning.by_shape import choose, weight_axes
from meshwright.partitioning.leaves import Leaf, Walk, bits, refuse, walk
from meshwright.partitioning.metadata import read_metadata
from meshwright.partitioning.specs import (
    AnyMesh,
    Uneven,
    make_spec,
    mesh_axes,
    problems,
    without_uneven,
)
from meshwright.partitioning.stacked import is_stacked

MIN_SHARD_SIZE = 1024


def partition(
    tree: Any,
    mesh: AnyMesh,
    *,
    rules: Rules | None = None,
    logical: Table | None = None,
    names: Any = None,
    axes: Sequence[str] | None = None,
    min_shard_size: int = MIN_SHARD_SIZE,
    uneven: Uneven = "error",
    unmatched: Unmatched = "error",
    unused: str = "error",
    stacked: str | Sequence[str] | bool | None = None,
) -> Any:
    """A `PartitionSpec` for every array of a tree; other leaves pass through.

    By `rules`: (pattern, spec) pairs over the leaf's path, first match wins. By `logical` axes: a
    table from logical names to mesh axes; the names come from `names`, a tree of tuples, or from
    Flax metadata in the tree. By shape when neither is given: `axes` (default: those meant for
    weights) are used so that bytes per device are least; arrays below `min_shard_size` elements
    stay whole. `stacked` names the leaves whose first dim counts layers and stays whole.

    Options: `uneven="replicate"` drops axes that do not divide a dim, `unmatched="replicate"` or
    `"shape"` takes leaves that no rule matches, `unused="allow"` rules that match nothing.

    >>> import jax, meshwright as mw
    >>> mesh = mw.mesh("fsdp:4, tp:2")
    >>> w = jax.ShapeDtypeStruct((1024, 4096), "float32")
    >>> mw.partition({"w": w}, mesh)
    {'w': P('fsdp', 'tp')}
    >>> mw.partition({"w": w}, mesh, rules=[("w", ("tp", None))])
    {'w': P('tp',)}
    >>> names = {"w": ("embed", "mlp")}
    >>> mw.partition({"w": w}, mesh, names=names, logical={"embed": "fsdp", "mlp": None})
    {'w': P('fsdp',)}
    """
    found = walk(tree)
    specs = decide(
        found,
        mesh,
        rules=rules,
        logical=logical,
        names=names,
        axes=axes,
        min_shard_size=min_shard_size,
        uneven=uneven,
        unmatched=unmatched,
        unused=unused,
        stacked=stacked,
        tree=tree,
    )
    return found.rebuild(specs)


def shardings(tree: Any, mesh: AnyMesh, **options: Any) -> Any:
    """The same decision as `NamedSharding`s, ready for `jit` and `device_put`.

    >>> import jax, meshwright as mw
    >>> mw.shardings({"w": jax.numpy.ones((64, 64))}, mw.mesh("fsdp:8"))["w"].spec
    P('fsdp',)
    """
    found = walk(tree)
    specs = decide(found, mesh, tree=tree, **options)
    return found.rebuild([NamedSharding(mesh, spec) for spec in specs])


def decide(
    found: Walk,
    mesh: AnyMesh,
    *,
    rules: Rules | None = None,
    logical: Table | None = None,
    names: Any = None,
    axes: Sequence[str] | None = None,
    min_shard_size: int = MIN_SHARD_SIZE,
    uneven: Uneven = "error",
    unmatched: Unmatched = "error",
    unused: str = "error",
    stacked: str | Sequence[str] | bool | None = None,
    tree: Any = None,
) -> list[PartitionSpec]:
    """The specs of a walked tree, one per array; raises once for everything that is wrong."""
    sizes = mesh_axes(mesh)
    _check_word("uneven", uneven, ("error", "replicate"))
    _check_word("unmatched", unmatched, ("error", "replicate", "shape"))
    _check_word("unused", unused, ("error", "allow"))
    if rules is not None and logical is not None:
        raise PartitionError("pass rules or logical, not both.")
    if names is not None and logical is None:
        raise PartitionError("names go with logical={name: mesh axes}.")
    by_shape = _by_shape(sizes, axes, min_shard_size, stacked)
    if rules is not None:
        specs, wrong = _by_rules(found.arrays, rules, unmatched, unused, by_shape)
    elif logical is not None:
        specs, wrong = _by_logical(found.arrays, tree, logical, names)
    else:
        return [by_shape(leaf) for leaf in found.arrays]
    return _checked(found.arrays, specs, sizes, uneven, wrong)


def _checked(
    leaves: Sequence[Leaf],
    specs: list[PartitionSpec],
    sizes: dict[str, int],
    uneven: Uneven,
    wrong: list[str],
) -> list[PartitionSpec]:
    seen: dict[Any, PartitionSpec] = {}
    for place, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        key = (leaf.shape, spec)
        if key not in seen:
            if uneven == "replicate":
                spec = without_uneven(leaf.shape, spec, sizes)
            bad = list(problems(leaf.path, leaf.shape, spec, sizes))
            wrong.extend(bad)
            if bad:
                continue
            seen[key] = spec
        specs[place] = seen[key]
    refuse("partition", wrong)
    return specs


def _by_rules(
    leaves: Sequence[Leaf],
    rules: Rules,
    unmatched: Unmatched,
    unused: str,
    by_shape: Callable[[Leaf], PartitionSpec],
) -> tuple[list[PartitionSpec], list[str]]:
    specs, never = match_rules(leaves, read_rules(rules))
    wrong = []
    if never and unused == "error":
        wrong = [
            f"rule {short(str(getattr(p, 'pattern', p)))} matches no leaf. Mend or drop it, or "
            "pass unused='allow'."
            for p in never
        ]
    result = []
    for leaf, spec in zip(leaves, specs, strict=True):
        if spec is None and unmatched == "error" and leaf.shape:
            wrong.append(
                f"{leaf.where}: {leaf.shape} matches no rule. Add one, e.g. ('**', None), or pass "
                "unmatched='replicate' or 'shape'."
            )
        if spec is None:
            spec = by_shape(leaf) if unmatched == "shape" else make_spec()
        result.append(spec)
    return result, wrong


def _by_logical(
    leaves: Sequence[Leaf], tree: Any, logical: Table, names: Any
) -> tuple[list[PartitionSpec], list[str]]:
    table = read_table(logical)
    per_leaf = read_metadata(tree, leaves) if names is None else read_names(leaves, names)
    wrong = [
        problem
        for leaf, given in zip(leaves, per_leaf, strict=True)
        for problem in logical_problems(leaf, given, table)
    ]
    return [logical_spec(given or (), table) for given in per_leaf], wrong


def _by_shape(
    sizes: dict[str, int], axes: Sequence[str] | None, min_shard_size: int, stacked: Any
) -> Callable[[Leaf], PartitionSpec]:
    if axes is not None and not isinstance(axes, (list, tuple)):
        raise PartitionError(f"axes: {short(axes)} is not a list of mesh axes, e.g. ['fsdp'].")
    for place, axis in enumerate(axes or ()):
        if axis not in sizes:
            hint = near(axis, sizes) if isinstance(axis, str) else ""
            raise PartitionError(f"axes: no mesh axis {short(axis)} in {listing(sizes)}.{hint}")
        if axes and axis in axes[:place]:
            raise PartitionError(f"axes: {axis!r} appears twice. Name it once.")
    if not isinstance(min_shard_size, (int, np.integer)):
        raise PartitionError(f"min_shard_size: {short(min_shard_size)} is not a count of elements.")
    usable = weight_axes(sizes, axes)

    def by_shape(leaf: Leaf) -> PartitionSpec:
        if leaf.size < min_shard_size:
            return make_spec()
        first = 1 if is_stacked(leaf.path, len(leaf.shape), stacked) else 0
        return choose(leaf.shape, bits(leaf.dtype), usable, first)

    return by_shape


def _check_word(option: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PartitionError(f"{option}: {short(value)} is not one of {', '.join(known)}.")
