"""State that follows parameters: optimizer states, averages, copies."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import PartitionError
from meshwright.partitioning.leaves import Leaf, walk
from meshwright.partitioning.matching import check_specs, match_specs
from meshwright.partitioning.placing import check_values, put
from meshwright.partitioning.specs import AnyMesh, make_spec


def partition_like(state: Any, params: Any, specs: Any) -> Any:
    """Specs for a state, from those of the parameters it follows.

    A leaf of the state whose path ends with a parameter's path and that has its shape takes the
    parameter's spec (the longest path wins); all others stay whole, counters above all.

    >>> import jax, optax, meshwright as mw
    >>> params = {"w": jax.numpy.ones((64, 64))}
    >>> state = jax.eval_shape(optax.adam(1e-3).init, params)
    >>> specs = mw.partition(params, mw.mesh("fsdp:8"))
    >>> mw.partition_like(state, params, specs)[0].mu
    {'w': P('fsdp',)}
    """
    found, of_params = walk(state), walk(params)
    return found.rebuild(_follow(found.arrays, of_params.arrays, match_specs(of_params, specs)))


def shard_like(state: Any, params: Any, mesh: AnyMesh | None = None) -> Any:
    """The state placed beside the parameters it follows, which must be placed already.

    >>> import jax, optax, meshwright as mw
    >>> params = mw.shard({"w": jax.numpy.ones((64, 64))}, mw.mesh("fsdp:8"))
    >>> state = mw.shard_like(optax.adam(1e-3).init(params), params)
    >>> state[0].mu["w"].sharding == params["w"].sharding
    True
    """
    found, of_params = walk(state), walk(params)
    specs, meshes = [], []
    for leaf in of_params.arrays:
        sharding = getattr(leaf.value, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            raise PartitionError(
                f"{leaf.path}: the parameter is not placed on a mesh. Place it first, "
                "params = shard(params, mesh)."
            )
        specs.append(sharding.spec)
        meshes.append(sharding.mesh)
    if not meshes and mesh is None:
        raise PartitionError("the parameters hold no arrays, so there is nothing to follow.")
    if any(other != meshes[0] for other in meshes):
        raise PartitionError("the parameters stand on several meshes; call shard_like for each.")
    target = meshes[0] if mesh is None else mesh
    per_leaf = _follow(found.arrays, of_params.arrays, specs)
    check_specs("shard_like", found.arrays, per_leaf, target)
    check_values(found.arrays, "error")
    return found.rebuild(put(found.arrays, [NamedSharding(target, spec) for spec in per_leaf]))


def _follow(
    leaves: tuple[Leaf, ...], params: tuple[Leaf, ...], specs: list[PartitionSpec]
) -> list[PartitionSpec]:
    by_path = {(leaf.path, leaf.shape): spec for leaf, spec in zip(params, specs, strict=True)}
    result = []
    for leaf in leaves:
        path, spec = leaf.path, by_path.get((leaf.path, leaf.shape))
        while spec is None and "/" in path:
            path = path.partition("/")[2]
            spec = by_path.get((path, leaf.shape))
        if spec is None:
            spec = by_path.get(("", leaf.shape))
        result.append(make_spec() if spec is None else spec)
    return result
