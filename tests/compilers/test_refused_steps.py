"""Steps that the vendors' compilers refuse, or that do not fit: remedies against real compiles."""

import dataclasses

import pytest

import meshwright as mw
from meshwright.rehearsal.api import run

pytestmark = pytest.mark.compilers

TOLERANCE = 0.25  # of the peak before the change


def decoder(**settings):
    sizes = {"layers": 4, "embed": 2048, "heads": 16, "kv_heads": 8, "mlp": 8192, "vocab": 32000}
    return mw.models.model("llama3-8b", **sizes, **settings)


def by_what(remedies):
    return {remedy.what: remedy for remedy in remedies}


def assert_near(remedy):
    compiled = run(remedy.request).memory
    assert remedy.peak == pytest.approx(compiled.peak, abs=TOLERANCE * remedy.before), remedy
    return compiled


def assert_no_less(remedy, codegen=True):
    """What is computed again is estimated as if a compiler reused none of its memory."""
    request = dataclasses.replace(remedy.request, codegen=codegen)
    assert run(request).memory.peak < remedy.peak < remedy.before


def test_a_refused_decoder_has_estimated_buffers_and_ways_out():
    found = mw.rehearse_model(
        decoder(remat="none"), batch=64, seq=2048, mesh="fsdp:4", on="v5e:2x2"
    )
    assert found.memory.refused and found.memory.estimated
    assert found.estimate.stand_in
    text = str(found)
    assert "largest at the peak, estimated on CPU devices" in text
    assert "the same step on simulated CPU devices" in " ".join(text.split())
    # Splash attention writes no scores, and the CPU devices' are not shown as if it did.
    scores = [b for b in found.memory.buffers if b.shape.endswith("8,2,2048,2048]")]
    assert not scores
    ways = by_what(found.remedies())
    assert {
        "accumulate gradients over half batches",
        "offload the inputs of layers to the host",
        "halve the sequence",
        "take a larger slice",
    } <= set(ways)
    assert_no_less(ways["rematerialise layers"], codegen=False)


@pytest.mark.slow
def test_a_decoder_too_large_for_gpus_is_told_of_cudnns_attention():
    found = mw.rehearse_model(
        decoder(remat="none", attention="dot"),
        batch=32,
        seq=8192,
        mesh="fsdp:8",
        on="h100:8",
    )
    assert not found.fits and not found.memory.refused
    ways = by_what(found.remedies())
    flash = ways["attention by a flash kernel"]
    assert "--set attention=auto" in flash.how
    assert assert_near(flash).peak < 0.6 * found.memory.peak
    assert_no_less(ways["rematerialise layers"])
