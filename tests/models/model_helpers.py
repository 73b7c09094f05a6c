"""Parameters without a compiler, and results side by side."""

import jax
import numpy as np


def fresh(weights, seed=0):
    """Weights drawn by NumPy: nothing is compiled."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda w: jax.numpy.asarray(w.mean + w.std * random.normal(size=w.shape), "float32"),
        weights,
    )


def fresh_state(model):
    """A first state with such parameters; moments are zero."""
    params = fresh(model.weights())
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), model.shapes())
    return jax.tree.map(jax.numpy.asarray, state | {"params": params})


def close(ours, theirs, **tolerance):
    """Two trees hold the same numbers."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), **tolerance),
        ours,
        theirs,
    )
