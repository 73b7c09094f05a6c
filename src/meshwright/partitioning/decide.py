"""`partition(...)`: a spec for every array of a tree, by rules, by logical axes, or by shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import PartitionError, listing, near, short
from meshwright.partitioning.by_shape import choose, find_stacks, weight_axes
from meshwright.partitioning.logical import (
    Table,
    fits,
    logical_problems,
    logical_spec,
    read_metadata,
    read_names,
    read_table,
)
from meshwright.partitioning.rules import Rules, Unmatched, match_rules, read_rules
from meshwright.trees.specs import (
    AnyMesh,
    Uneven,
    check_specs,
    entry_axes,
    is_split,
    make_spec,
    match_specs,
    mesh_axes,
    problems,
    ways,
)
from meshwright.trees.walk import Leaf, Walk, bits, refuse, walk

# How to decide: the options that `partition` and everything built on it share.


MIN_SHARD_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class Options:
    """See `partition`. Checked when made."""

    rules: Any = None
    logical: Any = None
    names: Any = None
    axes: Sequence[str] | None = None
    min_shard_size: int = MIN_SHARD_SIZE
    uneven: str = "error"
    unmatched: str = "error"
    unused: str = "error"
    stacked: Any = None

    def __post_init__(self) -> None:
        _check_word("uneven", self.uneven, ("error", "replicate"))
        _check_word("unmatched", self.unmatched, ("error", "replicate", "shape"))
        _check_word("unused", self.unused, ("error", "allow"))
        if self.rules is not None and self.logical is not None:
            raise PartitionError("pass rules or logical, not both.")
        if self.names is not None and self.logical is None:
            raise PartitionError("names go with logical={name: mesh axes}.")
        self._check_by_shape()
        size = self.min_shard_size
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise PartitionError(f"min_shard_size: {short(size)} is not a count of elements.")
        if size < 0:
            raise PartitionError(f"min_shard_size: {size} is less than 0. Use 0 to cut all arrays.")

    @property
    def by_shape(self) -> bool:
        """Whether shapes decide, about all leaves or those that are left."""
        return (self.rules is None and self.logical is None) or self.unmatched == "shape"

    def _check_by_shape(self) -> None:
        """Whether options that say how to decide by shape are obeyed by anything."""
        if self.by_shape:
            return
        given = "rules" if self.rules is not None else "logical"
        for option, value in (("axes", self.axes), ("stacked", self.stacked)):
            if value is not None:
                raise PartitionError(
                    f"{option}: is for deciding by shape, but {given}= decides. Drop it, or pass "
                    "unmatched='shape' to decide so about the leaves that are left."
                )

    def check_axes(self, sizes: Mapping[str, int]) -> None:
        """Whether `axes` are axes of this mesh, once each."""
        if self.axes is not None and not isinstance(self.axes, (list, tuple)):
            raise PartitionError(
                f"axes: {short(self.axes)} is not a list of mesh axes, e.g. ['fsdp']."
            )
        for place, axis in enumerate(self.axes or ()):
            if axis not in sizes:
                hint = near(axis, sizes) if isinstance(axis, str) else ""
                raise PartitionError(f"axes: no mesh axis {short(axis)} in {listing(sizes)}.{hint}")
            if axis in (self.axes or ())[:place]:
                raise PartitionError(f"axes: {axis!r} appears twice. Name it once.")


def read_options(options: Mapping[str, Any]) -> Options:
    """Options by name; a misspelt one is named, with the near one."""
    known = [field.name for field in dataclasses.fields(Options)]
    for name in options:
        if name not in known:
            raise PartitionError(
                f"no option {name!r}.{near(name, known)} Known: {listing(known, 10)}."
            )
    return Options(**options)


def _check_word(option: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise PartitionError(f"{option}: {short(value)} is not one of {', '.join(known)}.")


class PartitionOptions(TypedDict, total=False):
    """The options of `partition`, for functions that pass them on."""

    rules: Rules | None
    logical: Table | None
    names: Any
    axes: Sequence[str] | None
    min_shard_size: int
    uneven: Uneven
    unmatched: Unmatched
    unused: str
    stacked: str | Sequence[str] | bool | None


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
    stay whole. `stacked` names the leaves whose first dim counts layers and stays whole; without
    it the tree tells, as the page on partitioning says.

    Options: `uneven="replicate"` drops axes that do not divide a dim, `unmatched="replicate"` or
    `"shape"` takes leaves that no rule matches (or that have no names), `unused="allow"` rules and
    patterns that match nothing.

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
    options = Options(
        rules, logical, names, axes, min_shard_size, uneven, unmatched, unused, stacked
    )
    found = walk(tree)
    return found.rebuild(decide(found, tree, mesh, options))


def shardings(tree: Any, mesh: AnyMesh, **options: Unpack[PartitionOptions]) -> Any:
    """The same decision as `NamedSharding`s, ready for `jit` and `device_put`.

    >>> import jax, meshwright as mw
    >>> mw.shardings({"w": jax.numpy.ones((64, 64))}, mw.mesh("fsdp:8"))["w"].spec
    P('fsdp',)
    """
    found = walk(tree)
    specs = decide(found, tree, mesh, read_options(options))
    return found.rebuild([NamedSharding(mesh, spec) for spec in specs])


def decide(found: Walk, tree: Any, mesh: AnyMesh, options: Options) -> list[PartitionSpec]:
    """The specs of a walked tree, one per array; raises once for everything that is wrong."""
    sizes = mesh_axes(mesh)
    options.check_axes(sizes)
    specs: list[PartitionSpec | None] = [None] * len(found.arrays)
    wrong: list[str] = []
    if options.rules is not None:
        specs, wrong = _by_rules(found.arrays, options)
    elif options.logical is not None:
        specs, wrong = _by_logical(found.arrays, tree, options)
    specs, more = _checked(found.arrays, specs, sizes, options)
    wrong += more
    if options.by_shape:
        specs, more = _by_shape(found.arrays, specs, sizes, options)
        wrong += more
    refuse("partition", wrong)
    return [make_spec() if spec is None else spec for spec in specs]


def settle(
    what: str, found: Walk, tree: Any, mesh: AnyMesh, specs: Any, options: Mapping[str, Any]
) -> list[PartitionSpec]:
    """The specs that were given, checked; or, where there are none, those that `decide` finds."""
    if specs is None:
        return decide(found, tree, mesh, read_options(options))
    if options:
        raise PartitionError(f"{', '.join(options)}: options of partition, but specs were given.")
    per_leaf = match_specs(found, specs)
    check_specs(what, found.arrays, per_leaf, mesh)
    return per_leaf


def _by_rules(
    leaves: Sequence[Leaf], options: Options
) -> tuple[list[PartitionSpec | None], list[str]]:
    specs, never = match_rules(leaves, read_rules(options.rules))
    wrong = list(never) if options.unused == "error" else []
    if options.unmatched == "error":
        wrong += [
            f"{leaf.where}: {leaf.shape} matches no rule. Add one, e.g. ('**', None), or pass "
            "unmatched='replicate' or 'shape'."
            for leaf, spec in zip(leaves, specs, strict=True)
            if spec is None and leaf.shape
        ]
    return specs, wrong


def _by_logical(
    leaves: Sequence[Leaf], tree: Any, options: Options
) -> tuple[list[PartitionSpec | None], list[str]]:
    table = read_table(options.logical)
    wrong: list[str] = []
    if options.names is None:
        per_leaf = read_metadata(tree, leaves)
    else:
        per_leaf, wrong = read_names(leaves, options.names)
    specs: list[PartitionSpec | None] = []
    for leaf, names in zip(leaves, per_leaf, strict=True):
        if names is not None or options.unmatched == "error":
            wrong.extend(logical_problems(leaf, names, table))
        # Names that are too few or too many were reported; their spec would say it again.
        fit = names is not None and fits(leaf, names)
        specs.append(logical_spec(names or (), table) if fit else None)
    return specs, wrong


def _checked(
    leaves: Sequence[Leaf],
    specs: Sequence[PartitionSpec | None],
    sizes: dict[str, int],
    options: Options,
) -> tuple[list[PartitionSpec | None], list[str]]:
    """The specs as they will be used, and what is wrong with them."""
    seen: dict[Any, PartitionSpec | None] = {}
    result, wrong = [], []
    for leaf, spec in zip(leaves, specs, strict=True):
        key = (leaf.shape, spec)
        if spec is not None and key not in seen:
            if options.uneven == "replicate":
                spec = drop_uneven(leaf.shape, spec, sizes)
            bad = list(problems(leaf.path, leaf.shape, spec, sizes))
            wrong.extend(bad)
            if not bad:
                seen[key] = make_spec(spec) if spec and spec[-1] is None else spec
        result.append(seen.get(key))
    return result, wrong


def _by_shape(
    leaves: Sequence[Leaf],
    specs: Sequence[PartitionSpec | None],
    sizes: dict[str, int],
    options: Options,
) -> tuple[list[PartitionSpec | None], list[str]]:
    """Specs for the leaves that have none yet, and patterns for stacks that match no leaf."""
    usable = weight_axes(sizes, options.axes)
    stacks, unused = find_stacks(leaves, options.stacked)
    result = list(specs)
    for place, leaf in enumerate(leaves):
        if result[place] is None and leaf.size >= options.min_shard_size:
            first = 1 if len(leaf.shape) > 1 and leaf.path in stacks else 0
            result[place] = choose(leaf.shape, bits(leaf.dtype), usable, first)
    return result, unused if options.unused == "error" else []


# `uneven="replicate"`: a spec without the axes that do not divide their dim.


def drop_uneven(
    shape: tuple[int, ...], spec: PartitionSpec, axes: Mapping[str, int]
) -> PartitionSpec:
    """The spec with every axis dropped that does not divide what those before it leave of its dim.

    >>> drop_uneven((6, 8), PartitionSpec(("fsdp", "tp"), "ep"), {"fsdp": 2, "tp": 2, "ep": 4})
    P('fsdp', 'ep')
    """
    if not is_split(spec):  # `problems` says so
        return spec
    entries = [
        _dividing(shape[dim], entry, axes)
        if dim < len(shape) and shape[dim] % ways(entry, axes)
        else entry
        for dim, entry in enumerate(spec)
    ]
    return make_spec(entries) if entries != list(spec) else spec


def _dividing(side: int, entry: Any, axes: Mapping[str, int]) -> Any:
    """What is left of an entry: one axis, several, or `None`."""
    kept: list[str] = []
    for axis in entry_axes(entry):
        if side % axes.get(axis, 1) == 0:
            side //= axes.get(axis, 1)
            kept.append(axis)
    return tuple(kept) if len(kept) > 1 else (kept[0] if kept else None)
