"""Steps for one GPU, each bound by something else: what `rehearsal_gpu.py` rehearses and measures.

`SEEN` are the steps on which the speeds of `rehearsal/kernel_speeds.py` were made: constants were
fitted to their kernels, the form of the model was chosen on them, or their errors were known
meanwhile. `BLIND` were written and measured when the model was done, and nothing has been changed
for them. Each is a function and its arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import meshwright as mw

Shape = jax.ShapeDtypeStruct
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of plain gradient descent, whose result is the new parameters and the loss."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        new = jax.tree.map(
            lambda p, g: (p - 1e-3 * g.astype(p.dtype)).astype(p.dtype), params, grads
        )
        return new, value

    return step


def attention(kind: str, seq: int, heads: int = 16, head: int = 128) -> Step:
    width = heads * head
    rows = 16384 // seq

    def loss(params: Any, x: jax.Array) -> jax.Array:
        q, k, v = (
            jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in ("query", "key", "value")
        )
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kind)
        out = jnp.einsum("bshk,hkd->bsd", out, params["out"])
        return jnp.mean(out.astype(jnp.float32) ** 2)

    params = {name: Shape((width, heads, head), jnp.bfloat16) for name in ("query", "key", "value")}
    params["out"] = Shape((heads, head, width), jnp.bfloat16)
    return trained(loss), (params, Shape((rows, seq, width), jnp.bfloat16))


def products(dtype: Any, tokens: int, width: int, layers: int = 4) -> Step:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for weight in params:
            x = jax.nn.relu(x @ weight)
        return jnp.mean(x.astype(jnp.float32))

    params = [Shape((width, width), dtype) for _ in range(layers)]
    return trained(loss), (params, Shape((tokens, width), dtype))


def eight_bit_products(tokens: int, width: int, layers: int = 4) -> Step:
    small = jnp.float8_e4m3fn

    def step(params: Any, x: jax.Array) -> jax.Array:
        for weight in params:
            x = jnp.dot(x.astype(small), weight, preferred_element_type=jnp.bfloat16) * 0.01
        return x

    params = [Shape((width, width), small) for _ in range(layers)]
    return step, (params, Shape((tokens, width), jnp.bfloat16))


def activations(tokens: int, width: int) -> Step:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for scale in params:
            x = jax.nn.gelu(x * scale) + jnp.sin(x)
        return jnp.mean(x.astype(jnp.float32))

    return trained(loss), ([Shape((width,), jnp.float32)] * 4, Shape((tokens, width), jnp.float32))


def norms(tokens: int, width: int) -> Step:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for scale, bias in params:
            y = x.astype(jnp.float32)
            y = y - jnp.mean(y, axis=-1, keepdims=True)
            y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
            x = x + (y * scale + bias).astype(x.dtype)
        return jnp.mean(x.astype(jnp.float32))

    vector = Shape((width,), jnp.float32)
    return trained(loss), ([(vector, vector)] * 4, Shape((tokens, width), jnp.bfloat16))


def softmaxes(rows: int, width: int) -> Step:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for scale in params:
            x = jax.nn.softmax(x * scale, axis=-1) + x
        return jnp.mean(x**2)

    return trained(loss), ([Shape((), jnp.float32)] * 3, Shape((rows, width), jnp.float32))


def sorting(count: int, rows: int, width: int) -> Step:
    def step(flat: jax.Array, matrix: jax.Array) -> Any:
        values, places = jax.lax.top_k(matrix, 64)
        return jnp.sort(flat), jnp.argsort(matrix, axis=-1), values, places

    return step, (Shape((count,), jnp.float32), Shape((rows, width), jnp.float32))


def tables(vocab: int, width: int, tokens: int) -> Step:
    def loss(table: Any, ids: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(table[ids]) ** 2)

    return trained(loss), (Shape((vocab, width), jnp.float32), Shape((tokens,), jnp.int32))


def convolutions(rows: int, side: int, channels: int) -> Step:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for kernel in params:
            y = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(y) + x
        return jnp.mean(x.astype(jnp.float32))

    kernels = [Shape((3, 3, channels, channels), jnp.bfloat16)] * 4
    return trained(loss), (kernels, Shape((rows, side, side, channels), jnp.bfloat16))


def recurrent(rows: int, length: int, width: int) -> Step:
    def loss(params: Any, xs: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> Any:
            gates = x @ params["in"] + h @ params["hidden"]
            r, z, n = jnp.split(gates, 3, axis=-1)
            new = jnp.tanh(n * jax.nn.sigmoid(r))
            h = jax.nn.sigmoid(z) * h + (1 - jax.nn.sigmoid(z)) * new
            return h, h

        _, hs = jax.lax.scan(cell, jnp.zeros((rows, width), xs.dtype), xs)
        return jnp.mean(hs.astype(jnp.float32) ** 2)

    params = {name: Shape((width, 3 * width), jnp.bfloat16) for name in ("in", "hidden")}
    return trained(loss), (params, Shape((length, rows, width), jnp.bfloat16))


def of_model(name: str, rows: int, seq: int | None, **changes: Any) -> Step:
    model = mw.models.model(name, **changes)
    batch = jax.eval_shape(lambda: model.example(rows, seq))
    return model.train_step, (model.shapes(), batch)


def grouped_attention(seq: int, heads: int, groups: int, head: int, causal: bool) -> Step:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in "qkv")
        out = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
        return jnp.mean(jnp.einsum("bshk,hkd->bsd", out, params["o"]).astype(jnp.float32) ** 2)

    width = heads * head
    counts = {"q": heads, "k": groups, "v": groups}
    params = {name: Shape((width, count, head), jnp.bfloat16) for name, count in counts.items()}
    params["o"] = Shape((heads, head, width), jnp.bfloat16)
    return trained(loss), (params, Shape((32768 // seq, seq, width), jnp.bfloat16))


def gated_layers(tokens: int, width: int, inner: int, layers: int) -> Step:
    """Feed-forwards with a gate, a norm and a residual, scanned and rematerialised."""

    def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        y = x.astype(jnp.float32)
        y = (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)
        gate, up, down = params
        return x + (jax.nn.silu(y @ gate) * (y @ up)) @ down, None

    def loss(params: Any, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params)  # type: ignore[arg-type]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    wide = Shape((layers, width, inner), jnp.bfloat16)
    params = (wide, wide, Shape((layers, inner, width), jnp.bfloat16))
    return trained(loss), (params, Shape((tokens, width), jnp.bfloat16))


def long_short_term(rows: int, length: int, width: int) -> Step:
    def loss(params: Any, xs: jax.Array) -> jax.Array:
        def cell(carry: Any, x: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ params, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((rows, width), xs.dtype)
        _, hs = jax.lax.scan(cell, (start, start), xs)
        return jnp.mean(hs**2)

    weights = Shape((2 * width, 4 * width), jnp.float32)
    return trained(loss), (weights, Shape((length, rows, width), jnp.float32))


def separable(rows: int, side: int, channels: int) -> Step:
    """Pointwise convolutions between strided ones, with batch norms."""

    def norm(x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        mean, var = jnp.mean(y, (0, 1, 2)), jnp.var(y, (0, 1, 2))
        return ((y - mean) * jax.lax.rsqrt(var + 1e-5)).astype(x.dtype)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for n, kernel in enumerate(params):
            x = jax.lax.conv_general_dilated(
                x, kernel, (1 + n % 2,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(norm(x))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    c = channels
    shapes = [(1, 1, c, 2 * c), (3, 3, 2 * c, 2 * c), (1, 1, 2 * c, 4 * c), (3, 3, 4 * c, 4 * c)]
    kernels = [Shape(shape, jnp.bfloat16) for shape in shapes]
    return trained(loss), (kernels, Shape((rows, side, side, c), jnp.bfloat16))


def ranking(rows: int, width: int, bins: int) -> Step:
    """Sorted rows with their places, a histogram, cumulative sums."""

    def step(scores: jax.Array, labels: jax.Array) -> Any:
        order = jnp.argsort(-scores, axis=-1)
        gains = jnp.cumsum(jnp.take_along_axis(scores, order, axis=-1), axis=-1)
        return gains, jnp.zeros((bins,), jnp.float32).at[labels.ravel()].add(scores.ravel())

    return step, (Shape((rows, width), jnp.float32), Shape((rows, width), jnp.int32))


def entropy(tokens: int, width: int, vocab: int) -> Step:
    """A head: bf16 logits, their cross entropy in float32."""

    def loss(table: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = (x @ table).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    table = Shape((width, vocab), jnp.bfloat16)
    return trained(loss), (table, Shape((tokens, width), jnp.bfloat16), Shape((tokens,), jnp.int32))


def moments(size: int, arrays: int) -> Step:
    """Adam's update alone."""

    def step(params: Any, grads: Any, mu: Any, nu: Any) -> Any:
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
        nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, nu, grads)
        new = jax.tree.map(lambda p, m, v: p - m / (jnp.sqrt(v) + 1e-8), params, mu, nu)
        return new, mu, nu

    tree = [Shape((size, size), jnp.float32)] * arrays
    return step, (tree, tree, tree, tree)


def spectra(rows: int, length: int) -> Step:
    def step(x: jax.Array) -> Any:
        spectrum = jnp.fft.rfft(x)
        return jnp.log1p(jnp.abs(spectrum)), jnp.fft.irfft(spectrum * 0.5)

    return step, (Shape((rows, length), jnp.float32),)


def whole_numbers(tokens: int, width: int, layers: int) -> Step:
    """Products of int8 that are scaled and rounded in between."""

    def step(params: Any, x: jax.Array) -> jax.Array:
        for weight, scale in params:
            y = jnp.dot(x, weight, preferred_element_type=jnp.int32).astype(jnp.float32) * scale
            x = jnp.clip(jnp.round(y), -127, 127).astype(jnp.int8)
        return x

    layer = (Shape((width, width), jnp.int8), Shape((width,), jnp.float32))
    return step, ([layer] * layers, Shape((tokens, width), jnp.int8))


def scaled_norms(tokens: int, width: int) -> Step:
    """Norms by the root of the mean square, in bf16 with residuals."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for scale in params:
            y = x.astype(jnp.float32)
            y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
            x = x + jnp.tanh(y.astype(x.dtype) * scale)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return trained(loss), (
        [Shape((width,), jnp.bfloat16)] * 4,
        Shape((tokens, width), jnp.bfloat16),
    )


def routed(tokens: int, experts: int) -> Step:
    """A router: probabilities, the best two of each token, their weights."""

    def loss(table: Any, x: jax.Array) -> jax.Array:
        chances = jax.nn.softmax((x @ table).astype(jnp.float32), axis=-1)
        best, _ = jax.lax.top_k(chances, 2)
        return jnp.mean(best / jnp.sum(best, -1, keepdims=True)) + jnp.mean(jnp.log(chances))

    table = Shape((2048, experts), jnp.bfloat16)
    return trained(loss), (table, Shape((tokens, 2048), jnp.bfloat16))


def images(rows: int, side: int) -> Step:
    """A stem as networks of images have it: a strided convolution of 7 x 7, pooling, two more."""

    def conv(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=numbers
        )

    def loss(params: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(conv(x, params[0], 2))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for kernel in params[1:]:
            x = jax.nn.silu(conv(x, kernel, 1))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shapes = [(7, 7, 3, 64), (3, 3, 64, 192), (3, 3, 192, 192)]
    kernels = [Shape(shape, jnp.bfloat16) for shape in shapes]
    return trained(loss), (kernels, Shape((rows, side, side, 3), jnp.bfloat16))


def filtered(rows: int, side: int) -> Step:
    """Pictures filtered by their spectrum, forth and back in two dimensions."""

    def step(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.fft.irfft2(jnp.fft.rfft2(x) * weights)

    weights = Shape((side, side // 2 + 1), jnp.float32)
    return step, (Shape((rows, side, side), jnp.float32), weights)


def dropped(tokens: int, width: int, layers: int) -> Step:
    """Products with dropout between them, whose masks are drawn by threefry."""

    def loss(params: Any, x: jax.Array, seed: jax.Array) -> jax.Array:
        for n, weight in enumerate(params):
            keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(seed), n), 0.9, x.shape)
            x = jnp.where(keep, jax.nn.gelu(x @ weight), 0)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params = [Shape((width, width), jnp.bfloat16)] * layers
    return trained(loss), (params, Shape((tokens, width), jnp.bfloat16), Shape((), jnp.uint32))


def sums_of_segments(rows: int, segments: int, width: int) -> Step:
    """A layer of a graph network: rows gathered along edges, products, sums at their ends."""

    def loss(weight: Any, x: jax.Array, ends: jax.Array, starts: jax.Array) -> jax.Array:
        sent = jax.nn.relu(x[starts % segments] @ weight)
        met = jax.ops.segment_sum(sent, ends % segments, num_segments=segments)
        return jnp.mean(met**2)

    edges = Shape((rows,), jnp.int32)
    weight = Shape((width, width), jnp.float32)
    return trained(loss), (weight, Shape((segments, width), jnp.float32), edges, edges)


SEEN: dict[str, Callable[[], Step]] = {
    "flash 2k": functools.partial(attention, "cudnn", 2048),
    "flash 16k": functools.partial(attention, "cudnn", 16384),
    "naive 8k": functools.partial(attention, "xla", 8192),
    "bf16 products": functools.partial(products, jnp.bfloat16, 16384, 8192),
    "f32 products": functools.partial(products, jnp.float32, 8192, 4096),
    "gelu and sin": functools.partial(activations, 8192, 16384),
    "softmax": functools.partial(softmaxes, 65536, 2048),
    "sort": functools.partial(sorting, 2**24, 1024, 16384),
    "table of 32k": functools.partial(tables, 32000, 4096, 8192),
    "convolutions": functools.partial(convolutions, 128, 56, 256),
    "llama3-8b": functools.partial(of_model, "llama3-8b", 8, 2048, layers=4, vocab=32_000),
    "bf16 products, small": functools.partial(products, jnp.bfloat16, 4096, 2048, 12),
    "GRU": functools.partial(recurrent, 256, 256, 1024),
    "flash 8k": functools.partial(attention, "cudnn", 8192),
    "flash 8k, head 64": functools.partial(attention, "cudnn", 8192, 32, 64),
    "naive 2k": functools.partial(attention, "xla", 2048),
    "naive 16k": functools.partial(attention, "xla", 16384, 8),
    "f32 products, large": functools.partial(products, jnp.float32, 16384, 8192),
    "fp8 products": functools.partial(eight_bit_products, 16384, 8192),
    "norms": functools.partial(norms, 32768, 4096),
    "softmax, wide": functools.partial(softmaxes, 2048, 50304),
    "sort, long": functools.partial(sorting, 2**26, 8192, 4096),
    "table of 128k": functools.partial(tables, 128256, 2048, 16384),
    "convolutions, deep": functools.partial(convolutions, 256, 14, 512),
    "mixtral-8x7b": functools.partial(
        of_model, "mixtral-8x7b", 4, 2048, layers=2, mlp=3584, vocab=32_000
    ),
    "vit-l16": functools.partial(of_model, "vit-l16", 128, None),
    "resnet50": functools.partial(of_model, "resnet50", 256, None),
    "flash 4k, 8 groups": functools.partial(grouped_attention, 4096, 32, 8, 128, True),
    "flash 32k, not causal": functools.partial(grouped_attention, 32768, 16, 16, 64, False),
    "naive 4k": functools.partial(attention, "xla", 4096),
    "bf16 products, thin": functools.partial(products, jnp.bfloat16, 1024, 6144, 6),
    "fp8 products, 4k": functools.partial(eight_bit_products, 8192, 4096, 6),
    "gated layers": functools.partial(gated_layers, 16384, 3072, 8192, 6),
    "bf16 head": functools.partial(entropy, 8192, 2048, 50304),
    "norms, narrow": functools.partial(norms, 131072, 1024),
    "softmax 512": functools.partial(softmaxes, 262144, 512),
    "ranking": functools.partial(ranking, 4096, 8192, 100_000),
    "separable": functools.partial(separable, 64, 112, 128),
    "LSTM": functools.partial(long_short_term, 512, 128, 1536),
    "Adam": functools.partial(moments, 8192, 6),
    "spectra": functools.partial(spectra, 8192, 16384),
    "vit-b16": functools.partial(of_model, "vit-b16", 256, None),
    "mixtral, 4 of 16": functools.partial(
        *(of_model, "mixtral-8x7b", 8, 1024),
        **{"layers": 2, "mlp": 2048, "vocab": 32_000, "experts": 16, "chosen": 4},
    ),
    "flash 2k, whole, head 128": functools.partial(grouped_attention, 2048, 24, 4, 128, False),
    "flash 16k, 2 groups": functools.partial(grouped_attention, 16384, 16, 2, 128, True),
    "naive 1k": functools.partial(attention, "xla", 1024),
    "bf16 products, 3k": functools.partial(products, jnp.bfloat16, 8192, 3072, 8),
    "fp8 products, wide": functools.partial(eight_bit_products, 4096, 12288, 3),
    "int8 products": functools.partial(whole_numbers, 16384, 6144, 4),
    "RMS norms": functools.partial(scaled_norms, 16384, 8192),
    "router": functools.partial(routed, 131072, 128),
    "softmax 4k": functools.partial(softmaxes, 32768, 4096),
    "sort, rows of 2k": functools.partial(sorting, 2**23, 16384, 2048),
    "graph": functools.partial(sums_of_segments, 2**20, 65536, 256),
    "stem": functools.partial(images, 256, 224),
    "convolutions, 28": functools.partial(convolutions, 128, 28, 384),
    "GRU, wide": functools.partial(recurrent, 1024, 64, 2048),
    "dropout": functools.partial(dropped, 16384, 4096, 4),
    "filtered": functools.partial(filtered, 256, 1024),
    "head of 128k": functools.partial(entropy, 4096, 4096, 128_256),
    "decoder, 4k": functools.partial(
        of_model, "llama3-8b", 4, 4096, layers=2, mlp=8192, vocab=64_000
    ),
}
BLIND: dict[str, Callable[[], Step]] = {
    "flash 2k, head 64": functools.partial(grouped_attention, 2048, 24, 8, 64, True),
    "flash 8k, 4 groups": functools.partial(grouped_attention, 8192, 32, 4, 128, True),
    "flash 16k, head 64": functools.partial(attention, "cudnn", 16384, 24, 64),
    "naive 2k, 8 heads": functools.partial(attention, "xla", 2048, 8),
    "naive 8k, head 64": functools.partial(attention, "xla", 8192, 8, 64),
    "f32 products, 6k": functools.partial(products, jnp.float32, 4096, 6144, 3),
    "bf16 products, 5k": functools.partial(products, jnp.bfloat16, 12288, 5120, 5),
    "fp8 products, 6k": functools.partial(eight_bit_products, 8192, 6144, 4),
    "gelu and sin, 4k": functools.partial(activations, 16384, 4096),
    "norms, 2k": functools.partial(norms, 65536, 2048),
    "softmax 1k": functools.partial(softmaxes, 131072, 1024),
    "sort, rows of 8k": functools.partial(sorting, 2**25, 4096, 8192),
    "table of 64k": functools.partial(tables, 64000, 3072, 32768),
    "convolutions, 112": functools.partial(convolutions, 64, 112, 128),
    "GRU, longer": functools.partial(recurrent, 512, 128, 1536),
    "mixtral, 4k": functools.partial(
        of_model, "mixtral-8x7b", 2, 4096, layers=2, mlp=4096, vocab=32_000
    ),
}
# Never met before `measured_gpu.py` went by speeds that `calibrate` had measured.
CALIBRATED: dict[str, Callable[[], Step]] = {
    "bf16 products, 7k": functools.partial(products, jnp.bfloat16, 10240, 7168, 4),
    "flash 4k, 2 groups": functools.partial(grouped_attention, 4096, 24, 2, 128, True),
    "norms, wide": functools.partial(norms, 8192, 12288),
    "softmax 8k": functools.partial(softmaxes, 16384, 8192),
    "gated layers, 2k": functools.partial(gated_layers, 24576, 2048, 7168, 5),
    "llama3-8b, 3 layers": functools.partial(
        of_model, "llama3-8b", 4, 4096, layers=3, vocab=48_000
    ),
}
# Never met before the model had a clock that power holds down; measured once, as they come.
LATER: dict[str, Callable[[], Step]] = {
    "bf16 products, 10k": functools.partial(products, jnp.bfloat16, 6144, 10240, 3),
    "gated layers, 5k": functools.partial(gated_layers, 8192, 5120, 13824, 3),
    "flash 8k, 40 heads": functools.partial(grouped_attention, 8192, 40, 8, 128, True),
    "softmax 16k": functools.partial(softmaxes, 8192, 16384),
    "norms, 6k": functools.partial(norms, 16384, 6144),
    "head of 64k": functools.partial(entropy, 16384, 3072, 64_000),
    "decoder, 8k": functools.partial(of_model, "llama3-8b", 2, 8192, layers=2, vocab=96_000),
}
# Measured once, with their programs kept, before the last change to the model of rows; looked at
# once, after it.
LAST: dict[str, Callable[[], Step]] = {
    "norms, 5k": functools.partial(norms, 24576, 5120),
    "softmax 5k": functools.partial(softmaxes, 24576, 5120),
    "bf16 products, 9k": functools.partial(products, jnp.bfloat16, 8192, 9216, 3),
    "gated layers, 4k": functools.partial(gated_layers, 12288, 4096, 10240, 3),
    "flash 4k, 20 heads": functools.partial(grouped_attention, 4096, 20, 4, 128, True),
    "decoder, 2k": functools.partial(of_model, "llama3-8b", 8, 2048, layers=2, vocab=40_000),
}
# Measured once; then the model of rows was made anew from other kernels, since norms were out.
BEFORE_ROWS: dict[str, Callable[[], Step]] = {
    "norms, 7k": functools.partial(norms, 16384, 7168),
    "softmax 12k": functools.partial(softmaxes, 12288, 12288),
    "bf16 products, 11k": functools.partial(products, jnp.bfloat16, 6144, 11264, 3),
    "gated layers, 6k": functools.partial(gated_layers, 8192, 6144, 16384, 2),
    "flash 2k, 32 heads": functools.partial(grouped_attention, 2048, 32, 8, 128, True),
    "decoder, 1k": functools.partial(of_model, "llama3-8b", 16, 1024, layers=3, vocab=56_000),
}
# Written when the model was done; measured once, with nothing changed for them.
UNMET: dict[str, Callable[[], Step]] = {
    "norms, 4608": functools.partial(norms, 24576, 4608),
    "softmax 20k": functools.partial(softmaxes, 6144, 20480),
    "bf16 products, 12k": functools.partial(products, jnp.bfloat16, 4096, 12288, 3),
    "gated layers, 3584": functools.partial(gated_layers, 16384, 3584, 18944, 2),
    "flash 8k, 28 heads": functools.partial(grouped_attention, 8192, 28, 4, 128, True),
    "decoder, 152k": functools.partial(of_model, "llama3-8b", 4, 2048, layers=2, vocab=152_064),
}
STEPS = SEEN | BLIND | CALIBRATED | LATER | LAST | BEFORE_ROWS | UNMET
