"""`uneven="replicate"`: a spec without the axes that do not divide their dim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.partitioning.specs import entry_axes, is_split, make_spec, ways


def drop_uneven(
    shape: tuple[int, ...], spec: PartitionSpec, axes: Mapping[str, int]
) -> PartitionSpec:
    """The spec with every axis dropped that does not divide what those before it leave of its dim.

    >>> drop_uneven((6, 8), PartitionSpec(("fsdp", "tp"), "ep"), {"fsdp": 2, "tp": 2, "ep": 4})
    P('fsdp', 'ep')
    """
    if not is_split(spec):  # `problems` says so
        return spec
    entries = [
        _dividing(shape[dim], entry, axes)
        if dim < len(shape) and shape[dim] % ways(entry, axes)
        else entry
        for dim, entry in enumerate(spec)
    ]
    return make_spec(entries) if entries != list(spec) else spec


def _dividing(side: int, entry: Any, axes: Mapping[str, int]) -> Any:
    """What is left of an entry: one axis, several, or `None`."""
    kept: list[str] = []
    for axis in entry_axes(entry):
        if side % axes.get(axis, 1) == 0:
            side //= axes.get(axis, 1)
            kept.append(axis)
    return tuple(kept) if len(kept) > 1 else (kept[0] if kept else None)
