"""Meshes, targets and comparisons that the tests of checkpoints share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def mesh(shape, names, devices=None):
    count = int(np.prod(shape))
    return Mesh(np.array((devices or jax.devices())[:count]).reshape(shape), names)


def cut(on, *axes):
    return NamedSharding(on, PartitionSpec(*axes))


FSDP = mesh((8,), ("fsdp",))
DP_TP = mesh((2, 4), ("dp", "tp"))
FOUR = mesh((4,), ("fsdp",))
ONE = mesh((1,), ("fsdp",))


def target_on(tree, sharding):
    """The shapes of a tree, all with one sharding, scalars whole; what is no array stays."""

    def shape(leaf):
        if not hasattr(leaf, "shape"):
            return leaf
        placed = sharding if leaf.shape else whole_on(sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    return jax.tree.map(shape, tree)


def whole_on(sharding):
    return cut(sharding.mesh) if hasattr(sharding, "mesh") else sharding


def bits(array):
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if hasattr(one, "shape"):
            assert (one.shape, one.dtype, bits(one)) == (other.shape, other.dtype, bits(other))
        else:
            assert type(one) is type(other)
            assert repr(one) == repr(other)
