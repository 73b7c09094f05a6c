"""Train, save with Orbax, restore on another mesh, train on: as if nothing had happened.

python examples/orbax_checkpoint.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw

WIDTH, HIDDEN, BATCH = 256, 1024, 32
BEFORE, AFTER = 3, 4


class State(NamedTuple):
    """All that a run needs to go on: its place in the stream of random numbers, too."""

    params: dict
    momentum: dict
    key: jax.Array
    step: int


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    start = mw.shard(make_state(), mw.mesh("fsdp:8"))
    saved = train(start, BEFORE)
    expected = train(saved, AFTER)
    print(f"uninterrupted, on fsdp:8: loss {loss_of(expected):.6f} after {expected.step} steps")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "latest"
        mw.save_checkpoint(path, start)
        mw.save_checkpoint(path, saved, overwrite=True)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        print(f"saved after {saved.step} steps, over the one before: {size / 1e6:.1f} MB")

        shapes = make_state(jax.eval_shape)
        for request in ("fsdp:8", "dp:2, tp:4", "fsdp:4, tp:2"):
            target = mw.shard(shapes, mw.mesh(request))
            restored = mw.restore_checkpoint(path, target)
            assert_same_bits(restored, saved)
            ended = train(restored, AFTER)
            print(
                f"restored on {request}: every bit as saved, {pieces(restored)} pieces of 'up'; "
                f"loss {loss_of(ended):.6f} after {ended.step} steps, "
                f"at most {difference(ended, expected):.0e} from the uninterrupted run"
            )
            if difference(ended, expected) > 1e-5:
                raise SystemExit("the restored run went another way")


def make_state(make=lambda build: build()) -> State:
    """The first state, or with `jax.eval_shape` its shapes."""

    def build():
        up, down, key = jax.random.split(jax.random.key(0), 3)
        params = {
            "up": jax.random.normal(up, (WIDTH, HIDDEN)) / WIDTH**0.5,
            "down": jax.random.normal(down, (HIDDEN, WIDTH)) / HIDDEN**0.5,
        }
        return params, jax.tree.map(jnp.zeros_like, params), key

    return State(*make(build), step=0)


def loss(params: dict, batch: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] - batch) ** 2)


@jax.jit
def update(params: dict, momentum: dict, key: jax.Array) -> tuple:
    key, now = jax.random.split(key)
    grads = jax.grad(loss)(params, jax.random.normal(now, (BATCH, WIDTH)))
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, key


def train(state: State, steps: int) -> State:
    for _ in range(steps):
        state = State(*update(state.params, state.momentum, state.key), state.step + 1)
    return state


def loss_of(state: State) -> float:
    return float(loss(state.params, jnp.ones((BATCH, WIDTH))))


def pieces(state: State) -> int:
    """Into how many different pieces the first layer is cut."""
    return len({str(shard.index) for shard in state.params["up"].addressable_shards})


def difference(ours: State, theirs: State) -> float:
    pairs = zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True)
    return max(float(np.abs(np.subtract(one, other)).max()) for one, other in pairs)


def assert_same_bits(ours: State, theirs: State) -> None:
    ours, theirs = (s._replace(key=jax.random.key_data(s.key)) for s in (ours, theirs))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if np.asarray(one).tobytes() != np.asarray(other).tobytes():
            raise SystemExit("a restored array differs from the saved one")


if __name__ == "__main__":
    main()
