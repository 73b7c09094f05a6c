"""Models of Equinox as its users write them: a ViT, a UNet and a BERT.

A function `<model>_parts` returns the pieces (`init`, `loss`, `batch`, `rules`), and `<model>` the
model's own train step with its arguments, `(step, args)`: an `eqx.filter_jit` of whole modules,
whose leaves are functions and numbers too.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax


class Mlp(eqx.Module):
    """Two linear layers; the activation is a leaf of the module."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: Callable

    def __init__(self, width, hidden, key):
        one, two = jax.random.split(key)
        self.up = eqx.nn.Linear(width, hidden, key=one)
        self.down = eqx.nn.Linear(hidden, width, key=two)
        self.activation = jax.nn.gelu

    def __call__(self, x):
        return self.down(self.activation(self.up(x)))


class Encoder(eqx.Module):
    """A transformer block over (length, width); `before` says where its norms stand."""

    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: Mlp
    before: bool = True
    scale: float = 1.0

    def __init__(self, width, heads, key, before=True):
        one, two = jax.random.split(key)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.norm2 = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=one)
        self.mlp = Mlp(width, 4 * width, two)
        self.before = before

    def __call__(self, x, mask=None):
        if self.before:
            y = jax.vmap(self.norm1)(x)
            x = x + self.scale * self.attention(y, y, y, mask)
            return x + self.scale * jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))
        x = jax.vmap(self.norm1)(x + self.attention(x, x, x, mask))
        return jax.vmap(self.norm2)(x + jax.vmap(self.mlp)(x))


# An Equinox kernel is (out, in): what comes out of the first of two products is cut over tp.
_BLOCK_RULES = [
    ("query_proj/weight", ("tp", "fsdp")),
    ("key_proj/weight", ("tp", "fsdp")),
    ("value_proj/weight", ("tp", "fsdp")),
    ("output_proj/weight", ("fsdp", "tp")),
    ("up/weight", ("tp", "fsdp")),
    ("up/bias", ("tp",)),
    ("down/weight", ("fsdp", "tp")),
]


class ViT(eqx.Module):
    """A vision transformer with a class token."""

    patches: eqx.nn.Conv2d
    positions: jax.Array
    token: jax.Array
    blocks: list[Encoder]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, width, side, patch, classes, key):
        keys = jax.random.split(key, 6)
        self.patches = eqx.nn.Conv2d(3, width, patch, patch, key=keys[0])
        self.positions = 0.02 * jax.random.normal(keys[1], ((side // patch) ** 2 + 1, width))
        self.token = 0.02 * jax.random.normal(keys[2], (width,))
        self.blocks = [Encoder(width, width // 16, keys[i]) for i in (3, 4)]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, classes, key=keys[5])

    def __call__(self, image):
        x = self.patches(image)
        x = x.reshape(x.shape[0], -1).T
        x = jnp.concatenate([self.token[None], x]) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[0]))


def _image_loss(model, batch):
    logits = jax.vmap(model)(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def vit_parts(width=64, rows=8, side=16, classes=16):
    images = jax.random.normal(jax.random.key(1), (rows, 3, side, side))
    labels = jax.random.randint(jax.random.key(2), (rows,), 0, classes)

    def make():
        return ViT(width, side, 4, classes, jax.random.key(0))

    rules = [*_BLOCK_RULES, ("head/weight", ("tp", "fsdp")), ("**", None)]
    return make, _image_loss, {"image": images, "label": labels}, rules


class ConvBlock(eqx.Module):
    """Two convolutions with group norms, a step embedding between them, and a residual."""

    norm1: eqx.nn.GroupNorm
    norm2: eqx.nn.GroupNorm
    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    step: eqx.nn.Linear
    skip: eqx.nn.Conv2d | None

    def __init__(self, channels, out, step, key):
        keys = jax.random.split(key, 4)
        self.norm1 = eqx.nn.GroupNorm(8, channels)
        self.norm2 = eqx.nn.GroupNorm(8, out)
        self.conv1 = eqx.nn.Conv2d(channels, out, 3, padding=1, key=keys[0])
        self.conv2 = eqx.nn.Conv2d(out, out, 3, padding=1, key=keys[1])
        self.step = eqx.nn.Linear(step, out, key=keys[2])
        self.skip = None if channels == out else eqx.nn.Conv2d(channels, out, 1, key=keys[3])

    def __call__(self, x, step):
        y = self.conv1(jax.nn.silu(self.norm1(x)))
        y = y + self.step(jax.nn.silu(step))[:, None, None]
        y = self.conv2(jax.nn.silu(self.norm2(y)))
        return y + (x if self.skip is None else self.skip(x))


class UNet(eqx.Module):
    """A UNet of diffusion models, two levels deep: predicts noise from an image and a time."""

    time: Mlp
    first: eqx.nn.Conv2d
    down1: ConvBlock
    pool: eqx.nn.Conv2d
    down2: ConvBlock
    middle: ConvBlock
    up2: ConvBlock
    grow: eqx.nn.ConvTranspose2d
    up1: ConvBlock
    last: eqx.nn.Conv2d

    def __init__(self, width, key):
        keys = jax.random.split(key, 10)
        self.time = Mlp(width, 4 * width, keys[0])
        self.first = eqx.nn.Conv2d(3, width, 3, padding=1, key=keys[1])
        self.down1 = ConvBlock(width, width, width, keys[2])
        self.pool = eqx.nn.Conv2d(width, width, 3, 2, 1, key=keys[3])
        self.down2 = ConvBlock(width, 2 * width, width, keys[4])
        self.middle = ConvBlock(2 * width, 2 * width, width, keys[5])
        self.up2 = ConvBlock(4 * width, width, width, keys[6])
        self.grow = eqx.nn.ConvTranspose2d(width, width, 2, 2, key=keys[7])
        self.up1 = ConvBlock(2 * width, width, width, keys[8])
        self.last = eqx.nn.Conv2d(width, 3, 3, padding=1, key=keys[9])

    def __call__(self, image, time):
        width = self.first.out_channels
        angles = time * jnp.exp(-jnp.log(1e4) * jnp.arange(width // 2) / (width // 2))
        step = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)]))
        a = self.down1(self.first(image), step)
        b = self.down2(self.pool(a), step)
        x = self.up2(jnp.concatenate([self.middle(b, step), b]), step)
        return self.last(self.up1(jnp.concatenate([self.grow(x), a]), step))


def _noise_loss(model, batch):
    time = batch["time"][:, None, None, None]
    noisy = (1 - time) * batch["image"] + time * batch["noise"]
    return jnp.mean((jax.vmap(model)(noisy, batch["time"]) - batch["noise"]) ** 2)


def unet_parts(width=64, rows=8, side=8):
    keys = jax.random.split(jax.random.key(1), 3)
    batch = {
        "image": jax.random.normal(keys[0], (rows, 3, side, side)),
        "noise": jax.random.normal(keys[1], (rows, 3, side, side)),
        "time": jax.random.uniform(keys[2], (rows,)),
    }

    def make():
        return UNet(width, jax.random.key(0))

    # Kernels are (out, in, height, width). `P('fsdp', 'tp')` on all of them is what XLA's Shardy
    # path gets wrong (a second convolution behind a group norm), so tp is on what comes out.
    rules = [
        ("first/weight", ("tp", None)),
        ("last/weight", (None, "tp")),
        (r"(conv1|conv2|skip|pool|grow)/weight", ("tp", "fsdp")),
        (r"(conv1|conv2|skip|pool|grow|first)/bias", ("tp",)),
        ("step/weight", ("tp", "fsdp")),
        ("up/weight", ("tp", "fsdp")),
        ("down/weight", ("fsdp", "tp")),
        ("**", None),
    ]
    return make, _noise_loss, batch, rules


class Bert(eqx.Module):
    """BERT's encoder, norms behind, with the masked-token head tied to the embedding."""

    words: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    segments: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    layers: list[Encoder]
    dense: eqx.nn.Linear
    head_norm: eqx.nn.LayerNorm
    bias: jax.Array

    def __init__(self, vocab, width, length, key):
        keys = jax.random.split(key, 6)
        self.words = eqx.nn.Embedding(vocab, width, key=keys[0])
        self.positions = eqx.nn.Embedding(length, width, key=keys[1])
        self.segments = eqx.nn.Embedding(2, width, key=keys[2])
        self.norm = eqx.nn.LayerNorm(width)
        self.layers = [Encoder(width, width // 16, keys[i], before=False) for i in (3, 4)]
        self.dense = eqx.nn.Linear(width, width, key=keys[5])
        self.head_norm = eqx.nn.LayerNorm(width)
        self.bias = jnp.zeros(vocab)

    def __call__(self, tokens, segments, mask):
        x = jax.vmap(self.words)(tokens) + jax.vmap(self.segments)(segments)
        x = jax.vmap(self.norm)(x + self.positions.weight[: tokens.shape[0]])
        pairs = mask[:, None] & mask[None, :]
        for layer in self.layers:
            x = layer(x, pairs)
        x = jax.vmap(self.head_norm)(jax.nn.gelu(jax.vmap(self.dense)(x)))
        return x @ self.words.weight.T + self.bias


def _masked_loss(model, batch):
    logits = jax.vmap(model)(batch["tokens"], batch["segments"], batch["mask"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return jnp.sum(losses * batch["predicted"]) / jnp.sum(batch["predicted"])


def bert_parts(width=64, rows=8, length=16, vocab=128):
    keys = jax.random.split(jax.random.key(1), 2)
    labels = jax.random.randint(keys[0], (rows, length), 0, vocab)
    predicted = jax.random.bernoulli(keys[1], 0.3, (rows, length)).at[:, 1].set(True)
    batch = {
        "tokens": jnp.where(predicted, 0, labels),
        "segments": jnp.zeros((rows, length), jnp.int32).at[:, length // 2 :].set(1),
        "mask": jnp.ones((rows, length), bool).at[:, -2:].set(False).at[:, 0].set(True),
        "labels": labels,
        "predicted": predicted,
    }

    def make():
        return Bert(vocab, width, length, jax.random.key(0))

    # The rows of the table take both axes: with fsdp on its columns XLA exchanges activations.
    rules = [
        ("words/weight", (("tp", "fsdp"), None)),
        *_BLOCK_RULES,
        ("dense/weight", ("fsdp", None)),
        ("**", None),
    ]
    return make, _masked_loss, batch, rules


def trained(parts):
    """Return the train step of a model of this file with its arguments, `(step, args)`."""
    make, loss, batch, _ = parts
    model, tx = make(), optax.adamw(1e-3)

    @eqx.filter_jit
    def step(model, state, batch):
        value, grads = eqx.filter_value_and_grad(loss)(model, batch)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    return step, (model, tx.init(eqx.filter(model, eqx.is_inexact_array)), batch)


def vit(**sizes):
    return trained(vit_parts(**sizes))


def unet(**sizes):
    return trained(unet_parts(**sizes))


def bert(**sizes):
    return trained(bert_parts(**sizes))
