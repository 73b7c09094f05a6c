"""A model of plain dicts and arrays: sharded by shape, then by rules, and trained.

python examples/plain_pytree.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import meshwright as mw

VOCAB, WIDTH, HIDDEN, LAYERS, STEPS = 512, 256, 1024, 2, 10

# First match wins; a pattern is matched against the end of the path, `layers/0/up`.
RULES = [
    ("embed", ("tp", "fsdp")),
    ("up", ("fsdp", "tp")),
    ("down", ("tp", "fsdp")),
    ("bias", None),
]


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    params = make_params(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (16, 17), 0, VOCAB)
    expected = train(params, tokens)

    mesh = mw.mesh("dp:2, fsdp:2, tp:2")
    batch = mw.shard(tokens, mesh, P(("dp", "fsdp")))
    for how, rules in (("shape", None), ("rules", RULES)):
        specs = mw.partition(params, mesh, rules=rules)
        print(f"by {how}: {mw.explain(params, mesh, specs)}")
        got = train(mw.shard(params, mesh, specs), batch)
        print(f"loss after {STEPS} steps: {got[1]:.6f} on 8 devices, {expected[1]:.6f} on one\n")
        compare(got, expected)


def make_params(key: jax.Array) -> dict:
    embed, *keys = jax.random.split(key, 1 + 2 * LAYERS)
    layers = [
        {
            "up": jax.random.normal(up, (WIDTH, HIDDEN)) / WIDTH**0.5,
            "down": jax.random.normal(down, (HIDDEN, WIDTH)) / HIDDEN**0.5,
            "bias": jnp.zeros(HIDDEN),
        }
        for up, down in zip(keys[::2], keys[1::2], strict=True)
    ]
    return {"embed": jax.random.normal(embed, (VOCAB, WIDTH)) / WIDTH**0.5, "layers": layers}


def loss(params: dict, tokens: jax.Array) -> jax.Array:
    """How badly each token is guessed from the one before it."""
    x = jax.nn.one_hot(tokens[:, :-1], VOCAB) @ params["embed"]  # shards better than a lookup
    for layer in params["layers"]:
        x = x + jax.nn.gelu(x @ layer["up"] + layer["bias"]) @ layer["down"]
    guesses = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(guesses, tokens[:, 1:, None], -1))


def train(params: dict, tokens: jax.Array) -> tuple[dict, float]:
    """Gradient descent; the parameters stay placed as they come."""

    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 2.0 * g, params, grads), value

    placed = jax.tree.map(lambda p: p.sharding, params)
    step = jax.jit(step, out_shardings=(placed, None))
    for _ in range(STEPS):
        params, value = step(params, tokens)
        value = float(value)
    return params, value


def compare(got, expected) -> None:
    """Stop unless both runs agree to float32's precision."""
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if not np.abs(np.subtract(ours, theirs)).max() <= 1e-5 * np.abs(theirs).max():
            raise SystemExit("the sharded run disagrees with the one on a single device")


if __name__ == "__main__":
    main()
