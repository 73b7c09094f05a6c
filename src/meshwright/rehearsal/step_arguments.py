"""The arguments of a step as shapes with shardings: given ones kept, the others decided.

The first argument and those that are donated are state: they are sharded as `partition` says, and
state after the first follows it as `partition_like` says. The others are data: their first dim is
sharded over the data axes. A sharding that an argument already has, or that `in_shardings` gives,
wins.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwright.axes import role
from meshwright.errors import RehearsalError, short
from meshwright.partitioning.decide import partition, resolve_specs
from meshwright.partitioning.optimizer_state import partition_like
from meshwright.partitioning.report import PartitionReport, explain_tree
from meshwright.trees.specs import make_spec, match_specs
from meshwright.trees.walk import Leaf, walk

_DATA_ROLES = ("data", "fsdp")


# In: the arguments, the mesh, and what the user said of each. Out: per argument a tree of specs of
# its structure. Invariant: arrays keep a sharding they have on this mesh, whatever is decided for
# their neighbours. Example, mesh fsdp:8: (params, adam state, batch, key) becomes (by shape, like
# params, P("fsdp"), P()).
def decide_specs(
    args: Sequence[Any],
    mesh: AbstractMesh,
    in_shardings: Sequence[Any] | None,
    data: tuple[int, ...],
    options: Mapping[str, Any],
) -> list[Any]:
    """Decide a tree of specs for every argument; `options` are those of `partition`."""
    if in_shardings is not None and (
        not isinstance(in_shardings, (tuple, list)) or len(in_shardings) != len(args)
    ):
        raise RehearsalError(
            f"in_shardings: one entry for each of the {len(args)} arguments is needed, None where "
            f"it shall be decided, not {short(in_shardings)}.",
            option="in_shardings",
        )
    specs: list[Any] = [None] * len(args)
    params: int | None = None  # the first argument that is state: others follow it
    for i, arg in enumerate(args):
        given = None if in_shardings is None else in_shardings[i]
        if isinstance(given, PartitionSpec):
            arrays = walk(arg)
            specs[i] = arrays.rebuild([given] * len(arrays.arrays))
        elif given is not None:
            specs[i] = given
        elif i in data:
            by_rows = functools.partial(data_specs, mesh=mesh, name=f"argument {i}")
            specs[i] = _keep_or_decide(arg, mesh, by_rows)
        elif params is None:
            decide = functools.partial(partition, mesh=mesh, **options)
            specs[i] = _keep_or_decide(arg, mesh, decide)
        else:
            follow = functools.partial(partition_like, params=args[params], specs=specs[params])
            specs[i] = _keep_or_decide(arg, mesh, follow)
        if params is None and i not in data:
            params = i
    return specs


def data_specs(arg: Any, mesh: AbstractMesh, name: str = "data") -> Any:
    """Shard every array along its first dim, over the axes that split data; keys are replicated."""
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    axes = tuple(axis for axis in sizes if role(axis).name in _DATA_ROLES and sizes[axis] > 1)
    spec = make_spec([axes if len(axes) > 1 else axes[0]] if axes else ())
    shards = math.prod(sizes[axis] for axis in axes)
    arrays = walk(arg)
    replicated = [not has_rows(leaf) for leaf in arrays.arrays]
    for leaf, whole in zip(arrays.arrays, replicated, strict=True):
        if not whole and leaf.shape[0] % shards:
            where = name if leaf.where == "(the array)" else f"{name}, {leaf.where}"
            raise RehearsalError(
                f"{where}: {leaf.shape[0]} rows cannot be cut over {shards} devices "
                f"({', '.join(axes)}). Data are cut along their first dim: take a multiple of "
                f"{shards}, or say how it is sharded: in_shardings=[..., PartitionSpec(), ...], an "
                "entry for each argument, None where it shall be decided.",
                option="in_shardings",
            )
    return arrays.rebuild([make_spec() if whole else spec for whole in replicated])


def has_rows(leaf: Any) -> bool:
    """Whether a leaf has rows to shard: numbers and random keys have none."""
    shape = np.shape(leaf) if not hasattr(leaf, "shape") else tuple(leaf.shape)
    # `jax.random.PRNGKey` makes a plain uint32[2]; keys of the new kind have no dims.
    return bool(shape) and not (shape == (2,) and str(getattr(leaf, "dtype", "")) == "uint32")


def _keep_or_decide(arg: Any, mesh: AbstractMesh, decide: Callable[[Any], Any]) -> Any:
    """Keep the specs that arrays bring with them from a mesh of these axes; decide the others."""
    arrays = walk(arg)
    own = [_spec_of(leaf, mesh) for leaf in arrays.arrays]
    # Deciding may refuse (uneven dims, unmatched rules), so it is not asked where nothing is open.
    if None not in own:
        return arrays.rebuild(own)
    decided = match_specs(arrays, decide(arg))
    return arrays.rebuild(
        [new if kept is None else kept for kept, new in zip(own, decided, strict=True)]
    )


def _spec_of(leaf: Leaf, mesh: AbstractMesh) -> PartitionSpec | None:
    sharding: Any = getattr(leaf.value, "sharding", None)
    return sharding.spec if _is_on(sharding, mesh) else None


def _is_on(sharding: Any, mesh: AbstractMesh) -> bool:
    """Whether a sharding is on a mesh of the same axes, whatever its devices."""
    axes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == axes


def as_shapes(args: Sequence[Any], specs: Sequence[Any], mesh: AbstractMesh) -> tuple[Any, ...]:
    """Return the arguments without values: each array a `ShapeDtypeStruct` with its sharding."""
    return tuple(_shapes(arg, spec, mesh) for arg, spec in zip(args, specs, strict=True))


def _shapes(arg: Any, specs: Any, mesh: AbstractMesh) -> Any:
    arrays = walk(arg)
    for leaf in arrays.leaves:
        if callable(leaf):
            raise RehearsalError(
                f"{short(leaf)} among the arguments is no array. Pass arrays, and functions and "
                "settings by closure; for Equinox, eqx.partition the module and eqx.combine it "
                "inside of the step."
            )
    per_leaf = resolve_specs("rehearse", arrays, arg, mesh, specs, {})
    return arrays.rebuild(
        [
            jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
                leaf.shape,
                # As `jit` would: float64 of NumPy is float32 unless jax_enable_x64 is set.
                jax.dtypes.canonicalize_dtype(leaf.value.dtype, allow_extended_dtype=True),
                sharding=NamedSharding(mesh, spec),
            )
            for leaf, spec in zip(arrays.arrays, per_leaf, strict=True)
        ]
    )


def with_jit_shardings(
    shapes: tuple[Any, ...], jit_shardings: Sequence[Any], mesh: AbstractMesh
) -> tuple[Any, ...]:
    """Replace shardings by those that the step's own `jit` gives its flat arguments, which win."""
    leaves, treedef = jax.tree.flatten(shapes)
    if len(jit_shardings) != len(leaves):
        return shapes  # static arguments are not among them
    replaced = [
        jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, sharding.spec)
        )
        if hasattr(leaf, "sharding") and _is_on(sharding, mesh)
        else leaf
        for leaf, sharding in zip(leaves, jit_shardings, strict=True)
    ]
    tree: tuple[Any, ...] = jax.tree.unflatten(treedef, replaced)
    return tree


def sharding_table(
    names: Sequence[str], shapes: Sequence[Any], mesh: AbstractMesh
) -> PartitionReport:
    """Report how all arguments are sharded, in one table."""
    walks = [walk(shape) for shape in shapes]
    specs = [each.rebuild([leaf.value.sharding.spec for leaf in each.arrays]) for each in walks]
    return explain_tree(
        dict(zip(names, shapes, strict=True)), mesh, dict(zip(names, specs, strict=True))
    )


def argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional parameters, `argument 3` where there is none."""
    try:
        names = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # builtins and odd callables have no signature
        names = []
    return [names[i] if i < len(names) else f"argument {i}" for i in range(count)]
