"""`MeshPartitionHelper`: the interface of an older library, a thin door on the same core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import PartitionError, listing, near, short
from meshwright.partitioning.by_shape import Axis, axis_group, choose_spec
from meshwright.partitioning.decide import Options
from meshwright.transfers.device_put import check_values, put
from meshwright.trees.specs import AnyMesh, make_spec, mesh_axes, spec_problems, specs_on_mesh
from meshwright.trees.walk import is_shape, refuse, tie_problems, walk

Method = tuple[str, ...]


class MeshPartitionHelper:
    """Specs by shape for one mesh.

    >>> import jax.numpy as jnp, meshwright as mw
    >>> helper = mw.MeshPartitionHelper(mw.mesh("fsdp:4, tp:2"))
    >>> helper.analyze_pytree({"w": jnp.ones((1024, 4096))})
    {(1024, 4096): [('fsdp',), ('tp',)]}
    >>> helper.create_partition_spec((1024, 4096), [("fsdp",), ("tp",)])
    P('fsdp', 'tp')
    """

    def __init__(self, mesh: AnyMesh):
        self.mesh = mesh
        self.axis_sizes: dict[str, int] = mesh_axes(mesh)
        self._suggested: dict[bool, list[Method]] = {}

    def analyze_pytree(self, pytree: Any) -> dict[tuple[int, ...], list[Method]]:
        """The methods for every distinct array shape, best first."""
        shapes = dict.fromkeys(leaf.shape for leaf in walk(pytree).arrays)
        return {shape: self._suggest_methods(shape) for shape in shapes}

    def create_partition_spec(
        self, array_shape: Sequence[int], methods: Sequence[Method], min_shard_size: int = 1024
    ) -> PartitionSpec:
        """The methods applied to the dims; `PartitionSpec()` for a scalar or when nothing fits."""
        shape = _read_shape(array_shape)
        axes = self._axes(methods)
        Options(min_shard_size=min_shard_size)  # checks it
        size = 1
        for side in shape:
            size *= side
        if not shape or size < min_shard_size:
            return make_spec()
        return choose_spec(shape, 32, axes, 0)

    def shard_array(self, array: Any, partition_spec: PartitionSpec) -> Any:
        """The array placed with a `NamedSharding`."""
        walked = walk(array)
        if len(walked.arrays) != 1 or walked.arrays[0].value is not array:
            raise PartitionError(f"{short(array)} is not one array.")
        shape, spec = walked.arrays[0].shape, specs_on_mesh(partition_spec, self.mesh)
        refuse("shard_array", list(spec_problems("", shape, spec, mesh_axes(self.mesh))))
        check_values(walked.arrays, what="shard_array")
        return put(walked.arrays, [NamedSharding(self.mesh, spec)], what="shard_array")[0]

    def auto_shard_pytree(self, pytree: Any, min_shard_size: int = 1024) -> Any:
        """The same tree, every array placed by its best spec, in one transfer."""
        mesh_axes(self.mesh)
        walked = walk(pytree)
        refuse("auto_shard_pytree", tie_problems(pytree))
        seen: dict[Any, NamedSharding] = {}
        for leaf in walked.arrays:
            if leaf.shape not in seen:
                methods = self._suggest_methods(leaf.shape)
                spec = self.create_partition_spec(leaf.shape, methods, min_shard_size)
                seen[leaf.shape] = NamedSharding(self.mesh, spec)
        check_values(walked.arrays, what="auto_shard_pytree")
        return walked.rebuild(put(walked.arrays, [seen[leaf.shape] for leaf in walked.arrays]))

    def _suggest_methods(self, shape: Sequence[int]) -> list[Method]:
        """Suggest the axes of one group as a method; experts first for three dims and more."""
        if not _read_shape(shape):
            return []
        deep = len(shape) > 2
        if deep not in self._suggested:
            groups: dict[str, list[str]] = {}
            for name, size in self.axis_sizes.items():
                group = axis_group(name)
                if size > 1 and group in _METHODS:
                    groups.setdefault(group, []).append(name)
            order = ("expert", "fsdp", "tensor") if deep else _METHODS
            self._suggested[deep] = [tuple(groups[g]) for g in order if g in groups]
        return list(self._suggested[deep])

    def _axes(self, methods: Sequence[Method]) -> tuple[Axis, ...]:
        if not isinstance(methods, (list, tuple)):
            raise PartitionError(
                f"methods: {short(methods)} is not a list such as [('fsdp',), ('tp',)]."
            )
        axes: list[Axis] = []
        for group, method in enumerate(methods):
            if not isinstance(method, (str, list, tuple)):
                raise PartitionError(f"methods: {short(method)} is not a tuple of mesh axes.")
            for name in (method,) if isinstance(method, str) else method:
                if name not in self.axis_sizes:
                    raise PartitionError(
                        f"methods: no mesh axis {short(name)} in {listing(self.axis_sizes)}."
                        f"{near(str(name), self.axis_sizes)}"
                    )
                if any(name == other for other, _, _ in axes):
                    raise PartitionError(f"methods: axis {name!r} appears twice.")
                if self.axis_sizes[name] > 1:
                    axes.append((name, self.axis_sizes[name], group))
        return tuple(axes)


def _read_shape(shape: Any) -> tuple[int, ...]:
    if not is_shape(shape):
        raise PartitionError(f"array_shape: {short(shape)} is not a shape, e.g. (1024, 4096).")
    return tuple(int(side) for side in shape)


# Axes that cut weights here, as `axis_group` groups them.
_METHODS = ("fsdp", "tensor", "expert")
