"""GPT-2 and Llama in Flax Linen as the transformers library has them, small.

GPT-2 keeps kernels as (out, in) with queries, keys and values in one, and ties its logits to the
table of words; Llama has fewer heads for keys and values, a gated feed-forward and a head of its
own. The parameters of both are plain dicts without names. `<model>_parts` returns the pieces
(`init`, `loss`, `batch`, `rules`), `<model>` a train step as the library's examples write it,
`(step, args)`: a `TrainState` that holds the key of dropout.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state


class Conv1D(nn.Module):
    """A linear layer with a kernel of (out, in)."""

    features: int

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(0.02)
        kernel = self.param("kernel", init, (self.features, x.shape[-1]))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return x @ kernel.T + bias


def attend(q, k, v):
    """Causal attention over (rows, length, heads, size)."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


class Gpt2Block(nn.Module):
    """One layer of GPT-2."""

    heads: int

    @nn.compact
    def __call__(self, x, train):
        drop = nn.Dropout(0.1, deterministic=not train)
        width = x.shape[-1]
        y = Conv1D(3 * width, name="c_attn")(nn.LayerNorm(name="ln_1")(x))
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(y, 3, -1))
        x = x + drop(Conv1D(width, name="c_proj")(attend(q, k, v).reshape(x.shape)))
        y = nn.gelu(Conv1D(4 * width, name="c_fc")(nn.LayerNorm(name="ln_2")(x)))
        return x + drop(Conv1D(width, name="mlp_c_proj")(y))


class Gpt2(nn.Module):
    """GPT-2 with tied logits."""

    vocab: int
    width: int
    layers: int = 2

    @nn.compact
    def __call__(self, tokens, train=False):
        words = nn.Embed(self.vocab, self.width, name="wte")
        places = nn.Embed(tokens.shape[1], self.width, name="wpe")
        x = words(tokens) + places(jnp.arange(tokens.shape[1]))
        for number in range(self.layers):
            x = Gpt2Block(self.width // 16, name=f"h_{number}")(x, train)
        return words.attend(nn.LayerNorm(name="ln_f")(x))


class LlamaBlock(nn.Module):
    """One layer of Llama, without its rotations."""

    heads: int
    kv_heads: int

    @nn.compact
    def __call__(self, x):
        width, size = x.shape[-1], x.shape[-1] // self.heads

        def project(features, name):
            return nn.Dense(features, use_bias=False, name=name)

        y = nn.RMSNorm(name="input_layernorm")(x)
        q = project(width, "q_proj")(y).reshape(*x.shape[:2], self.heads, size)
        k, v = (
            project(self.kv_heads * size, name)(y).reshape(*x.shape[:2], self.kv_heads, size)
            for name in ("k_proj", "v_proj")
        )
        k, v = (jnp.repeat(part, self.heads // self.kv_heads, 2) for part in (k, v))
        x = x + project(width, "o_proj")(attend(q, k, v).reshape(x.shape))
        y = nn.RMSNorm(name="post_attention_layernorm")(x)
        hidden = 8 * width // 3 // 16 * 16
        gated = nn.silu(project(hidden, "gate_proj")(y)) * project(hidden, "up_proj")(y)
        return x + project(width, "down_proj")(gated)


class Llama(nn.Module):
    """A Llama with logits of their own."""

    vocab: int
    width: int
    layers: int = 2

    @nn.compact
    def __call__(self, tokens, train=False):
        x = nn.Embed(self.vocab, self.width, name="embed_tokens")(tokens)
        heads = self.width // 16
        for number in range(self.layers):
            x = LlamaBlock(heads, heads // 2, name=f"layers_{number}")(x)
        return nn.Dense(self.vocab, use_bias=False, name="lm_head")(nn.RMSNorm(name="norm")(x))


def _parts(model, rows, length, rules):
    shape = (rows, length)

    def init():
        return model.init(jax.random.key(0), jnp.zeros(shape, "int32"))["params"]

    def loss(params, tokens, **training):
        logits = model.apply({"params": params}, tokens, **training)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return losses.mean()

    return init, loss, jax.random.randint(jax.random.key(1), shape, 0, model.vocab), rules


def gpt2_parts(width=64, rows=8, length=16, vocab=128):
    rules = [
        ("wte/embedding", (("tp", "fsdp"), None)),
        (r"(c_attn|c_fc)/kernel", ("tp", "fsdp")),
        (r"c_proj/kernel$", ("fsdp", "tp")),
        ("**", None),
    ]
    return _parts(Gpt2(vocab, width), rows, length, rules)


def llama_parts(width=64, rows=8, length=16, vocab=128):
    rules = [
        ("embed_tokens/embedding", (("tp", "fsdp"), None)),
        (r"((q|k|v|gate|up)_proj|lm_head)/kernel", ("fsdp", "tp")),
        (r"(o|down)_proj/kernel", ("tp", "fsdp")),
        ("**", None),
    ]
    return _parts(Llama(vocab, width), rows, length, rules)


class DropoutState(train_state.TrainState):
    """Parameters, optimizer and the key that each step splits."""

    dropout_rng: jax.Array


def _step(init, loss, tokens, _):
    state = DropoutState.create(
        apply_fn=None, params=init(), tx=optax.adamw(1e-3), dropout_rng=jax.random.PRNGKey(2)
    )

    @jax.jit
    def step(state, batch):
        key, next_key = jax.random.split(state.dropout_rng)
        training = {"train": True, "rngs": {"dropout": key}}
        grad = jax.value_and_grad(lambda params: loss(params, batch["input_ids"], **training))
        value, grads = grad(state.params)
        return state.apply_gradients(grads=grads, dropout_rng=next_key), {"loss": value}

    return step, (state, {"input_ids": tokens})


def gpt2(**sizes):
    """The train step of GPT-2, with dropout."""
    return _step(*gpt2_parts(**sizes))


def llama(**sizes):
    """The train step of Llama, which has no dropout to use its key."""
    return _step(*llama_parts(**sizes))
