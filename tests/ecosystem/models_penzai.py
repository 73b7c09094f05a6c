"""GPT-NeoX of penzai itself, small: its layers are one stack, and its arrays have names.

The parameters are a tuple of values without a word in their paths; what they are stands in their
labels and in the names of their dims. `neox_parts` returns the pieces (`init`, `loss`, `batch`,
`rules`), `neox` a train step of these values with optax, `(step, args)`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from penzai import pz
from penzai.models.transformer.variants import gpt_neox

# What each name of a dim is cut over; the others, such as the one that counts layers, are whole.
NEOX_TABLE = {"embedding": "fsdp", "neurons": "tp", "heads": "tp", "vocabulary": None}


def _rule(number, value):
    """The rule of one parameter: the rows of the table take both axes, vectors are whole."""
    names = list(value.value.named_axes)
    if "embedder" in value.label:
        spec = (("tp", "fsdp"), None)
    elif len({"embedding", "neurons", "heads", "vocabulary"} & set(names)) < 2:
        spec = None
    else:
        table = NEOX_TABLE | {"vocabulary": "tp"}
        spec = (*(None,) * (value.value.data_array.ndim - len(names)), *map(table.get, names))
    return f"{number}/**", spec


def neox_parts(width=64, rows=8, length=16, vocab=128, layers=4):
    config = gpt_neox.GPTNeoXTransformerConfig(
        num_attention_heads=width // 16,
        embedding_dim=width,
        projection_dim=16,
        mlp_hidden_dim=4 * width,
        num_decoder_blocks=layers,
        vocab_size=vocab,
        activation_fn="gelu_exact",
        rope_subset_size=4,
        rope_wavelength=10_000.0,
        layernorm_epsilon=1e-5,
        parameter_dtype=jnp.float32,
        activation_dtype=jnp.float32,
        use_layer_stack=True,
    )
    without_values = gpt_neox.build_gpt_neox_transformer(config)

    def init():
        model = gpt_neox.build_gpt_neox_transformer(config, init_base_rng=jax.random.key(0))
        return pz.unbind_params(model, freeze=True)[1]

    def loss(params, tokens):
        model = pz.bind_variables(without_values, params)
        logits = model(pz.nx.wrap(tokens).tag("batch", "seq")).unwrap("batch", "seq", "vocabulary")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return losses.mean()

    rules = [_rule(number, value) for number, value in enumerate(jax.eval_shape(init))]
    return init, loss, jax.random.randint(jax.random.key(1), (rows, length), 0, vocab), rules


def neox(**sizes):
    """The train step: values of parameters go in and come back, the model around them is fixed."""
    init, loss, tokens, _ = neox_parts(**sizes)
    params, optimizer = init(), optax.adamw(1e-3)

    @jax.jit
    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), tokens)
