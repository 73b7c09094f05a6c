"""`data_shard(...)`: which rows of a global batch a process must load."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.axes import role
from meshwright.errors import PartitionError, listing, short
from meshwright.partitioning.rules import read_spec
from meshwright.trees.specs import entry_axes, mesh_axes, spec_problems


@dataclasses.dataclass(frozen=True)
class DataShard:
    """Part `index` of `count` equal parts of every batch: what one process loads.

    Processes with the same index must load the same rows: they hold copies of them.
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
        """Return the slice of a global batch of so many rows.

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
    """Return the part of the data that this process (or `process`) must load.

    `spec` is how the batch is cut: its first entry names the mesh axes of the batch dim. Default:
    every axis that splits data (`dp`, `fsdp` and their like). For Grain:
    `ShardOptions(shard_index=part.index, shard_count=part.count)`. Raises `PartitionError` if the
    processes do not hold equal, contiguous parts, or this one holds none.

    >>> import meshwright as mw
    >>> mw.data_shard(mw.mesh("dp:4, tp:2"))
    DataShard(index=0, count=1)
    """
    sizes = mesh_axes(mesh)
    if not isinstance(mesh, Mesh):
        raise PartitionError("data_shard needs a Mesh of devices, which know their processes.")
    axes = _batch_axes(sizes, spec)
    # One row of devices per part of the batch, in the order in which the spec cuts the batch dim;
    # the devices of a row hold copies of their part.
    batch_dims = [mesh.axis_names.index(axis) for axis in axes]
    other_dims = [dim for dim in range(mesh.devices.ndim) if dim not in batch_dims]
    parts = math.prod(sizes[axis] for axis in axes)
    devices = np.transpose(mesh.devices, [*batch_dims, *other_dims]).reshape(parts, -1)
    process = jax.process_index() if process is None else process
    held = _parts_by_process(devices)
    if process not in held:
        raise PartitionError(
            f"process {short(process)} has no device in this mesh, so it loads nothing. "
            f"Processes of the mesh: {listing(sorted(held))}."
        )
    return _equal_part(held, parts, process, axes)


def _batch_axes(sizes: dict[str, int], spec: Any) -> list[str]:
    if spec is None:
        return [name for name in sizes if role(name).name in ("data", "fsdp")]
    read = read_spec(spec, "data_shard", option="spec")
    # The size of the batch is not known here, and 0 rows divide by anything.
    problems = list(spec_problems("", (0,) * max(1, len(read)), read, sizes))
    if problems:
        raise PartitionError(f"data_shard: {problems[0]}", option="spec")
    return list(entry_axes(read[0])) if len(read) else []


def _parts_by_process(devices: np.ndarray) -> dict[int, list[int]]:
    """Return which parts of the batch each process holds, from a row of devices per part."""
    held: dict[int, set[int]] = {}
    for part, row in enumerate(devices):
        for device in row:
            held.setdefault(device.process_index, set()).add(part)
    return {process: sorted(parts) for process, parts in held.items()}


def _equal_part(held: dict[int, list[int]], parts: int, process: int, axes: list[str]) -> DataShard:
    # Checked for all processes and not for this one alone, so that all of them raise the same
    # error: one that went on would wait for the others in its first collective.
    size = min(len(held_parts) for held_parts in held.values())
    for holder, own in sorted(held.items()):
        if parts % size or own[0] % size or own != list(range(own[0], own[0] + size)):
            raise PartitionError(
                f"the batch over {', '.join(axes)} is not cut into equal, contiguous parts per "
                f"process (process {holder} holds {listing(own)} of {parts}). Put the data axes "
                "first in the mesh, or let them cross the processes."
            )
    return DataShard(held[process][0] // size, parts // size)
