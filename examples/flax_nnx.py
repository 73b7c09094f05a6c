"""A Flax NNX model whose parameters name their dims; a table says what is sharded, and how.

python examples/flax_nnx.py
"""

from __future__ import annotations

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshwright as mw

VOCAB, WIDTH, HIDDEN, LAYERS, STEPS = 512, 256, 1024, 2, 10

# Logical name -> mesh axis, several, or None for a dim that is not sharded.
TABLE = {"vocab": ("fsdp", "tp"), "embed": "fsdp", "mlp": "tp", "norm": None}


def named(init, *names: str | None):
    return nnx.with_partitioning(init, names)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init, ones = nnx.initializers.lecun_normal(), nnx.initializers.ones
        up, down = named(init, "embed", "mlp"), named(init, "mlp", "embed")
        self.norm = nnx.RMSNorm(WIDTH, scale_init=named(ones, "norm"), rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, kernel_init=down, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        table = named(nnx.initializers.normal(0.02), "vocab", None)
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=table, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    nnx.use_eager_sharding(False)  # the names are logical: NNX shall not look for mesh axes

    tokens = jax.random.randint(jax.random.key(1), (16, 17), 0, VOCAB)
    alone = Model(nnx.Rngs(0))
    expected = train(alone, tokens)

    mesh = mw.mesh("dp:2, fsdp:2, tp:2")
    print(mw.explain(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), mesh, logical=TABLE))
    model = mw.init(lambda: Model(nnx.Rngs(0)), mesh=mesh, logical=TABLE)  # made in pieces
    loss = train(model, mw.shard(tokens, mesh, P(("dp", "fsdp"))))

    print(f"loss after {STEPS} steps: {loss:.6f} on 8 devices, {expected:.6f} on one")
    print(f"layers/0/up is {model.layers[0].up.kernel.sharding.spec}")
    compare((loss, nnx.state(model)), (expected, nnx.state(alone)))


def train(model: Model, tokens: jax.Array) -> float:
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        def loss(model):
            guesses = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(guesses, tokens[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    for _ in range(STEPS):
        value = float(step(model, optimizer, tokens))
    return value


def compare(got, expected) -> None:
    """Stop unless both runs agree to float32's precision."""
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if not np.abs(np.subtract(ours, theirs)).max() <= 1e-5 * np.abs(theirs).max():
            raise SystemExit("the sharded run disagrees with the one on a single device")


if __name__ == "__main__":
    main()
