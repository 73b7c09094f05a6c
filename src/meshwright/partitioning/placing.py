"""`shard(...)`: a tree placed by its specs in one batched transfer, checked first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwright.errors import PartitionError
from meshwright.partitioning.callbacks import FromCallback as FromCallback
from meshwright.partitioning.calling import make_from_callback
from meshwright.partitioning.decide import settle
from meshwright.partitioning.leaves import Leaf, Walk, refuse, walk
from meshwright.partitioning.local_parts import check_parts
from meshwright.partitioning.matching import check_constrained, match_specs, plain_specs
from meshwright.partitioning.specs import AnyMesh
from meshwright.partitioning.ties import tie_problems
from meshwright.partitioning.values import (
    Narrow,
    check_narrow,
    in_native_order,
    kept_dtype,
    value_problems,
)
from meshwright.partitioning.values import check_values as check_values
from meshwright.spec.checks import check_flag


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

    `specs` is a tree of `PartitionSpec`s as `partition` makes it (or of `NamedSharding`s on this
    mesh, as `shardings` does), or one for all; without it `partition(tree, mesh, **options)`
    decides. Leaves may be host or device arrays, `FromCallback`s, or `ShapeDtypeStruct`s, which
    come back with their sharding. An array that the tree holds twice is placed once, and stays
    one. In several processes host arrays must be the same everywhere, and each process copies only
    its own pieces; `local=True` says that they are this process's part instead. 64-bit values that
    JAX would narrow are refused, or converted with `narrow="convert"`, integers if they fit.

    >>> import numpy as np, meshwright as mw
    >>> placed = mw.shard({"w": np.ones((512, 512), "float32")}, mw.mesh("fsdp:4, tp:2"))
    >>> placed["w"].sharding.spec
    P('fsdp', 'tp')
    """
    check_narrow(narrow)
    local = check_flag("local", local)
    found = walk(tree)
    refuse("shard", [*tie_problems(tree), *value_problems(found.arrays, narrow, "shard")])
    per_leaf = _specs(found, tree, mesh, specs, options, local)
    shardings = [NamedSharding(mesh, spec) for spec in per_leaf]
    return found.rebuild(put(found.arrays, shardings, local))


def _specs(
    found: Walk, tree: Any, mesh: AnyMesh, specs: Any, options: dict[str, Any], local: bool
) -> list[PartitionSpec]:
    specs = plain_specs(specs, mesh)
    if not local:
        return settle("shard", found, tree, mesh, specs, options)
    if specs is None or options:
        raise PartitionError("local=True needs specs: a part does not tell the whole shape.")
    per_leaf = match_specs(found, specs)
    check_parts("shard", found.arrays, per_leaf, mesh)
    return per_leaf


def put(
    leaves: Sequence[Leaf],
    shardings: Sequence[NamedSharding],
    local: bool = False,
    what: str = "shard",
) -> list[Any]:
    """Place checked leaves: one call for all that a single process holds."""
    check_constrained(what, leaves, shardings)
    names = [(id(leaf.value), to) for leaf, to in zip(leaves, shardings, strict=True)]
    single = dict(zip(names, leaves, strict=True))
    placed = _each(list(single.values()), [to for _, to in single], local)
    by_name = dict(zip(single, placed, strict=True))
    return [by_name[name] for name in names]


def _each(leaves: Sequence[Leaf], shardings: Sequence[NamedSharding], local: bool) -> list[Any]:
    if shardings and isinstance(shardings[0].mesh, AbstractMesh):
        return [_abstract(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
    results: list[Any] = [None] * len(leaves)
    together = []
    for place, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if isinstance(leaf.value, jax.ShapeDtypeStruct):
            results[place] = _abstract(leaf, sharding)
        elif isinstance(leaf.value, FromCallback):
            results[place] = make_from_callback(leaf, sharding)
        elif local:
            results[place] = jax.make_array_from_process_local_data(  # type: ignore[no-untyped-call]
                sharding, in_native_order(leaf.value)
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
    if not isinstance(value, jax.Array):
        return in_native_order(value)
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    here: set[Any] = value.sharding.device_set
    if len(here) > 1 or here == sharding.device_set:
        return value
    (device,) = here
    return np.asarray(value) if device.platform == "cpu" else value


def _abstract(leaf: Leaf, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        leaf.shape, kept_dtype(leaf), sharding=sharding
    )


def _across(leaf: Leaf, sharding: NamedSharding) -> Any:
    """A global array from one that every process has whole."""
    value = leaf.value
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        from meshwright.partitioning.moving import reshard

        return reshard(value, sharding.mesh, sharding.spec)
    keys = isinstance(value, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    host = value if keys else in_native_order(np.asarray(value))
    # The dtype is for processes that hold no piece and so have nothing to read it from.
    return jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: host[index], dtype=kept_dtype(leaf)
    )
