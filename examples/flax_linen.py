"""A Flax Linen model with logical axes: the whole train state is made sharded, at once.

python examples/flax_linen.py
"""

from __future__ import annotations

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import meshwright as mw

VOCAB, WIDTH, HIDDEN, LAYERS, STEPS = 512, 256, 1024, 2, 10

# Logical name -> mesh axis, several, or None for a dim that is not sharded.
TABLE = {"vocab": ("fsdp", "tp"), "embed": "fsdp", "mlp": "tp", "norm": None}


def named(init, *names: str | None):
    return nn.with_logical_partitioning(init, names)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init, ones = nn.initializers.lecun_normal(), nn.initializers.ones
        up, down = named(init, "embed", "mlp"), named(init, "mlp", "embed")
        h = nn.RMSNorm(scale_init=named(ones, "norm"), name="norm")(x)
        h = nn.gelu(nn.Dense(HIDDEN, use_bias=False, kernel_init=up, name="up")(h))
        return x + nn.Dense(WIDTH, use_bias=False, kernel_init=down, name="down")(h)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = named(nn.initializers.normal(0.02), "vocab", None)
        embed = nn.Embed(VOCAB, WIDTH, embedding_init=table, name="embed")
        x = embed(tokens)
        for layer in range(LAYERS):
            x = Block(name=f"layer_{layer}")(x)
        return embed.attend(x)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    tokens = jax.random.randint(jax.random.key(1), (16, 17), 0, VOCAB)
    expected = train(make_state(jax.random.key(0)), tokens)

    mesh = mw.mesh("dp:2, fsdp:2, tp:2")
    print(mw.explain(jax.eval_shape(make_state, jax.random.key(0)), mesh, logical=TABLE))
    state = mw.init(make_state, jax.random.key(0), mesh=mesh, logical=TABLE)
    got = train(state, mw.shard(tokens, mesh, P(("dp", "fsdp"))))
    print(f"loss after {STEPS} steps: {got[1]:.6f} on 8 devices, {expected[1]:.6f} on one")
    print(f"layer_0/up is {got[0].params['layer_0']['up']['kernel'].value.sharding.spec}")
    compare(got, expected)


def make_state(key: jax.Array) -> TrainState:
    """Parameters in their boxes, which hold the names; the momentum gets the same boxes."""
    model = Model()
    params = model.init(key, jax.numpy.zeros((1, 16), int))["params"]
    tx = optax.sgd(0.1, momentum=0.9)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train(state: TrainState, tokens: jax.Array) -> tuple[TrainState, float]:
    @jax.jit
    def step(state, tokens):
        def loss(params):
            guesses = state.apply_fn({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(guesses, tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    for _ in range(STEPS):
        state, value = step(state, tokens)
        value = float(value)
    return state, value


def compare(got, expected) -> None:
    """Stop unless both runs agree to float32's precision."""
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if not np.abs(np.subtract(ours, theirs)).max() <= 1e-5 * np.abs(theirs).max():
            raise SystemExit("the sharded run disagrees with the one on a single device")


if __name__ == "__main__":
    main()
