"""`partition_like(...)`: specs for a tree that follows the parameters, such as an optimizer state.

Optimizers build their state by mapping over the parameters, so that a moment of `layers/0/w` stands
at a path that ends with `layers/0/w`. Paths are matched by their ends, whatever containers the
optimizer puts around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import PartitionError, short
from meshwright.partitioning.decide import MIN_SHARD_BYTES
from meshwright.trees.specs import make_spec, match_specs
from meshwright.trees.walk import Leaf, refuse, walk

# Shape and spec of a parameter.
Param = tuple[tuple[int, ...], PartitionSpec]


def partition_like(state: Any, params: Any, specs: Any, *, unmatched: str = "error") -> Any:
    """Choose specs for a state from those of the parameters that it follows.

    A leaf of the state whose path ends with a parameter's path and that has its shape takes the
    parameter's spec (the longest path wins); dims before that shape, as the memories of L-BFGS
    have them, are not sharded. All other leaves are replicated, such as counters. Two kinds of
    them raise a `PartitionError`, unless `unmatched="replicate"`: those with a parameter's
    shape of two dims or more, and those as large as all parameters together.

    >>> import jax, optax, meshwright as mw
    >>> params = {"w": jax.numpy.ones((256, 256))}
    >>> state = jax.eval_shape(optax.adam(1e-3).init, params)
    >>> specs = mw.partition(params, mw.mesh("fsdp:8"))
    >>> mw.partition_like(state, params, specs)[0].mu
    {'w': P('fsdp',)}
    """
    walked_state, walked_params = walk(state), walk(params)
    per_param = match_specs(walked_params, specs)
    per_leaf = follow_params(walked_state.arrays, walked_params.arrays, per_param, unmatched)
    return walked_state.rebuild(per_leaf)


def unplaced_problem(leaf: Leaf) -> str | None:
    """Say why a parameter has no mesh and spec of its own to follow, or return `None`."""
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


def follow_params(
    leaves: tuple[Leaf, ...],
    params: tuple[Leaf, ...],
    specs: list[PartitionSpec],
    unmatched: str,
) -> list[PartitionSpec]:
    """Choose a spec for each leaf of a state from the parameters and their specs."""
    if unmatched not in ("error", "replicate"):
        raise PartitionError(
            f"unmatched: {short(unmatched)} is not 'error' or 'replicate'.", option="unmatched"
        )
    # A list, since paths are text: the keys 1 and "1" of two containers make the same one.
    by_path: dict[str, list[Param]] = {}
    for leaf, spec in zip(params, specs, strict=True):
        by_path.setdefault(leaf.path, []).append((leaf.shape, spec))
    followed = [_followed_spec(leaf, by_path) for leaf in leaves]
    if unmatched == "error":
        rest = [leaf for leaf, spec in zip(leaves, followed, strict=True) if spec is None]
        refuse("state", list(_suspicious(rest, params)), option="unmatched")
    return [make_spec() if spec is None else spec for spec in followed]


def _followed_spec(leaf: Leaf, by_path: Mapping[str, list[Param]]) -> PartitionSpec | None:
    """Return the spec of the parameter with the longest path that ends the leaf's, or `None`."""
    words = leaf.path.split("/") if leaf.path else []
    # From the whole path to the empty one, which is the path of parameters that are one array.
    for start in range(len(words) + 1):
        candidates = by_path.get("/".join(words[start:]), ())
        for shape, spec in candidates:
            if shape == leaf.shape:
                return spec
        for shape, spec in candidates:
            more = len(leaf.shape) - len(shape)
            if shape and more > 0 and leaf.shape[more:] == shape:
                return make_spec([*[None] * more, *spec])
    return None


def _suspicious(rest: Sequence[Leaf], params: Sequence[Leaf]) -> Iterator[str]:
    """Yield a problem for leaves that follow no parameter but look as if they should."""
    # Vectors are left out: the length of a bias is a common size for other things too.
    shapes = {leaf.shape for leaf in params if len(leaf.shape) > 1}
    all_elements = sum(leaf.size for leaf in params)
    for leaf in rest:
        if leaf.shape in shapes:
            yield (
                f"{leaf.where}: has a parameter's shape {leaf.shape} but no parameter's path. Pass "
                "the parameters that the state was made from, or unmatched='replicate'."
            )
        elif leaf.size >= all_elements and leaf.bytes >= MIN_SHARD_BYTES:
            yield (
                f"{leaf.where}: {leaf.shape} holds as many elements as all parameters together "
                f"({all_elements:,}) but follows none, so it would be replicated. Keep "
                "the state in the parameters' tree (no optax.flatten), give it a spec of its own, "
                "or pass unmatched='replicate'."
            )
