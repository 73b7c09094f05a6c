"""Models of Flax Linen as its users write them: a decoder with logical axes, a ResNet.

A function `<model>_parts` returns the pieces (`init`, `loss`, `batch`, `rules`), and `<model>` the
model's own train step with its arguments, `(step, args)`. `rules` are (pattern, spec) pairs for
mesh axes `fsdp` and `tp` as somebody who knows the model would write them.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

# The table of Flax's lm1b example, for these axes; it leaves out 'kv', which that model names too.
LM1B_TABLE = {"vocab": "tp", "embed": "fsdp", "mlp": "tp", "heads": "tp"}

_kernel = nn.initializers.xavier_uniform()
_bias = nn.initializers.normal(1e-6)


def _named(init, *names):
    return nn.with_logical_partitioning(init, names)


class Lm1bBlock(nn.Module):
    """Attention and feed-forward of a decoder, pre-norm."""

    heads: int
    mlp: int

    @nn.compact
    def __call__(self, x, mask):
        width = x.shape[-1]
        y = nn.LayerNorm(
            bias_init=_named(nn.initializers.zeros, "embed"),
            scale_init=_named(nn.initializers.ones, "embed"),
        )(x)
        # Two names for kernels of three dims, as in Flax's example.
        y = nn.MultiHeadDotProductAttention(
            num_heads=self.heads,
            qkv_features=width,
            use_bias=False,
            kernel_init=_named(_kernel, "embed", "kv"),
        )(y, mask=mask)
        x = x + nn.with_logical_constraint(y, ("activation_batch", None, "activation_embed"))
        y = nn.LayerNorm(
            bias_init=_named(nn.initializers.zeros, "embed"),
            scale_init=_named(nn.initializers.ones, "embed"),
        )(x)
        y = nn.Dense(
            self.mlp,
            kernel_init=_named(_kernel, "embed", "mlp"),
            bias_init=_named(_bias, "mlp"),
            name="wi",
        )(y)
        y = nn.with_logical_constraint(nn.relu(y), ("activation_batch", None, "activation_mlp"))
        y = nn.Dense(
            width,
            kernel_init=_named(_kernel, "mlp", "embed"),
            bias_init=_named(_bias, "embed"),
            name="wo",
        )(y)
        return x + y


class Lm1b(nn.Module):
    """A decoder with tied logits and sinusoidal positions."""

    vocab: int
    width: int
    layers: int = 2

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(
            self.vocab,
            self.width,
            embedding_init=_named(nn.initializers.normal(1.0), "vocab", "embed"),
        )
        x = embed(tokens) + _sinusoids(tokens.shape[1], self.width)
        x = nn.with_logical_constraint(x, ("activation_batch", None, "activation_embed"))
        mask = nn.make_causal_mask(tokens)
        for i in range(self.layers):
            x = Lm1bBlock(self.width // 16, 4 * self.width, name=f"block_{i}")(x, mask)
        x = nn.LayerNorm(
            bias_init=_named(nn.initializers.zeros, "embed"),
            scale_init=_named(nn.initializers.ones, "embed"),
        )(x)
        return embed.attend(x) / jnp.sqrt(self.width)


def _sinusoids(length, width):
    position = np.arange(length)[:, None]
    rate = np.exp(np.arange(0, width, 2) * -(np.log(1e4) / width))
    return jnp.asarray(
        np.concatenate([np.sin(position * rate), np.cos(position * rate)], -1), jnp.float32
    )


def lm1b_parts(width=64, rows=8, length=16, vocab=128):
    model = Lm1b(vocab, width)
    shape = jax.ShapeDtypeStruct((rows, length), "int32")

    def init(boxed=False):
        params = model.init(jax.random.key(0), jnp.zeros(shape.shape, shape.dtype))["params"]
        return params if boxed else nn.unbox(params)

    def loss(params, tokens):
        logits = model.apply({"params": params}, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return losses.mean()

    tokens = jax.random.randint(jax.random.key(1), shape.shape, 0, vocab)
    # The rows of the table take both axes: with fsdp on its columns XLA exchanges activations.
    rules = [
        ("embedding", (("tp", "fsdp"), None)),
        ("query/kernel", ("fsdp", "tp", None)),
        ("key/kernel", ("fsdp", "tp", None)),
        ("value/kernel", ("fsdp", "tp", None)),
        ("out/kernel", ("tp", None, "fsdp")),
        ("wi/kernel", ("fsdp", "tp")),
        ("wo/kernel", ("tp", "fsdp")),
        ("wi/bias", ("tp",)),
        ("**", None),
    ]
    return init, loss, tokens, rules


def lm1b(boxed=True, **sizes):
    """The train step of the decoder: a `TrainState` of boxed parameters, `(step, args)`."""
    init, loss, tokens, _ = lm1b_parts(**sizes)
    state = train_state.TrainState.create(
        apply_fn=Lm1b(8, 8).apply, params=init(boxed), tx=optax.adamw(1e-3)
    )

    @jax.jit
    def step(state, tokens):
        value, grads = jax.value_and_grad(loss)(state.params, tokens)
        return state.apply_gradients(grads=grads), value

    return step, (state, tokens)


class ResNetBlock(nn.Module):
    """Two convolutions and a residual."""

    filters: int
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x, train):
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.relu(norm()(conv(self.filters, (3, 3), self.strides)(x)))
        y = norm(scale_init=nn.initializers.zeros)(conv(self.filters, (3, 3))(y))
        if x.shape != y.shape:
            x = norm(name="norm_proj")(
                conv(self.filters, (1, 1), self.strides, name="conv_proj")(x)
            )
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A ResNet with three groups of blocks."""

    classes: int
    filters: int

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(self.filters, (3, 3), use_bias=False, name="conv_init")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name="bn_init")(x))
        for i in range(3):
            strides = (2, 2) if i else (1, 1)
            x = ResNetBlock(self.filters * 2**i, strides)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))


class ResNetState(train_state.TrainState):
    """The state of Flax's ImageNet example: parameters, optimizer and batch statistics."""

    batch_stats: dict


def resnet_parts(width=64, rows=8, side=16, classes=16):
    model = ResNet(classes, width // 2)
    images = jax.random.normal(jax.random.key(1), (rows, side, side, 3))
    labels = jax.random.randint(jax.random.key(2), (rows,), 0, classes)

    def init():
        return model.init(jax.random.key(0), jnp.zeros((1, side, side, 3)))

    stats = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), jax.eval_shape(init)["batch_stats"])

    def loss(params, batch, stats=stats):
        variables = {"params": params, "batch_stats": stats}
        logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), new["batch_stats"]

    rules = [
        ("Conv_0/kernel", (None, None, "fsdp", "tp")),
        ("Conv_1/kernel", (None, None, "tp", "fsdp")),
        ("conv_proj/kernel", (None, None, "fsdp", "tp")),
        ("Dense_0/kernel", ("fsdp", "tp")),
        ("**", None),
    ]
    return init, loss, {"image": images, "label": labels}, rules


def resnet(**sizes):
    """The train step of the ResNet, which returns new batch statistics, `(step, args)`."""
    init, loss, batch, _ = resnet_parts(**sizes)
    variables = init()
    state = ResNetState.create(
        apply_fn=None,
        params=variables["params"],
        tx=optax.sgd(0.1, momentum=0.9),
        batch_stats=variables["batch_stats"],
    )

    @jax.jit
    def step(state, batch):
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, stats), grads = grad(state.params, batch, state.batch_stats)
        return state.apply_gradients(grads=grads, batch_stats=stats), value

    return step, (state, batch)
