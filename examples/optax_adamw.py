"""AdamW with masked weight decay: the optimizer's state is sharded like the parameters.

python examples/optax_adamw.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import meshwright as mw

VOCAB, WIDTH, HIDDEN, STEPS = 512, 256, 1024, 10


RATE = optax.warmup_cosine_decay_schedule(0, 1e-3, 2, STEPS)


def decayed(params: dict) -> dict:
    """Matrices decay, scales do not."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


# With a smaller eps, Adam blows the rounding of tiny gradients up to more than 1e-5.
ADAMW = optax.adamw(RATE, eps=1e-6, weight_decay=0.1, mask=decayed)
TX = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    tokens = jax.random.randint(jax.random.key(1), (16, 17), 0, VOCAB)
    params = make_params(jax.random.key(0))
    expected = train(params, TX.init(params), tokens)

    mesh = mw.mesh("dp:2, fsdp:2, tp:2")
    batch = mw.shard(tokens, mesh, P(("dp", "fsdp")))

    # Before anything is made: the specs of a state that is only shapes, and what it will weigh.
    shapes = jax.eval_shape(make_params, jax.random.key(0))
    state_shapes = jax.eval_shape(TX.init, shapes)
    specs = mw.partition(shapes, mesh)
    state_specs = mw.partition_like(state_shapes, shapes, specs)
    print(mw.explain(state_shapes, mesh, state_specs))

    params = mw.init(make_params, jax.random.key(0), mesh=mesh, specs=specs)
    state = mw.init(TX.init, params, mesh=mesh, specs=state_specs)
    loss, params, state = train(params, state, batch)
    print(f"loss after {STEPS} steps: {loss:.6f} on 8 devices, {expected[0]:.6f} on one")

    # A state that comes from elsewhere, say from a file, is placed beside its parameters.
    state = mw.shard_like(jax.device_get(state), params)
    compare((loss, params, state), expected)


def make_params(key: jax.Array) -> dict:
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)) / WIDTH**0.5,
        "scale": jnp.ones(WIDTH),
        "up": jax.random.normal(keys[1], (WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(keys[2], (HIDDEN, WIDTH)) / HIDDEN**0.5,
    }


def loss_of(params: dict, tokens: jax.Array) -> jax.Array:
    """How badly each token is guessed from the one before it."""
    x = jax.nn.one_hot(tokens[:, :-1], VOCAB) @ params["embed"]  # shards better than a lookup
    h = jax.nn.gelu(x * params["scale"] @ params["up"])
    guesses = (x + h @ params["down"]) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(guesses, tokens[:, 1:]).mean()


def train(params: dict, state: optax.OptState, tokens: jax.Array) -> tuple:
    """Parameters and state stay placed as they come."""

    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    placed = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(step, out_shardings=(*placed, None))
    for _ in range(STEPS):
        params, state, value = step(params, state, tokens)
        value = float(value)
    return value, params, state


def compare(got, expected) -> None:
    """Stop unless both runs agree to float32's precision."""
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if not np.abs(np.subtract(ours, theirs)).max() <= 1e-5 * np.abs(theirs).max():
            raise SystemExit("the sharded run disagrees with the one on a single device")


if __name__ == "__main__":
    main()
