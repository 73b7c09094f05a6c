"""cuDNN's attention without cuDNN, and kernels on hardware that they are not for."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import meshwright as mw
from meshwright.errors import RehearsalError

pytestmark = pytest.mark.compilers

MIB = 2**20
BATCH, ROWS, HEADS, WIDTH, EMBED = 32, 2048, 8, 128, 512


def loss(params, x):
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in "qkv")
    found = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    out = jnp.einsum("bshk,hkd->bsd", found, params["o"])
    return jnp.mean(out.astype(jnp.float32) ** 2)


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: (p - g).astype(p.dtype), params, grads), value


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def params(key_heads=HEADS):
    return {
        "q": bf16(EMBED, HEADS, WIDTH),
        "k": bf16(EMBED, key_heads, WIDTH),
        "v": bf16(EMBED, key_heads, WIDTH),
        "o": bf16(HEADS, WIDTH, EMBED),
    }


# The workspace of the backward call on an H200 (benchmarked there, exact): float32 of the query's
# gradient and a sum a row; of the keys' for each head, where several share them.
@pytest.mark.parametrize(
    ("on", "mesh", "key_heads"),
    [("h100:8", "fsdp:8", HEADS), ("h100:8x2", "dp:2, fsdp:8", 2)],
)
def test_cudnn_attention_is_cut_over_the_batch_and_has_its_workspace(on, mesh, key_heads):
    found = mw.rehearse(
        step, params(key_heads), bf16(BATCH, ROWS, EMBED), mesh=mesh, on=on, donate_argnums=0
    )
    local = BATCH // found.placement.topology.num_devices
    assert found.text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert found.text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1
    assert f"bf16[{local},{HEADS},{ROWS},{WIDTH}]" in found.text  # not gathered
    assert {entry.cause for entry in found.collectives} >= {"gradient sums", "parameter gathers"}
    expected = 256 + 4 * local * ROWS * HEADS * (WIDTH + 1)
    if key_heads < HEADS:
        expected += 4 * local * ROWS * HEADS * WIDTH
    (workspace,) = (buffer for buffer in found.memory.buffers if buffer.shape.startswith("u8["))
    assert workspace.bytes == expected
    assert workspace.source.file == __file__
    alive = sum(buffer.bytes for buffer in found.memory.buffers)
    assert abs(found.memory.peak - alive) < 2 * MIB


def double(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def tpu_kernel(x):
    return pl.pallas_call(double, out_shape=x, compiler_params=pltpu.CompilerParams())(x)


def triton_kernel(x):
    from jax.experimental.pallas import triton

    return pl.pallas_call(double, out_shape=x, compiler_params=triton.CompilerParams())(x)


def cudnn_kernel(x):
    q = x.reshape(1, 128, 1, 128).astype(jnp.bfloat16)
    return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")


@pytest.mark.parametrize(
    ("function", "on", "words"),
    [
        (tpu_kernel, "h100:8", r"is for TPUs, and the program is for cuda"),
        (triton_kernel, "v5e:2x2", r"is for GPUs \(cuda\), and the program is for tpu"),
        (cudnn_kernel, "v5e:2x2", r"is for GPUs \(cuda\), and the program is for tpu"),
    ],
)
def test_a_kernel_for_another_platform_says_which(function, on, words):
    with pytest.raises(RehearsalError, match=rf"test_kernel_platforms\.py:\d+ {words}"):
        mw.rehearse(function, jax.ShapeDtypeStruct((128, 128), "float32"), mesh="fsdp:-1", on=on)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(("function", "on"), [(tpu_kernel, "v5e:1x1"), (triton_kernel, "h100:1")])
def test_a_kernel_for_this_platform_is_compiled(function, on):
    found = mw.rehearse(
        function, jax.ShapeDtypeStruct((128, 128), "float32"), mesh="fsdp:-1", on=on
    )
    assert "custom-call" in found.text
