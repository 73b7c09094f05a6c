"""The arguments of a step as shapes with shardings: given ones kept, the others decided.

The first argument and those that are donated are state: they are cut as `partition` says, and
state beyond the first follows it as `partition_like` says. The others are data: their first dim
is cut over the data axes. A sharding that an argument already has, or that `specs` gives, wins.
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

_DATA = ("data", "fsdp")


def names_of(function: Callable[..., Any], count: int) -> list[str]:
    """What the arguments are called, for people to read."""
    try:
        found = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        found = []
    return [found[i] if i < len(found) else f"argument {i}" for i in range(count)]


def decide_specs(
    args: Sequence[Any],
    mesh: AbstractMesh,
    specs: Sequence[Any] | None,
    data: tuple[int, ...],
    options: Mapping[str, Any],
) -> list[Any]:
    """A tree of specs for every argument."""
    if specs is not None and (not isinstance(specs, (tuple, list)) or len(specs) != len(args)):
        raise RehearsalError(
            f"specs: one entry for each of the {len(args)} arguments is needed, None where it "
            f"shall be decided, not {short(specs)}."
        )
    found: list[Any] = [None] * len(args)
    first: int | None = None
    for i, arg in enumerate(args):
        given = None if specs is None else specs[i]
        if isinstance(given, PartitionSpec):
            arrays = walk(arg)
            found[i] = arrays.rebuild([given] * len(arrays.arrays))
        elif given is not None:
            found[i] = given
        elif i in data:
            cut = functools.partial(data_specs, mesh=mesh, name=f"argument {i}")
            found[i] = _where_they_lie(arg, mesh, cut)
        elif first is None:
            decide = functools.partial(partition, mesh=mesh, **options)
            found[i] = _where_they_lie(arg, mesh, decide)
        else:
            follow = functools.partial(partition_like, params=args[first], specs=found[first])
            found[i] = _where_they_lie(arg, mesh, follow)
        if first is None and i not in data:
            first = i
    return found


def data_specs(arg: Any, mesh: AbstractMesh, name: str = "data") -> Any:
    """Every array cut along its first dim, over the axes that split data; keys are whole."""
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    axes = tuple(axis for axis in sizes if role(axis).name in _DATA and sizes[axis] > 1)
    spec = make_spec([axes if len(axes) > 1 else axes[0]] if axes else ())
    ways = math.prod(sizes[axis] for axis in axes)
    found = walk(arg)
    whole = [not has_rows(leaf) for leaf in found.arrays]
    for leaf, uncut in zip(found.arrays, whole, strict=True):
        if not uncut and leaf.shape[0] % ways:
            where = name if leaf.where == "(the array)" else f"{name}, {leaf.where}"
            raise RehearsalError(
                f"{where}: {leaf.shape[0]} rows cannot be cut over {ways} devices "
                f"({', '.join(axes)}). Data are cut along their first dim: take a multiple of "
                f"{ways}, or say how it lies: specs=[..., PartitionSpec(), ...], an entry for each "
                "argument, None where it shall be decided."
            )
    return found.rebuild([make_spec() if uncut else spec for uncut in whole])


def has_rows(leaf: Any) -> bool:
    """Whether a leaf has rows to be cut: numbers and random keys of the old kind have none."""
    shape = np.shape(leaf) if not hasattr(leaf, "shape") else tuple(leaf.shape)
    return bool(shape) and not (shape == (2,) and str(getattr(leaf, "dtype", "")) == "uint32")


def _where_they_lie(arg: Any, mesh: AbstractMesh, decide: Callable[[Any], Any]) -> Any:
    """The specs that arrays bring with them from a mesh of these axes; the others decided."""
    found = walk(arg)
    brought = [_spec_of(leaf, mesh) for leaf in found.arrays]
    if None not in brought:
        return found.rebuild(brought)
    decided = match_specs(found, decide(arg))
    return found.rebuild(
        [other if own is None else own for own, other in zip(brought, decided, strict=True)]
    )


def _spec_of(leaf: Leaf, mesh: AbstractMesh) -> PartitionSpec | None:
    sharding: Any = getattr(leaf.value, "sharding", None)
    return sharding.spec if _is_on(sharding, mesh) else None


def _is_on(sharding: Any, mesh: AbstractMesh) -> bool:
    """Whether it is one on a mesh of these axes."""
    ours = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == ours


def as_shapes(args: Sequence[Any], specs: Sequence[Any], mesh: AbstractMesh) -> tuple[Any, ...]:
    """The arguments without values, each array with its sharding on the mesh."""
    return tuple(_shapes(arg, spec, mesh) for arg, spec in zip(args, specs, strict=True))


def _shapes(arg: Any, specs: Any, mesh: AbstractMesh) -> Any:
    found = walk(arg)
    for leaf in found.leaves:
        if callable(leaf):
            raise RehearsalError(
                f"{short(leaf)} among the arguments is no array. Pass arrays, and functions and "
                "settings by closure; for Equinox, eqx.partition the module and eqx.combine it "
                "inside of the step."
            )
    per_leaf = resolve_specs("rehearse", found, arg, mesh, specs, {})
    return found.rebuild(
        [
            jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
                leaf.shape,
                jax.dtypes.canonicalize_dtype(leaf.value.dtype, allow_extended_dtype=True),
                sharding=NamedSharding(mesh, spec),
            )
            for leaf, spec in zip(found.arrays, per_leaf, strict=True)
        ]
    )


def as_jitted(shapes: tuple[Any, ...], given: Sequence[Any], mesh: AbstractMesh) -> tuple[Any, ...]:
    """The same with the shardings that the step's own `jit` gives, which win."""
    leaves, treedef = jax.tree.flatten(shapes)
    if len(given) != len(leaves):
        return shapes  # static arguments are not among them
    found = [
        jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, sharding.spec)
        )
        if hasattr(leaf, "sharding") and _is_on(sharding, mesh)
        else leaf
        for leaf, sharding in zip(leaves, given, strict=True)
    ]
    again: tuple[Any, ...] = jax.tree.unflatten(treedef, found)
    return again


def sharding_table(
    names: Sequence[str], shapes: Sequence[Any], mesh: AbstractMesh
) -> PartitionReport:
    """All arguments in one table."""
    walks = [walk(shape) for shape in shapes]
    specs = [one.rebuild([leaf.value.sharding.spec for leaf in one.arrays]) for one in walks]
    return explain_tree(
        dict(zip(names, shapes, strict=True)), mesh, dict(zip(names, specs, strict=True))
    )
