"""Check `PartitionSpec`s against arrays and a mesh, and a tree of specs against a tree of arrays.

Every check returns or raises all that is wrong at once, with the path of each leaf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright._text import plural
from meshwright.errors import MeshError, PartitionError, listing, near, short
from meshwright.meshes.devices import check_current
from meshwright.trees.metadata import flatten_like_unboxed
from meshwright.trees.walk import Leaf, Paths, Walk, flatten, path_text, refuse, shown_path

Uneven = Literal["error", "replicate"]
AnyMesh = Mesh | AbstractMesh


def make_spec(entries: Iterable[Any] = ()) -> PartitionSpec:
    """Make a spec from its entries; replicated dims at the end are left out.

    `P('x', None)` and `P('x')` mean the same but are not equal, so specs of one form are made.

    >>> make_spec(["fsdp", None])
    P('fsdp',)
    """
    kept = list(entries)
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)  # type: ignore[no-untyped-call]


def mesh_axes(mesh: AnyMesh) -> dict[str, int]:
    """Return `{axis name: size}` of a mesh or abstract mesh, whose devices must still be there."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise PartitionError(
            f"mesh: {short(mesh)} is not a jax.sharding.Mesh or AbstractMesh. "
            "Make one with meshwright.mesh('fsdp:-1').",
            option="mesh",
        )
    if isinstance(mesh, Mesh):
        _check_devices(mesh)
    return {str(name): size for name, size in mesh.shape.items()}


def _check_devices(mesh: Mesh) -> None:
    # A backend that was replaced takes all its devices along, so one device tells for all; a mesh
    # may have 100,000. The error counts them all.
    try:
        check_current(tuple(mesh.devices.flat[:1]))
    except MeshError:
        check_current(tuple(mesh.devices.flat))


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a spec.

    >>> entry_axes("fsdp"), entry_axes(("fsdp", "tp")), entry_axes(None)
    (('fsdp',), ('fsdp', 'tp'), ())
    """
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def shard_count(entry: Any, axes: Mapping[str, int]) -> int:
    """Return into how many shards an entry of a spec cuts its dim."""
    return math.prod(axes.get(axis, 1) for axis in entry_axes(entry))


def shard_shape(
    shape: tuple[int, ...], spec: PartitionSpec, axes: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the shape of one device's shard."""
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    return tuple(
        -(-size // shard_count(entry, axes)) for size, entry in zip(shape, entries, strict=True)
    )


def spec_problems(
    path: str,
    shape: tuple[int, ...],
    spec: PartitionSpec,
    axes: Mapping[str, int],
    *,
    otherwise: str = "",
) -> Iterator[str]:
    """Yield everything that is wrong with a spec for an array of this shape.

    `otherwise` is what the caller offers for dims that do not divide, besides padding.

    >>> list(spec_problems("w", (6, 8), PartitionSpec("fsdp", "ttp"), {"fsdp": 2, "tp": 2}))
    ["w: dim 1: no mesh axis 'ttp' in fsdp, tp. Did you mean 'tp'?"]
    """
    where = shown_path(path)
    if not isinstance(spec, PartitionSpec):
        yield f"{where}: {short(spec)} is not a PartitionSpec.{write_as(spec)}"
        return
    if not is_reduction_free(spec):
        yield f"{where}: {short(spec)} asks for more than a split. Name axes of dims only."
        return
    if len(spec) > len(shape):
        yield (
            f"{where}: {short(spec)} has {plural(len(spec), 'entry')} for an array with "
            f"{plural(len(shape), 'dim')} {shape}. Drop {len(spec) - len(shape)}."
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
        count = shard_count(entry, axes)
        if dim < len(shape) and shape[dim] % count:
            yield (
                f"{where}: dim {dim} has size {shape[dim]}, not divisible by {count} (axes "
                f"{', '.join(map(str, entry_axes(entry)))}). Pad to "
                f"{-(-shape[dim] // count) * count}"
                + (f", use another axis, or {otherwise}." if otherwise else " or use another axis.")
            )


def is_reduction_free(spec: PartitionSpec) -> bool:
    """Whether a spec says only how dims are cut, without `unreduced` or `reduced` axes.

    JAX uses these two under explicit sharding, for arrays that are still to be summed over an axis.
    """
    return not (spec.unreduced or spec.reduced)


def write_as(value: Any) -> str:
    """Say how to write as a spec what looks like one.

    >>> write_as(("dp", ["fsdp", "tp"]))
    " Write P('dp', ('fsdp', 'tp'))."
    """
    if value is None:
        return " Use PartitionSpec() for an array that is replicated."
    if not looks_like_spec(value):
        return ""
    entries = (value,) if isinstance(value, str) else value
    texts = [repr(tuple(entry) if isinstance(entry, list) else entry) for entry in entries]
    return f" Write P({listing(texts)})."


def looks_like_spec(value: Any) -> bool:
    """Whether a value is an axis name, or a tuple or list of names, tuples of names and `None`s."""
    if isinstance(value, str):
        return True
    # A namedtuple is a node of the user's tree, never a spec.
    plain = isinstance(value, (tuple, list)) and not hasattr(value, "_fields")
    return plain and all(
        entry is None
        or isinstance(entry, str)
        or (isinstance(entry, (tuple, list)) and all(isinstance(axis, str) for axis in entry))
        for entry in value
    )


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
            for problem in spec_problems(leaf.path, leaf.shape, spec, sizes)
        ],
    )


def check_constrained(
    what: str, leaves: Sequence[Leaf], shardings: Sequence[NamedSharding]
) -> None:
    """Refuse specs with `UNCONSTRAINED` dims, which leave the choice to the compiler."""
    refuse(
        what,
        [
            f"{leaf.where}: {short(sharding.spec)} leaves a dim unconstrained, which only jit can "
            "decide. Use None, or an axis."
            for leaf, sharding in zip(leaves, shardings, strict=True)
            if PartitionSpec.UNCONSTRAINED in tuple(sharding.spec)
        ],
    )


# A tree of specs against the tree of arrays it is meant for.


def match_specs(walked: Walk, specs: Any) -> list[PartitionSpec]:
    """Return the spec of every array, from a tree like the arrays' own, or one spec for all.

    A `NamedSharding` counts as its spec; where there is a mesh, `specs_on_mesh` checks its mesh.
    """
    if _is_spec(specs):
        return [_spec(specs)] * len(walked.arrays)
    values = [_spec(value) for _, value in _flatten_like(walked, specs)]
    chosen = [values[leaf.position] for leaf in walked.arrays]
    refuse(
        "specs",
        [
            f"{leaf.where}: {short(spec)} is not a PartitionSpec.{write_as(spec)}"
            for leaf, spec in zip(walked.arrays, chosen, strict=True)
            if not isinstance(spec, PartitionSpec)
        ],
        option="specs",
    )
    return chosen


def specs_on_mesh(specs: Any, mesh: AnyMesh) -> Any:
    """Return the tree with each `NamedSharding` replaced by its spec; it must be on this mesh."""
    if specs is None or isinstance(specs, PartitionSpec):
        return specs
    flat, treedef = flatten(specs, _is_spec)
    named = [(path, value) for path, value in flat if isinstance(value, NamedSharding)]
    if not named:
        return specs
    mesh_axes(mesh)
    memory_kind = NamedSharding(mesh, make_spec()).memory_kind
    problems = []
    for path, value in named:
        where = shown_path(path_text(path)) if path else "specs"
        if value.mesh != mesh:
            problems.append(
                f"{where}: {_mesh_difference(value.mesh, mesh)}. Pass its spec, or a sharding on "
                "the mesh itself."
            )
        # `None` means the default memory of the devices, which is where arrays go.
        elif value.memory_kind not in (None, memory_kind):
            problems.append(
                f"{where}: a sharding in memory {value.memory_kind!r}; arrays go to "
                f"{memory_kind!r}. Use jax.device_put for other memory."
            )
    refuse("specs", problems, option="specs")
    return jax.tree.unflatten(treedef, [_spec(value) for _, value in flat])


def spec_on_axes(value: Any, mesh: AnyMesh) -> PartitionSpec:
    """Return the spec of a sharding whose mesh has the axes of `mesh`, whatever its devices.

    This is how a sharding is read where the devices do not matter, as in a rehearsal for hardware
    that is not here; on a mesh of other axes, its spec would mean something else.
    """
    if isinstance(value, PartitionSpec):
        return value
    if not isinstance(value, NamedSharding):
        raise PartitionError(f"{short(value)} is not a PartitionSpec.{write_as(value)}")
    if dict(value.mesh.shape) != dict(mesh.shape):
        raise PartitionError(f"{_mesh_difference(value.mesh, mesh)}. Pass a spec for this mesh.")
    return value.spec


def _flatten_like(walked: Walk, specs: Any) -> Paths:
    """Flatten the specs leaf by leaf of the arrays' tree.

    What counts as a leaf is tried from strict to lenient, and the first structure that equals the
    arrays' wins: a `None` beside arrays is an empty node of both trees, but a `None` in place of a
    spec is a mistake, to be reported with its path instead of as another structure. The same holds
    for a tuple that should have been a `PartitionSpec`. Then the same for the arrays' tree without
    the boxes of Flax.
    """
    readings: tuple[Callable[[Any], bool], ...] = (
        _is_spec,
        lambda value: value is None or _is_spec(value),
        lambda value: value is None or _is_spec(value) or looks_like_spec(value),
    )
    for is_leaf in readings:
        flat, treedef = flatten(specs, is_leaf)
        if treedef == walked.treedef:
            return flat
    unboxed = flatten_like_unboxed(walked, specs, readings)
    if unboxed is not None:
        return unboxed
    if looks_like_spec(specs):
        raise PartitionError(
            f"specs: {short(specs)} is not a PartitionSpec.{write_as(specs)}", option="specs"
        )
    raise PartitionError(
        f"specs: the tree differs from the arrays' tree. {_difference(walked, specs)}",
        option="specs",
    )


def _is_spec(value: Any) -> bool:
    return isinstance(value, (PartitionSpec, NamedSharding))


def _spec(value: Any) -> Any:
    return value.spec if isinstance(value, NamedSharding) else value


def _mesh_difference(theirs: AnyMesh, ours: AnyMesh) -> str:
    """Say how two meshes differ: in their axes, or in the devices behind equal ones."""
    their_axes, our_axes = (
        short(", ".join(f"{name}:{size}" for name, size in mesh.shape.items()), 80)
        for mesh in (theirs, ours)
    )
    if their_axes != our_axes:
        return f"a sharding on the mesh {their_axes}, but the mesh is {our_axes}"
    return f"a sharding on another mesh {their_axes}, of other devices, another order or axis types"


def _difference(walked: Walk, specs: Any) -> str:
    """Name the first leaf that only one of the two trees has."""
    flat_specs, _ = flatten(specs, lambda value: value is None or _is_spec(value))
    flat_arrays, _ = flatten(jax.tree.unflatten(walked.treedef, walked.leaves))
    array_paths = [path_text(path) for path, _ in flat_arrays]
    spec_paths = [path_text(path) for path, _ in flat_specs]
    missing = set(array_paths) - set(spec_paths)
    extra = set(spec_paths) - set(array_paths)
    if missing:
        first = next(path for path in array_paths if path in missing)
        more = f", nor have {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"First difference: {shown_path(first)!r} has no spec{more}."
    if extra:
        first = next(path for path in spec_paths if path in extra)
        return f"First difference: {shown_path(first)!r} has a spec but is not in the tree."
    return "They have the same leaves in containers of different kinds."
