"""Is a `PartitionSpec` good for an array on a mesh? Says everything that is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright.errors import PartitionError, listing, near, short

Uneven = Literal["error", "replicate"]
AnyMesh = Mesh | AbstractMesh


def make_spec(entries: Iterable[Any] = ()) -> PartitionSpec:
    """A spec from its entries; whole dims at the end are left out."""
    kept = list(entries)
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)  # type: ignore[no-untyped-call]


def mesh_axes(mesh: AnyMesh) -> dict[str, int]:
    """`{axis name: size}` of a mesh or abstract mesh."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise PartitionError(
            f"mesh: {short(mesh)} is not a jax.sharding.Mesh or AbstractMesh. "
            "Make one with meshwright.mesh('fsdp:-1')."
        )
    return {str(name): size for name, size in mesh.shape.items()}


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def ways(entry: Any, axes: Mapping[str, int]) -> int:
    """Into how many pieces an entry cuts its dim."""
    return math.prod(axes.get(axis, 1) for axis in entry_axes(entry))


def problems(
    path: str, shape: tuple[int, ...], spec: PartitionSpec, axes: Mapping[str, int]
) -> Iterator[str]:
    """Everything that is wrong with a spec for an array of this shape."""
    where = path or "(the array)"
    if not isinstance(spec, PartitionSpec):
        yield f"{where}: {short(spec)} is not a PartitionSpec."
        return
    if len(spec) > len(shape):
        yield (
            f"{where}: {spec} has {len(spec)} entries for an array with {len(shape)} dims "
            f"{shape}. Drop {len(spec) - len(shape)}."
        )
    seen: set[str] = set()
    for dim, entry in enumerate(spec):
        for axis in entry_axes(entry):
            if axis not in axes:
                hint = near(axis, axes) if isinstance(axis, str) else ""
                yield f"{where}: dim {dim}: no mesh axis {short(axis)} in {listing(axes)}.{hint}"
            elif axis in seen:
                yield f"{where}: {spec} uses axis {axis!r} twice. Use it on one dim."
            seen.add(axis)
        if dim < len(shape) and shape[dim] % ways(entry, axes):
            n = ways(entry, axes)
            yield (
                f"{where}: dim {dim} has size {shape[dim]}, not divisible by {n} (axes "
                f"{', '.join(map(str, entry_axes(entry)))}). Pad to {-(-shape[dim] // n) * n}, "
                "use another axis, or decide with partition(..., uneven='replicate')."
            )


def without_uneven(
    shape: tuple[int, ...], spec: PartitionSpec, axes: Mapping[str, int]
) -> PartitionSpec:
    """The spec with every entry dropped that does not divide its dim."""
    entries = [
        None if dim < len(shape) and shape[dim] % ways(entry, axes) else entry
        for dim, entry in enumerate(spec)
    ]
    return make_spec(entries)


def shard_shape(
    shape: tuple[int, ...], spec: PartitionSpec, axes: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of one device's piece."""
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    return tuple(-(-size // ways(entry, axes)) for size, entry in zip(shape, entries, strict=True))


def named(mesh: AnyMesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh, spec)
