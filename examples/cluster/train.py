"""Train under any launcher. Started again, on whatever devices are left, it goes on.

srun -n 4 python examples/cluster/train.py --folder /shared/run1
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import meshwright as mw

WIDTH, HIDDEN, BATCH = 64, 256, 48
optimizer = optax.adamw(1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="that all processes see")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a step, to kill it in")
    options = parser.parse_args()
    jax.distributed.initialize()  # Slurm, Open MPI, Kubernetes and TPU pods say who is who
    train(**vars(options))


def train(folder: Path, steps: int, every: int, pause: float) -> None:
    """Run to `steps` from the newest checkpoint in `folder`; every process calls it."""
    first, state, mesh = mw.resume(folder, make_state, jax.random.key(0), mesh="fsdp:-1")
    rows = mw.data_shard(mesh).rows(BATCH)
    checkpoints = mw.Checkpoints(folder, every=every)
    say(f"on {mesh.size} devices from step {first}")

    def save() -> None:  # told to stop, all processes come here before the same step
        checkpoints.save(watch.step, state, force=True)
        checkpoints.wait()

    with mw.Watchdog(timeout=120, on_preemption="save", save=save) as watch, checkpoints:
        step = watch.wrap(train_step)
        for i in range(first, steps):
            watch.step = i
            batch = mw.shard(read(i, rows), mesh, P("fsdp"), local=True)
            state, loss = step(state, batch)
            checkpoints.save(i + 1, state)  # every so many steps, written beside the next ones
            if i % 10 == 0:
                say(f"step {i} loss {loss:.6f}")
            time.sleep(pause)
        watch.step = None
        checkpoints.save(steps, state, force=True)
    say(f"done after step {steps}")


def make_state(key: jax.Array) -> dict:
    up, down = jax.random.split(key)
    params = {
        "up": jax.random.normal(up, (WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(down, (HIDDEN, WIDTH)) / HIDDEN**0.5,
    }
    return {"params": params, "optimizer": optimizer.init(params)}


@jax.jit
def train_step(state: dict, batch: jax.Array) -> tuple[dict, jax.Array]:
    def loss(params: dict) -> jax.Array:
        return jnp.mean((jax.nn.gelu(batch @ params["up"]) @ params["down"] - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, moments = optimizer.update(grads, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, value


def read(step: int, rows: slice) -> np.ndarray:
    """The rows of a step's batch that this process needs: the same rows for any process count."""
    made = [np.random.default_rng((step, row)).normal(size=WIDTH) for row in range(BATCH)[rows]]
    return np.stack(made).astype(np.float32)


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
