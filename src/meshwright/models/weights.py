"""`Weight`: a parameter as a shape, logical names and initial values; and how names are sharded.

A model describes its parameters as a tree of `Weight`s. From that tree come the arrays, their
count, and their sharding: each dim has a logical name ("embed", "heads"), each mesh axis a role
("fsdp", "tensor"), and two tables here say which roles split which names, one for parameters and
one for activations.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from meshwright._text import plural
from meshwright.axes import role
from meshwright.errors import ModelError, near, short
from meshwright.trees.specs import AnyMesh, make_spec, mesh_axes


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array of parameters, not yet made: its shape, a name per dim, and its initial values.

    Values are drawn from a normal distribution with `mean` and `std`. If it is a stack of layers,
    `layers` are their numbers in the whole model, one per index of the first dim.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    mean: float = 0.0
    std: float = 0.0
    layers: range | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to biases and the scales of norms."""
        return len(self.shape) - (self.layers is not None) > 1


def matrix(inputs: int, **dims: int) -> Weight:
    """Describe a weight whose outputs sum `inputs` products, so that they keep the inputs' spread.

    >>> matrix(64, embed=64, mlp=256)
    Weight(shape=(64, 256), names=('embed', 'mlp'), mean=0.0, std=0.125, layers=None)
    """
    return Weight(tuple(dims.values()), tuple(dims), std=inputs**-0.5)


def constant(value: float, **dims: int) -> Weight:
    """Describe a bias or the scale of a norm, all of one value."""
    return Weight(tuple(dims.values()), tuple(dims), mean=value)


def stack_layers(layer: Any, layers: range) -> Any:
    """Turn the weights of one layer into those of several, stacked for a scan to run over."""

    def stack(weight: Weight) -> Weight:
        shape, names = (len(layers), *weight.shape), ("layers", *weight.names)
        return dataclasses.replace(weight, shape=shape, names=names, layers=layers)

    return jax.tree.map(stack, layer)


def stack_by_stage(layer: Any, layers: int, stages: int) -> list[Any]:
    """Return a stack of layers for each stage."""
    per_stage = layers // stages
    return [
        stack_layers(layer, range(stage * per_stage, (stage + 1) * per_stage))
        for stage in range(stages)
    ]


def draw(weights: Any, key: jax.Array, dtype: str) -> Any:
    """Draw the arrays of a tree of weights.

    The key of an array is folded from its path and layer, so a layer begins with the same values
    however many stages the model has.
    """
    flat, treedef = jax.tree.flatten_with_path(weights)
    # One fold-in over the numbers of all arrays and layers: a fold-in for each would be hundreds
    # of equations to compile.
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
    """A number for an array's layer: of its path, since Python's `hash` differs by process."""
    return zlib.crc32(f"{path_pattern(path)} {layer}".encode())


def _draw(weight: Weight, keys: jax.Array, dtype: str) -> jax.Array:
    """Draw one array; `keys` has one key per layer of a stack, or a single one."""
    if weight.std == 0.0:
        return jnp.full(weight.shape, weight.mean, dtype)
    shape = weight.shape[1:] if weight.layers else weight.shape
    values = jax.vmap(lambda key: jax.random.normal(key, shape, dtype))(keys)
    return weight.mean + weight.std * values.reshape(weight.shape)


def path_pattern(path: Any) -> str:
    """Write a path as rules match it, the same for every stage: `stages/*/mlp/up`."""
    text = jax.tree_util.keystr(path, simple=True, separator="/")
    return re.sub(r"^stages/\d+/", "stages/*/", text)


def count_parameters(weights: Any) -> int:
    """Count the elements of all arrays in a tree of weights."""
    return sum(weight.size for weight in jax.tree.leaves(weights))


# The roles of axes that split each dim of a parameter: roles that must divide it (`partition`
# raises if they do not), then roles that are used only where they divide. Heads that tensor axes do
# not divide are replicated: Llama's 8 heads of keys and values on 16 devices. Axes of experts also
# split parameters outside the experts, as more `fsdp` would. Channels of images come in many sizes,
# and a size decides what divides, so it is part of the name: `in:64`.
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

# The roles of axes that split each dim of an activation, where they divide it. `rows` are those of
# a batch whose tokens have been dispatched to experts: the expert axes split the experts by then.
# `split_embed` is `embed` for models that also split the stream between layers.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "rows": ("data", "fsdp"),
    "seq": ("sequence", "context"),
    "embed": (),
    "split_embed": ("tensor",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "experts": ("expert",),
    "classes": ("tensor",),
}

# Names of axes over whole machines, each of which holds a copy of the model: data parallelism.
_DATA_NAMES = ("pod", "pods", "slice", "slices")


def _axes_with_roles(names: Iterable[str], roles: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes with these roles, in the order of the roles and then of the mesh."""
    role_of = {name: "data" if name in _DATA_NAMES else role(name).name for name in names}
    return tuple(name for wanted in roles for name in role_of if role_of[name] == wanted)


def logical_rules(weights: Any, mesh: AnyMesh) -> dict[str, Any]:
    """Return `{logical name: mesh axes}` for all names in a tree of weights."""
    sizes_of: dict[str, set[int]] = {}
    for weight in jax.tree.leaves(weights):
        for name, size in zip(weight.names, weight.shape, strict=True):
            sizes_of.setdefault(name, set()).add(size)
    return {name: _weight_axes(name, sizes, mesh) for name, sizes in sizes_of.items()}


def _weight_axes(name: str, sizes: set[int], mesh: AnyMesh) -> Any:
    """Return the axes for a logical name, whose dims have these sizes throughout the model."""
    axis_sizes = mesh_axes(mesh)
    must, may = _WEIGHTS.get(name.partition(":")[0], ((), ()))
    required = _axes_with_roles(axis_sizes, must)
    shards = math.prod(axis_sizes[axis] for axis in required)
    optional = _dividing_axes(axis_sizes, _axes_with_roles(axis_sizes, may), sizes, shards)
    return _spec_entry([*required, *optional])


def _dividing_axes(
    axis_sizes: Mapping[str, int], axes: Iterable[str], sizes: Collection[int], shards: int = 1
) -> list[str]:
    """Of the axes, in order, those that divide all sizes, which `shards` splits already."""
    chosen = []
    for axis in axes:
        if all(size % (shards * axis_sizes[axis]) == 0 for size in sizes):
            chosen.append(axis)
            shards *= axis_sizes[axis]
    return chosen


def _spec_entry(axes: Iterable[str]) -> Any:
    """Return the entry of a `PartitionSpec` for one dim: None, a name, or several."""
    names = tuple(axes)
    return names if len(names) > 1 else (names[0] if names else None)


def sharding_rules(weights: Any, mesh: AnyMesh) -> list[tuple[str, PartitionSpec]]:
    """Return a rule per kind of parameter.

    Optimizers keep copies of the parameters under paths that end alike, so the rules, which match
    the ends of paths, are good for the whole state.
    """
    table = logical_rules(weights, mesh)
    specs: dict[str, PartitionSpec] = {}
    for path, weight in jax.tree.leaves_with_path(weights):
        specs[path_pattern(path)] = make_spec(table[name] for name in weight.names)
    return list(specs.items())


def batch_spec(mesh: AnyMesh, *names: str) -> PartitionSpec:
    """Return the spec of inputs whose dims have these logical names."""
    axes = mesh_axes(mesh)
    return make_spec(_spec_entry(_axes_with_roles(axes, _ACTIVATIONS[name])) for name in names)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrain the sharding of an activation, by a logical name per dim (None: replicated).

    Names are batch, rows, seq, embed, split_embed, heads, mlp, vocab, experts and classes. The mesh
    is the one set by `jax.set_mesh`; axes that it does not have, or that do not divide a dim, are
    left out. Without such a mesh this does nothing. Raises `ModelError` for an unknown name, and
    where there are more or fewer names than dims.

    >>> import jax, jax.numpy as jnp, meshwright as mw
    >>> with jax.set_mesh(mw.mesh("fsdp:4, tp:2")):
    ...     constrain(jnp.ones((8, 16, 32)), "batch", "seq", "mlp").sharding.spec
    P('fsdp', None, 'tp')
    """
    _check_activation_names(x, names)
    axes = auto_axes()
    if not axes:
        return x
    entries = [
        None if name is None else _spec_entry(activation_axes(axes, name, size))
        for name, size in zip(names, x.shape, strict=True)
    ]
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, make_spec(entries))  # type: ignore[no-untyped-call]
    return constrained


def _check_activation_names(x: jax.Array, names: Sequence[Any]) -> None:
    """Refuse wrong names also where there is no mesh: a model is often tried on one device."""
    for name in names:
        if name is not None and not (isinstance(name, str) and name in _ACTIVATIONS):
            raise ModelError(
                f"constrain: no logical name {short(name)}.{near(str(name), _ACTIVATIONS)} "
                f"Known: {', '.join(_ACTIVATIONS)}.",
                option="names",
            )
    if len(names) != x.ndim:
        raise ModelError(
            f"constrain: {plural(len(names), 'name')} for an array with {plural(x.ndim, 'dim')} "
            f"{x.shape}. Give one per dim, None for a dim that is replicated.",
            option="names",
        )


def auto_axes() -> dict[str, int]:
    """Return the axes of the ambient mesh that the compiler shards over, with their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    # A constraint on an Explicit axis is an assertion, and on a Manual one an error.
    return {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }


def activation_axes(axis_sizes: Mapping[str, int], name: str, size: int) -> tuple[str, ...]:
    """Return the axes that split a dim of an activation, by its logical name and its size."""
    axes = _axes_with_roles(axis_sizes, _ACTIVATIONS[name])
    return tuple(_dividing_axes(axis_sizes, axes, [size]))
