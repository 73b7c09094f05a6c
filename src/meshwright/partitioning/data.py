"""Which part of the data a process must load."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.errors import PartitionError, listing, short
from meshwright.partitioning.rules import read_spec
from meshwright.trees.specs import entry_axes, mesh_axes, problems


@dataclasses.dataclass(frozen=True)
class DataShard:
    """This process loads part `index` of `count` equal parts of every batch.

    Processes with the same index must load the same rows: they hold copies of them.
    `rows(batch)` gives the slice of a global batch.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not (_is_count(self.index) and _is_count(self.count) and self.index < self.count):
            raise PartitionError(
                f"DataShard: part {short(self.index)} of {short(self.count)}. Parts are counted "
                "from 0, so the index is less than the count."
            )

    def rows(self, batch: int) -> slice:
        """
        >>> DataShard(1, 4).rows(64)
        slice(16, 32, None)
        """
        if not _is_count(batch):
            raise PartitionError(f"a batch of {short(batch)} is not a count of rows.")
        if batch % self.count:
            raise PartitionError(
                f"a batch of {batch} does not split into {self.count} equal parts. "
                f"Use {batch // self.count * self.count} or {-(-batch // self.count) * self.count}."
            )
        size = batch // self.count
        return slice(self.index * size, (self.index + 1) * size)


def _is_count(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return False
    return int(value) >= 0


def data_shard(mesh: Mesh, spec: Any = None, *, process: int | None = None) -> DataShard:
    """The part of the data that this process (or `process`) must load.

    `spec` is how the batch is cut: its first entry names the mesh axes of the batch dim. Default:
    every axis that splits data (`dp`, `fsdp` and their like). For Grain:
    `ShardOptions(shard_index=part.index, shard_count=part.count)`.

    >>> import meshwright as mw
    >>> mw.data_shard(mw.mesh("dp:4, tp:2"))
    DataShard(index=0, count=1)
    """
    sizes = mesh_axes(mesh)
    if not isinstance(mesh, Mesh):
        raise PartitionError("data_shard needs a Mesh of devices, which know their processes.")
    axes = _batch_axes(sizes, spec)
    order = [mesh.axis_names.index(axis) for axis in axes]
    rest = [d for d in range(mesh.devices.ndim) if d not in order]
    parts = math.prod(sizes[axis] for axis in axes)
    devices = np.transpose(mesh.devices, [*order, *rest]).reshape(parts, -1)
    process = jax.process_index() if process is None else process
    loaded = _parts_of(devices)
    if process not in loaded:
        raise PartitionError(
            f"process {short(process)} has no device in this mesh, so it loads nothing. "
            f"Processes of the mesh: {listing(sorted(loaded))}."
        )
    return _equal_part(loaded, parts, process, axes)


def _batch_axes(sizes: dict[str, int], spec: Any) -> list[str]:
    from meshwright.axes import role

    if spec is None:
        return [name for name in sizes if role(name).name in ("data", "fsdp")]
    given = read_spec(spec, "data_shard")
    wrong = list(problems("", (0,) * max(1, len(given)), given, sizes))
    if wrong:
        raise PartitionError(f"data_shard: {wrong[0]}")
    return list(entry_axes(given[0])) if len(given) else []


def _parts_of(devices: np.ndarray) -> dict[int, list[int]]:
    """Which parts of the batch each process holds."""
    loaded: dict[int, set[int]] = {}
    for part, row in enumerate(devices):
        for device in row:
            loaded.setdefault(device.process_index, set()).add(part)
    return {process: sorted(parts) for process, parts in loaded.items()}


def _equal_part(
    loaded: dict[int, list[int]], parts: int, process: int, axes: list[str]
) -> DataShard:
    # The same for every process, and so is what is said when it does not work out.
    size = min(len(held) for held in loaded.values())
    for other, held in sorted(loaded.items()):
        if parts % size or held[0] % size or held != list(range(held[0], held[0] + size)):
            raise PartitionError(
                f"the batch over {', '.join(axes)} is not cut into equal, contiguous parts per "
                f"process (process {other} holds {listing(held)} of {parts}). Put the data axes "
                "first in the mesh, or let them cross the processes."
            )
    return DataShard(loaded[process][0] // size, parts // size)
