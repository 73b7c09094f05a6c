"""State that follows parameters: optimizer states, averages, copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import PartitionError, short
from meshwright.partitioning.decide import MIN_SHARD_SIZE
from meshwright.trees.specs import make_spec, match_specs
from meshwright.trees.walk import Leaf, refuse, walk

Followed = tuple[tuple[int, ...], PartitionSpec]


def partition_like(state: Any, params: Any, specs: Any, *, unmatched: str = "error") -> Any:
    """Specs for a state, from those of the parameters it follows.

    A leaf of the state whose path ends with a parameter's path and that has its shape takes the
    parameter's spec (the longest path wins); dims before that shape, as the memories of L-BFGS
    have them, stay whole. All other leaves stay whole, counters above all. Two kinds of them are
    refused, unless `unmatched="replicate"`: those with a parameter's shape of two dims or more, and
    those as large as all parameters together.

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


def _unplaced(leaf: Leaf) -> str | None:
    """Why a parameter cannot be followed to its place."""
    if isinstance(leaf.value, jax.core.Tracer):
        return (
            f"{leaf.where}: the parameter is a tracer, which has no place. Under jit use "
            "jax.lax.with_sharding_constraint with the specs of partition_like, or out_shardings."
        )
    if isinstance(getattr(leaf.value, "sharding", None), NamedSharding):
        return None
    return (
        f"{leaf.where}: the parameter is not placed on a mesh. Place it first, "
        "params = shard(params, mesh)."
    )


def _follow(
    leaves: tuple[Leaf, ...],
    params: tuple[Leaf, ...],
    specs: list[PartitionSpec],
    unmatched: str,
) -> list[PartitionSpec]:
    if unmatched not in ("error", "replicate"):
        raise PartitionError(f"unmatched: {short(unmatched)} is not 'error' or 'replicate'.")
    by_path: dict[str, list[Followed]] = {}
    for leaf, spec in zip(params, specs, strict=True):
        by_path.setdefault(leaf.path, []).append((leaf.shape, spec))
    found = [_followed(leaf, by_path) for leaf in leaves]
    if unmatched == "error":
        lost = [leaf for leaf, spec in zip(leaves, found, strict=True) if spec is None]
        refuse("state", list(_suspicious(lost, params)))
    return [make_spec() if spec is None else spec for spec in found]


def _followed(leaf: Leaf, by_path: Mapping[str, list[Followed]]) -> PartitionSpec | None:
    """The spec of the parameter with the longest path that ends the leaf's, or `None`."""
    words = leaf.path.split("/") if leaf.path else []
    for start in range(len(words) + 1):
        here = by_path.get("/".join(words[start:]), ())
        for shape, spec in here:
            if shape == leaf.shape:
                return spec
        for shape, spec in here:
            more = len(leaf.shape) - len(shape)
            if shape and more > 0 and leaf.shape[more:] == shape:
                return make_spec([*[None] * more, *spec])
    return None


def _suspicious(lost: Sequence[Leaf], params: Sequence[Leaf]) -> Iterator[str]:
    """Leaves that follow nothing but look as if they should."""
    shapes = {leaf.shape for leaf in params if len(leaf.shape) > 1}
    everything = sum(leaf.size for leaf in params)
    for leaf in lost:
        if leaf.shape in shapes:
            yield (
                f"{leaf.where}: has a parameter's shape {leaf.shape} but no parameter's path. Pass "
                "the parameters that the state was made from, or unmatched='replicate'."
            )
        elif leaf.size >= max(everything, MIN_SHARD_SIZE):
            yield (
                f"{leaf.where}: {leaf.shape} holds as many elements as all parameters together "
                f"({everything:,}) but follows none, so every device would hold it whole. Keep the "
                "state in the parameters' tree (no optax.flatten), give it a spec of its own, or "
                "pass unmatched='replicate'."
            )
