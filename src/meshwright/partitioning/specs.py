"""Is a `PartitionSpec` good for an array on a mesh? Says everything that is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshwright.errors import MeshError, PartitionError, listing, near, short
from meshwright.meshes.targets import check_current
from meshwright.partitioning.leaves import shown

Uneven = Literal["error", "replicate"]
AnyMesh = Mesh | AbstractMesh


def make_spec(entries: Iterable[Any] = ()) -> PartitionSpec:
    """A spec from its entries; whole dims at the end are left out."""
    kept = list(entries)
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)  # type: ignore[no-untyped-call]


def mesh_axes(mesh: AnyMesh) -> dict[str, int]:
    """`{axis name: size}` of a mesh or abstract mesh, whose devices must still be there."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise PartitionError(
            f"mesh: {short(mesh)} is not a jax.sharding.Mesh or AbstractMesh. "
            "Make one with meshwright.mesh('fsdp:-1')."
        )
    if isinstance(mesh, Mesh):
        _check_devices(mesh)
    return {str(name): size for name, size in mesh.shape.items()}


def _check_devices(mesh: Mesh) -> None:
    try:
        check_current(
            tuple(mesh.devices.flat[:1])
        )  # one tells for all, and a mesh may have 100,000
    except MeshError:
        check_current(tuple(mesh.devices.flat))


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
    where = shown(path)
    if not isinstance(spec, PartitionSpec):
        yield f"{where}: {short(spec)} is not a PartitionSpec.{write_as(spec)}"
        return
    if not is_split(spec):
        yield f"{where}: {short(spec)} asks for more than a split. Name axes of dims only."
        return
    if len(spec) > len(shape):
        yield (
            f"{where}: {short(spec)} has {len(spec)} entries for an array with {len(shape)} dims "
            f"{shape}. Drop {len(spec) - len(shape)}."
        )
    seen: set[str] = set()
    for dim, entry in enumerate(spec):
        for axis in entry_axes(entry):
            if axis not in axes:
                hint = near(axis, axes) if isinstance(axis, str) else ""
                yield f"{where}: dim {dim}: no mesh axis {short(axis)} in {listing(axes)}.{hint}"
            elif axis in seen:
                yield f"{where}: {short(spec)} uses axis {axis!r} twice. Use it on one dim."
            seen.add(axis)
        if dim < len(shape) and shape[dim] % ways(entry, axes):
            n = ways(entry, axes)
            yield (
                f"{where}: dim {dim} has size {shape[dim]}, not divisible by {n} (axes "
                f"{', '.join(map(str, entry_axes(entry)))}). Pad to {-(-shape[dim] // n) * n}, "
                "use another axis, or decide with partition(..., uneven='replicate')."
            )


def is_split(spec: PartitionSpec) -> bool:
    """Whether a spec names axes of dims alone, and no sums that are open or closed."""
    return not (spec.unreduced or spec.reduced)


def write_as(value: Any) -> str:
    """How to write as a spec what looks like one.

    >>> write_as(("dp", ["fsdp", "tp"]))
    " Write P('dp', ('fsdp', 'tp'))."
    """
    if value is None:
        return " Use PartitionSpec() for an array that stays whole."
    if not looks_like_spec(value):
        return ""
    entries = (value,) if isinstance(value, str) else value
    texts = [repr(tuple(entry) if isinstance(entry, list) else entry) for entry in entries]
    return f" Write P({listing(texts)})."


def looks_like_spec(value: Any) -> bool:
    """A name of an axis, or a tuple or list of names, of several for one dim, and of `None`s."""
    if isinstance(value, str):
        return True
    plain = isinstance(value, (tuple, list)) and not hasattr(value, "_fields")
    return plain and all(
        entry is None
        or isinstance(entry, str)
        or (isinstance(entry, (tuple, list)) and all(isinstance(axis, str) for axis in entry))
        for entry in value
    )


def shard_shape(
    shape: tuple[int, ...], spec: PartitionSpec, axes: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of one device's piece."""
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    return tuple(-(-size // ways(entry, axes)) for size, entry in zip(shape, entries, strict=True))
