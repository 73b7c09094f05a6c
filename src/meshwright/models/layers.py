"""Layers that models share: attention, feed-forward, norms, rotary positions, the loss, products.

Plain functions of parameters and activations; the weights of a layer are described beside it.
Activations are (batch, seq, embed), and `constrain` says how they are sharded where a layer
changes their shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.attention import Blocks, attend
from meshwright.models.remat import named
from meshwright.models.weights import Weight, constant, constrain, matrix

Einsum = Callable[[str, jax.Array, jax.Array], jax.Array]

_SPLIT = ("batch", "seq", "heads", None)  # logical names of queries, keys and values


def attention_weights(
    embed: int, heads: int, kv_heads: int, head: int, *, biased: bool = False
) -> dict[str, Weight]:
    """Describe projections to queries, keys and values, and back."""
    weights = {
        "query": matrix(embed, embed=embed, heads=heads, head=head),
        "key": matrix(embed, embed=embed, kv_heads=kv_heads, head=head),
        "value": matrix(embed, embed=embed, kv_heads=kv_heads, head=head),
        "out": matrix(heads * head, heads=heads, head=head, embed=embed),
    }
    if biased:
        weights["query_bias"] = constant(0.0, heads=heads, head=head)
        weights["key_bias"] = constant(0.0, kv_heads=kv_heads, head=head)
        weights["value_bias"] = constant(0.0, kv_heads=kv_heads, head=head)
        weights["out_bias"] = constant(0.0, norm=embed)
    return weights


def self_attention(
    params: Any,
    x: jax.Array,
    *,
    theta: float | None = None,
    causal: bool = False,
    attention: str = "dot",
    blocks: Blocks | None = None,
    einsum: Einsum = jnp.einsum,
) -> jax.Array:
    """Attend among the positions of each row, (batch, seq, embed) in and out.

    With `theta`, queries and keys get rotary position embeddings. `attention` and `blocks` are
    those of `attend`; `einsum` computes the products with weights.
    """
    query = constrain(_project(einsum, "bsd,dhk->bshk", x, params, "query"), *_SPLIT)
    key = constrain(_project(einsum, "bsd,dhk->bshk", x, params, "key"), *_SPLIT)
    value = constrain(_project(einsum, "bsd,dhk->bshk", x, params, "value"), *_SPLIT)
    if theta is not None:
        query, key = rotary_embedding(query, theta), rotary_embedding(key, theta)
    query, key = named(query, "query_proj"), named(key, "key_proj")
    value = named(value, "value_proj")
    mixed = attend(query, key, value, causal=causal, attention=attention, blocks=blocks)
    mixed = named(mixed, "context")
    return named(_project(einsum, "bshk,hkd->bsd", mixed, params, "out"), "out_proj")


def _project(einsum: Einsum, formula: str, x: jax.Array, params: Any, name: str) -> jax.Array:
    out = einsum(formula, x, params[name])
    return out + params[f"{name}_bias"] if f"{name}_bias" in params else out


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def feed_forward_weights(embed: int, mlp: int, *, gated: bool = True) -> dict[str, Weight]:
    """Describe the projections of `feed_forward`: up and down, and the gate if there is one."""
    up = matrix(embed, embed=embed, mlp=mlp)
    weights = {"up": up, "down": matrix(mlp, mlp=mlp, embed=embed)}
    return {"gate": up} | weights if gated else weights


def feed_forward(
    params: Any, x: jax.Array, *, activation: str = "silu", einsum: Einsum = jnp.einsum
) -> jax.Array:
    """Compute (f(x W_gate) * (x W_up)) W_down, or f(x W_up) W_down without a gate.

    With a gate and "silu" it is SwiGLU. `einsum` computes the products with weights.
    """
    curve = ACTIVATIONS[activation]
    if "gate" in params:
        gate = named(einsum("bsd,df->bsf", x, params["gate"]), "mlpwi_0")
        wide = curve(gate) * named(einsum("bsd,df->bsf", x, params["up"]), "mlpwi_1")
    else:
        wide = curve(named(einsum("bsd,df->bsf", x, params["up"]), "mlpwi"))
    # Sharded over `mlp`, the second product leaves partial sums: one all-reduce per layer.
    wide = constrain(wide, "batch", "seq", "mlp")
    return named(einsum("bsf,fd->bsd", wide, params["down"]), "mlpwo")


def gelu_weights(embed: int, mlp: int) -> dict[str, Weight]:
    """Describe the up and down projections of `gelu`, with biases."""
    return {
        "up": matrix(embed, embed=embed, mlp=mlp),
        "up_bias": constant(0.0, mlp=mlp),
        "down": matrix(mlp, mlp=mlp, embed=embed),
        "down_bias": constant(0.0, norm=embed),
    }


def gelu(params: Any, x: jax.Array) -> jax.Array:
    """Feed-forward with GELU: gelu(x W_up + b_up) W_down + b_down."""
    wide = jax.nn.gelu(named(jnp.dot(x, params["up"]), "mlpwi") + params["up_bias"])
    wide = constrain(wide, "batch", "seq", "mlp")
    return jnp.add(named(jnp.dot(wide, params["down"]), "mlpwo"), params["down_bias"])


# Norms compute in float32 whatever the activations are: sums of squares overflow float16, and
# bfloat16 has too few digits for them.


def rms_norm(x: jax.Array, scale: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Divide by the root mean square over the last dim.

    >>> rms_norm(jnp.array([8.0, 8.0, -8.0]), jnp.ones(3)).round(3)
    Array([ 1.,  1., -1.], dtype=float32)
    """
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Subtract the mean over the last dim, and divide by the standard deviation.

    >>> layer_norm(jnp.array([1.0, 3.0]), jnp.ones(2), jnp.ones(2)).round(3)
    Array([0., 2.], dtype=float32)
    """
    return _standardize(x, -1, eps) * scale.astype(x.dtype) + bias.astype(x.dtype)


def group_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, groups: int, eps: float = 1e-5
) -> jax.Array:
    """Normalize images over all pixels and a group of channels, (batch, rows, columns, channels).

    Unlike batch norm it keeps no statistics of the batch, which may so be cut into microbatches.
    """
    grouped = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    normalized = _standardize(grouped, (1, 2, 4), eps).reshape(x.shape)
    return normalized * scale.astype(x.dtype) + bias.astype(x.dtype)


def _standardize(x: jax.Array, dims: int | tuple[int, ...], eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide -= wide.mean(dims, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, dims, keepdims=True) + eps)
    return wide.astype(x.dtype)


def rotary_embedding(x: jax.Array, theta: float) -> jax.Array:
    """Rotate the vectors of each head by their position in the sequence.

    `x` is (batch, seq, heads, head). Dim `i` of a head forms a plane with dim `i + head / 2`; in
    it, position `p` turns by `p * theta ** (-2 i / head)`: the first planes fast, the last slowly.
    The product of a query and a key then depends on their distance, not on where they are.
    """
    half = x.shape[-1] // 2
    speeds = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * speeds
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean of `-log p(label)`, in float32.

    The label's logit is picked out by a comparison and a sum, not by an index: where classes are
    sharded, devices exchange the sums and never gather the logits.

    >>> cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3])) / jnp.log(4.0)
    Array(1., dtype=float32)
    """
    logits = logits.astype(jnp.float32)
    # Subtracting the largest logit keeps exp from overflowing; it cancels, so no gradient is lost.
    highest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    total = jnp.log(jnp.sum(jnp.exp(logits - highest), axis=-1)) + highest[..., 0]
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    return jnp.mean(total - jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1))


# Products in eight bits: int8, or float8 as NVIDIA's GPUs and TPUs from 7x on compute it. Both
# operands of a product with weights are scaled by the largest of their values, one scale for an
# array, and rounded; what is stored stays as it is. Only products of layers with their weights are
# so: not the scores of attention, nor the logits.

# "compute": as the operands are. "int8": forward in int8, summed in int32, and the backward pass in
# the operands' own dtype. "fp8": forward in float8_e4m3fn, the gradient of the results in
# float8_e5m2, which has the wider range; all three products are summed in float32.
PRODUCTS = ("compute", "int8", "fp8")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def quantized_einsum(formula: str, x: jax.Array, weight: jax.Array, products: str) -> jax.Array:
    """Compute `jnp.einsum(formula, x, weight)` in eight bits; `products` is "int8" or "fp8".

    Every letter of `formula` stands in two of its three terms.

    >>> x = jnp.array([[1.0, -2.0]])
    >>> quantized_einsum("bd,df->bf", x, jnp.eye(2), "int8").round(1)
    Array([[ 1., -2.]], dtype=float32)
    """
    return _product(formula, x, weight, *_DTYPES[products][:2])


# The dtypes of operands, and of the gradients that meet them in the backward pass.
_DTYPES: dict[str, tuple[Any, Any, Any]] = {
    "int8": (jnp.int8, jnp.int8, None),
    "fp8": (jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2),
}


def _forward(formula: str, x: jax.Array, weight: jax.Array, products: str) -> Any:
    return quantized_einsum(formula, x, weight, products), (x, weight)


def _backward(formula: str, products: str, operands: Any, gradient: jax.Array) -> Any:
    x, weight = operands
    terms, result = formula.split("->")
    left, right = terms.split(",")
    for_x, for_weight = f"{result},{right}->{left}", f"{left},{result}->{right}"
    dtype, _, of_gradient = _DTYPES[products]
    if of_gradient is None:
        return jnp.einsum(for_x, gradient, weight), jnp.einsum(for_weight, x, gradient)
    return (
        _product(for_x, gradient, weight, of_gradient, dtype),
        _product(for_weight, x, gradient, dtype, of_gradient),
    )


quantized_einsum.defvjp(_forward, _backward)


def _product(formula: str, x: jax.Array, y: jax.Array, x_dtype: Any, y_dtype: Any) -> jax.Array:
    small_x, x_scale = _quantize(x, x_dtype)
    small_y, y_scale = _quantize(y, y_dtype)
    sums = jnp.int32 if x_dtype == jnp.int8 else jnp.float32
    product = jnp.einsum(formula, small_x, small_y, preferred_element_type=sums)
    scaled: jax.Array = product.astype(jnp.float32) * (x_scale * y_scale)
    return scaled.astype(x.dtype)


def _quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return an array in eight bits, and the number to multiply it with."""
    is_int = dtype == jnp.int8
    # -128 is left out, so that a value and its negative round alike.
    largest = 127.0 if is_int else float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    wide = x.astype(jnp.float32)
    highest = jnp.max(jnp.abs(wide))
    scale = jnp.where(highest > 0, highest / largest, 1.0)
    # Clipped: the division may round past the largest, which float8 has no number for.
    scaled = jnp.clip(wide / scale, -largest, largest)
    return (jnp.round(scaled) if is_int else scaled).astype(dtype), scale
