"""One process of several: plans a step for all devices, runs it, prints what it found as JSON."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from joining import start, tell

import meshwright as mw

WIDE, ROWS = 256, 64


def step(state, x):
    def cost(params):
        hidden = jnp.tanh(x @ params["up"]) @ params["down"]
        return jnp.mean((hidden - x) ** 2)

    value, grads = jax.value_and_grad(cost)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


def arguments():
    rng = np.random.default_rng(0)
    state = {
        "up": rng.normal(size=(WIDE, 4 * WIDE)).astype("float32") / 16,
        "down": rng.normal(size=(4 * WIDE, WIDE)).astype("float32") / 16,
    }
    return state, rng.normal(size=(ROWS, WIDE)).astype("float32")


def report() -> dict:
    args = arguments()
    plan = mw.plan(step, *args, donate_argnums=0, progress=False)
    fixed = mw.plan(step, *args, mesh="fsdp:4, tp:2", donate_argnums=0, progress=False)
    losses = []
    for each in (plan, fixed):
        jitted = each.jit()
        state, x = mw.shard(args, each.mesh, each.in_specs)
        state, value = jitted(state, x)
        state, value = jitted(state, x)
        assert jitted._cache_size() == 1
        losses.append(float(value))
    return {
        "plans": [str(each).rsplit("\n", 1)[0] for each in (plan, fixed)],
        "lists": [each.lists for each in (plan, fixed)],
        "specs": [str(each.in_specs) for each in (plan, fixed)],
        "devices": [[d.id for d in each.mesh.devices.flat] for each in (plan, fixed)],
        "losses": losses,
    }


if __name__ == "__main__":
    port, me, processes = map(int, sys.argv[1:4])
    start(port, me, processes, 8 // processes)
    tell(report)
