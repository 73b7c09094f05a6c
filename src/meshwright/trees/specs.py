"""Is a `PartitionSpec` good for an array on a mesh? Says everything that is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright.errors import MeshError, PartitionError, listing, near, short
from meshwright.meshes.devices import check_current
from meshwright.trees.walk import Leaf, Paths, Walk, flatten, path_text, refuse, shown

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


# A tree of specs against the tree it is meant for.


def match_specs(found: Walk, specs: Any) -> list[PartitionSpec]:
    """The spec of every array, from a tree like the arrays' own, or one spec for all.

    A `NamedSharding` counts as its spec; where there is a mesh, `plain_specs` looks at its mesh.
    """
    if _is_spec(specs):
        return [_spec(specs)] * len(found.arrays)
    values = [_spec(value) for _, value in _flat_like(found, specs)]
    chosen = [values[leaf.place] for leaf in found.arrays]
    refuse(
        "specs",
        [
            f"{leaf.where}: {short(spec)} is not a PartitionSpec.{write_as(spec)}"
            for leaf, spec in zip(found.arrays, chosen, strict=True)
            if not isinstance(spec, PartitionSpec)
        ],
    )
    return chosen


def plain_specs(specs: Any, mesh: AnyMesh) -> Any:
    """The same tree with specs for `NamedSharding`s, which must be of this mesh."""
    if specs is None or isinstance(specs, PartitionSpec):
        return specs
    flat, treedef = flatten(specs, _is_spec)
    named = [(path, value) for path, value in flat if isinstance(value, NamedSharding)]
    if not named:
        return specs
    mesh_axes(mesh)
    kind = NamedSharding(mesh, make_spec()).memory_kind
    wrong = []
    for path, value in named:
        where = shown(path_text(path)) if path else "specs"
        if value.mesh != mesh:
            wrong.append(
                f"{where}: {_other_mesh(value.mesh, mesh)}. Pass its spec, or a sharding on "
                "the mesh itself."
            )
        elif value.memory_kind not in (None, kind):
            wrong.append(
                f"{where}: a sharding in memory {value.memory_kind!r}; arrays go to {kind!r}. "
                "Use jax.device_put for other memory."
            )
    refuse("specs", wrong)
    return jax.tree.unflatten(treedef, [_spec(value) for _, value in flat])


def check_specs(
    what: str, leaves: Sequence[Leaf], specs: Sequence[PartitionSpec], mesh: AnyMesh
) -> None:
    """Refuse specs that do not fit their arrays or the mesh, all at once."""
    sizes = mesh_axes(mesh)
    refuse(
        what,
        [
            problem
            for leaf, spec in zip(leaves, specs, strict=True)
            for problem in problems(leaf.path, leaf.shape, spec, sizes)
        ],
    )


def check_constrained(
    what: str, leaves: Sequence[Leaf], shardings: Sequence[NamedSharding]
) -> None:
    """Refuse specs that leave the choice to a compiler."""
    refuse(
        what,
        [
            f"{leaf.where}: {short(to.spec)} leaves a dim unconstrained, which only jit can "
            "decide. Use None, or an axis."
            for leaf, to in zip(leaves, shardings, strict=True)
            if PartitionSpec.UNCONSTRAINED in tuple(to.spec)
        ],
    )


def _flat_like(found: Walk, specs: Any) -> Paths:
    """The specs, leaf by leaf of the arrays' tree; what stands in place of one is named later."""
    readings: tuple[Callable[[Any], bool], ...] = (
        _is_spec,
        # A None in place of a spec is named, one beside arrays is fine.
        lambda value: value is None or _is_spec(value),
        lambda value: value is None or _is_spec(value) or looks_like_spec(value),
    )
    for is_leaf in readings:
        flat, treedef = flatten(specs, is_leaf)
        if treedef == found.treedef:
            return flat
    if looks_like_spec(specs):
        raise PartitionError(f"specs: {short(specs)} is not a PartitionSpec.{write_as(specs)}")
    raise PartitionError(
        f"specs: the tree differs from the arrays' tree. {_difference(found, specs)}"
    )


def _is_spec(value: Any) -> bool:
    return isinstance(value, (PartitionSpec, NamedSharding))


def _spec(value: Any) -> Any:
    return value.spec if isinstance(value, NamedSharding) else value


def _other_mesh(theirs: AnyMesh, ours: AnyMesh) -> str:
    """How two meshes differ: in their axes, or in what lies behind equal ones."""
    axes = [
        short(", ".join(f"{name}:{size}" for name, size in m.shape.items()), 80)
        for m in (theirs, ours)
    ]
    if axes[0] != axes[1]:
        return f"a sharding on the mesh {axes[0]}, but the mesh is {axes[1]}"
    return f"a sharding on another mesh {axes[0]}, of other devices, another order or axis types"


def _difference(found: Walk, specs: Any) -> str:
    """The first leaf that only one of the two trees has."""
    flat, _ = flatten(specs, lambda value: value is None or _is_spec(value))
    whole, _ = flatten(jax.tree.unflatten(found.treedef, found.leaves))
    ours = [path_text(path) for path, _ in whole]
    theirs = [path_text(path) for path, _ in flat]
    missing, extra = set(ours) - set(theirs), set(theirs) - set(ours)
    if missing:
        first = next(path for path in ours if path in missing)
        return f"First difference: {shown(first)!r} has no spec{_more(missing)}."
    if extra:
        first = next(path for path in theirs if path in extra)
        return f"First difference: {shown(first)!r} has a spec but is not in the tree."
    return "They have the same leaves in containers of different kinds."


def _more(paths: set[str]) -> str:
    return f", nor have {len(paths) - 1} more" if len(paths) > 1 else ""
