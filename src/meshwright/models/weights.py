"""Parameters before they exist: shapes, a logical name per dim, how they begin."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from meshwright.axes import role
from meshwright.errors import ModelError, near
from meshwright.trees.specs import AnyMesh, make_spec, mesh_axes


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array of parameters to be: normal numbers of this mean and spread.

    `layers` are the numbers of the layers that its first dim counts, if it is a stack of them.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    mean: float = 0.0
    std: float = 0.0
    layers: range | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay pulls at it: at matrices, not at biases and the scales of norms."""
        return len(self.shape) - (self.layers is not None) > 1


def matrix(inputs: int, **dims: int) -> Weight:
    """A weight that sums over `inputs` numbers and keeps their spread.

    >>> matrix(64, embed=64, mlp=256)
    Weight(shape=(64, 256), names=('embed', 'mlp'), mean=0.0, std=0.125, layers=None)
    """
    return Weight(tuple(dims.values()), tuple(dims), std=inputs**-0.5)


def constant(value: float, **dims: int) -> Weight:
    """A bias or the scale of a norm."""
    return Weight(tuple(dims.values()), tuple(dims), mean=value)


def stacked(layer: Any, layers: range) -> Any:
    """The weights of one layer as a stack of several, for a scan to run over."""

    def stack(weight: Weight) -> Weight:
        shape, names = (len(layers), *weight.shape), ("layers", *weight.names)
        return dataclasses.replace(weight, shape=shape, names=names, layers=layers)

    return jax.tree.map(stack, layer)


def in_stages(layer: Any, layers: int, stages: int) -> list[Any]:
    """One stack of layers per stage."""
    each = layers // stages
    return [stacked(layer, range(n * each, (n + 1) * each)) for n in range(stages)]


def draw(weights: Any, key: jax.Array, dtype: str) -> Any:
    """The parameters. A layer begins the same however many stages there are."""
    flat, treedef = jax.tree.flatten_with_path(weights)
    # One number per array and layer, and all keys from them at once: compiled in a moment.
    numbers = [[_number(path, layer) for layer in weight.layers or [0]] for path, weight in flat]
    joined = jnp.array([*itertools.chain.from_iterable(numbers)], jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, joined)
    ends = list(itertools.accumulate(map(len, numbers)))
    arrays = [
        _draw(weight, keys[end - len(own) : end], dtype)
        for (_, weight), own, end in zip(flat, numbers, ends, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)


def _number(path: Any, layer: int) -> int:
    return zlib.crc32(f"{pattern(path)} {layer}".encode())


def _draw(weight: Weight, keys: jax.Array, dtype: str) -> jax.Array:
    if weight.std == 0.0:
        return jnp.full(weight.shape, weight.mean, dtype)
    shape = weight.shape[1:] if weight.layers else weight.shape
    numbers = jax.vmap(lambda key: jax.random.normal(key, shape, dtype))(keys)
    return weight.mean + weight.std * numbers.reshape(weight.shape)


def pattern(path: Any) -> str:
    """A path as rules have it, the same for every stage: `stages/*/mlp/up`."""
    text = jax.tree_util.keystr(path, simple=True, separator="/")
    return re.sub(r"^stages/\d+/", "stages/*/", text)


def count(weights: Any) -> int:
    """How many parameters there are."""
    return sum(weight.size for weight in jax.tree.leaves(weights))


# From logical names to mesh axes, for parameters and for activations.


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
