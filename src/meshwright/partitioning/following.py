"""State that follows parameters: optimizer states, averages, copies."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import PartitionError, short
from meshwright.partitioning.leaves import Leaf, refuse, walk
from meshwright.partitioning.matching import check_specs, match_specs
from meshwright.partitioning.placing import check_values, put
from meshwright.partitioning.specs import AnyMesh, make_spec


def partition_like(state: Any, params: Any, specs: Any, *, unmatched: str = "error") -> Any:
    """Specs for a state, from those of the parameters it follows.

    A leaf of the state whose path ends with a parameter's path and that has its shape takes the
    parameter's spec (the longest path wins); all others stay whole, counters above all. A leaf
    with a parameter's shape that follows none is refused, or stays whole with
    `unmatched="replicate"`.

    >>> import jax, optax, meshwright as mw
    >>> params = {"w": jax.numpy.ones((64, 64))}
    >>> state = jax.eval_shape(optax.adam(1e-3).init, params)
    >>> specs = mw.partition(params, mw.mesh("fsdp:8"))
    >>> mw.partition_like(state, params, specs)[0].mu
    {'w': P('fsdp',)}
    """
    found, of_params = walk(state), walk(params)
    per_param = match_specs(of_params, specs)
    return found.rebuild(_follow(found.arrays, of_params.arrays, per_param, unmatched))


def shard_like(
    state: Any, params: Any, mesh: AnyMesh | None = None, *, unmatched: str = "error"
) -> Any:
    """The state placed beside the parameters it follows, as `partition_like` decides.

    The parameters must be placed already.

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
    per_leaf = _follow(found.arrays, of_params.arrays, specs, unmatched)
    check_specs("shard_like", found.arrays, per_leaf, target)
    check_values(found.arrays, "error")
    return found.rebuild(put(found.arrays, [NamedSharding(target, spec) for spec in per_leaf]))


def _follow(
    leaves: tuple[Leaf, ...],
    params: tuple[Leaf, ...],
    specs: list[PartitionSpec],
    unmatched: str,
) -> list[PartitionSpec]:
    if unmatched not in ("error", "replicate"):
        raise PartitionError(f"unmatched: {short(unmatched)} is not 'error' or 'replicate'.")
    by_path = {(leaf.path, leaf.shape): spec for leaf, spec in zip(params, specs, strict=True)}
    shapes = {leaf.shape for leaf in params if len(leaf.shape) > 1}
    found = [_followed(leaf, by_path) for leaf in leaves]
    if unmatched == "error":
        refuse(
            "state",
            [
                f"{leaf.where}: has a parameter's shape {leaf.shape} but no parameter's path. Pass "
                "the parameters that the state was made from, or unmatched='replicate'."
                for leaf, spec in zip(leaves, found, strict=True)
                if spec is None and leaf.shape in shapes
            ],
        )
    return [make_spec() if spec is None else spec for spec in found]


def _followed(leaf: Leaf, by_path: dict[tuple[str, tuple[int, ...]], PartitionSpec]) -> Any:
    """The spec of the parameter with the longest path that ends the leaf's, or `None`."""
    words = leaf.path.split("/") if leaf.path else []
    for start in range(len(words) + 1):
        spec = by_path.get(("/".join(words[start:]), leaf.shape))
        if spec is not None:
            return spec
    return None
