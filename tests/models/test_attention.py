"""Flash attention against the products written out, and which of them is taken for what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import close

import meshwright as mw
from meshwright.errors import ModelError
from meshwright.models.attention import (
    Blocks,
    attend,
    choose_kernel,
    target_platform,
    tuned_blocks,
)

BATCH, LENGTH, HEADS, KV_HEADS, HEAD = 2, 256, 4, 2, 128
SMALL = Blocks(**dict.fromkeys(Blocks().sizes(), 128))


def operands(seed=0, heads=HEADS, kv_heads=KV_HEADS):
    random = np.random.default_rng(seed)
    shapes = [(BATCH, LENGTH, count, HEAD) for count in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(random.normal(size=shape), "float32") for shape in shapes]


def value_and_gradients(arrays, mesh=None, **options):
    def loss(*arrays):
        return jnp.sum(jnp.sin(attend(*arrays, **options)))

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    if mesh is None:
        return step(*arrays)
    with jax.set_mesh(mw.mesh(mesh)):
        return step(*arrays)


@functools.cache
def written_out(causal):
    return value_and_gradients(operands(), attention="dot", causal=causal)


# Interpreted: splash runs on a CPU as its kernel is written, block by block.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "causal", "fused"),
    [
        (None, True, False),
        (None, True, True),
        (None, True, None),
        (None, False, False),
        ("fsdp:2, tp:4", True, False),  # more devices than heads of keys
        ("fsdp:2, tp:2, sp:2", True, True),  # queries' positions are split, too
    ],
)
def test_splash_equals_the_products_written_out(mesh, causal, fused):
    # `None` of the parameters: as they are tuned for these shapes.
    blocks = None if fused is None else Blocks(**SMALL.sizes(), fused_backward=fused)
    options = {"attention": "splash", "interpret": True, "blocks": blocks}
    value, gradients = value_and_gradients(operands(), mesh, causal=causal, **options)
    wanted, wanted_gradients = written_out(causal)
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    close(gradients, wanted_gradients, atol=1e-4)


def test_a_cpu_takes_the_products_written_out():
    query = operands()[0]
    assert target_platform() == "cpu"
    assert choose_kernel("auto", query) == "dot"
    auto = jax.make_jaxpr(functools.partial(attend, causal=True))(*operands())
    dot = jax.make_jaxpr(functools.partial(attend, causal=True, attention="dot"))(*operands())
    assert str(auto) == str(dot)
    with pytest.raises(ModelError, match=r"attention='flash': there is no flash kernel for cpu"):
        choose_kernel("flash", query)


def chosen_on(platform, spec, query, attention="auto"):
    """What is taken where the ambient mesh has devices of a platform."""
    device = jax.sharding.AbstractDevice(device_kind="any", num_cores=1, platform=platform)
    mesh = mw.abstract_mesh(spec).update(abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return choose_kernel(attention, query)


def queries(length=256, head=128, dtype="bfloat16"):
    return jax.ShapeDtypeStruct((8, length, 4, head), dtype)


@pytest.mark.parametrize(
    ("platform", "spec", "query", "kernel"),
    [
        ("tpu", "fsdp:8", queries(), "splash"),
        ("tpu", "fsdp:4, sp:2", queries(), "splash"),
        ("tpu", "fsdp:4, sp:4", queries(), "dot"),
        ("tpu", "fsdp:8", queries(length=196), "dot"),
        ("gpu", "fsdp:8", queries(), "cudnn"),
        ("gpu", "fsdp:4, sp:2", queries(), "dot"),
        ("gpu", "fsdp:8", queries(dtype="float32"), "dot"),
        ("gpu", "fsdp:8", queries(head=256), "dot"),
        ("cpu", "fsdp:8", queries(), "dot"),
    ],
)
def test_auto_takes_the_platforms_kernel_where_it_can(platform, spec, query, kernel):
    assert chosen_on(platform, spec, query) == kernel


@pytest.mark.parametrize(
    ("platform", "spec", "query", "message"),
    [
        ("tpu", "fsdp:8", queries(length=196), "196 positions, is no multiple of 128"),
        ("gpu", "fsdp:8", queries(dtype="float32"), "cuDNN takes bfloat16 and float16"),
        ("gpu", "fsdp:8", queries(head=256), "heads of at most 128"),
        ("gpu", "fsdp:4, sp:2", queries(), "whole sequences"),
    ],
)
def test_flash_that_is_asked_for_says_why_not(platform, spec, query, message):
    with pytest.raises(ModelError, match=message):
        chosen_on(platform, spec, query, "flash")


def test_kernels_of_another_platform_are_named_as_such():
    with pytest.raises(ModelError, match="'cudnn': it is a kernel for gpu, and this is for tpu"):
        chosen_on("tpu", "fsdp:8", queries(), "cudnn")
    with pytest.raises(ModelError, match="'splash': it is a kernel for tpu, and this is for gpu"):
        chosen_on("gpu", "fsdp:8", queries(), "splash")


def test_tuned_blocks_fit_the_sequence():
    sizes = [128, 384, 640, 2048, 4096, 6144, 8192]
    tuned = {size: tuned_blocks(size, size) for size in sizes}
    assert [tuned[size].q for size in sizes] == [128, 384, 128, 512, 512, 1024, 1024]
    assert all(blocks.fused_backward and blocks.kv_compute <= 512 for blocks in tuned.values())
    assert tuned_blocks(16384, 16384) == Blocks()
    # A quarter of the queries, all keys: as many sums as keys have blocks.
    assert tuned_blocks(2048, 8192) == tuned[8192]
    assert all(blocks == blocks.cut_to(size) for size, blocks in tuned.items())


def test_blocks_fit_the_sequence():
    assert set(Blocks().cut_to(384).sizes().values()) == {384}
    assert set(Blocks().cut_to(640).sizes().values()) == {128}
    large = Blocks(**dict.fromkeys(Blocks().sizes(), 2048))
    assert set(large.cut_to(512).sizes().values()) == {512}
    with pytest.raises(ModelError, match="q=1024 does not divide a sequence of 1536"):
        Blocks(q=1024).cut_to(1536)
    with pytest.raises(ModelError, match="q=100 is not a multiple of 128"):
        Blocks(q=100)
    with pytest.raises(ModelError, match="kv_compute=384 does not divide kv=512"):
        Blocks(kv_compute=384)
