"""`data_shard(...)`: which rows of a global batch, and of a source, a process must load."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright._show import short_repr
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

    def rows_of(self, source: Any, batch: int, *, step: int = 0) -> ShardRows:
        """Return this process's rows of a source, from the batch of number `step` on.

        `source` has rows by number, `len(source)` of them, in an order that is the same in every
        process: a list, an array, a data source of Grain or PyTorch. Batch `n` is its rows from
        `n * batch` on, however many processes there are: after a restart with fewer, `step=n` goes
        on with batch `n`, and no row is repeated or left out. A last batch that is not full is.

        >>> list(DataShard(0, 4).rows_of(range(100), 8, step=2))[:4]
        [16, 17, 24, 25]
        >>> list(DataShard(0, 2).rows_of(range(100), 8, step=3))[:4]
        [24, 25, 26, 27]
        """
        own = self.rows(batch)
        if own.start == own.stop:
            raise PartitionError("a batch of 0 has no rows.", option="batch")
        if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
            raise PartitionError(
                f"{short(source)} has no rows by number. Pass a sequence, or a source with "
                "__len__ and __getitem__.",
                option="source",
            )
        if not _is_count(step):
            raise PartitionError(f"step {short(step)} is not a count of batches.", option="step")
        return ShardRows(source, int(batch), own.start, own.stop - own.start, int(step))


class ShardRows(Sequence[Any]):
    """One process's rows of a source, batch after batch. Made by `DataShard.rows_of`."""

    def __init__(self, source: Any, batch: int, start: int, size: int, step: int) -> None:
        self._source, self._batch, self._start, self._size = source, batch, start, size
        self._step = step

    def __len__(self) -> int:
        return max(0, len(self._source) // self._batch - self._step) * self._size

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[at] for at in range(*number.indices(len(self)))]
        at = operator.index(number)
        at += len(self) if at < 0 else 0
        if not 0 <= at < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        batches, row = divmod(at, self._size)
        return self._source[(self._step + batches) * self._batch + self._start + row]

    def __repr__(self) -> str:
        return short_repr(self, f"{len(self):,} rows of {len(self._source):,}")


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
