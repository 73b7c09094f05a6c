"""Arrays of which every process brings its part: does each part fall into equal pieces?"""

from __future__ import annotations

import collections
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwright.partitioning.leaves import Leaf, refuse
from meshwright.partitioning.specs import AnyMesh, entry_axes, mesh_axes, problems, ways


def check_parts(
    what: str, leaves: Sequence[Leaf], specs: Sequence[PartitionSpec], mesh: AnyMesh
) -> None:
    """Refuse parts that cannot be cut as their specs say; names every one of this process."""
    sizes = mesh_axes(mesh)
    refuse(
        what,
        [
            problem
            for leaf, spec in zip(leaves, specs, strict=True)
            for problem in _problems(leaf, spec, mesh, sizes)
        ],
    )


def _problems(
    leaf: Leaf, spec: PartitionSpec, mesh: AnyMesh, sizes: Mapping[str, int]
) -> Iterator[str]:
    if not isinstance(leaf.value, (jax.Array, np.ndarray, np.generic)):  # it tells its whole shape
        yield from problems(leaf.path, leaf.shape, spec, sizes)
        return
    # A part says nothing of the whole dims, which is what must divide there: zero always does.
    wrong = list(problems(leaf.path, (0,) * len(leaf.shape), spec, sizes))
    yield from wrong
    if wrong or isinstance(mesh, AbstractMesh) or PartitionSpec.UNCONSTRAINED in tuple(spec):
        return
    for dim, (size, entry) in enumerate(zip(leaf.shape, spec, strict=False)):
        pieces = _pieces_here(mesh, entry)
        axes = ", ".join(entry_axes(entry))
        if pieces is None:
            yield (
                f"{leaf.where}: dim {dim}: axes {axes} do not give every process an equal part of "
                "its own. Put them first in the mesh, or pass the whole array without local=True."
            )
        elif pieces and size % pieces:
            yield (
                f"{leaf.where}: dim {dim}: this process's part has size {size}, not divisible by "
                f"the {pieces} pieces it holds (axes {axes}). Pad it to "
                f"{-(-size // pieces) * pieces}, or drop the last batch."
            )


@functools.lru_cache(maxsize=256)
def _pieces_here(mesh: Any, entry: Any) -> int | None:
    """How many pieces of a dim this process holds, or None, as `share` says."""
    count = ways(entry, mesh_axes(mesh))
    held: dict[int, set[int]] = collections.defaultdict(set)
    cut = NamedSharding(mesh, PartitionSpec(entry))  # type: ignore[no-untyped-call]
    indices: dict[Any, Any] = dict(cut.devices_indices_map((count,)))
    for device, (side,) in indices.items():
        held[device.process_index].add(side.start or 0)
    return share(held, count, jax.process_index())


def share(held: Mapping[int, Collection[int]], count: int, process: int) -> int | None:
    """How many of `count` pieces a process holds; None where parts overlap or are not equal.

    >>> share({0: {0, 1}, 1: {2, 3}}, 4, process=0), share({0: {0, 1}, 1: {1, 2}}, 3, process=0)
    (2, None)
    """
    parts = {frozenset(pieces) for pieces in held.values()}
    if len({len(part) for part in parts}) > 1 or sum(map(len, parts)) != count:
        return None
    return len(held.get(process, ()))
