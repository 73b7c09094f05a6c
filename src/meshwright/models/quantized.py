"""Products in eight bits: int8, or float8 as NVIDIA's GPUs and TPUs from 7x on compute it.

Both operands of a product with weights are scaled by the largest of their values, one scale for an
array, and rounded; what is stored stays as it is. Only products of layers with their weights are
so: not the scores of attention, nor the logits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

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
