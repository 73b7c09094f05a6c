"""Steps with JAX's own attention kernels, planned and compiled by libtpu."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright._compat import tpu_attention

pytestmark = pytest.mark.compilers

BATCH, HEADS, LENGTH, HEAD, WIDTH = 16, 16, 2048, 128, 1024


def products(q, k, v):
    scores = jnp.einsum("bhsd,bhtd->bhst", q, k, preferred_element_type=jnp.float32)
    past = jnp.arange(LENGTH)[:, None] >= jnp.arange(LENGTH)
    weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bhst,bhtd->bhsd", weights, v)


def flash(q, k, v):
    kernels = tpu_attention("flash_attention")
    sizes = kernels.BlockSizes(
        **dict.fromkeys(
            """block_q block_k_major block_k block_q_major_dkv block_k_major_dkv block_k_dkv
            block_q_dkv block_k_major_dq block_k_dq block_q_dq""".split(),
            512,
        ),
        block_b=1,
    )
    return kernels.flash_attention(q, k, v, causal=True, block_sizes=sizes)


def splash(q, k, v):
    kernels = tpu_attention("splash_attention")
    attention = kernels.make_splash_mha(
        kernels.MultiHeadMask([kernels.CausalMask((LENGTH, LENGTH))] * HEADS),
        block_sizes=kernels.BlockSizes(*[512] * 8),
        head_shards=1,
        q_seq_shards=1,
    )
    return jax.vmap(attention)(q, k, v)


def decoder_step(attention):
    """Two layers of a decoder in a scan, checkpointed, and SGD with momentum."""

    @jax.checkpoint
    def layer(x, w):
        q, k, v = (jnp.einsum("bse,ehd->bhsd", x, w[n]) for n in ("query", "key", "value"))
        x = x + jnp.einsum("bhsd,hde->bse", attention(q * HEAD**-0.5, k, v), w["out"])
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss(params, tokens):
        x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
        logits = jax.nn.log_softmax((x @ params["head"]).astype(jnp.float32))
        return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()

    def step(state, tokens):
        value, grads = jax.value_and_grad(loss)(state["params"], tokens)
        speed = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], speed)
        return {"params": params, "momentum": speed}, value

    return step


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def state():
    layers = {name: shape(2, WIDTH, HEADS, HEAD) for name in ("query", "key", "value")}
    layers |= {"out": shape(2, HEADS, HEAD, WIDTH)}
    layers |= {"up": shape(2, WIDTH, 4 * WIDTH), "down": shape(2, 4 * WIDTH, WIDTH)}
    params = {"embed": shape(32000, WIDTH), "head": shape(WIDTH, 32000), "layers": layers}
    return {"params": params, "momentum": params}


@functools.cache
def planned(attention, mesh=None, heads_on=None):
    """The plan of a decoder, and what libtpu makes of it."""
    plan = mw.plan(
        decoder_step(attention),
        state(),
        shape(BATCH, LENGTH, dtype=jnp.int32),
        on="v5e:4x4",
        mesh=mesh,
        keep={"layers/key dim 2": heads_on} if heads_on else None,
        donate_argnums=0,
        max_axes=2,
        pipelines=False,
        progress=False,
    )
    return plan, plan.rehearse(codegen=False, progress=False)


ATTENDED = re.compile(rf"\[(\d+),(\d+),{LENGTH},{HEAD}\]")


def kernel_shapes(rehearsal):
    """Batch and heads of what kernels make, as they are on a device."""
    calls = re.findall(r"= (.*) custom-call\(.*\"tpu_custom_call\"", rehearsal.text)
    return {tuple(map(int, pair)) for results in calls for pair in ATTENDED.findall(results)}


def gathered(rehearsal):
    """What is gathered of activations, which have the tokens of a row, but for the tokens."""
    return [
        each.shape
        for each in rehearsal.collectives
        if each.kind == "all-gather" and f"{LENGTH}," in each.shape and each.bytes > 2**20
    ]


@pytest.mark.parametrize("attention", [flash, splash], ids=lambda f: f.__name__)
def test_kernels_are_run_on_a_devices_own_rows_and_nothing_is_gathered_for_them(attention):
    plan, rehearsal = planned(attention)
    assert [axis.shards[0] for axis in plan.axes] == ["batch"]
    assert kernel_shapes(rehearsal) == {(BATCH // 16, HEADS)}
    assert gathered(rehearsal) == []
    assert plan.predicted.seconds == pytest.approx(rehearsal.time.total, rel=0.25)
    _, as_products = planned(products)
    assert rehearsal.time.total < as_products.time.total
    assert rehearsal.memory.peak <= as_products.memory.peak


@pytest.mark.parametrize("attention", [flash, splash], ids=lambda f: f.__name__)
def test_kernels_are_run_on_a_devices_own_heads(attention):
    _, rehearsal = planned(attention, "fsdp:4, tp:4", "tp")
    assert kernel_shapes(rehearsal) == {(BATCH // 4, HEADS // 4)}
    assert not any(ATTENDED.search(text) for text in gathered(rehearsal))


@pytest.mark.parametrize("attention", [flash, splash], ids=lambda f: f.__name__)
def test_the_planner_counts_the_work_and_the_time_of_compiled_kernels(attention):
    plan, rehearsal = planned(attention)
    kernels = [each for each in plan.costs.program.operations if each.primitive == "pallas_call"]
    compiled = rehearsal.time.custom
    assert {each.trust for each in compiled} == {"counted"}
    work = sum(each.times * each.flops for each in kernels) / 16
    assert work == pytest.approx(sum(each.flops for each in compiled))
    seconds = sum(
        each.times * plan.costs.way(plan.costs.work(each), plan.lists).compute for each in kernels
    )
    assert seconds == pytest.approx(sum(each.seconds for each in compiled), rel=0.1)


@pytest.mark.slow
def test_our_models_with_splash_are_planned_like_those_with_products():
    results = {}
    for attention in ("splash", "dot"):
        model = mw.models.model("llama3-8b", layers=2, vocab=32768, seq=LENGTH, attention=attention)
        plan = mw.plan(
            model.train_step,
            model.shapes(),
            model.batch(BATCH),
            on="v5e:4x4",
            mesh="fsdp:16",
            donate_argnums=0,
            progress=False,
        )
        results[attention] = plan.rehearse(codegen=False, progress=False)
    splash, dot = results["splash"], results["dot"]
    assert kernel_shapes(splash) == {(1, 32), (1, 8)}  # of queries, and of keys and values
    assert gathered(splash) == []
    assert splash.time.total < dot.time.total
    assert splash.memory.peak <= dot.memory.peak
