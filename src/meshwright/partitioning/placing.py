"""`shard(...)`: a tree placed by its specs in one batched transfer, checked first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwright.errors import PartitionError, short
from meshwright.partitioning.decide import settle
from meshwright.partitioning.leaves import Leaf, Walk, refuse, walk
from meshwright.partitioning.matching import check_specs, match_specs
from meshwright.partitioning.specs import AnyMesh

Narrow = Literal["error", "convert"]


@dataclasses.dataclass(frozen=True)
class FromCallback:
    """An array that is only made where it is needed: `fn(index)` gives the piece at `index`.

    Stands in a tree like an array; `shard` calls `fn` for the pieces of this process alone.
    """

    shape: tuple[int, ...]
    dtype: Any
    fn: Callable[..., Any]


def shard(
    tree: Any,
    mesh: AnyMesh,
    specs: Any = None,
    *,
    narrow: Narrow = "error",
    local: bool = False,
    **options: Any,
) -> Any:
    """The tree with every array placed on the mesh; other leaves pass through.

    `specs` is a tree of `PartitionSpec`s as `partition` makes it, or one for all; without it
    `partition(tree, mesh, **options)` decides. Leaves may be host or device arrays,
    `FromCallback`s, or `ShapeDtypeStruct`s, which come back with their sharding. In several
    processes host arrays must be the same everywhere, and each process copies only its own
    pieces; `local=True` says that they are this process's part instead. 64-bit values that JAX
    would narrow are refused, or converted with `narrow="convert"`.

    >>> import numpy as np, meshwright as mw
    >>> placed = mw.shard({"w": np.ones((512, 512), "float32")}, mw.mesh("fsdp:4, tp:2"))
    >>> placed["w"].sharding.spec
    P('fsdp', 'tp')
    """
    if narrow not in ("error", "convert"):
        raise PartitionError(f"narrow: {short(narrow)} is not 'error' or 'convert'.")
    found = walk(tree)
    check_values(found.arrays, narrow)
    per_leaf = _specs(found, tree, mesh, specs, options, local)
    shardings = [NamedSharding(mesh, spec) for spec in per_leaf]
    return found.rebuild(put(found.arrays, shardings, local))


def _specs(
    found: Walk, tree: Any, mesh: AnyMesh, specs: Any, options: dict[str, Any], local: bool
) -> list[PartitionSpec]:
    if not local:
        return settle("shard", found, tree, mesh, specs, options)
    if specs is None or options:
        raise PartitionError("local=True needs specs: a part does not tell the whole shape.")
    per_leaf = match_specs(found, specs)
    # Parts say nothing of the whole dims, which is what must divide: zero always does.
    parts = [leaf._replace(shape=(0,) * len(leaf.shape)) for leaf in found.arrays]
    check_specs("shard", parts, per_leaf, mesh)
    return per_leaf


def check_values(leaves: Sequence[Leaf], narrow: Narrow) -> None:
    """Refuse what cannot be placed: tracers, deleted arrays, values JAX would narrow."""
    wrong = []
    for leaf in leaves:
        value = leaf.value
        if isinstance(value, jax.core.Tracer):
            wrong.append(
                f"{leaf.where}: a tracer. Under jit use jax.lax.with_sharding_constraint with the "
                "specs of partition, or jit's in_shardings."
            )
        elif isinstance(value, jax.Array):
            if value.is_deleted():
                wrong.append(
                    f"{leaf.where}: the array was deleted or donated. Use the one it went into."
                )
        elif not isinstance(value, jax.ShapeDtypeStruct):
            kept = _kept(leaf)
            if kept is None:
                wrong.append(
                    f"{leaf.where}: {type(value).__name__} of {leaf.dtype} cannot be placed. "
                    "Make it an array of numbers first."
                )
            elif narrow == "error" and kept != leaf.dtype:
                wrong.append(
                    f"{leaf.where}: {leaf.dtype} would become {kept}. Convert it, enable "
                    "jax_enable_x64, or pass narrow='convert'."
                )
    refuse("shard", wrong)


def _kept(leaf: Leaf) -> Any:
    """The dtype a leaf has once placed; None for text, objects and masked arrays."""
    if isinstance(leaf.value, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf.dtype
    numeric = any(
        jax.numpy.issubdtype(leaf.dtype, kind)
        for kind in (np.number, np.bool_, jax.dtypes.prng_key)
    )
    if not numeric or isinstance(leaf.value, np.ma.MaskedArray):
        return None
    return jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)


def put(
    leaves: Sequence[Leaf], shardings: Sequence[NamedSharding], local: bool = False
) -> list[Any]:
    """Place checked leaves: one call for all that a single process holds."""
    refuse(
        "shard",
        [
            f"{leaf.where}: {to.spec} leaves a dim unconstrained, which only jit can decide. Use "
            "None, or an axis."
            for leaf, to in zip(leaves, shardings, strict=True)
            if PartitionSpec.UNCONSTRAINED in tuple(to.spec)
        ],
    )
    if shardings and isinstance(shardings[0].mesh, AbstractMesh):
        return [_abstract(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
    results: list[Any] = [None] * len(leaves)
    together = []
    for place, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if isinstance(leaf.value, jax.ShapeDtypeStruct):
            results[place] = _abstract(leaf, sharding)
        elif isinstance(leaf.value, FromCallback):
            results[place] = _called(leaf, sharding)
        elif local:
            results[place] = jax.make_array_from_process_local_data(  # type: ignore[no-untyped-call]
                sharding, leaf.value
            )
        elif not sharding.is_fully_addressable:
            results[place] = _across(leaf, sharding)
        else:
            together.append(place)
    values = [_source(leaves[i].value, shardings[i]) for i in together]
    placed = jax.device_put(values, [shardings[i] for i in together])
    for place, value in zip(together, placed, strict=True):
        results[place] = value
    return results


def _source(value: Any, sharding: NamedSharding) -> Any:
    """A CPU device's array as the host memory it is.

    JAX cuts an array on a device by a program per array, three times slower than slicing; and
    what it does not cut it shares, so that donating one array would delete the other.
    """
    if not isinstance(value, jax.Array) or jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    here = value.sharding
    if len(here.device_set) > 1 or here.device_set == sharding.device_set:
        return value
    (device,) = here.device_set
    return np.asarray(value) if device.platform == "cpu" else value


def _abstract(leaf: Leaf, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        leaf.shape, _kept(leaf), sharding=sharding
    )


def _called(leaf: Leaf, sharding: NamedSharding) -> Any:
    """An array whose pieces a function makes, each checked as it comes."""
    local, kept = sharding.shard_shape(leaf.shape), _kept(leaf)

    def piece(index: Any) -> Any:
        made = leaf.value.fn(index)
        shape, dtype = getattr(made, "shape", None), getattr(made, "dtype", None)
        if shape != local or dtype not in (kept, leaf.dtype):
            raise PartitionError(
                f"{leaf.where}: the function gave {dtype} {shape} for the piece at {short(index)}, "
                f"which is {leaf.dtype} {local}. Return that part of the array."
            )
        return made

    return jax.make_array_from_callback(leaf.shape, sharding, piece, dtype=kept)


def _across(leaf: Leaf, sharding: NamedSharding) -> Any:
    """A global array from one that every process has whole."""
    value = leaf.value
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        from meshwright.partitioning.moving import reshard

        return reshard(value, sharding.mesh, sharding.spec)
    keys = isinstance(value, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    host = value if keys else np.asarray(value)
    # The dtype is for processes that hold no piece and so have nothing to read it from.
    return jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: host[index], dtype=_kept(leaf)
    )
