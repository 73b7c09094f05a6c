"""A tree of specs against the tree it is meant for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import PartitionError, short
from meshwright.partitioning.leaves import Leaf, Walk, path_text, refuse, shown
from meshwright.partitioning.nodes import Paths, flatten
from meshwright.partitioning.specs import (
    AnyMesh,
    looks_like_spec,
    make_spec,
    mesh_axes,
    problems,
    write_as,
)


def match_specs(found: Walk, specs: Any) -> list[PartitionSpec]:
    """The spec of every array, from a tree like the arrays' own, or one spec for all.

    A `NamedSharding` counts as its spec; where there is a mesh, `plain_specs` looks at its mesh.
    """
    if _is_spec(specs):
        return [_spec(specs)] * len(found.arrays)
    values = [_spec(value) for _, value in _flat_like(found, specs)]
    chosen = [values[leaf.place] for leaf in found.arrays]
    refuse(
        "specs",
        [
            f"{leaf.where}: {short(spec)} is not a PartitionSpec.{write_as(spec)}"
            for leaf, spec in zip(found.arrays, chosen, strict=True)
            if not isinstance(spec, PartitionSpec)
        ],
    )
    return chosen


def plain_specs(specs: Any, mesh: AnyMesh) -> Any:
    """The same tree with specs for `NamedSharding`s, which must be of this mesh."""
    if specs is None or isinstance(specs, PartitionSpec):
        return specs
    flat, treedef = flatten(specs, _is_spec)
    named = [(path, value) for path, value in flat if isinstance(value, NamedSharding)]
    if not named:
        return specs
    mesh_axes(mesh)
    kind = NamedSharding(mesh, make_spec()).memory_kind
    wrong = []
    for path, value in named:
        where = shown(path_text(path)) if path else "specs"
        if value.mesh != mesh:
            wrong.append(
                f"{where}: {_other_mesh(value.mesh, mesh)}. Pass its spec, or a sharding on "
                "the mesh itself."
            )
        elif value.memory_kind not in (None, kind):
            wrong.append(
                f"{where}: a sharding in memory {value.memory_kind!r}; arrays go to {kind!r}. "
                "Use jax.device_put for other memory."
            )
    refuse("specs", wrong)
    return jax.tree.unflatten(treedef, [_spec(value) for _, value in flat])


def check_specs(
    what: str, leaves: Sequence[Leaf], specs: Sequence[PartitionSpec], mesh: AnyMesh
) -> None:
    """Refuse specs that do not fit their arrays or the mesh, all at once."""
    sizes = mesh_axes(mesh)
    refuse(
        what,
        [
            problem
            for leaf, spec in zip(leaves, specs, strict=True)
            for problem in problems(leaf.path, leaf.shape, spec, sizes)
        ],
    )


def check_constrained(
    what: str, leaves: Sequence[Leaf], shardings: Sequence[NamedSharding]
) -> None:
    """Refuse specs that leave the choice to a compiler."""
    refuse(
        what,
        [
            f"{leaf.where}: {short(to.spec)} leaves a dim unconstrained, which only jit can "
            "decide. Use None, or an axis."
            for leaf, to in zip(leaves, shardings, strict=True)
            if PartitionSpec.UNCONSTRAINED in tuple(to.spec)
        ],
    )


def _flat_like(found: Walk, specs: Any) -> Paths:
    """The specs, leaf by leaf of the arrays' tree; what stands in place of one is named later."""
    readings: tuple[Callable[[Any], bool], ...] = (
        _is_spec,
        # A None in place of a spec is named, one beside arrays is fine.
        lambda value: value is None or _is_spec(value),
        lambda value: value is None or _is_spec(value) or looks_like_spec(value),
    )
    for is_leaf in readings:
        flat, treedef = flatten(specs, is_leaf)
        if treedef == found.treedef:
            return flat
    if looks_like_spec(specs):
        raise PartitionError(f"specs: {short(specs)} is not a PartitionSpec.{write_as(specs)}")
    raise PartitionError(
        f"specs: the tree differs from the arrays' tree. {_difference(found, specs)}"
    )


def _is_spec(value: Any) -> bool:
    return isinstance(value, (PartitionSpec, NamedSharding))


def _spec(value: Any) -> Any:
    return value.spec if isinstance(value, NamedSharding) else value


def _other_mesh(theirs: AnyMesh, ours: AnyMesh) -> str:
    """How two meshes differ: in their axes, or in what lies behind equal ones."""
    axes = [
        short(", ".join(f"{name}:{size}" for name, size in m.shape.items()), 80)
        for m in (theirs, ours)
    ]
    if axes[0] != axes[1]:
        return f"a sharding on the mesh {axes[0]}, but the mesh is {axes[1]}"
    return f"a sharding on another mesh {axes[0]}, of other devices, another order or axis types"


def _difference(found: Walk, specs: Any) -> str:
    """The first leaf that only one of the two trees has."""
    flat, _ = flatten(specs, lambda value: value is None or _is_spec(value))
    whole, _ = flatten(jax.tree.unflatten(found.treedef, found.leaves))
    ours = [path_text(path) for path, _ in whole]
    theirs = [path_text(path) for path, _ in flat]
    missing, extra = set(ours) - set(theirs), set(theirs) - set(ours)
    if missing:
        first = next(path for path in ours if path in missing)
        return f"First difference: {shown(first)!r} has no spec{_more(missing)}."
    if extra:
        first = next(path for path in theirs if path in extra)
        return f"First difference: {shown(first)!r} has a spec but is not in the tree."
    return "They have the same leaves in containers of different kinds."


def _more(paths: set[str]) -> str:
    return f", nor have {len(paths) - 1} more" if len(paths) > 1 else ""
