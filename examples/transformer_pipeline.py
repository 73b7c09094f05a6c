"""A small transformer trained as a pipeline of 4 groups of 2 devices, against one device.

python examples/transformer_pipeline.py
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw

WIDTH, HEADS, LAYERS, WORDS, LENGTH = 32, 4, 4, 64, 16
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


def make_params(key: jax.Array) -> dict[str, Any]:
    def dense(key: jax.Array, rows: int, columns: int) -> jax.Array:
        return jax.random.normal(key, (rows, columns)) / math.sqrt(rows)

    layers = []
    for layer in jax.random.split(key, LAYERS):
        keys = jax.random.split(layer, 4)
        layers.append(
            {
                "qkv": dense(keys[0], WIDTH, 3 * WIDTH),
                "out": dense(keys[1], WIDTH, WIDTH),
                "up": dense(keys[2], WIDTH, 4 * WIDTH),
                "down": dense(keys[3], 4 * WIDTH, WIDTH),
            }
        )
    return {"embed": dense(key, WORDS, WIDTH) * 4, "layers": layers}


def block(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    q, k, v = jnp.split(_norm(x) @ layer["qkv"], 3, axis=-1)
    q, k, v = (a.reshape(*a.shape[:-1], HEADS, -1) for a in (q, k, v))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(_norm(x) @ layer["up"]) @ layer["down"]


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def loss(params: dict[str, Any], words: jax.Array) -> jax.Array:
    x = params["embed"][words[:, :-1]]
    for number, layer in enumerate(params["layers"]):
        x = jax.checkpoint(block)(layer, x)
        if number + 1 < LAYERS:
            x = mw.stage_end(x)  # a layer is a stage
    logits = _norm(x) @ params["embed"].T  # tied to the embedding, in another group
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:]))


def train(params: Any, state: Any, words: jax.Array) -> tuple[Any, Any, jax.Array]:
    value, grads = mw.value_and_grad(loss)(params, words)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    groups = mw.MpmdMesh(mw.mesh("pp:4, dp:2"), "pp")
    step = mw.pipeline(train, groups, schedule="zb-h1", microbatches=8)
    params = make_params(jax.random.key(0))
    words = np.random.default_rng(0).integers(0, WORDS, (32, LENGTH + 1))
    words[:, 1::2] = words[:, :-1:2]  # every second word is known: something to learn
    words = words.astype("int32")

    print(step.explain(params, tx.init(params), words))
    ours = run(step, params, words)
    alone = run(jax.jit(train), params, words)
    print(f"loss after 10 steps: {ours:.6f} as a pipeline, {alone:.6f} on one device")
    compare(ours, alone)


def run(step: Any, params: Any, words: np.ndarray) -> float:
    state = tx.init(params)
    for _ in range(10):
        params, state, value = step(params, state, words)
    return float(value)


def compare(ours: float, alone: float) -> None:
    if not abs(ours - alone) <= 1e-4 * abs(alone):
        raise SystemExit("the sharded run disagrees with the one on a single device")


if __name__ == "__main__":
    main()
