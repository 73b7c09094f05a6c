"""Avoidable costs in programs of the TPU compiler: Flax's decoder, and work that is done again."""

import linecache
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw

pytestmark = pytest.mark.compilers


@pytest.mark.slow
def test_the_largest_cost_of_lm1b_is_at_its_logits(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[1] / "ecosystem")])
    pytest.importorskip("flax")
    import models_linen

    step, args = models_linen.lm1b(rows=64, length=32, vocab=2048)
    r = mw.rehearse(
        step,
        *args,
        mesh="fsdp:4, tp:4",
        on="v5e:4x4",
        logical=models_linen.LM1B_TABLE,
        unmatched="replicate",
        cache=tmp_path,
    )
    first = r.costs()[0]
    assert first.kind in ("activation all-reduced", "batch gathered") and first.over == "fsdp"
    assert "embed.attend" in linecache.getline(first.source.file, first.source.line)
    assert 'P("fsdp", *[P.UNCONSTRAINED] * 2)' in first.write


@pytest.mark.parametrize("on", ["v5e:2x4", "h100:8"])
def test_products_of_whole_weights_are_done_again_over_tp(on, tmp_path):
    def step(w, x):
        def loss(w, x):
            def layer(h, w):
                return jnp.tanh(h @ w), None

            h, _ = jax.lax.scan(jax.checkpoint(layer), x, w)
            return jnp.sum(h.astype("float32") ** 2)

        return jax.value_and_grad(loss)(w, x)

    w = jax.ShapeDtypeStruct((4, 1024, 1024), "bfloat16")
    x = jax.ShapeDtypeStruct((256, 1024), "bfloat16")
    options = {"mesh": "dp:2, tp:4", "on": on, "cache": tmp_path}
    r = mw.rehearse(step, w, x, in_shardings=[P(), P("dp")], **options)
    assert {(work.over, work.copies) for work in r.time.repeated} == {("tp", 4)}
    assert r.time.useful_flops == pytest.approx(r.time.flops / 4)
    once = mw.rehearse(step, w, x, in_shardings=[P(None, None, "tp"), P("dp")], **options)
    assert once.time.repeated == ()
    assert once.time.flops == pytest.approx(r.time.useful_flops, rel=0.01)
