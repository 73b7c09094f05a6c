"""What is to be moved, and everything that speaks against it. Touches no device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshwright import _compat
from meshwright.errors import PartitionError, short
from meshwright.partitioning.leaves import Leaf, Walk
from meshwright.partitioning.matching import match_specs, plain_specs
from meshwright.partitioning.moving.moves import Move
from meshwright.partitioning.specs import AnyMesh, is_split, mesh_axes, problems
from meshwright.partitioning.ties import tie_problems

Finish = Callable[[jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The moves and how each result is finished, or the problems."""

    moves: tuple[Move, ...] = ()
    finish: tuple[Finish, ...] = ()
    problems: tuple[str, ...] = ()


def plan(tree: Any, found: Walk, mesh: AnyMesh, specs: Any) -> Plan:
    sizes = mesh_axes(mesh)
    wrong = [*_mesh_problems(mesh), *tie_problems(tree)]
    try:
        per_leaf = match_specs(found, _broadcast(plain_specs(specs, mesh), tree))
    except PartitionError as error:
        return Plan(problems=(*wrong, str(error)))
    for leaf, spec in zip(found.arrays, per_leaf, strict=True):
        wrong += value_problems(leaf)
        wrong += spec_problems(leaf, spec, sizes)
    if wrong:
        return Plan(problems=tuple(wrong))
    pairs = [
        _move(leaf, NamedSharding(mesh, spec))
        for leaf, spec in zip(found.arrays, per_leaf, strict=True)
    ]
    return Plan(tuple(move for move, _ in pairs), tuple(finish for _, finish in pairs))


def spans_processes(found: Walk, mesh: AnyMesh) -> bool:
    """Whether arrays or mesh lie in more than one process; then all processes take part."""
    if jax.process_count() == 1:
        return False
    places = [set(mesh.devices.flat)] if isinstance(mesh, Mesh) else []
    splits = {_source(leaf.value) for leaf in found.arrays}
    places += [split.device_set for split in splits if split is not None]
    return len({device.process_index for devices in places for device in devices}) > 1


def _broadcast(specs: Any, tree: Any) -> Any:
    """`specs` as a full tree where it is a prefix; what is none is left for `match_specs`."""
    if isinstance(specs, PartitionSpec):
        return specs
    try:
        return jax.tree.broadcast(specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
    except ValueError:
        return specs


def _mesh_problems(mesh: AnyMesh) -> Iterator[str]:
    if not isinstance(mesh, Mesh):
        yield (
            f"mesh: an AbstractMesh ({short(mesh)}) has no devices. "
            "Make one that has: meshwright.mesh('fsdp:-1')."
        )
    elif _compat.is_compile_only(mesh.devices.flat[0]):
        yield "mesh: its devices exist only for the compiler. Make a mesh of jax.devices()."


def value_problems(leaf: Leaf) -> Iterator[str]:
    """Why the values of a leaf cannot be moved."""
    where, value = leaf.where, leaf.value
    if isinstance(value, jax.core.Tracer):
        yield (
            f"{where}: a tracer. Under jit use jax.lax.with_sharding_constraint or "
            "jax.sharding.reshard."
        )
    elif isinstance(value, jax.Array):
        if value.is_deleted():
            yield f"{where}: the array was deleted or donated. Use the one it went into."
        elif getattr(getattr(value.sharding, "spec", None), "unreduced", None):
            yield f"{where}: a sum is still open ({value.sharding}). Reduce it first."
    elif isinstance(value, jax.ShapeDtypeStruct):
        if value.sharding is None or value.sharding.has_addressable_devices:
            yield (
                f"{where}: a shape without values. It may stand for an array only in a process "
                "that holds no part of it, and names its sharding."
            )
    elif isinstance(value, (np.ndarray, np.generic)):
        yield from _dtype_problems(where, value.dtype)
    else:
        yield f"{where}: {short(value)} holds no values yet. Place it with shard."


def _dtype_problems(where: str, dtype: np.dtype[Any]) -> Iterator[str]:
    if not dtype.isnative:
        yield f"{where}: {dtype} is in another byte order. Use x.astype({dtype.name!r})."
        return
    try:
        jax.typeof(np.empty(0, dtype))
        known = dtype != jax.dtypes.float0
    except TypeError:
        known = False
    kept = jax.dtypes.canonicalize_dtype(dtype) if known else None
    if kept is None:
        yield f"{where}: {dtype} is no dtype that a device can hold. Leave it out of the tree."
    elif kept != dtype:
        yield f"{where}: {dtype} would become {kept}. Convert it, or enable jax_enable_x64."


def spec_problems(leaf: Leaf, spec: PartitionSpec, sizes: Mapping[str, int]) -> Iterator[str]:
    """Why an array cannot lie as its spec says."""
    yield from problems(leaf.path, leaf.shape, spec, sizes)
    if is_split(spec) and PartitionSpec.UNCONSTRAINED in tuple(spec):
        yield (
            f"{leaf.where}: {short(spec)} leaves a dim open. Say how to split it, or None for "
            "whole."
        )


def _move(leaf: Leaf, target: NamedSharding) -> tuple[Move, Finish]:
    """Keys travel as the integers they are made of."""
    value: Any = leaf.value
    finish: Finish = _as_it_is
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        value, finish = _key_data(leaf)
    shape, dtype = tuple(value.shape), np.dtype(value.dtype)
    return Move(leaf.where, shape, dtype, value, _source(value), target), finish


def _key_data(leaf: Leaf) -> tuple[Any, Finish]:
    if isinstance(leaf.value, jax.Array):
        kind: Any = jax.random.key_impl(leaf.value)
        data: Any = jax.random.key_data(leaf.value)
    else:
        kind, data = _key_shape(leaf.value)
    return data, lambda moved: jax.random.wrap_key_data(moved, impl=kind)


def _key_shape(keys: jax.ShapeDtypeStruct) -> tuple[Any, jax.ShapeDtypeStruct]:
    """The kind of keys that are not here, and the integers they are made of."""
    kinds = []

    def look(traced: Any) -> Any:
        kinds.append(jax.random.key_impl(traced))
        return jax.random.key_data(traced)

    plain = jax.eval_shape(look, keys)
    data = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        plain.shape, plain.dtype, sharding=keys.sharding
    )
    return kinds[0], data


def _as_it_is(moved: jax.Array) -> Any:
    return moved


def _source(value: Any) -> Sharding | None:
    """Where an array lies; None for one that every process has whole, on its own."""
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, jax.Array) and jax.process_count() > 1 and not value.committed:
        return None
    sharding: Sharding | None = getattr(value, "sharding", None)
    return sharding
