"""Remedies for models of Flax and Equinox: estimated peaks against those of a second compile."""

import flax.linen as nn
import models_equinox
import models_linen
import optax
import pytest

import meshwright as mw
from meshwright.rehearsal.mesh_remedies import argument_bytes_of

pytestmark = pytest.mark.slow

TOLERANCE = 0.15  # of the peak before the change
SIZES = {
    "lm1b": {"width": 128, "rows": 32, "length": 128, "vocab": 1024},
    "vit": {"width": 128, "rows": 64, "side": 32},
}
LM1B = {
    "mesh": "dp:2, fsdp:2, tp:2",
    "logical": models_linen.LM1B_TABLE,
    "unmatched": "replicate",
}


def rehearsed(parts, mesh="dp:2, fsdp:4", **options):
    step, args = parts
    return mw.rehearse(step, *args, mesh=mesh, on="h100:8", compiler="cpu", **options)


@pytest.fixture(scope="module")
def lm1b():
    return rehearsed(models_linen.lm1b(**SIZES["lm1b"]), **LM1B)


@pytest.fixture(scope="module")
def vit():
    return rehearsed(models_equinox.vit(**SIZES["vit"]))


@pytest.mark.parametrize("name", SIZES)
def test_estimates_are_near_what_a_second_compile_says(name, request):
    ways = request.getfixturevalue(name).remedies(check=True)
    tried = {way.what: way for way in ways if way.tried is not None}
    assert {"shard parameters further", "halve the batch"} <= set(tried)
    for way in tried.values():
        if way.what.startswith("shard "):  # what the partitioner gathers there is not known before
            arguments = argument_bytes_of(way.request)
            assert way.tried.memory.arguments == pytest.approx(arguments, abs=8)  # a step's number
        else:
            assert way.peak == pytest.approx(way.tried.memory.peak, abs=TOLERANCE * way.before), way


def estimated(result, what):
    return next(way for way in result.remedies() if way.what == what)


def test_rematerialised_layers_of_linen_are_not_told_to_do_it_again(lm1b, monkeypatch):
    assert estimated(lm1b, "rematerialise layers").saves > 0
    monkeypatch.setattr(models_linen, "Lm1bBlock", nn.remat(models_linen.Lm1bBlock))
    lighter = rehearsed(models_linen.lm1b(**SIZES["lm1b"]), **LM1B)
    assert "rematerialise layers" not in {each.what for each in lighter.remedies()}


def test_first_moments_in_bfloat16_are_as_estimated(monkeypatch):
    before = rehearsed(models_linen.lm1b(width=128), **LM1B)
    way = estimated(before, "optimizer moments in bfloat16")
    adamw = optax.adamw
    monkeypatch.setattr(optax, "adamw", lambda rate: adamw(rate, mu_dtype="bfloat16"))
    lighter = rehearsed(models_linen.lm1b(width=128), **LM1B)
    saved = before.memory.peak - lighter.memory.peak
    assert way.saves == pytest.approx(saved, abs=0.05 * way.before)


def test_scores_are_seen_in_both(lm1b, vit):
    for result in (lm1b, vit):
        way = estimated(result, "attention by a flash kernel")
        assert "implementation='cudnn'" in way.how
        assert 0 < way.saves < result.memory.temporaries
