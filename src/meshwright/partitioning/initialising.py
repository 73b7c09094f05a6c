"""`init(...)`: run an initialiser so that no array ever exists whole on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from meshwright.errors import PartitionError, short
from meshwright.partitioning.decide import settle
from meshwright.partitioning.leaves import walk
from meshwright.partitioning.specs import mesh_axes


def init(fn: Callable[..., Any], *args: Any, mesh: Mesh, specs: Any = None, **options: Any) -> Any:
    """`fn(*args)` computed straight into its shardings.

    `specs`, or the options of `partition`, decide; the result's shapes are found without running
    `fn`. Leaves that are no arrays come back as `fn` returns them.

    >>> import jax, meshwright as mw
    >>> normal = lambda key: {"w": jax.random.normal(key, (256, 256))}
    >>> w = mw.init(normal, jax.random.key(0), mesh=mw.mesh("fsdp:8"))["w"]
    >>> w.addressable_shards[0].data.shape
    (32, 256)
    """
    if not callable(fn):
        raise PartitionError(f"init: {short(fn)} is not a function.")
    mesh_axes(mesh)
    if not isinstance(mesh, Mesh):
        raise PartitionError("init computes: it needs a Mesh of devices, not an AbstractMesh.")
    trees: list[Any] = []

    def arrays(*args: Any) -> list[Any]:
        """The arrays alone; the tree they stand in, with shapes for them, goes to `trees`."""
        made = walk(fn(*args))
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in made.arrays]  # type: ignore[no-untyped-call]
        trees.append(made.rebuild(shapes))
        return [leaf.value for leaf in made.arrays]

    jax.eval_shape(arrays, *args)
    found = walk(trees[0])
    per_leaf = settle("init", found, trees[0], mesh, specs, options)
    shardings = [NamedSharding(mesh, spec) for spec in per_leaf]
    return found.rebuild(jax.jit(arrays, out_shardings=shardings)(*args))
