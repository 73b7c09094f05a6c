"""Small real programs, one or more for every primitive that has a rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.ad_checkpoint
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import triton
from jax.sharding import NamedSharding, PartitionSpec


class Program(NamedTuple):
    """A function whose jaxpr has the primitive, and its arguments as shapes."""

    label: str
    primitive: str
    function: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]


PROGRAMS: dict[str, Program] = {}
# Functions of one dim of eight entries each, which are compiled all at once.
ELEMENTWISE: dict[str, Program] = {}


def add(label: str, function: Callable[..., Any], *shapes: Any, primitive: str = "") -> None:
    """Add a program; without `primitive` its label's first word is the primitive."""
    table = ELEMENTWISE if {shape.shape for shape in shapes} == {(8,)} else PROGRAMS
    assert label not in table, label
    table[label] = Program(label, primitive or label.split()[0], function, shapes)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def u32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.uint32)


def c64(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.complex64)


def bools(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


# Elementwise.
for name in """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma
    erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign
    sin sinh sqrt square tan tanh""".split():
    add(name, getattr(lax, name), f32(8))
# New in jax 0.12; the gradient of tanh has the second.
NEW = ("log2", "one_minus_square", "polynomial")
for name in NEW[:2]:
    if hasattr(lax, name):
        add(name, getattr(lax, name), f32(8))
if hasattr(lax, "polynomial"):
    add("polynomial", lambda x: lax.polynomial(x, [1.0, 2.0, 3.0]), f32(8))
for name in "add atan2 div max min mul nextafter pow rem sub eq ge gt le lt ne".split():
    add(name, getattr(lax, name), f32(8), f32(8))
for name in "igamma igammac polygamma zeta".split():
    add(name, getattr(lax, name), f32(8), f32(8))
add("igamma_grad_a", lax.igamma_grad_a, f32(8), f32(8))
add("regularized_incomplete_beta", lax.betainc, f32(8), f32(8), f32(8))
for name in "and or xor".split():
    add(name, getattr(lax, f"bitwise_{name}"), i32(8), i32(8))
for name in "clz population_count".split():
    add(name, getattr(lax, name), i32(8))
add("not", lax.bitwise_not, i32(8))
for name in "shift_left shift_right_arithmetic shift_right_logical".split():
    add(name, getattr(lax, name), i32(8), i32(8))
for name in "real imag conj".split():
    add(name, getattr(lax, name), c64(8))
for name in "eq_to le_to lt_to".split():
    add(name, getattr(lax, f"{name}_p").bind, f32(8), f32(8))
add("complex", lax.complex, f32(8), f32(8))
add("add of a row of size 1", lambda a, b: jax.jit(jnp.add)(a, b), f32(8, 16), f32(1, 16))
add("add of a scalar", lambda a, b: a + b, f32(8, 16), f32())
add("integer_pow", lambda x: x**3, f32(8))
add("convert_element_type", lambda x: x.astype(jnp.bfloat16), f32(8, 16))
add("reduce_precision", lambda x: lax.reduce_precision(x, 8, 7), f32(8))
add("select_n", lax.select_n, bools(8, 16), f32(8, 16), f32(8, 16))
add("select_n by a scalar", lax.select_n, bools(), f32(8, 16), f32(8, 16))
add("clamp", lax.clamp, f32(8, 16), f32(8, 16), f32(8, 16))
add("clamp by scalars", lax.clamp, f32(), f32(8, 16), f32())
add("copy", lambda x: lax.copy_p.bind(x) if hasattr(lax, "copy_p") else jnp.copy(x), f32(8, 16))
add("stop_gradient", lambda x: lax.stop_gradient(x), f32(8, 16))
add("name", lambda x: jax.ad_checkpoint.checkpoint_name(x, "kept"), f32(8, 16))
add(
    "add_any",
    lambda x: jax.vjp(lambda x: (x * 2, x * 3), x)[1]((x, x))[0],
    f32(8, 16),
)
add("device_put", lambda x: jax.device_put(x), f32(8, 16))
add("empty", lambda: lax.empty((8, 16), jnp.float32))
add(
    "layout_constraint",
    lambda x: with_layout_constraint(x, Layout(major_to_minor=(1, 0))),
    f32(8, 16),
)
add("optimization_barrier", lambda a, b: lax.optimization_barrier((a, b)), f32(8, 16), f32(16, 24))
add("iota", lambda: lax.broadcasted_iota(jnp.int32, (8, 16), 1))
add("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), f32(8, 16))
add(
    "bitcast_convert_type to smaller",
    lambda x: lax.bitcast_convert_type(x, jnp.int8),
    f32(8, 16),
)
add(
    "bitcast_convert_type to larger",
    lambda x: lax.bitcast_convert_type(x, jnp.int32),
    jax.ShapeDtypeStruct((8, 16, 4), jnp.int8),
)

# Random numbers.
add("threefry2x32", lambda k, x: jax.extend.random.threefry_2x32(k, x), u32(2), u32(64))
add("random_bits", lambda k: jax.random.bits(jax.random.wrap_key_data(k), (8, 16)), u32(2))
add("random_wrap", lambda k: jax.random.key_data(jax.random.wrap_key_data(k)), u32(8, 2))
add("random_unwrap", lambda k: jax.random.key_data(jax.random.wrap_key_data(k)), u32(8, 2))
add(
    "random_split",
    lambda k: jax.random.key_data(jax.random.split(jax.random.wrap_key_data(k), 16)),
    u32(2),
)
add(
    "random_fold_in",
    lambda k, x: jax.random.key_data(jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(k), x)),
    u32(8, 2),
    u32(8),
)
add(
    "random_split of many",
    lambda k: jax.random.key_data(
        jax.vmap(lambda k: jax.random.split(k, 16))(jax.random.wrap_key_data(k))
    ),
    u32(8, 2),
)
add(
    "random_bits of many",
    lambda k: jax.vmap(lambda k: jax.random.bits(k, (16,)))(jax.random.wrap_key_data(k)),
    u32(8, 2),
)
add("random_seed", lambda s: jax.random.key_data(jax.vmap(jax.random.key)(s)), u32(8))
add("random_clone", lambda k: jax.random.clone(jax.random.wrap_key_data(k)), u32(8, 2))
add(
    "random_gamma",
    lambda k, a: lax.stop_gradient(jax.random.gamma(jax.random.wrap_key_data(k), a)),
    u32(2),
    f32(8),
)
add("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (8, 16)), u32(4))

# Products.
add("dot_general", lambda a, b: a @ b, f32(16, 32), f32(32, 64))
add(
    "dot_general with a batch",
    lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b),
    f32(8, 16, 32),
    f32(8, 32, 64),
)
add(
    "dot_general of two contracted dims",
    lambda a, b: jnp.einsum("bshd,hde->bse", a, b),
    f32(8, 16, 8, 4),
    f32(8, 4, 32),
)
add(
    "ragged_dot_general",
    lambda a, b, g: lax.ragged_dot(a, b, g),
    f32(1024, 128),
    f32(4, 128, 256),
    i32(4),
)
add(
    "ragged_dot_general contracted",
    lambda a, b, g: lax.ragged_dot_general(
        a, b, g, lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    ),
    f32(1024, 128),
    f32(1024, 256),
    i32(4),
)
IMAGES = ("NHWC", "HWIO", "NHWC")


def conv(stride: int = 1, padding: Any = "SAME", **options: Any) -> Callable[..., Any]:
    return lambda x, w: lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=IMAGES, **options
    )


def by_weights(function: Callable[..., Any], *shape: int) -> Callable[..., Any]:
    """The gradient of a convolution's weights, a convolution again."""
    return lambda x, g: jax.linear_transpose(lambda w: function(x, w), f32(*shape))(g)[0]


def conv_program(label: str, function: Callable[..., Any], *shapes: Any) -> None:
    add(f"conv_general_dilated {label}", function, *shapes)


add("conv_general_dilated", conv(), f32(8, 16, 16, 8), f32(3, 3, 8, 16))
conv_program("1x1", conv(), f32(8, 16, 16, 8), f32(1, 1, 8, 16))
conv_program("1x1 with a stride", conv(2), f32(8, 16, 16, 8), f32(1, 1, 8, 16))
conv_program("with a stride", conv(2), f32(8, 16, 16, 8), f32(3, 3, 8, 16))
conv_program("of patches", conv(4, "VALID"), f32(8, 16, 16, 8), f32(4, 4, 8, 16))
conv_program(
    "dilated image",
    conv(padding=((1, 2), (1, 2)), lhs_dilation=(2, 2)),
    f32(8, 16, 16, 8),
    f32(3, 3, 8, 16),
)
conv_program("dilated kernel", conv(rhs_dilation=(2, 2)), f32(8, 16, 16, 8), f32(3, 3, 8, 16))
conv_program("gradient", by_weights(conv(), 3, 3, 8, 16), f32(8, 16, 16, 8), f32(8, 16, 16, 16))
conv_program("1x1 gradient", by_weights(conv(), 1, 1, 8, 16), f32(8, 16, 16, 8), f32(8, 16, 16, 16))
conv_program("depthwise", conv(feature_group_count=16), f32(8, 16, 16, 16), f32(3, 3, 1, 16))
conv_program(
    "depthwise twice as wide", conv(feature_group_count=16), f32(8, 16, 16, 16), f32(3, 3, 1, 32)
)
conv_program(
    "depthwise gradient",
    by_weights(conv(feature_group_count=16), 3, 3, 1, 16),
    f32(8, 16, 16, 16),
    f32(8, 16, 16, 16),
)
conv_program("in groups", conv(feature_group_count=4), f32(8, 16, 16, 16), f32(3, 3, 4, 32))
conv_program(
    "in groups gradient",
    by_weights(conv(feature_group_count=4), 3, 3, 4, 32),
    f32(8, 16, 16, 16),
    f32(8, 16, 16, 32),
)
conv_program("in 2 groups", conv(feature_group_count=2), f32(8, 16, 16, 16), f32(3, 3, 8, 32))

# Shapes.
add("transpose", lambda x: x.transpose(2, 0, 1), f32(8, 16, 24))
add("broadcast_in_dim", lambda x: jnp.broadcast_to(x[:, None], (8, 16, 24)), f32(8, 24))
add("broadcast_in_dim of size 1", lambda x: jnp.broadcast_to(x, (8, 16)), f32(1, 16))
add("reshape merges", lambda x: x.reshape(128, 24), f32(8, 16, 24))
add("reshape splits", lambda x: x.reshape(8, 16, 24), f32(8, 384))
add("reshape regroups", lambda x: x.reshape(4, 8, 3), f32(8, 12))
add("reshape a fused projection", lambda x: x.reshape(8, 3, 4, 8), f32(8, 96))
add("reshape without", lambda x: x.reshape(8, 1, 16), f32(8, 16))
add("reshape merges all", lambda x: x.reshape(-1), f32(8, 16, 4))
add("squeeze", lambda x: lax.squeeze(x, (1,)), f32(8, 1, 16))
add("concatenate", lambda a, b: jnp.concatenate([a, b], 1), f32(8, 16), f32(8, 16))
add("split", lambda x: jnp.split(x, [8, 24], 1), f32(8, 32))
add("rev", lambda x: lax.rev(x, (1,)), f32(8, 16))
add("slice", lambda x: x[:, :-1], f32(8, 16))
add("slice with a stride", lambda x: lax.slice(x, (0, 0), (8, 16), (1, 2)), f32(8, 16))
add("slice of odd entries", lambda x: lax.slice(x, (0, 1), (8, 16), (1, 2)), f32(8, 16))
add("pad", lambda x: jnp.pad(x, ((0, 0), (1, 3))), f32(8, 16))
add("pad between", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (0, 1, 1))), f32(8, 16))
add("pad before each", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 1))), f32(8, 16))
add("tile", lambda x: jnp.tile(x, (1, 2)), f32(8, 16))
add("stack", lambda a, b: jnp.stack([a, b], 1), f32(8, 16), f32(8, 16))
add("unstack", lambda x: jnp.unstack(x, axis=1), f32(8, 4, 16))

# Reductions.
for name in "max min prod sum".split():
    add(f"reduce_{name}", getattr(jnp, name), f32(8, 16), primitive=f"reduce_{name}")
add("reduce_sum of one dim", lambda x: x.sum(1), f32(8, 16))
add("reduce_and", lambda x: jnp.all(x, 1), bools(8, 16))
add("reduce_or", lambda x: jnp.any(x, 1), bools(8, 16))
add("reduce_xor", lambda x: lax.reduce_xor(x, (0,)), i32(8, 16))
add("argmax", lambda x: jnp.argmax(x, 1), f32(8, 16))
add("argmin", lambda x: jnp.argmin(x, 1), f32(8, 16))
add(
    "reduce",
    lambda x, y: lax.reduce(
        (x, y), (0.0, 0.0), lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), (1,)
    ),
    f32(8, 16),
    f32(8, 16),
)
add("reduce of one operand", lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * 2, (1,)), f32(8, 16))
for name in "cumsum cumprod cummax cummin cumlogsumexp".split():
    add(name, functools.partial(getattr(lax, name), axis=1), f32(8, 16))
window = {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 2, 1), "padding": "VALID"}


def pool(start: float, function: Any, **options: Any) -> Callable[..., Any]:
    return lambda x: lax.reduce_window(x, start, function, **{**window, **options})


add("reduce_window_max", pool(-jnp.inf, lax.max), f32(8, 16, 16, 8))
add("reduce_window_sum", pool(0.0, lax.add), f32(8, 16, 16, 8))
add("reduce_window_min", pool(jnp.inf, lax.min), f32(8, 16, 16, 8))
add("reduce_window", pool(1.0, lax.mul), f32(8, 16, 16, 8))
add(
    "reduce_window_max overlapping",
    pool(-jnp.inf, lax.max, window_dimensions=(1, 3, 3, 1), padding="SAME"),
    f32(8, 16, 16, 8),
)
add(
    "select_and_scatter_add",
    lambda x, g: jax.vjp(pool(-jnp.inf, lax.max), x)[1](g)[0],
    f32(8, 16, 16, 8),
    f32(8, 8, 8, 8),
)
add(
    "select_and_scatter_add overlapping",
    lambda x, g: jax.vjp(
        pool(-jnp.inf, lax.max, window_dimensions=(1, 3, 3, 1), padding="SAME"), x
    )[1](g)[0],
    f32(8, 16, 16, 8),
    f32(8, 8, 8, 8),
)
add(
    "select_and_gather_add",
    lambda x, t: jax.jvp(pool(-jnp.inf, lax.max), (x,), (t,))[1],
    f32(8, 16, 16, 8),
    f32(8, 16, 16, 8),
)

# Sorting.
add("sort", lambda x: lax.sort(x, dimension=1), f32(8, 16))
add(
    "sort of several",
    lambda a, b: lax.sort((a, b), dimension=1, num_keys=1),
    f32(8, 16),
    i32(8, 16),
)
add("top_k", lambda x: lax.top_k(x, 4), f32(8, 16))
add("approx_top_k", lambda x: lax.approx_max_k(x, 4), f32(8, 16))

# Lookups.
add("gather of rows", lambda t, i: t[i], f32(32, 16), i32(8, 4))
add("gather clipped", lambda t, i: t.at[i].get(mode="clip"), f32(32, 16), i32(8, 4))
add("gather promised", lambda t, i: t.at[i].get(mode="promise_in_bounds"), f32(32, 16), i32(8, 4))
add("gather filled", lambda t, i: t.at[i].get(mode="fill", fill_value=7), f32(32, 16), i32(8, 4))
add(
    "gather of labels",
    lambda x, i: jnp.take_along_axis(x, i[..., None], -1),
    f32(8, 16, 32),
    i32(8, 16),
)
add("gather by two indices", lambda x, i, j: x[i, j], f32(8, 16, 24), i32(32), i32(32))
add(
    "gather of windows",
    lambda x, i: jax.vmap(lambda k: lax.dynamic_slice(x, (k, 0), (4, 16)))(i),
    f32(32, 16),
    i32(8),
)
add(
    "gather of rows kept",
    lambda x, i: jax.vmap(lambda k: lax.dynamic_slice(x, (k, 0), (1, 16)))(i),
    f32(32, 16),
    i32(8),
)
add("gather of columns", lambda x, i: x[:, i], f32(8, 32), i32(16))
for kind in "add multiply min max apply set".split():
    if kind != "apply":
        name = {"add": "scatter-add", "multiply": "scatter-mul", "set": "scatter"}.get(
            kind, f"scatter-{kind}"
        )

        def put(t: Any, i: Any, u: Any, kind: str = kind) -> Any:
            return getattr(t.at[i], kind)(u)

        add(f"{name} of rows", put, f32(32, 16), i32(8, 4), f32(8, 4, 16))
add(
    "scatter-sub of rows",
    lambda t, i, u: t.at[i].subtract(u),
    f32(32, 16),
    i32(8, 4),
    f32(8, 4, 16),
)
add(
    "scatter-add of labels",
    lambda x, i, u: jax.vmap(jax.vmap(lambda x, i, u: x.at[i].add(u)))(x, i, u),
    f32(8, 16, 32),
    i32(8, 16),
    f32(8, 16),
)
add(
    "scatter-add by two indices",
    lambda x, i, j, u: x.at[i, j].add(u),
    f32(8, 16, 24),
    i32(32),
    i32(32),
    f32(32, 24),
)
add("scatter of one row", lambda x, u: x.at[3].set(u), f32(8, 16), f32(16))
add("scatter-add of windows", lambda x, u: x.at[2:6].add(u), f32(32, 16), f32(4, 16))
add(
    "scatter-add of one column per row",
    lambda x, i, u: x.at[jnp.arange(8), i].add(u),
    f32(8, 32),
    i32(8),
    f32(8),
)
add("scatter-add of one row kept", lambda x, u: x.at[2:3].add(u), f32(32, 16), f32(1, 16))
add("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (8, 16)), f32(32, 16), i32())
add("dynamic_slice of one", lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 16)), f32(32, 16), i32())
add(
    "dynamic_update_slice",
    lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
    f32(32, 16),
    f32(8, 16),
    i32(),
)
add(
    "dynamic_update_slice of one",
    lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
    f32(32, 16),
    f32(1, 16),
    i32(),
)

# Linear algebra.
square = f32(8, 16, 16)
add("cholesky", lambda x: lax.linalg.cholesky(x, symmetrize_input=False), square)
add("cholesky_update", lax.linalg.cholesky_update, f32(4, 4), f32(4))
add(
    "triangular_solve",
    lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
    square,
    f32(8, 16, 24),
)
add(
    "triangular_solve from the right",
    lambda a, b: lax.linalg.triangular_solve(a, b, left_side=False, lower=True),
    square,
    f32(8, 24, 16),
)
add("eigh", lambda x: lax.linalg.eigh(x, symmetrize_input=False), square)
add("svd", lambda x: lax.linalg.svd(x, full_matrices=False), f32(8, 16, 12))
add("qr", lambda x: lax.linalg.qr(x, full_matrices=False), f32(8, 16, 12))
add("householder_product", lax.linalg.householder_product, f32(8, 16, 12), f32(8, 12))
add("ormqr", lambda a, t, c: lax.linalg.ormqr(a, t, c), f32(8, 16, 12), f32(8, 12), f32(8, 16, 4))
add("lu", lax.linalg.lu, square)
add("lu_pivots_to_permutation", lambda p: lax.linalg.lu_pivots_to_permutation(p, 16), i32(8, 16))
add(
    "tridiagonal_solve",
    lax.linalg.tridiagonal_solve,
    f32(8, 16),
    f32(8, 16),
    f32(8, 16),
    f32(8, 16, 4),
)
add("symmetric_product", lambda a, c: lax.linalg.symmetric_product(a, c), f32(8, 16, 4), square)
add("tridiagonal", lambda x: lax.linalg.tridiagonal(x), square)
add("hessenberg", lambda x: lax.linalg.hessenberg(x), square)
add("schur", lambda x: lax.linalg.schur(x), square)
add("eig", lambda x: lax.linalg.eig(x), square)
add("fft", lambda x: jnp.fft.fft(x), c64(8, 16))
add("fft of two dims", lambda x: jnp.fft.rfft2(x), f32(8, 16, 16))


# What XLA cannot look into.
def _sum_of_squares(x: Any, y: Any) -> Any:
    return jnp.einsum("ij,kj->ik", x, y)


def _partition(mesh: Any, args: Any, result: Any) -> Any:
    shardings = tuple(arg.sharding for arg in args)
    axis = (*shardings[0].spec, None, None)[1]

    def local(x: Any, y: Any) -> Any:
        made = _sum_of_squares(x, y)
        return made if axis is None else lax.psum(made, axis)

    return mesh, local, result.sharding, shardings


partitioned = custom_partitioning(_sum_of_squares)
partitioned.def_partition(
    partition=_partition, sharding_rule="i j, k j -> i k", reduction_factors=("j",)
)
add("custom_partitioning", partitioned, f32(8, 16), f32(24, 16))


def _softmax_partition(mesh: Any, args: Any, result: Any) -> Any:
    rows = (*args[0].sharding.spec, None, None, None)[:2]
    sharding = NamedSharding(mesh, PartitionSpec(*rows, None))
    return mesh, jax.nn.softmax, sharding, (sharding,)


softmax = custom_partitioning(lambda x: jax.nn.softmax(x))
softmax.def_partition(
    partition=_softmax_partition,
    sharding_rule="... i -> ... i",
    need_replication_factors=("i",),
)
add("custom_partitioning of rows", softmax, f32(8, 4, 16))


def _double(x: Any, out: Any) -> None:
    out[...] = x[...] * 2


add("pallas_call", pl.pallas_call(_double, out_shape=f32(8, 128), interpret=True), f32(8, 128))
add("pure_callback", lambda x: jax.pure_callback(np.negative, f32(8, 16), x), f32(8, 16))
add(
    "ffi_call",
    lambda x: jax.ffi.ffi_call("lapack_spotrf_ffi", (f32(16, 16), i32()))(x, uplo=np.uint8(76)),
    f32(16, 16),
)
# Not interpreted: for the vendors' compilers.
_rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
KERNELS = {
    platform: Program(
        f"pallas_call for {platform}",
        "pallas_call",
        pl.pallas_call(
            _double,
            grid=(4,),
            in_specs=[_rows],
            out_specs=_rows,
            out_shape=f32(32, 128),
            compiler_params=params,
        ),
        (f32(32, 128),),
    )
    for platform, params in (("tpu", None), ("cuda", triton.CompilerParams()))
}
