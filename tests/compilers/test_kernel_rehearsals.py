"""Programs with kernels of their own, as people run them, through the vendors' compilers."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_mask,
)
from jax.sharding import PartitionSpec as P

import meshwright as mw

pytestmark = pytest.mark.compilers

BATCH, HEADS, LENGTH, HEAD = 8, 4, 1024, 128
ATTENTION = jax.ShapeDtypeStruct((BATCH, HEADS, LENGTH, HEAD), jnp.bfloat16)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def causal_splash(query, key, value):
    mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((LENGTH, LENGTH))] * HEADS)
    blocks = splash.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), 256),
        **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), 256),
        **dict.fromkeys(("block_q_dq", "block_kv_dq"), 256),
    )
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=blocks)
    return jax.vmap(kernel)(query, key, value)


def sharded(attention, axis="fsdp"):
    spec = P(axis)
    return jax.shard_map(attention, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)


def gradients(attention, query, key, value):
    def loss(*operands):
        return attention(*operands).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(query, key, value)


def test_splash_attention_is_read_with_the_metadata_of_its_kernels(cache):
    step = functools.partial(gradients, sharded(causal_splash))
    r = mw.rehearse(
        step,
        *[ATTENTION] * 3,
        mesh="fsdp:8",
        on="v5e:2x4",
        in_shardings=[P("fsdp")] * 3,
        name="splash",
        cache=cache,
    )
    assert r.fits
    assert "kernel_metadata={\n" in r.text  # else this test shows nothing
    assert r.text.count('custom_call_target="tpu_custom_call"') == 3
    assert {entry.kind for entry in r.collectives} <= {"all-reduce"}
