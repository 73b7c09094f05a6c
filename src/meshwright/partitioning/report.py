"""`describe(...)`: what a partitioning costs, leaf by leaf and in all."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.partitioning.decide import settle
from meshwright.partitioning.leaves import Leaf, bits, walk
from meshwright.partitioning.matching import plain_specs
from meshwright.partitioning.specs import (
    AnyMesh,
    entry_axes,
    mesh_axes,
    shard_shape,
    ways,
)

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


@dataclasses.dataclass(frozen=True)
class LeafRow:
    """One array: where it stands, how it is cut, and what a device holds of it."""

    path: str
    text: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    spec: PartitionSpec
    bytes: int
    device_bytes: int
    copies: int

    @property
    def replicated(self) -> bool:
        """Whether every device of the mesh holds all of it."""
        return self.local == self.shape


@dataclasses.dataclass(frozen=True)
class PartitionReport:
    """A tree on a mesh. Prints itself as a table; HTML in a notebook; `to_json()` for scripts.

    `device_bytes` is what every device holds: pieces are equal, so no device holds more.
    """

    axes: dict[str, int]
    rows: tuple[LeafRow, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def device_bytes(self) -> int:
        return sum(row.device_bytes for row in self.rows)

    @property
    def replicated(self) -> tuple[LeafRow, ...]:
        """Arrays that every device holds whole, largest first."""
        whole = [row for row in self.rows if row.replicated]
        return tuple(sorted(whole, key=lambda row: (-row.bytes, row.path)))

    def __str__(self) -> str:
        from meshwright.partitioning.show import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from meshwright.partitioning.show import as_html

        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        from meshwright.partitioning.show import as_json

        return as_json(self)


def describe(tree: Any, mesh: AnyMesh, specs: Any = None, **options: Any) -> PartitionReport:
    """What the given specs, or `partition(tree, mesh, **options)`, make of a tree.

    With neither specs nor options, arrays (and shapes) that lie on this mesh already are shown as
    they lie, and the others as `partition` would cut them.

    >>> import jax, meshwright as mw
    >>> tree = {"w": jax.ShapeDtypeStruct((1024, 4096), "float32")}
    >>> print(mw.describe(tree, mw.mesh("fsdp:4, tp:2")))
    1 array on fsdp:4, tp:2 (8 devices): 16 MiB, 2 MiB on each device
    path  array                    bytes  on a device  copies
    w     f32[1024@fsdp,4096@tp]  16 MiB        2 MiB       1
    """
    found = walk(tree)
    sizes = mesh_axes(mesh)
    per_leaf = settle("describe", found, tree, mesh, plain_specs(specs, mesh), options)
    if specs is None and not options:
        per_leaf = [
            _lies(leaf, mesh, spec) for leaf, spec in zip(found.arrays, per_leaf, strict=True)
        ]
    return PartitionReport(
        sizes,
        tuple(_row(leaf, spec, sizes) for leaf, spec in zip(found.arrays, per_leaf, strict=True)),
    )


def _lies(leaf: Leaf, mesh: AnyMesh, otherwise: PartitionSpec) -> PartitionSpec:
    """How an array lies on the mesh; `otherwise` if it is not there."""
    sharding = getattr(leaf.value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not _same_mesh(sharding.mesh, mesh):
        return otherwise
    return sharding.spec


@functools.lru_cache(maxsize=64)
def _same_mesh(one: AnyMesh, other: AnyMesh) -> bool:
    """The same axes, over the same devices where both have devices."""
    if tuple(one.shape.items()) != tuple(other.shape.items()):
        return False
    if isinstance(one, Mesh) and isinstance(other, Mesh):
        return bool((one.devices == other.devices).all())
    return True


def _row(leaf: Leaf, spec: PartitionSpec, sizes: dict[str, int]) -> LeafRow:
    local = shard_shape(leaf.shape, spec, sizes)
    held = math.ceil(math.prod(local) * bits(leaf.dtype) / 8)
    cuts = math.prod(ways(entry, sizes) for entry in spec)
    return LeafRow(
        leaf.path,
        typed(leaf.shape, leaf.dtype, spec),
        leaf.shape,
        local,
        spec,
        leaf.bytes,
        held,
        math.prod(sizes.values()) // cuts,
    )


def typed(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> str:
    """An array in JAX's own notation.

    >>> typed((8, 8), "float32", PartitionSpec("x"))
    'f32[8@x,8]'
    """
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    dims = []
    for side, entry in zip(shape, entries, strict=True):
        axes = entry_axes(entry)
        joined = axes[0] if len(axes) == 1 else f"({','.join(axes)})"
        dims.append(f"{side}@{joined}" if axes else str(side))
    return f"{short_dtype(dtype)}[{','.join(dims)}]"


def short_dtype(dtype: Any) -> str:
    """
    >>> short_dtype("bfloat16"), short_dtype("uint8")
    ('bf16', 'u8')
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return str(dtype)
    name = str(np.dtype(dtype).name)
    head = name.rstrip("0123456789")
    return _SHORT[head] + name[len(head) :] if head in _SHORT else name
