"""An Equinox model, sharded by rules over the paths of its arrays, and trained.

python examples/equinox_mlp.py
"""

from __future__ import annotations

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import meshwright as mw

VOCAB, WIDTH, HIDDEN, LAYERS, STEPS = 512, 256, 1024, 2, 10

# First match wins; patterns match the end of a path, `layers/0/up/weight`, which is (out, in).
RULES = [
    ("embed/weight", (("fsdp", "tp"),)),
    ("up/weight", ("tp", "fsdp")),
    ("up/bias", ("tp",)),
    ("down/weight", ("fsdp", "tp")),
    ("**", None),
]


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        up, down = jax.random.split(key)
        self.up = eqx.nn.Linear(WIDTH, HIDDEN, key=up)
        self.down = eqx.nn.Linear(HIDDEN, WIDTH, key=down)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(x)))


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    layers: list[Block]

    def __init__(self, key: jax.Array):
        embed, *keys = jax.random.split(key, 1 + LAYERS)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=embed)
        self.layers = [Block(key) for key in keys]

    def __call__(self, token: jax.Array) -> jax.Array:
        x = self.embed(token)
        for layer in self.layers:
            x = layer(x)
        return self.embed.weight @ x / WIDTH**0.5


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    model = Model(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (16, 17), 0, VOCAB)
    expected = train(model, tokens)

    mesh = mw.mesh("dp:2, fsdp:2, tp:2")
    print(mw.explain(model, mesh, rules=RULES))
    sharded = mw.shard(model, mesh, rules=RULES)  # leaves that are no arrays pass through
    got = train(sharded, mw.shard(tokens, mesh, P(("dp", "fsdp"))))
    print(f"loss after {STEPS} steps: {got[1]:.6f} on 8 devices, {expected[1]:.6f} on one")
    compare(got, expected)


def train(model: Model, tokens: jax.Array) -> tuple[Model, float]:
    params, static = eqx.partition(model, eqx.is_array)
    tx = optax.sgd(0.1, momentum=0.9)
    state = tx.init(params)

    @jax.jit
    def step(params, state, tokens):
        def loss(params):
            model = eqx.combine(params, static)
            guesses = jax.vmap(jax.vmap(model))(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(guesses, tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    for _ in range(STEPS):
        params, state, value = step(params, state, tokens)
        value = float(value)
    return eqx.combine(params, static), value


def compare(got, expected) -> None:
    """Stop unless both runs agree to float32's precision."""
    got, expected = eqx.filter((got, expected), eqx.is_inexact_array_like)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if not np.abs(np.subtract(ours, theirs)).max() <= 1e-5 * np.abs(theirs).max():
            raise SystemExit("the sharded run disagrees with the one on a single device")


if __name__ == "__main__":
    main()
