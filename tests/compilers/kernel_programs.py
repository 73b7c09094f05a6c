"""Programs with kernels as people run them: what each computes on a device, counted by hand.

Every program works on its own part of its arguments, cut along their first dim over one axis, `dp`;
the shapes here are those of one device.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# jax 0.12 calls some of its kernels deprecated; people run them all the same.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import (
        all_gather_mgpu,
        attention_mgpu,
        blackwell_matmul_mgpu,
        blackwell_ragged_dot_mgpu,
        collective_matmul_mgpu,
        decode_attention,
        hopper_matmul_mgpu,
        hopper_mixed_type_matmul_mgpu,
        layer_norm,
        ragged_dot_mgpu,
        reduce_scatter_mgpu,
        rms_norm,
        softmax,
        transposed_ragged_dot_mgpu,
    )
    from jax.experimental.pallas.ops.gpu import attention as triton_attention
    from jax.experimental.pallas.ops.gpu import paged_attention as triton_paged
    from jax.experimental.pallas.ops.tpu import flash_attention as flash
    from jax.experimental.pallas.ops.tpu import matmul as tpu_matmul
    from jax.experimental.pallas.ops.tpu.megablox import gmm
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged_paged
    from jax.experimental.pallas.ops.tpu.random import philox, threefry
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

BATCH, HEADS, LENGTH, HEAD, BLOCK = 2, 4, 1024, 128, 256
BLOCKS = LENGTH // BLOCK
CAUSAL = BLOCKS * (BLOCKS + 1) // 2  # blocks of scores that are not all masked
PRODUCT = BATCH * HEADS * 2 * BLOCK * BLOCK * HEAD  # operations of a product of such blocks
TOKENS, WIDTH, EXPERTS = 1024, 512, 4

bf16, f32, s8, s32 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.int32


def shape(*dims, dtype=bf16):
    return jax.ShapeDtypeStruct(dims, dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of one device's arguments; `flops` and the trust in each of its kernels as they
    must be. `per_device`: they are done once for each device of the ring.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    flops: float
    kernels: tuple[str, ...] = ()
    on: tuple[str, ...] = ("v5e:2x2",)
    per_device: bool = False


BOTH = ("v5e:2x2", "h100:8")
GPU = ("h100:8",)
ATTENTION = (shape(BATCH, HEADS, LENGTH, HEAD),) * 3


def gradients(attention):
    def step(*operands):
        def loss(*operands):
            return attention(*operands).astype(f32).sum()

        return jax.grad(loss, argnums=tuple(range(len(operands))))(*operands)

    return step


def block_sizes(fused=False):
    named = ["block_q", "block_kv", "block_kv_compute"]
    named += ["block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"]
    named += [] if fused else ["block_q_dq", "block_kv_dq"]
    return splash.BlockSizes(**dict.fromkeys(named, BLOCK), use_fused_bwd_kernel=fused)


def splash_with(mask, fused=False):
    def attention(query, key, value):
        kernel = splash.make_splash_mha_single_device(
            masks.MultiHeadMask([mask] * HEADS), block_sizes=block_sizes(fused)
        )
        return jax.vmap(kernel)(query, key, value)

    return attention


causal_splash = splash_with(masks.CausalMask((LENGTH, LENGTH)))


def splash_layers(query, key, value):
    def layer(x, _):
        return causal_splash(x, key, value), None

    return lax.scan(layer, query, None, length=3)[0]


def flash_causal(query, key, value):
    names = [field.name for field in dataclasses.fields(flash.BlockSizes)]
    sizes = {name: 1 if name == "block_b" else BLOCK for name in names}
    return flash.flash_attention(
        query, key, value, causal=True, block_sizes=flash.BlockSizes(**sizes)
    )


def grouped(function):
    return function, (
        shape(TOKENS, WIDTH),
        shape(EXPERTS, WIDTH, WIDTH),
        shape(EXPERTS, dtype=s32),
    )


def megablox(tokens, weights, sizes):
    return gmm(tokens, weights, sizes, f32, (128, 128, 128))


def paged(query, keys, values, lengths, pages):
    return paged_attention(query, keys, values, lengths, pages, pages_per_compute_block=4)


def ring_attention(query, key, value):
    """Attention over a sequence that is cut over the ring: keys and values go around it."""
    count = lax.axis_size("dp")
    ring = [(i, (i + 1) % count) for i in range(count)]

    def turn(carry, _):
        total, weight, key, value = carry
        scores = jnp.exp(jnp.einsum("bhqd,bhkd->bhqk", query, key).astype(f32))
        total += jnp.einsum("bhqk,bhkd->bhqd", scores.astype(bf16), value).astype(f32)
        weight += scores.sum(-1, keepdims=True)
        key, value = (lax.ppermute(each, "dp", ring) for each in (key, value))
        return (total, weight, key, value), None

    start = (jnp.zeros(query.shape, f32), jnp.zeros((*query.shape[:3], 1), f32), key, value)
    total, weight, *_ = lax.scan(turn, start, None, length=count)[0]
    return (total / weight).astype(bf16)


def ragged_exchange(tokens, out, sizes):
    return lax.ragged_all_to_all(tokens, out, *[sizes[0]] * 4, axis_name="dp")


def int8_product(left, right):
    return jnp.dot(left, right, preferred_element_type=s32)


def fp8_product(left, right):
    left, right = (each.astype(jnp.float8_e4m3fn) for each in (left, right))
    return jnp.dot(left, right, preferred_element_type=f32)


def transformed(x):
    return jnp.fft.ifft(jnp.fft.fft(x) * 2).real


def branched(x, w):
    return lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x * 2, x)


def looped(x, w):
    def more(carry):
        return jnp.abs(carry[0, 0]) < 100

    return lax.while_loop(more, lambda x: x @ w + 1, x)


def user_kernel(declared):
    """A kernel with metadata whose loop only a run knows, with or without what it costs."""

    def call(x, factor):
        estimate = pl.CostEstimate(flops=12345, transcendentals=0, bytes_accessed=4096)
        return pl.pallas_call(
            _repeated,
            out_shape=jax.ShapeDtypeStruct(x.shape, f32),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pltpu.SMEM)],
            metadata={"made by": "a {user}", "blocks": '{"q": 1}'},
            cost_estimate=estimate if declared else None,
        )(x, factor)

    return call


def _repeated(x, factor, out):
    def step(_, value):
        return value + jnp.dot(x[...], x[...], preferred_element_type=f32)

    out[...] = lax.fori_loop(0, factor[0], step, jnp.zeros(x.shape, f32))


def random_bits(seed):
    return philox.philox_random_bits(seed, 32, (256, 1024))


def threefry_bits(key):
    return threefry.plthreefry_random_bits(key, 32, (256, 1024))


def ragged_pages(query, pages, lengths, indices, starts, count):
    return ragged_paged.ragged_paged_attention(
        query, pages, lengths, indices, starts, count, sm_scale=1.0
    )


# Products of Mosaic GPU: two warpgroups with 64 x 128 of a result each.
TILES = {"tile_m": 64, "tile_n": 128, "tile_k": 64, "max_concurrent_steps": 4}


def hopper_product(left, right):
    return hopper_matmul_mgpu.matmul(left, right, None, hopper_matmul_mgpu.TuningConfig(**TILES))


def mixed_product(left, right):
    config = hopper_mixed_type_matmul_mgpu.TuningConfig(**TILES)
    return hopper_mixed_type_matmul_mgpu.mixed_matmul_kernel(
        left, right, out_dtype=bf16, config=config
    )


def hopper_ragged(tokens, weights, sizes):
    return ragged_dot_mgpu.ragged_dot(
        tokens, weights, group_sizes=sizes, block_m=64, block_n=64, block_k=64,
        max_concurrent_steps=2, grid_block_n=1,
    )  # fmt: skip


def blackwell_product(collective):
    def product(left, right):
        config = blackwell_matmul_mgpu.TuningConfig(
            tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=2, collective=collective
        )
        return blackwell_matmul_mgpu.matmul_kernel(left, right, config)

    return product


def blackwell_ragged(tokens, weights, sizes):
    config = blackwell_ragged_dot_mgpu.TuningConfig(
        tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=2, collective=True,
        grid_tile_width=1, grid_minor_dim=blackwell_matmul_mgpu.MatmulDimension.N,
    )  # fmt: skip
    return blackwell_ragged_dot_mgpu.ragged_dot_kernel(tokens, weights, sizes, config)


def transposed_ragged(left, right, sizes):
    return transposed_ragged_dot_mgpu.transposed_ragged_dot(
        left, right, group_sizes=sizes, block_m=64, block_n=64, block_k=64,
        max_concurrent_steps=2, grid_block_n=1,
    )  # fmt: skip


def gathered_product(left, right):
    config = hopper_matmul_mgpu.TuningConfig(**TILES)
    return collective_matmul_mgpu.all_gather_lhs_matmul(left, right, "dp", config=config)


def hopper_attention(causal, backward):
    blocks = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=causal, **blocks
    )

    def attention(query, key, value):
        return attention_mgpu.attention(query, key, value, config)

    return gradients(attention) if backward else attention


def triton_mha(query, key, value):
    return triton_attention.mha(query, key, value, segment_ids=None, causal=True)


def triton_pages(query, keys, values, tables, lengths):
    return triton_paged.paged_attention(query, keys, values, tables, lengths)


SQUARE = (shape(512, 512), shape(512, 512))
RAGGED = 2 * TOKENS * WIDTH * WIDTH
# Attention of Triton: blocks of 128, keys in the order (batch, length, heads, dim).
TRITON = (shape(BATCH, LENGTH, HEADS, HEAD, dtype=jnp.float16),) * 3
_HALF_BLOCKS = 8 * 9 // 2 * BATCH * HEADS * 2 * 128 * 128 * HEAD

PROGRAMS = [
    Program("splash", causal_splash, ATTENTION, 2 * CAUSAL * PRODUCT, ("counted",)),
    Program("splash backward", gradients(causal_splash), ATTENTION, 9 * CAUSAL * PRODUCT,
            ("counted",) * 3),
    Program("splash fused backward",
            gradients(splash_with(masks.CausalMask((LENGTH, LENGTH)), fused=True)),
            ATTENTION, 7 * CAUSAL * PRODUCT, ("counted",) * 2),
    Program("splash local", splash_with(masks.LocalMask((LENGTH, LENGTH), (BLOCK - 1, 0), 0)),
            ATTENTION, 2 * (2 * BLOCKS - 1) * PRODUCT, ("counted",)),
    Program("splash in layers", splash_layers, ATTENTION, 3 * 2 * CAUSAL * PRODUCT, ("counted",)),
    Program("flash", flash_causal, ATTENTION, 2 * CAUSAL * PRODUCT, ("counted",)),
    Program("flash backward", gradients(flash_causal), ATTENTION, 9 * CAUSAL * PRODUCT,
            ("counted",) * 3),
    Program("megablox", *grouped(megablox), RAGGED, ("declared",)),
    Program("ragged_dot", *grouped(lax.ragged_dot), RAGGED, ("declared", "unknown")),
    # The GPU's compiler multiplies every token with every expert.
    Program("ragged_dot", *grouped(lax.ragged_dot), EXPERTS * RAGGED, on=GPU),
    Program("paged attention", paged,
            (shape(4, 8, HEAD), shape(4, 64, 16, HEAD), shape(4, 64, 16, HEAD),
             shape(4, dtype=s32), shape(4, 16, dtype=s32)), 0, ("unknown",)),
    Program("Pallas product",
            functools.partial(tpu_matmul.matmul, block_shape=(256, 256), block_k=256), SQUARE,
            2 * 512**3, ("counted",)),
    Program("random bits", random_bits, (shape(2, dtype=jnp.uint32),), 0, ("counted",)),
    Program("user kernel, declared", user_kernel(True),
            (shape(256, 256), shape(1, dtype=s32)), 12345, ("declared",)),
    Program("user kernel", user_kernel(False),
            (shape(256, 256), shape(1, dtype=s32)), 0, ("unknown",)),
    Program("ring attention", ring_attention, ATTENTION, 2 * BLOCKS**2 * PRODUCT, on=BOTH,
            per_device=True),
    Program("ragged all-to-all", ragged_exchange,
            (shape(64, WIDTH), shape(64, WIDTH), shape(1, 4, dtype=s32)), 0),
    Program("int8 product", int8_product, (shape(512, 512, dtype=s8),) * 2, 2 * 512**3, on=BOTH),
    Program("fp8 product", fp8_product, SQUARE, 2 * 512**3, on=BOTH),
    Program("FFT", transformed, (shape(64, 1024, dtype=f32),), 0, on=GPU),
    Program("sort", jnp.sort, (shape(64, 4096, dtype=f32),), 0, on=BOTH),
    Program("cond", branched, SQUARE, 2 * 512**3, on=BOTH),
    Program("while", looped, SQUARE, 2 * 512**3, on=BOTH),
    Program("Triton attention", triton_mha, TRITON, 2 * _HALF_BLOCKS, ("counted",), GPU),
    # Its backward has blocks of 32 and seven products; a third kernel multiplies nothing.
    Program("Triton attention backward", gradients(triton_mha), TRITON,
            2 * _HALF_BLOCKS + 7 * 32 * 33 // 2 * BATCH * HEADS * 2 * 32 * 32 * HEAD,
            ("counted",) * 3, GPU),
    Program("Triton decoding", decode_attention.mqa,
            (shape(2, 16, HEAD), shape(2, 4096, HEAD), shape(2, 4096, HEAD)),
            2 * 2 * 2 * 16 * 4096 * HEAD, ("counted",), GPU),
    Program("Triton pages", triton_pages,
            (shape(2, 16, HEAD), shape(4, 64, 16, HEAD), shape(4, 64, 16, HEAD),
             shape(2, 128, dtype=s32), shape(2, dtype=s32)), 0, ("unknown",), GPU),
    Program("Triton softmax", softmax.softmax, (shape(64, 1024),), 0, ("counted",), GPU),
    Program("Triton layer norm", layer_norm.layer_norm,
            (shape(2, 64, 1024), shape(1024), shape(1024)), 0, ("counted",), GPU),
    Program("Triton RMS norm", rms_norm.rms_norm,
            (shape(2, 64, 1024), shape(1024), shape(1024)), 0, ("counted",), GPU),
    Program("threefry bits", threefry_bits, (shape(2, dtype=jnp.uint32),), 0, ("counted",)),
    # How long its sequences are only a run knows; its blocks depend on the kind of TPU.
    Program("ragged paged attention", ragged_pages,
            (shape(128, 8, HEAD), shape(64, 16, 16, HEAD), shape(8, dtype=s32),
             shape(8, 16, dtype=s32), shape(9, dtype=s32), shape(1, dtype=s32)),
            0, ("unknown",), ("v5e:2x2", "v6e:2x2")),
    Program("Mosaic product", hopper_product, (shape(1024, 512), shape(512, 1024)),
            2 * 1024 * 512 * 1024, ("counted",), GPU),
    Program("Mosaic mixed product", mixed_product,
            (shape(1024, 512, dtype=s8), shape(512, 1024)), 2 * 1024 * 512 * 1024,
            ("counted",), GPU),
    # It has blocks of 64 tokens, and one more for each group after the first.
    Program("Mosaic ragged_dot", *grouped(hopper_ragged),
            RAGGED // TOKENS * (TOKENS + 64 * (EXPERTS - 1)), ("counted",), GPU),
    # How many tokens a group has decides how far it goes, and only a run knows.
    Program("Mosaic transposed ragged_dot", transposed_ragged,
            (shape(TOKENS, WIDTH), shape(TOKENS, WIDTH), shape(EXPERTS, dtype=s32)),
            0, ("unknown",), GPU),
    Program("Blackwell product", blackwell_product(False), (shape(1024, 512), shape(512, 1024)),
            2 * 1024 * 512 * 1024, ("counted",), ("b200:8",)),
    Program("Blackwell product of two blocks", blackwell_product(True),
            (shape(1024, 512), shape(512, 1024)), 2 * 1024 * 512 * 1024, ("counted",), ("b200:8",)),
    # So does this, of 256: two blocks of threads with 128 each.
    Program("Blackwell ragged_dot", *grouped(blackwell_ragged),
            RAGGED // TOKENS * (TOKENS + 256 * (EXPERTS - 1)), ("counted",), ("b200:8",)),
    Program("Mosaic gathered product", gathered_product,
            (shape(1024, 512, dtype=jnp.float16), shape(512, 1024, dtype=jnp.float16)),
            2 * 1024 * 512 * 1024, ("counted",), GPU, per_device=True),
    # Causal: two warpgroups of 64 queries go as far as the later one must, by 128 keys.
    Program("Mosaic attention", hopper_attention(True, False), TRITON, 2 * _HALF_BLOCKS,
            ("counted",), GPU),
    Program("Mosaic attention backward", hopper_attention(False, True), TRITON,
            9 * 2 * BATCH * HEADS * LENGTH**2 * HEAD, ("counted",) * 3, GPU),
    Program("Mosaic all-gather",
            functools.partial(all_gather_mgpu.all_gather, axis_name=("dp",)),
            (shape(1024, 512),), 0, ("counted",), GPU),
    Program("Mosaic reduce-scatter",
            functools.partial(reduce_scatter_mgpu.reduce_scatter, axis_name=("dp",)),
            (shape(1024, 512),), 0, ("counted",), GPU),
]  # fmt: skip

# Mosaic's programs for GPUs are counted with jax 0.10 alone; later ones have another form.
if jax.__version_info__ >= (0, 11):
    PROGRAMS = [
        dataclasses.replace(each, flops=0, kernels=("unknown",) * len(each.kernels))
        if each.name.startswith(("Mosaic", "Blackwell"))
        else each
        for each in PROGRAMS
        if each.name != "Mosaic attention backward"
    ]
