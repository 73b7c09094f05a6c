"""A model of Flax NNX as its users write it: a decoder in the manner of Gemma.

`gemma_parts` returns the pieces (`init`, `loss`, `batch`, `rules`), `gemma` the model's own train
step with its arguments, `(step, args)`: an `nnx.jit` that updates a model and an optimizer in
place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

GEMMA_TABLE = {
    "vocab": "tp",
    "embed": "fsdp",
    "heads": "tp",
    "kv_heads": None,
    "head_dim": None,
    "mlp": "tp",
}

_normal = nnx.initializers.normal(0.02)


def _param(rngs, shape, *names):
    return nnx.Param(nnx.with_partitioning(_normal, names)(rngs.params(), shape, jnp.float32))


class RMSNorm(nnx.Module):
    """RMS norm with Gemma's `1 + scale`."""

    def __init__(self, width, rngs):
        zeros = nnx.with_partitioning(nnx.initializers.zeros, (None,))
        self.scale = nnx.Param(zeros(rngs.params(), (width,), jnp.float32))

    def __call__(self, x):
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return x * (1 + self.scale[...])


def rotate(x, positions):
    """Apply rotary position embeddings to `x` (rows, length, heads, head_dim)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / 1e4 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None, :], jnp.cos(angles)[:, None, :]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nnx.Module):
    """Causal attention with fewer heads for keys and values than for queries."""

    def __init__(self, width, heads, kv_heads, rngs):
        size = width // heads
        self.q = _param(rngs, (width, heads, size), "embed", "heads", "head_dim")
        self.kv = _param(rngs, (2, width, kv_heads, size), None, "embed", "kv_heads", "head_dim")
        self.out = _param(rngs, (heads, size, width), "heads", "head_dim", "embed")
        self.repeats = heads // kv_heads

    def __call__(self, x):
        positions = jnp.arange(x.shape[1])
        q = rotate(jnp.einsum("bte,ehd->bthd", x, self.q[...]), positions)
        k, v = jnp.einsum("bte,cehd->cbthd", x, self.kv[...])
        k = jnp.repeat(rotate(k, positions), self.repeats, 2)
        v = jnp.repeat(v, self.repeats, 2)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        seen = positions[:, None] >= positions[None, :]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
        return jnp.einsum("bthd,hde->bte", jnp.einsum("bhts,bshd->bthd", weights, v), self.out[...])


class GatedMlp(nnx.Module):
    """GeGLU feed-forward."""

    def __init__(self, width, hidden, rngs):
        self.gate = _param(rngs, (width, hidden), "embed", "mlp")
        self.up = _param(rngs, (width, hidden), "embed", "mlp")
        self.down = _param(rngs, (hidden, width), "mlp", "embed")

    def __call__(self, x):
        return (jax.nn.gelu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


class Block(nnx.Module):
    """One layer, with norms before and after as Gemma has them."""

    def __init__(self, width, rngs):
        self.attention = Attention(width, width // 16, max(1, width // 32), rngs)
        self.mlp = GatedMlp(width, 4 * width, rngs)
        self.before_attention = RMSNorm(width, rngs)
        self.after_attention = RMSNorm(width, rngs)
        self.before_mlp = RMSNorm(width, rngs)
        self.after_mlp = RMSNorm(width, rngs)

    def __call__(self, x):
        x = x + self.after_attention(self.attention(self.before_attention(x)))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


class Gemma(nnx.Module):
    """A decoder whose embedding is its output projection too."""

    def __init__(self, vocab, width, layers, rngs):
        self.embedder = _param(rngs, (vocab, width), "vocab", "embed")
        self.layers = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm = RMSNorm(width, rngs)

    def __call__(self, tokens):
        embedding = self.embedder[...]
        x = embedding[tokens] * embedding.shape[1] ** 0.5
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ embedding.T


def _loss(model, tokens):
    logits = model(tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


def gemma_parts(width=64, rows=8, length=16, vocab=128, layers=2):
    def make():
        with nnx.use_eager_sharding(False):  # the names are logical, no axes of a mesh
            return Gemma(vocab, width, layers, nnx.Rngs(0))

    graph, _ = nnx.split(nnx.eval_shape(make))

    def init():
        return nnx.state(make())

    def loss(state, tokens):
        return _loss(nnx.merge(graph, state), tokens)

    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, vocab)
    # The paths of a state: with the name of the array inside of a variable, or without.
    # The rows of the table take both axes: with fsdp on its columns XLA exchanges activations.
    rules = [
        (r"embedder", (("tp", "fsdp"), None)),
        (r"(attention/q)($|/)", ("fsdp", "tp", None)),
        (r"(attention/kv)($|/)", (None, "fsdp", None, None)),
        (r"(attention/out)($|/)", ("tp", None, "fsdp")),
        (r"(mlp/(gate|up))($|/)", ("fsdp", "tp")),
        (r"(mlp/down)($|/)", ("tp", "fsdp")),
        ("**", None),
    ]
    return init, loss, tokens, rules


def gemma(width=64, rows=8, length=16, vocab=128, layers=2):
    """The train step: `nnx.jit` with the model and its optimizer updated in place."""
    with nnx.use_eager_sharding(False):
        model = Gemma(vocab, width, layers, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, vocab)

    @nnx.jit
    def step(model, optimizer, tokens):
        value, grads = nnx.value_and_grad(_loss)(model, tokens)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, tokens)
