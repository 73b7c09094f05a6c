"""`partition(...)`: a spec for every array of a tree, by rules, by logical axes, or by shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwright._show import short_repr
from meshwright.errors import PartitionError, listing, literal_text, near, option_text, short
from meshwright.partitioning.by_shape import choose_spec, kind_of, turned_kernels, weight_axes
from meshwright.partitioning.logical import (
    Table,
    count_problem,
    logical_spec,
    missing_problem,
    read_names,
    read_table,
    unknown_problems,
)
from meshwright.partitioning.rules import Rules, Unmatched, Unused, match_rules, read_rules
from meshwright.partitioning.stacks import find_stacks
from meshwright.trees.metadata import read_metadata
from meshwright.trees.specs import (
    AnyMesh,
    Uneven,
    check_specs,
    entry_axes,
    is_reduction_free,
    make_spec,
    match_specs,
    mesh_axes,
    shard_count,
    spec_problems,
)
from meshwright.trees.walk import Leaf, Walk, bits, refuse, walk

# Gathering an array of less takes as long as gathering nothing: a collective starts in 1 to 30 us,
# in which a link moves so much and more. Of the models in `benchmarks/partitioning.py` a ResNet
# gains most, 50 gathers become 31; at four times as much a ViT grows and nothing is gained.
MIN_SHARD_BYTES = 64 * 1024

# The option that a problem is about, and its text.
Problem = tuple[str, str]
# A spec for each array, `None` where nothing was decided.
Specs = list[PartitionSpec | None]


def partition(
    tree: Any,
    mesh: AnyMesh,
    *,
    rules: Rules | None = None,
    logical: Table | None = None,
    names: Any = None,
    axes: Sequence[str] | None = None,
    min_shard_bytes: int = MIN_SHARD_BYTES,
    uneven: Uneven = "error",
    unmatched: Unmatched = "error",
    unused: Unused = "error",
    stacked: str | Sequence[str] | bool | None = None,
) -> Any:
    """Choose a `PartitionSpec` for every array of a tree; other leaves pass through.

    By `rules`, by `logical` axes, or by shape when neither is given.

    Args:
      tree: any pytree of arrays or shapes.
      mesh: the mesh to shard over; it needs no devices.
      rules: (pattern, spec) pairs over the leaf's path; the first that matches wins.
      logical: a table from names of dims to mesh axes. A name that is a mesh axis needs no entry,
        so `{}` reads metadata that names mesh axes.
      names: a tree of tuples with a name for each dim; by default the metadata of Flax or penzai.
      axes: by shape, the mesh axes to use so that bytes per device are least; by default those
        meant for weights.
      min_shard_bytes: by shape, arrays of fewer bytes (of a stack, a layer) are replicated.
      uneven: `"replicate"` drops axes that do not divide a dim, which are an error otherwise.
      unmatched: what becomes of leaves that no rule matches, that have no names, and of names that
        are not in the table: `"replicate"` for the leaf (or the dim of such a name), `"shape"`.
      unused: `"allow"` permits rules and patterns that match nothing.
      stacked: patterns of the leaves whose first dim counts layers and is not sharded; by default
        they are recognised by the structure of the tree. False for none.

    Raises:
      PartitionError: with the path of every leaf that is wrong.

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
        rules, logical, names, axes, min_shard_bytes, uneven, unmatched, unused, stacked
    )
    walked = walk(tree)
    return walked.rebuild(decide(walked, tree, mesh, options))


def shardings(tree: Any, mesh: AnyMesh, **options: Unpack[PartitionOptions]) -> Any:
    """Choose a `NamedSharding` for every array of a tree, ready for `jit` and `device_put`.

    The specs are those of `partition`, which explains the options and the errors.

    >>> import jax, meshwright as mw
    >>> mw.shardings({"w": jax.numpy.ones((256, 256))}, mw.mesh("fsdp:8"))["w"].spec
    P('fsdp',)
    """
    walked = walk(tree)
    specs = decide(walked, tree, mesh, read_options(options))
    return walked.rebuild([NamedSharding(mesh, spec) for spec in specs])


class PartitionOptions(TypedDict, total=False):
    """The options of `partition`, for functions that pass them on."""

    rules: Rules | None
    logical: Table | None
    names: Any
    axes: Sequence[str] | None
    min_shard_bytes: int
    uneven: Uneven
    unmatched: Unmatched
    unused: Unused
    stacked: str | Sequence[str] | bool | None


@dataclasses.dataclass(frozen=True, repr=False)
class Options:
    """The options of `partition` as a value, checked when it is made."""

    rules: Any = None
    logical: Any = None
    names: Any = None
    axes: Sequence[str] | None = None
    min_shard_bytes: int = MIN_SHARD_BYTES
    uneven: str = "error"
    unmatched: str = "error"
    unused: str = "error"
    stacked: Any = None

    def __post_init__(self) -> None:
        _check_word("uneven", self.uneven, ("error", "replicate"))
        _check_word("unmatched", self.unmatched, ("error", "replicate", "shape"))
        _check_word("unused", self.unused, ("error", "allow"))
        if self.rules is not None and self.logical is not None:
            raise PartitionError("pass rules or logical, not both.", option="rules")
        if self.names is not None and self.logical is None:
            raise PartitionError("names go with logical={name: mesh axes}.", option="names")
        self._check_by_shape()
        check_shard_limit("min_shard_bytes", self.min_shard_bytes, "bytes")

    @property
    def by_shape(self) -> bool:
        """Whether shapes decide, about all leaves or about those that are left."""
        return (self.rules is None and self.logical is None) or self.unmatched == "shape"

    def _check_by_shape(self) -> None:
        """Refuse options about deciding by shape where nothing is decided by shape."""
        if self.by_shape:
            return
        given = "rules" if self.rules is not None else "logical"
        for option, value in (("axes", self.axes), ("stacked", self.stacked)):
            if value is not None:
                raise PartitionError(
                    f"{option}: is for deciding by shape, but {given}= decides. Drop it, or pass "
                    f"{option_text('unmatched', 'shape')} to decide so about the leaves that are "
                    "left.",
                    option=option,
                )

    def check_axes(self, sizes: Mapping[str, int]) -> None:
        """Refuse `axes` that are not axes of this mesh, or that appear twice."""
        if self.axes is not None and not isinstance(self.axes, (list, tuple)):
            raise PartitionError(
                f"axes: {short(self.axes)} is not a list of mesh axes, e.g. ['fsdp'].",
                option="axes",
            )
        seen: set[str] = set()
        for axis in self.axes or ():
            if not isinstance(axis, str) or axis not in sizes:
                hint = near(axis, sizes) if isinstance(axis, str) else ""
                raise PartitionError(
                    f"axes: no mesh axis {short(axis)} in {listing(sizes)}.{hint}", option="axes"
                )
            if axis in seen:
                raise PartitionError(f"axes: {axis!r} appears twice. Name it once.", option="axes")
            seen.add(axis)

    def __repr__(self) -> str:
        changed = [
            f"{field.name}={short(value, 30)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not field.default
        ]
        return short_repr(self, ", ".join(changed) or "by shape")


def check_shard_limit(option: str, size: object, unit: str) -> None:
    """Refuse a limit below which arrays are replicated that is no count, or less than 0."""
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise PartitionError(f"{option}: {short(size)} is not a count of {unit}.", option=option)
    if size < 0:
        raise PartitionError(
            f"{option_text(option)}: {size} is less than 0. Use 0 to shard all arrays.",
            option=option,
        )


def read_options(options: Mapping[str, Any]) -> Options:
    """Make `Options` from keywords; for a misspelt one, the error suggests the near name."""
    known = [field.name for field in dataclasses.fields(Options)]
    for name in options:
        if name not in known:
            raise PartitionError(
                f"no option {name!r}.{near(name, known)} Known: {listing(known, 10)}."
            )
    return Options(**options)


def _check_word(option: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise PartitionError(
            f"{option}: {short(value)} is not one of {', '.join(known)}.", option=option
        )


def decide(walked: Walk, tree: Any, mesh: AnyMesh, options: Options) -> list[PartitionSpec]:
    """Choose the specs of a walked tree, one per array; raise once for everything that is wrong.

    `tree` itself is needed for the metadata of Flax, which stands around the arrays.
    """
    sizes = mesh_axes(mesh)
    options.check_axes(sizes)
    leaves = walked.arrays
    specs: Specs = [None] * len(leaves)
    problems: list[Problem] = []
    if options.rules is not None:
        specs, problems = _by_rules(leaves, options)
    elif options.logical is not None:
        specs, problems = _by_logical(leaves, tree, sizes, options)
    # Before shapes decide about what is left: their specs are right by construction.
    specs, more = _check_chosen(leaves, specs, sizes, options)
    problems += more
    if options.by_shape:
        specs, more = _by_shape(leaves, specs, sizes, options)
        problems += more
    about = {option for option, _ in problems}
    refuse(
        "partition", [text for _, text in problems], option=about.pop() if len(about) == 1 else None
    )
    return [make_spec() if spec is None else spec for spec in specs]


def resolve_specs(
    what: str, walked: Walk, tree: Any, mesh: AnyMesh, specs: Any, options: Mapping[str, Any]
) -> list[PartitionSpec]:
    """Return the given specs, checked; where there are none, those that `decide` chooses."""
    if specs is None:
        return decide(walked, tree, mesh, read_options(options))
    if options:
        raise PartitionError(
            f"{', '.join(options)}: options of partition, but specs were given.",
            option=next(iter(options)),
        )
    per_leaf = match_specs(walked, specs)
    check_specs(what, walked.arrays, per_leaf, mesh)
    return per_leaf


def _by_rules(leaves: Sequence[Leaf], options: Options) -> tuple[Specs, list[Problem]]:
    specs, unused = match_rules(leaves, read_rules(options.rules))
    # `unused` is lazy: searching why a rule took no leaf costs time, and is wanted only here.
    problems = [("unused", text) for text in unused] if options.unused == "error" else []
    if options.unmatched == "error":
        problems += [
            (
                "unmatched",
                f"{leaf.where}: {leaf.shape} matches no rule. Add one, e.g. "
                f"{literal_text(('**', None))}, or pass "
                f"{option_text('unmatched', 'replicate', 'shape')}.",
            )
            for leaf, spec in zip(leaves, specs, strict=True)
            if spec is None and leaf.shape  # a scalar has nothing to cut
        ]
    return specs, problems


def _by_logical(
    leaves: Sequence[Leaf], tree: Any, sizes: Mapping[str, int], options: Options
) -> tuple[Specs, list[Problem]]:
    table = read_table(options.logical)
    problems: list[Problem] = []
    given = options.names is not None
    if given:
        per_leaf, wrong = read_names(leaves, options.names)
        problems += [("names", text) for text in wrong]
    else:
        per_leaf = read_metadata(tree, leaves)
    specs: Specs = []
    for leaf, names in zip(leaves, per_leaf, strict=True):
        specs.append(None)
        if names is None:
            if leaf.shape and options.unmatched == "error":
                problems.append(("unmatched", missing_problem(leaf)))
            continue
        count = count_problem(leaf, names, given)
        if count is not None:  # a spec of these names would say it again
            problems.append(("logical", count))
            continue
        unknown = list(unknown_problems(leaf, names, table, sizes))
        if options.unmatched == "error":
            problems += [("logical", text) for text in unknown]
        if not unknown or options.unmatched != "shape":
            specs[-1] = logical_spec(names, table, sizes)
    return specs, problems


def _check_chosen(
    leaves: Sequence[Leaf], specs: Specs, sizes: dict[str, int], options: Options
) -> tuple[Specs, list[Problem]]:
    """Return the specs as they will be used, and what is wrong with them.

    A model has many leaves but few (shape, spec) pairs, so each pair is checked once; a bad one
    is reported for every leaf, since the message must name them all.
    """
    source = "rules" if options.rules is not None else "logical"
    checked: dict[Any, PartitionSpec | None] = {}
    result: Specs = []
    problems: list[Problem] = []
    for leaf, spec in zip(leaves, specs, strict=True):
        key = (leaf.shape, spec)
        if spec is not None and key not in checked:
            if options.uneven == "replicate":
                spec = drop_uneven(leaf.shape, spec, sizes)
            otherwise = f"pass {option_text('uneven', 'replicate')} to partition"
            wrong = list(spec_problems(leaf.path, leaf.shape, spec, sizes, otherwise=otherwise))
            problems += [(source, text) for text in wrong]
            if not wrong:
                checked[key] = make_spec(spec) if spec and spec[-1] is None else spec
        result.append(checked.get(key))
    return result, problems


def _by_shape(
    leaves: Sequence[Leaf], specs: Specs, sizes: dict[str, int], options: Options
) -> tuple[Specs, list[Problem]]:
    """Choose specs for leaves that have none yet; report `stacked` patterns that match no leaf."""
    usable = weight_axes(sizes, options.axes)
    stacks, unused = find_stacks(leaves, options.stacked)
    turned = turned_kernels(leaves)
    result = list(specs)
    for place, leaf in enumerate(leaves):
        # A stack of scalars, one per layer, has only its first dim to cut.
        layers = stacks.get(leaf.path) if len(leaf.shape) > 1 else None
        # Of a stack one layer at a time is gathered.
        size = leaf.bytes if layers is None else leaf.bytes // max(1, leaf.shape[layers])
        if result[place] is None and size >= options.min_shard_bytes:
            # The dim of the layers comes first, or is left out and put back.
            shape = (*leaf.shape[:1], *leaf.shape[2:]) if layers == 1 else leaf.shape
            spec = choose_spec(
                shape,
                bits(leaf.dtype),
                usable,
                int(layers == 0),
                kind_of(leaf.path),
                leaf.path in turned,
            )
            result[place] = make_spec([*spec[:1], None, *spec[1:]]) if layers == 1 else spec
    problems = [("stacked", text) for text in unused] if options.unused == "error" else []
    return result, problems


def drop_uneven(
    shape: tuple[int, ...], spec: PartitionSpec, axes: Mapping[str, int]
) -> PartitionSpec:
    """Drop every axis of a spec that does not divide what the axes before it leave of its dim.

    >>> drop_uneven((6, 8), PartitionSpec(("fsdp", "tp"), "ep"), {"fsdp": 2, "tp": 2, "ep": 4})
    P('fsdp', 'ep')
    """
    if not is_reduction_free(spec):  # `spec_problems` reports it
        return spec
    entries = [
        _dividing_axes(shape[dim], entry, axes)
        if dim < len(shape) and shape[dim] % shard_count(entry, axes)
        else entry
        for dim, entry in enumerate(spec)
    ]
    return make_spec(entries) if entries != list(spec) else spec


def _dividing_axes(size: int, entry: Any, axes: Mapping[str, int]) -> Any:
    """Return what is left of an entry: one axis, several, or `None`."""
    kept: list[str] = []
    for axis in entry_axes(entry):
        if size % axes.get(axis, 1) == 0:
            size //= axes.get(axis, 1)
            kept.append(axis)
    return tuple(kept) if len(kept) > 1 else (kept[0] if kept else None)
