"""How values lie in the groups: parameters as partitioned, activations by rows, the rest whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.axes import role
from meshwright.mpmd.groups import Groups
from meshwright.partitioning import partition
from meshwright.partitioning.by_rules import match_rules, read_rules
from meshwright.partitioning.leaves import Leaf, refuse
from meshwright.partitioning.options import read_options
from meshwright.partitioning.specs import make_spec


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Shardings on the groups' meshes."""

    groups: Groups
    rules: Any = None
    unused: str = "error"

    def __post_init__(self) -> None:
        read_options({"rules": self.rules, "unmatched": "shape", "unused": self.unused})
        if self.rules is not None:
            read_rules(self.rules)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        return self.groups.meshes

    def check_rules(self, names: Sequence[str]) -> None:
        """Refuse rules that no array of a step obeys."""
        if self.rules is not None and self.unused == "error":
            leaves = [Leaf(name, n, (), None, None) for n, name in enumerate(names)]
            _, wrong = match_rules(leaves, read_rules(self.rules))
            refuse("pipeline", list(wrong))

    def whole(self, group: int) -> NamedSharding:
        return NamedSharding(self.meshes[group], make_spec())

    def rows(self, group: int, shape: tuple[int, ...], dim: int = 0) -> NamedSharding:
        """Cut along one dim over the axes that carry data, as far as they divide it."""
        axes, cut = [], 1
        for name, size in self._data_axes(group):
            if len(shape) > dim and size > 1 and shape[dim] % (cut * size) == 0:
                axes.append(name)
                cut *= size
        if not axes:
            return self.whole(group)
        entry = tuple(axes) if len(axes) > 1 else axes[0]
        return NamedSharding(self.meshes[group], make_spec([*[None] * dim, entry]))

    def parameter(self, group: int, name: str, shape: tuple[int, ...], dtype: Any) -> NamedSharding:
        """By rules where there are any, else by shape."""
        mesh = self.meshes[group]
        if math.prod(mesh.shape.values()) == 1 or not shape:
            return self.whole(group)
        leaf = jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
        tree: Any = leaf
        for word in reversed(name.split("/")):
            tree = {word: tree}
        options = (
            {}
            if self.rules is None
            else {
                "rules": self.rules,
                "unmatched": "shape",
                "unused": "allow",
            }
        )
        (spec,) = jax.tree.leaves(
            partition(tree, mesh, **options), is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        return NamedSharding(mesh, spec)

    def _data_axes(self, group: int) -> list[tuple[str, int]]:
        return [
            (name, size) for name, size in self.meshes[group].shape.items() if _carries_data(name)
        ]


def _carries_data(axis: str) -> bool:
    return role(axis).name in ("data", "fsdp")
