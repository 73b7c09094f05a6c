"""`partition(...)`: a spec for every array of a tree, by rules, by logical axes, or by shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import PartitionError, short
from meshwright.partitioning.by_logical import (
    Names,
    Table,
    logical_problems,
    logical_spec,
    read_names,
    read_table,
)
from meshwright.partitioning.by_rules import Rules, Unmatched, match_rules, read_rules
from meshwright.partitioning.by_shape import choose, weight_axes
from meshwright.partitioning.leaves import Leaf, Walk, bits, refuse, walk
from meshwright.partitioning.matching import check_specs, match_specs
from meshwright.partitioning.metadata import read_metadata
from meshwright.partitioning.options import MIN_SHARD_SIZE, Options, read_options
from meshwright.partitioning.specs import (
    AnyMesh,
    Uneven,
    make_spec,
    mesh_axes,
    problems,
    without_uneven,
)
from meshwright.partitioning.stacked import is_stacked


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
    `"shape"` takes leaves that no rule matches (or that have no names), `unused="allow"` rules that
    match nothing.

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


def shardings(tree: Any, mesh: AnyMesh, **options: Any) -> Any:
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
    by_shape = _by_shape(sizes, options)
    if options.rules is not None:
        specs, wrong = _by_rules(found.arrays, options, by_shape)
    elif options.logical is not None:
        specs, wrong = _by_logical(found.arrays, tree, options)
    else:
        return [by_shape(leaf) for leaf in found.arrays]
    return _checked(found.arrays, specs, sizes, options, wrong)


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


def _checked(
    leaves: Sequence[Leaf],
    specs: list[PartitionSpec],
    sizes: dict[str, int],
    options: Options,
    wrong: list[str],
) -> list[PartitionSpec]:
    seen: dict[Any, PartitionSpec] = {}
    for place, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        key = (leaf.shape, spec)
        if key not in seen:
            if options.uneven == "replicate":
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
    leaves: Sequence[Leaf], options: Options, by_shape: Callable[[Leaf], PartitionSpec]
) -> tuple[list[PartitionSpec], list[str]]:
    specs, never = match_rules(leaves, read_rules(options.rules))
    wrong = []
    if never and options.unused == "error":
        wrong = [
            f"rule {short(str(getattr(p, 'pattern', p)))} matches no leaf. Mend or drop it, or "
            "pass unused='allow'."
            for p in never
        ]
    result = []
    for leaf, spec in zip(leaves, specs, strict=True):
        if spec is None and options.unmatched == "error" and leaf.shape:
            wrong.append(
                f"{leaf.where}: {leaf.shape} matches no rule. Add one, e.g. ('**', None), or pass "
                "unmatched='replicate' or 'shape'."
            )
        if spec is None:
            spec = by_shape(leaf) if options.unmatched == "shape" else make_spec()
        result.append(spec)
    return result, wrong


def _by_logical(
    leaves: Sequence[Leaf], tree: Any, options: Options
) -> tuple[list[PartitionSpec], list[str]]:
    table = read_table(options.logical)
    per_leaf = _names(leaves, tree, options)
    wrong = [
        problem
        for leaf, given in zip(leaves, per_leaf, strict=True)
        if given is not None or options.unmatched == "error"
        for problem in logical_problems(leaf, given, table)
    ]
    return [logical_spec(given or (), table) for given in per_leaf], wrong


def _names(leaves: Sequence[Leaf], tree: Any, options: Options) -> list[Names | None]:
    if options.names is None:
        return read_metadata(tree, leaves)
    return read_names(leaves, options.names)


def _by_shape(sizes: dict[str, int], options: Options) -> Callable[[Leaf], PartitionSpec]:
    options.check_axes(sizes)
    usable = weight_axes(sizes, options.axes)

    def by_shape(leaf: Leaf) -> PartitionSpec:
        if leaf.size < options.min_shard_size:
            return make_spec()
        first = 1 if is_stacked(leaf.path, len(leaf.shape), options.stacked) else 0
        return choose(leaf.shape, bits(leaf.dtype), usable, first)

    return by_shape
