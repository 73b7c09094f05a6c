"""From logical names to mesh axes, for parameters and for activations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from meshwright.axes import role
from meshwright.errors import ModelError, near
from meshwright.models.weights import pattern
from meshwright.partitioning.specs import AnyMesh, make_spec, mesh_axes

# What dims of parameters are split by: roles of axes that must divide them, then roles that are
# used where they divide. Heads that tensor axes do not divide are held by all, as Llama's 8 heads
# of keys and values by 16 devices; experts' axes split what is no expert, too, as more `fsdp`.
# Channels of images come in many sizes, which their names tell: `in:64`.
_WEIGHTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "vocab": (("tensor",), ()),
    "embed": (("fsdp",), ("expert",)),
    "heads": ((), ("tensor",)),
    "kv_heads": ((), ("tensor",)),
    "mlp": (("tensor",), ()),
    "experts": (("expert",), ()),
    "expert_embed": (("fsdp",), ()),
    "classes": ((), ("tensor",)),
    "in": ((), ("fsdp",)),
    "out": ((), ("tensor",)),
}

# What dims of activations are split by, where it divides them. `rows` are those of a batch whose
# tokens have gone to their experts.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "rows": ("data", "fsdp"),
    "seq": ("sequence", "context"),
    "embed": (),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "experts": ("expert",),
    "classes": ("tensor",),
}

# Axes over whole machines, which hold copies of the model.
_DATA_NAMES = ("pod", "pods", "slice", "slices")


def _axes(names: Iterable[str], roles: tuple[str, ...]) -> tuple[str, ...]:
    """The axes with these roles, in the order of the roles and then of the mesh."""
    found = {name: "data" if name in _DATA_NAMES else role(name).name for name in names}
    return tuple(name for wanted in roles for name in found if found[name] == wanted)


def logical_table(weights: Any, mesh: AnyMesh) -> dict[str, Any]:
    """`{logical name: mesh axes}` for all names in a tree of weights."""
    sizes: dict[str, set[int]] = {}
    for weight in jax.tree.leaves(weights):
        for name, size in zip(weight.names, weight.shape, strict=True):
            sizes.setdefault(name, set()).add(size)
    return {name: _weight_axes(name, found, mesh) for name, found in sizes.items()}


def _weight_axes(name: str, sizes: set[int], mesh: AnyMesh) -> Any:
    known = mesh_axes(mesh)
    must, may = _WEIGHTS.get(name.partition(":")[0], ((), ()))
    chosen = list(_axes(known, must))
    pieces = 1
    for axis in chosen:
        pieces *= known[axis]
    for axis in _axes(known, may):
        if all(size % (pieces * known[axis]) == 0 for size in sizes):
            chosen.append(axis)
            pieces *= known[axis]
    return _entry(chosen)


def _entry(axes: Iterable[str]) -> Any:
    found = tuple(axes)
    return found if len(found) > 1 else (found[0] if found else None)


def rules(weights: Any, mesh: AnyMesh) -> list[tuple[str, PartitionSpec]]:
    """A rule per kind of parameter; a state's copies of it end in the same path."""
    table = logical_table(weights, mesh)
    found: dict[str, PartitionSpec] = {}
    for path, weight in jax.tree.leaves_with_path(weights):
        found[pattern(path)] = make_spec(table[name] for name in weight.names)
    return list(found.items())


def batch_spec(mesh: AnyMesh, *names: str) -> PartitionSpec:
    """How inputs are split whose dims have these names."""
    return make_spec(_entry(_axes(mesh_axes(mesh), _ACTIVATIONS[name])) for name in names)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Ask the compiler for a layout, by a logical name (or `None`: whole) per dim.

    The mesh is the one set by `jax.set_mesh`; axes that it does not have, or that do not divide a
    dim, are left out. Without such a mesh this does nothing.

    >>> import jax, jax.numpy as jnp, meshwright as mw
    >>> with jax.set_mesh(mw.mesh("fsdp:4, tp:2")):
    ...     constrain(jnp.ones((8, 16, 32)), "batch", "seq", "mlp").sharding.spec
    P('fsdp', None, 'tp')
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    ours = {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    if not ours:
        return x
    entries = [_dividing(ours, name, size) for name, size in zip(names, x.shape, strict=True)]
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, make_spec(entries))  # type: ignore[no-untyped-call]
    return constrained


def _dividing(sizes: dict[str, int], name: str | None, size: int) -> Any:
    if name is None:
        return None
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"constrain: no logical name {name!r}.{near(name, _ACTIVATIONS)} "
            f"Known: {', '.join(_ACTIVATIONS)}."
        )
    chosen, pieces = [], 1
    for axis in _axes(sizes, _ACTIVATIONS[name]):
        if size % (pieces * sizes[axis]) == 0:
            chosen.append(axis)
            pieces *= sizes[axis]
    return _entry(chosen)
