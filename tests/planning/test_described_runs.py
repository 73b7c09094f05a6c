"""Described runs: counted parts are exact, predictions follow sizes, published rows come out."""

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import PlanningError
from meshwright.hardware.chips import CHIPS
from meshwright.planning.described_runs import (
    OTHER_CHIPS,
    DescribedRun,
    Transformer,
    domain_size,
    gpu_axis,
)
from meshwright.planning.run_prediction import FITTED, Reached, predict_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LLAMA_8B = Transformer(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_70B = Transformer(80, 8192, 28672, 64, 8, 128, 128256)
GPT3 = Transformer(96, 12288, 49152, 96, 96, 128, 51200, gated=False)
MOE = Transformer(48, 2048, 6144, 32, 4, 128, 151936, experts=128, active=8, expert_mlp=768)
MEGATRON = {
    "attention": "scores",
    "sequence_parallel": False,
    "eager": True,
    "overlap": False,
    "sharded_update": False,
}


def run(model=LLAMA_8B, chip="h100", devices=64, seq=4096, batch=256, microbatch=1, **more):
    chips = {**CHIPS, **OTHER_CHIPS}
    return DescribedRun(model, chips[chip], devices, seq, batch, microbatch, **more)


def seconds(**more):
    return predict_run(run(**more)).seconds


def test_weights_are_those_of_the_published_models():
    assert LLAMA_8B.layer_weights() * 32 + 2 * 128256 * 4096 == pytest.approx(8.03e9, rel=0.001)
    assert MOE.layer_weights() * 48 + 2 * 151936 * 2048 == pytest.approx(30.5e9, rel=0.005)
    assert MOE.layer_weights(active=True) * 48 + 2 * 151936 * 2048 == pytest.approx(
        3.35e9, rel=0.02
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"fsdp": 64, "remat": "full"},
        {"tp": 8, "pp": 4, "vp": 2},
        {"pp": 8, "vp": 3, "seq": 512},
        {"cp": 2, "tp": 2},
        {"model": MOE, "ep": 8, "eager": True},
        {"chip": "v5p", "fsdp": 16, "tp": 4},
        {"chip": "v6e", "fsdp": 64},
    ],
)
def test_parts_are_not_negative_and_add_up(more):
    time = predict_run(run(**more))
    assert min(time.parts.values()) >= 0
    assert sum(time.parts.values()) == pytest.approx(time.seconds)


@pytest.mark.parametrize("chip", ["a100", "h100", "b200", "v5p"])
@pytest.mark.parametrize("how", ["dp", "fsdp"])
def test_more_chips_are_faster_and_never_twice_as_efficient(chip, how):
    sizes = [64, 128, 256]
    times = [
        seconds(chip=chip, devices=n, batch=1024, fsdp=n if how == "fsdp" else 1) for n in sizes
    ]
    for fewer, more in itertools.pairwise(times):
        assert fewer / 2 * 0.999 <= more < fewer


def test_more_layers_tokens_and_width_take_longer():
    wider = dataclasses.replace(LLAMA_8B, mlp=2 * 14336)
    deeper = dataclasses.replace(LLAMA_8B, layers=64)
    assert seconds() < seconds(model=wider) < seconds(model=deeper)
    assert seconds(seq=8192) > 2 * seconds()
    assert seconds(batch=512) > 1.9 * seconds()


@given(st.sampled_from([2, 4, 8]), st.sampled_from([8, 16, 32, 64]), st.sampled_from([1, 2, 4]))
def test_bubble_is_that_of_one_f_one_b(stages, microbatches, chunks):
    # Nothing to hand over and no vocabulary: what is left is the schedule.
    chip = dataclasses.replace(CHIPS["h100"], network=1e9, link=1e9)
    model = dataclasses.replace(LLAMA_8B, vocab=1)
    pipeline = DescribedRun(model, chip, stages, 4096, microbatches, 1, pp=stages, vp=chunks)
    parts = dict(predict_run(pipeline).parts)
    bubble = parts.pop("pipeline")
    work = sum(parts.values()) - parts["optimizer"] - parts["gradients"]
    expected = (stages - 1) / (microbatches * chunks)
    assert bubble / work == pytest.approx(expected, rel=0.02, abs=0.002)


def test_full_remat_computes_the_forward_pass_again():
    plain, full = predict_run(run()).parts, predict_run(run(remat="full")).parts
    assert full["recomputation"] > plain["products"] / 3
    assert full["products"] == plain["products"]
    assert plain["recomputation"] == 0
    order = ["none", "minimal", "mlp", "qkv", "full"]
    times = [seconds(remat=remat) for remat in order]
    assert times == sorted(times)


def test_exchanges_appear_with_their_axes():
    parts = predict_run(run()).parts
    assert parts["tp"] == parts["cp"] == parts["ep"] == parts["fsdp"] == parts["pipeline"] == 0
    assert predict_run(run(tp=2)).parts["tp"] > 0
    assert predict_run(run(cp=2)).parts["cp"] > 0
    assert predict_run(run(fsdp=64)).parts["fsdp"] > 0
    assert predict_run(run(model=MOE, ep=8)).parts["ep"] > 0


def test_tp_over_two_nodes_waits_longer_than_in_one():
    inside, across = (predict_run(run(devices=16, tp=tp)).parts["tp"] for tp in (8, 16))
    assert across > 2 * inside
    # 16 GPUs of one NVLink domain are no worse off than 8.
    one = run(chip="gb200", devices=16, tp=16)
    assert predict_run(one).parts["tp"] < across


def test_tokens_go_to_other_nodes_once_for_each_node():
    one_choice = dataclasses.replace(MOE, active=1)
    inside = predict_run(run(MOE, seq=32768, ep=8)).parts["ep"]
    across = predict_run(run(MOE, seq=32768, ep=32)).parts["ep"]
    once = predict_run(run(one_choice, seq=32768, ep=32)).parts["ep"]
    assert across > 3 * inside
    # Eight choices of 32 devices on four nodes reach 3.6 nodes on the average.
    assert 3 * once < across < 3.6 * once


def test_axes_lie_with_tp_inside_and_replicas_outside():
    described = run(devices=64, tp=4, cp=2)
    assert domain_size(described) == 8
    assert gpu_axis(described, "tp") == (4, 1)
    assert gpu_axis(described, "cp") == (2, 1)
    assert gpu_axis(described, "dp") == (1, 8)
    assert gpu_axis(run(model=MOE, ep=32), "ep") == (8, 4)
    assert domain_size(run(chip="gb200", devices=256)) == 64


def test_slices_pay_for_their_network():
    one = seconds(chip="v5e", devices=256, fsdp=256, batch=512)
    two = seconds(chip="v5e", devices=512, fsdp=256, batch=1024, slices=2)
    assert one < two < 1.5 * one


def test_narrow_products_help_where_the_chip_has_them():
    assert seconds(products="fp8") < seconds()
    assert seconds(chip="gb300", products="nvfp4") < seconds(chip="gb300", products="fp8")
    assert seconds(chip="v5p", products="fp8") == seconds(chip="v5p")


def test_small_microbatches_wait_for_the_host_that_starts_kernels():
    small = Transformer(24, 1024, 4096, 16, 16, 64, 51200, gated=False)
    described = run(small, "a100", 2, 1024, 32, 1, remat="full", **MEGATRON)
    layers = 24 * described.microbatches
    assert predict_run(described).seconds > 3 * FITTED.start * layers
    quick = dataclasses.replace(described, eager=False)
    assert predict_run(quick).seconds < 0.6 * predict_run(described).seconds


# Published step times: the description, the seconds, and the error that is allowed.
PUBLISHED = {
    "GPT-3 on 64 A100, full recompute (arXiv 2205.05198)": (
        run(GPT3, "a100", 64, 2048, 64, 1, tp=8, pp=8, vp=3, remat="full", **MEGATRON),
        18.13,
        0.08,
    ),
    "GPT-3 on 64 A100, selective (arXiv 2205.05198)": (
        run(
            *(GPT3, "a100", 64, 2048, 64, 1),
            **(MEGATRON | {"sequence_parallel": True}),
            tp=8,
            pp=8,
            vp=3,
            remat="selective",
        ),
        13.75,
        0.08,
    ),
    "Llama 3.1 70B on 128 v6e (tpu-recipes)": (
        run(LLAMA_70B, "v6e", 128, 8192, 512, 4, fsdp=128, remat="qkv"),
        34.786,
        0.12,
    ),
    "Llama 3.1 70B on 64 TPU7x (tpu-recipes)": (
        run(LLAMA_70B, "tpu7x", 128, 8192, 256, 2, fsdp=128, remat="qkv"),
        12.2,
        0.15,
    ),
    "Llama 3.1 405B on 512 v5p (tpu-recipes)": (
        run(
            *(Transformer(126, 16384, 53248, 128, 8, 128, 128256), "v5p", 512, 8192, 1024, 2),
            fsdp=512,
            remat="context",
        ),
        131.474,
        0.12,
    ),
    "Llama 2 7B on 8 H100 (JAX-Toolbox)": (
        run(
            *(Transformer(32, 4096, 11008, 32, 32, 128, 32000), "h100", 8, 4096, 16, 2),
            fsdp=8,
            remat="minimal",
        ),
        0.721,
        0.15,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs_come_out(name):
    described, published, allowed = PUBLISHED[name]
    assert predict_run(described).seconds == pytest.approx(published, rel=allowed)


def test_constants_lie_where_they_can():
    values = dataclasses.asdict(FITTED)
    parts = ("a100", "h100", "b200", "mxu128", "mxu256", "flash_ampere", "flash_hopper")
    assert all(0 < values[name] <= 1 for name in parts)
    assert all(0 <= value <= 1 for name, value in values.items() if name.startswith("hidden"))
    faster = Reached(**values | {"h100": 1.0})
    assert predict_run(run(), faster).seconds < seconds()


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"tp": 3}, r"tp:3, pp:1, cp:1 need a multiple of 3 devices, and there are 64"),
        ({"tp": 0}, r"tp:0: an axis has one device at the least"),
        (
            {"microbatch": 8},
            r"64 replicas .* of 8 rows do not share a batch of 256.*at most 4 rows",
        ),
        ({"microbatch": 0}, r"microbatches of 0 rows"),
    ],
)
def test_runs_that_cannot_be_are_refused(more, match):
    with pytest.raises(PlanningError, match=match):
        run(**more)


def test_slices_without_a_documented_shape_are_named():
    with pytest.raises(PlanningError, match=r"v5e: 48 chips are no 1 slices of a documented"):
        predict_run(run(chip="v5e", devices=48, batch=480, fsdp=48))


# The benchmark reads files that nobody here has seen.

ROWS = """\
note,chips,hardware,step_time_s,tokens_per_s_per_chip,pp,tp,dp,micro_batch,global_batch,seq,heads,\
ffn,hidden,layers,model,framework,source,remat
,64,A100-80GB,4.49,,1,4,16,16,512,2048,32,12288,3072,30,GPT,Megatron-DeepSpeed,mine,full
,64,A100-80GB,10.58,,1,16,4,16,512,2048,32,12288,3072,30,GPT,Megatron-DeepSpeed,mine,full
,64,A100-80GB,,1234.5,1,1,64,4,512,2048,32,12288,3072,30,GPT,Megatron-DeepSpeed,mine,full
,8,Gaudi 3,4.49,,1,4,16,16,512,2048,32,12288,3072,30,GPT,Megatron-DeepSpeed,mine,full
,8,A100-80GB,4.49,,1,4,16,16,,2048,32,12288,3072,30,GPT,Megatron-DeepSpeed,mine,full
,8,A100-80GB,,,1,4,16,16,512,2048,32,12288,3072,30,GPT,Megatron-DeepSpeed,mine,full
,8,A100-80GB,4.49,,1,3,16,16,512,2048,32,12288,3072,30,GPT,Megatron-DeepSpeed,mine,full
"""


def test_benchmark_reads_another_file_and_names_what_it_leaves_out(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    script = [sys.executable, str(BENCHMARKS / "published_plans.py"), str(path)]
    shown = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[1].split()[:2] == ["mine", "3"]
    reasons = [line for line in lines if line.startswith("left out: 1 of mine")]
    assert len(reasons) == 4
    assert any("hardware 'gaudi 3' is not one of" in line for line in reasons)
    assert any("no global_batch" in line for line in reasons)
    assert any("no step_time_s, tokens_per_s_per_chip" in line for line in reasons)
    assert any("tp:3, pp:1, cp:1 need a multiple of 3 devices" in line for line in reasons)
    assert any("equal microbatches: 1 groups, mean regret 0.00%" in line for line in lines)
