"""One process of a pipeline: trains a small model, prints what it saw as JSON."""

import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from joining import start

import meshwright as mw

WIDTH, LAYERS, ROWS, STEPS = 8, 4, 32, 3


def make_params():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype("float32") / 3 for _ in range(LAYERS)]
    return {"layers": weights, "tied": rng.normal(size=(WIDTH, WIDTH)).astype("float32") / 3}


def make_loss(stages: int):
    def loss(params, x, y):
        h = x @ params["tied"]
        for n, weight in enumerate(params["layers"]):
            h = jnp.tanh(h @ weight)
            if n + 1 < LAYERS and (n + 1) % (LAYERS // stages) == 0:
                h = mw.stage_end(h)
        return jnp.mean((h @ params["tied"].T - y) ** 2), jnp.max(h)

    return loss


def train(groups, schedule: str, stages: int):
    """A few steps; what this process holds of the results, by name, and a timeline."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    loss = make_loss(stages)

    def step(params, state, x, y):
        (value, peak), grads = mw.value_and_grad(loss, has_aux=True, aux="max")(params, x, y)
        updates, adam = tx.update(grads, state["adam"], params)
        state = {"adam": adam, "step": state["step"] + 1}  # a Python number, at first
        return optax.apply_updates(params, updates), state, value, peak

    with mw.pipeline(step, groups, schedule=schedule, microbatches=4) as run:
        arrays, last = steps(run, tx)
        begin = time.time()
        seen = run.timeline(*last).to_json() | {"called": [begin, time.time()]}
    return {name: array for name, array in arrays.items() if array.addressable_shards}, seen


def steps(run, tx):
    params = make_params()
    state = {"adam": jax.tree.map(np.asarray, tx.init(params)), "step": 0}
    rng = np.random.default_rng(1)
    arrays = {}
    for n in range(STEPS):
        x = rng.normal(size=(ROWS, WIDTH)).astype("float32")
        batch = x, np.roll(x, 1, axis=1)
        params, state, value, peak = run(params, state, *batch)
        arrays |= {f"value {n}": value, f"peak {n}": peak}
    arrays |= {
        f"params{jax.tree_util.keystr(k)}": v
        for k, v in jax.tree_util.tree_leaves_with_path(params)
    }
    arrays |= {
        f"state{jax.tree_util.keystr(k)}": v for k, v in jax.tree_util.tree_leaves_with_path(state)
    }
    jax.block_until_ready([a for a in arrays.values() if a.addressable_shards])
    return arrays, (params, state, *batch)


def main() -> None:
    port, me, processes, devices, groups = map(int, sys.argv[1:6])
    schedule, stages, folder = sys.argv[6], int(sys.argv[7]), Path(sys.argv[8])
    start(port, me, processes, devices)
    everything = np.array(jax.devices()).reshape(groups, -1)
    mesh = jax.sharding.Mesh(everything, ("pp", "dp"))
    held, seen = train(mw.MpmdMesh(mesh, "pp"), schedule, stages)
    arrays = {name: np.asarray(array.addressable_shards[0].data) for name, array in held.items()}
    np.savez(folder / f"{me}.npz", **arrays)
    print(json.dumps(seen), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
