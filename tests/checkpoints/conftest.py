"""A place for a checkpoint, and a small one that has been saved there."""

import jax.numpy as jnp
import pytest

from meshwright.checkpoints.checkpoint import save_checkpoint


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


@pytest.fixture
def small(path):
    """A small tree that has been saved at `path`."""
    tree = {"a": {"w": jnp.arange(64.0).reshape(8, 8)}, "b": jnp.ones(8, jnp.bfloat16), "step": 3}
    save_checkpoint(path, tree)
    return tree
