"""What speaks against a route, and what is wrong with arrays that are to travel on one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from meshwright.errors import TransferError, listing, short
from meshwright.mpmd.transfers.items import Item, is_key
from meshwright.partitioning.leaves import Leaf
from meshwright.partitioning.specs import mesh_axes
from meshwright.partitioning.specs import problems as spec_problems


def refuse(what: str, problems: Sequence[str]) -> None:
    """Raise one error for all problems, or return when there are none."""
    if problems:
        shown = listing((f"\n  {problem}" for problem in problems), 6).replace(", \n", "\n")
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise TransferError(f"{what}: {count}, nothing was moved.{shown}")


def end_problems(leaf: Leaf, end: str, sharding: Any) -> Iterator[str]:
    """Why an array cannot lie as one end of a route says."""
    where = f"{leaf.where}: {end}"
    if not isinstance(sharding, Sharding):
        yield f"{where}: {short(sharding)} is not a sharding. Pass NamedSharding(mesh, spec)."
    elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        yield f"{where}: an AbstractMesh has no devices. Use a mesh of devices."
    else:
        yield from _split_problems(leaf, where, sharding)
        yield from _memory_problems(where, sharding)


def _split_problems(leaf: Leaf, where: str, sharding: Sharding) -> Iterator[str]:
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        if spec.unreduced or spec.reduced:
            yield f"{where}: {spec} asks for more than a split. Reduce the sum first."
            return
        if any(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
            yield f"{where}: {spec} leaves a dim open. Say how to split it, or None for whole."
        yield from spec_problems(where, leaf.shape, spec, mesh_axes(sharding.mesh))
        return
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError as error:
        yield f"{where}: {short(str(error), 200)}"


def _memory_problems(where: str, sharding: Sharding) -> Iterator[str]:
    device: Any = next(iter(sharding.device_set))
    try:
        usual = device.default_memory().kind
    except (AttributeError, RuntimeError, jax.errors.JaxRuntimeError):  # only for the compiler
        return
    if sharding.memory_kind not in (None, usual):
        yield (
            f"{where}: memory kind {sharding.memory_kind!r} does not travel. Use {usual!r}, and "
            "jax.device_put before or after."
        )


def pair_problems(leaf: Leaf, source: Sharding, target: Sharding) -> Iterator[str]:
    """Why an array cannot go from one sharding to the other."""
    sides: list[set[Any]] = [source.device_set, target.device_set]
    ends = [{device.platform for device in side} for side in sides]
    if ends[0] != ends[1]:
        names = [listing(sorted(end)) for end in ends]
        yield (
            f"{leaf.where}: from {names[0]} to {names[1]}. A route stays on one platform; "
            "meshwright.reshard goes from one to another."
        )


def fits(array: Any, item: Item) -> bool:
    """Whether an array is the one that a route was made for. Asked for every transfer: quick."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return False
    if item.kind is None:
        alike = array.shape == item.shape and array.dtype == item.dtype
    else:
        alike = _is_such_a_key(array, item)
    return (
        alike
        and not array.is_deleted()
        and (
            array.sharding == item.source
            or array.sharding.is_equivalent_to(item.source, array.ndim)
        )
    )


def misfit(array: Any, item: Item) -> str:
    """What is wrong with an array that does not fit; the route stays as it is."""
    where = item.where
    if isinstance(array, jax.core.Tracer):
        return f"{where}: a tracer. Transfers happen outside jit."
    if not isinstance(array, jax.Array):
        return f"{where}: {short(array)} is not a jax.Array. Place it with meshwright.shard."
    if array.is_deleted():
        return f"{where}: the array was deleted or donated. Use the one it went into."
    if item.kind is not None and not is_key(array.dtype):
        return f"{where}: {array.dtype}{list(array.shape)}, the route carries random keys."
    if item.kind is None and (array.shape != item.shape or array.dtype != item.dtype):
        return (
            f"{where}: {array.dtype}{list(array.shape)}, the route carries "
            f"{item.dtype}{list(item.shape)}. Make a route for it."
        )
    if item.kind is not None and not _is_such_a_key(array, item):
        return f"{where}: other keys or another shape than the route carries. Make one for them."
    return (
        f"{where}: lies as {short(array.sharding, 120)}, the route starts at "
        f"{short(item.source, 120)}. Move it there with jax.device_put, or make a route from it."
    )


def _is_such_a_key(array: jax.Array, item: Item) -> bool:
    return (
        is_key(array.dtype)
        and jax.random.key_impl(array) == item.kind
        and array.shape == item.shape[: array.ndim]
    )
