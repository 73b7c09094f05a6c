"""`MeshPartitionHelper`: shard a tree by shapes alone, as an older library's interface has it.

A method is a tuple of mesh axes that are used together on one dim, e.g. `("fsdp", "sp")`; a list
of them, best first, says how to shard a shape. The decisions are those of `partitioning.by_shape`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from meshwright._show import short_repr
from meshwright.errors import PartitionError, listing, near, short
from meshwright.partitioning.by_shape import Axis, axis_group, choose_spec
from meshwright.partitioning.decide import check_shard_limit
from meshwright.transfers.device_put import Narrow, check_narrow, check_values, put
from meshwright.trees.specs import AnyMesh, make_spec, mesh_axes, spec_problems, specs_on_mesh
from meshwright.trees.walk import is_shape, refuse, tie_problems, walk

Method = tuple[str, ...]


# Axes that shard weights here, as `axis_group` groups them; best first for matrices.
_METHODS = ("fsdp", "tensor", "expert")
# Arrays of three dims and more are often stacked experts, whose own axis then comes first.
_DEEP_METHODS = ("expert", "fsdp", "tensor")


class MeshPartitionHelper:
    """Partition specs by shape for one mesh.

    `narrow` says what becomes of NumPy's 64-bit arrays, which JAX keeps in 32 bits unless
    `jax_enable_x64` is set: `"error"` refuses them, `"convert"` places them so, integers if they
    fit, as `shard` does.

    >>> import jax.numpy as jnp, meshwright as mw
    >>> helper = mw.MeshPartitionHelper(mw.mesh("fsdp:4, tp:2"))
    >>> helper.analyze_pytree({"w": jnp.ones((1024, 4096))})
    {(1024, 4096): [('fsdp',), ('tp',)]}
    >>> helper.create_partition_spec((1024, 4096), [("fsdp",), ("tp",)])
    P('fsdp', 'tp')
    """

    def __init__(self, mesh: AnyMesh, *, narrow: Narrow = "error"):
        check_narrow(narrow)
        self.mesh = mesh
        self.narrow: Narrow = narrow
        self.axis_sizes: dict[str, int] = mesh_axes(mesh)
        self._suggested: dict[bool, list[Method]] = {}

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}:{size}" for name, size in self.axis_sizes.items())
        return short_repr(self, axes)

    def analyze_pytree(self, pytree: Any) -> dict[tuple[int, ...], list[Method]]:
        """Return the methods for every distinct array shape of a tree, best first."""
        shapes = dict.fromkeys(leaf.shape for leaf in walk(pytree).arrays)
        return {shape: self._suggest_methods(shape) for shape in shapes}

    def create_partition_spec(
        self, array_shape: Sequence[int], methods: Sequence[Method], min_shard_size: int = 1024
    ) -> PartitionSpec:
        """Apply the methods to the dims of a shape.

        Returns `PartitionSpec()` for a scalar, for fewer than `min_shard_size` elements, and when
        nothing fits. Axes of size one never appear.
        """
        shape = _read_shape(array_shape)
        axes = self._axes(methods)
        check_shard_limit("min_shard_size", min_shard_size, "elements")
        if not shape or math.prod(shape) < min_shard_size:
            return make_spec()
        return choose_spec(shape, 32, axes, 0)

    def shard_array(self, array: Any, partition_spec: PartitionSpec) -> Any:
        """Place an array with a `NamedSharding` of the spec."""
        arrays = walk(array).arrays
        if len(arrays) != 1 or arrays[0].value is not array:
            raise PartitionError(f"{short(array)} is not one array.")
        shape, spec = arrays[0].shape, specs_on_mesh(partition_spec, self.mesh)
        refuse("shard_array", list(spec_problems("", shape, spec, mesh_axes(self.mesh))))
        check_values(arrays, self.narrow, what="shard_array")
        return put(arrays, [NamedSharding(self.mesh, spec)], what="shard_array")[0]

    def auto_shard_pytree(self, pytree: Any, min_shard_size: int = 1024) -> Any:
        """Place every array of a tree by its best spec, in one transfer.

        Arrays with fewer than `min_shard_size` elements are replicated; other leaves pass through.
        """
        mesh_axes(self.mesh)  # checks again: the backend may have been reset since
        tree = walk(pytree)
        refuse("auto_shard_pytree", tie_problems(pytree))
        by_shape: dict[Any, NamedSharding] = {}
        for leaf in tree.arrays:
            if leaf.shape not in by_shape:
                methods = self._suggest_methods(leaf.shape)
                spec = self.create_partition_spec(leaf.shape, methods, min_shard_size)
                by_shape[leaf.shape] = NamedSharding(self.mesh, spec)
        check_values(tree.arrays, self.narrow, what="auto_shard_pytree")
        # One batched call: leaf by leaf, 4,000 leaves took seven times as long.
        return tree.rebuild(put(tree.arrays, [by_shape[leaf.shape] for leaf in tree.arrays]))

    def _suggest_methods(self, shape: Sequence[int]) -> list[Method]:
        """Return the methods for one shape, best first; older documentation names this method."""
        if not _read_shape(shape):
            return []
        deep = len(shape) > 2
        if deep not in self._suggested:
            groups: dict[str, list[str]] = {}
            for name, size in self.axis_sizes.items():
                group = axis_group(name)
                if size > 1 and group in _METHODS:
                    groups.setdefault(group, []).append(name)
            order = _DEEP_METHODS if deep else _METHODS
            self._suggested[deep] = [tuple(groups[group]) for group in order if group in groups]
        return list(self._suggested[deep])

    def _axes(self, methods: Sequence[Method]) -> tuple[Axis, ...]:
        if not isinstance(methods, (list, tuple)):
            raise PartitionError(
                f"methods: {short(methods)} is not a list such as [('fsdp',), ('tp',)].",
                option="methods",
            )
        axes: list[Axis] = []
        for group, method in enumerate(methods):
            if not isinstance(method, (str, list, tuple)):
                raise PartitionError(
                    f"methods: {short(method)} is not a tuple of mesh axes.", option="methods"
                )
            for name in (method,) if isinstance(method, str) else method:
                if name not in self.axis_sizes:
                    raise PartitionError(
                        f"methods: no mesh axis {short(name)} in {listing(self.axis_sizes)}."
                        f"{near(str(name), self.axis_sizes)}",
                        option="methods",
                    )
                if any(name == other for other, _, _ in axes):
                    raise PartitionError(f"methods: axis {name!r} appears twice.", option="methods")
                if self.axis_sizes[name] > 1:
                    axes.append((name, self.axis_sizes[name], group))
        return tuple(axes)


def _read_shape(shape: Any) -> tuple[int, ...]:
    if not is_shape(shape):
        raise PartitionError(
            f"array_shape: {short(shape)} is not a shape, e.g. (1024, 4096).", option="array_shape"
        )
    return tuple(int(side) for side in shape)
