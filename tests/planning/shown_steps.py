"""Small steps for the tests of what plans say of themselves; shapes only, planned in a second."""

import functools

import jax
import jax.numpy as jnp

import meshwright as mw

WIDTH, HIDDEN, ROWS = 1024, 8192, 32768


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def train(params, batch):
    """Two layers and a step of descent."""

    def loss(params):
        hidden = jax.nn.relu(batch["x"] @ params["up"])
        return ((hidden @ params["down"] - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(width=WIDTH, hidden=HIDDEN, rows=ROWS):
    params = {"up": shape(width, hidden), "down": shape(hidden, width)}
    return params, {"x": shape(rows, width), "y": shape(rows, width)}


@functools.cache
def planned(**options):
    """The plan of `train` for eight chips."""
    return mw.plan(train, *arguments(), on="v5e:2x4", donate_argnums=0, **options)
