"""Models with the kernels of their platform and other options, through the vendors' compilers."""

import re

import pytest

import meshwright as mw
from meshwright.models.attention import Blocks

pytestmark = pytest.mark.compilers

SIZES = {"layers": 2, "heads": 4, "kv_heads": 2, "head": 128, "seq": 512, "compute": "bfloat16"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def rehearsed(cache):
    def rehearse(mesh="fsdp:4, tp:2", on="v5e:2x4", **settings):
        model = mw.models.model("tiny", **{**SIZES, **settings})
        return mw.rehearse_model(model, batch=8, mesh=mesh, on=on, cache=cache)

    return rehearse


def kernels(result):
    """The names of the kernels in a program, without their numbers."""
    calls = re.findall(r"%([\w.]+) = .*custom_call_target=\"tpu_custom_call\"", result.text)
    return {name.partition(".")[0] for name in calls}


def test_a_tpu_gets_splash_attention_by_itself(rehearsed):
    names = kernels(rehearsed())
    assert any("splash" in name and "fwd" in name for name in names), names
    assert any("splash" in name and "dkv" in name for name in names), names


@pytest.mark.slow
def test_products_written_out_hold_the_scores(rehearsed):
    dot, flash = rehearsed(attention="dot"), rehearsed()
    assert not kernels(dot)
    scores = r"\[[\d,]*512,512\]"
    assert re.search(scores, dot.text)
    assert not re.search(scores, flash.text)


@pytest.mark.slow
def test_a_gpu_gets_cudnn_by_itself(rehearsed):
    r = rehearsed(on="h100:8")
    assert "__cudnn$fmhaSoftmax" in r.text
    assert "__cudnn$fmhaSoftmaxBackward" in r.text
    assert "__cudnn$fmha" not in rehearsed(on="h100:8", attention="dot").text


@pytest.mark.slow
def test_split_positions_and_other_kernels_compile(rehearsed):
    assert kernels(rehearsed(mesh="fsdp:2, tp:2, sp:2"))
    assert kernels(rehearsed(attention="pallas", kv_heads=4))
    fused = Blocks(**dict.fromkeys(Blocks().sizes(), 256), fused_backward=True)
    assert any("dkv" in name for name in kernels(rehearsed(blocks=fused)))


def test_a_step_of_ones_own_asks_the_ambient_mesh(cache):
    model = mw.models.model("tiny", **SIZES)

    def step(params, batch):
        return model.loss(params, batch)[0]

    shapes = model.shapes()["params"], model.batch(8)
    spec, on = "fsdp:8", "v5e:2x4"
    # A mesh of named hardware says what its devices are; the text of one does not.
    r = mw.rehearse(step, *shapes, mesh=mw.mesh(spec, on=on), cache=cache)
    assert any("splash" in name for name in kernels(r))
    bound = mw.rehearse(model.loss, *shapes, mesh=spec, on=on, cache=cache)
    assert any("splash" in name for name in kernels(bound))


@pytest.mark.slow
def test_offloaded_layers_leave_the_chip(rehearsed):
    r = rehearsed(remat="custom", offloaded=("decoder_layer_input", "query_proj"))
    on_host = set(re.findall(r"bf16\[([\d,]+)\]\{[^}]*S\(5\)\}", r.text))
    assert {"2,2,512,64", "2,2,512,2,128"} & on_host, on_host


@pytest.mark.slow
@pytest.mark.parametrize(("products", "dtype"), [("int8", "s8"), ("fp8", "f8e4m3fn")])
def test_products_in_eight_bits_compile(rehearsed, products, dtype):
    assert f"{dtype}[" in rehearsed(products=products, attention="dot").text
