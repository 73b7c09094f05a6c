"""Specs inside a group: the axis along which the mesh was cut has nothing left to split."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec

from meshwright.partitioning.specs import entry_axes


def without_axis(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """The spec with one mesh axis dropped; a spec that does not name it comes back as it is.

    >>> without_axis(PartitionSpec(("pp", "fsdp"), "pp", "tp"), "pp")
    P('fsdp', None, 'tp')
    """
    if not any(axis in entry_axes(entry) for entry in spec.partitions):
        return spec
    sums = {"unreduced": spec.unreduced, "reduced": spec.reduced}
    return PartitionSpec(  # type: ignore[no-untyped-call]
        *(_without(entry, axis) for entry in spec.partitions), **sums
    )


def _without(entry: Any, axis: str) -> Any:
    axes = entry_axes(entry)
    if axis not in axes:
        return entry
    left = tuple(other for other in axes if other != axis)
    return left[0] if len(left) == 1 else left or None
