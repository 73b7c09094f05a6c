"""The modelled time of a step: kernels by their work and bytes, communication that is exposed."""

import dataclasses

import numpy as np
import pytest

import meshwright as mw
from meshwright.hardware.chips import CHIPS
from meshwright.hlo.program import read_program
from meshwright.rehearsal.collectives.analyze import analyze
from meshwright.rehearsal.collectives.costs import beside_back, grid_coords
from meshwright.rehearsal.collectives.types import Collectives
from meshwright.rehearsal.kernel_speeds import speeds
from meshwright.rehearsal.kernels import kernels
from meshwright.rehearsal.step_time import StepTime, step_time

HEAD = "HloModule jit_f, is_scheduled=true, num_partitions=4\n\n"
GROUPS = "replica_groups={{0,1,2,3}}, use_global_device_ids=true"
ADD = """\
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

"""


def program(body, before=""):
    return read_program(
        f"{HEAD}{ADD}{before}ENTRY %main (a: bf16[4096,4096]) -> bf16[4096,4096] {{\n"
        f"  %a = bf16[4096,4096] parameter(0)\n{body}}}\n"
    )


DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def dot(name, of="a", root=False):
    return f"  {'ROOT ' if root else ''}%{name} = bf16[4096,4096] dot(%a, %{of}), {DIMS}\n"


def test_a_large_product_waits_for_the_multipliers():
    time = step_time(program(dot("d", root=True)), Collectives(()), CHIPS["h100"])
    assert time.flops == 2 * 4096**3
    assert time.bytes == 3 * 2 * 4096**2
    # One after the other, as a step runs: 660 to 690 of 990 TFLOP/s on an H200.
    assert 0.66 < 2 * 4096**3 / 990e12 / time.compute < 0.70
    assert time.memory == time.exposed == 0.0


@pytest.mark.parametrize(
    ("side", "microseconds"), [(1024, 5.9), (2048, 23.3), (4096, 167), (8192, 1319)]
)
def test_small_products_reach_less(side, microseconds):
    seconds = speeds(CHIPS["h200"]).compute(2 * side**3, "bf16")
    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.07)


def test_short_kernels_take_as_long_as_their_launch():
    gpu = speeds(CHIPS["h200"])
    assert 1e-6 + gpu.launch(1e-6) == pytest.approx(2.5e-6)
    assert gpu.launch(1e-3) < 1e-6
    assert gpu.launch(0.0) == 0.0


def test_a_scatter_moves_what_it_adds_and_not_its_table():
    added = """\
%scattering (t: f32[32000,64], i: s32[128,1], u: f32[128,64]) -> f32[32000,64] {
  %t = f32[32000,64] parameter(0)
  %i = s32[128,1] parameter(1)
  %u = f32[128,64] parameter(2)
  ROOT %w = f32[32000,64] scatter(%t, %i, %u), update_window_dims={1}, \
inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add
}

"""
    body = """\
  %table = f32[32000,64] constant(0)
  %ids = s32[128,1] constant(0)
  %rows = f32[128,64] constant(0)
  %new = f32[32000,64] fusion(%table, %ids, %rows), kind=kInput, calls=%scattering
  ROOT %end = bf16[4096,4096] copy(%a)
"""
    read = program(body, added)
    moved = {kernel.instruction.name: kernel.bytes for kernel in kernels(read, read.entry)}
    assert moved["new"] == 3 * 4 * 128 * 64 + 4 * 128


def test_a_sum_waits_for_the_memory():
    time = step_time(
        program("  ROOT %s = bf16[4096,4096] add(%a, %a)\n"), Collectives(()), CHIPS["h100"]
    )
    assert time.compute == 0.0
    assert time.memory == pytest.approx(3 * 2 * 4096**2 / speeds(CHIPS["h100"]).bytes)


def test_a_kernel_that_slices_moves_the_slice():
    fused = """\
%slicing (p: bf16[32,4096], i: s32[]) -> bf16[1,4096] {
  %p = bf16[32,4096] parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = bf16[1,4096] dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,4096}
}

%updating (q: bf16[32,4096], u: bf16[1,4096], j: s32[]) -> bf16[32,4096] {
  %q = bf16[32,4096] parameter(0)
  %u = bf16[1,4096] parameter(1)
  %j = s32[] parameter(2)
  ROOT %w = bf16[32,4096] dynamic-update-slice(%q, %u, %j, %j)
}

%outer (r: bf16[32,4096], k: s32[]) -> bf16[1,4096] {
  %r = bf16[32,4096] parameter(0)
  %k = s32[] parameter(1)
  %inside = bf16[1,4096] fusion(%r, %k), kind=kLoop, calls=%slicing
  ROOT %twice = bf16[1,4096] add(%inside, %inside)
}

"""
    body = """\
  %stack = bf16[32,4096] constant(0)
  %n = s32[] constant(0)
  %row = bf16[1,4096] fusion(%stack, %n), kind=kLoop, calls=%slicing
  %new = bf16[32,4096] fusion(%stack, %row, %n), kind=kLoop, calls=%updating
  %nested = bf16[1,4096] fusion(%stack, %n), kind=kLoop, calls=%outer
  ROOT %end = bf16[4096,4096] copy(%a)
"""
    read = program(body, fused)
    found = {kernel.instruction.name: kernel.bytes for kernel in kernels(read, read.entry)}
    row = 2 * 4096
    assert found["row"] == found["nested"] == 2 * row + 4
    assert found["new"] == 2 * row + 4


def test_a_kernel_that_updates_some_of_its_results_in_place_writes_slices_and_the_others():
    fused = """\
%f (s: f32[64,128,512], x: f32[128,512], i: s32[]) -> (f32[64,128,512], f32[128,512]) {
  %s = f32[64,128,512] parameter(0)
  %x = f32[128,512] parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %y = f32[128,512] multiply(%x, %x)
  %part = f32[1,128,512] bitcast(%y)
  %new = f32[64,128,512] dynamic-update-slice(%s, %part, %i, %zero, %zero)
  ROOT %both = (f32[64,128,512], f32[128,512]) tuple(%new, %y)
}

"""
    body = """\
  %stack = f32[64,128,512] constant(0)
  %array = f32[128,512] constant(0)
  %at = s32[] constant(3)
  ROOT %r = (f32[64,128,512], f32[128,512]) fusion(%stack, %array, %at), kind=kLoop, calls=%f
"""
    read = program(body, fused)
    [kernel] = [each for each in kernels(read, read.entry) if each.instruction.name == "r"]
    assert kernel.bytes == pytest.approx(3 * 128 * 512 * 4, abs=16)


def test_communication_hides_behind_what_runs_meanwhile():
    start = f"  %s = f32[64] all-reduce-start(%b), {GROUPS}, to_apply=%add\n"
    done = "  %e = f32[64] all-reduce-done(%s)\n"
    before = "  %b = f32[64] constant(0)\n"
    placed = mw.place("dp:4", "v5e:2x2")

    def timed(*lines):
        read = program(before + "".join(lines))
        return step_time(read, analyze(read, placed), CHIPS["v5e"])

    hidden = timed(start, dot("d"), done, dot("f", "d", root=True))
    exposed = timed(start, done, dot("d"), dot("f", "d", root=True))
    assert hidden.exposed == 0.0
    assert hidden.hidden == exposed.exposed > 0.0
    assert exposed.total - hidden.total == pytest.approx(exposed.exposed)


AROUND = [(0, 1), (1, 2), (2, 3), (3, 0)]
BACK = [(b, a) for a, b in AROUND]
SWAPPED = [(0, 1), (1, 0), (2, 3), (3, 2)]


def permuted(chip, permutes, order):
    """A step of permutes; `order`: `As` where A starts, `Ad` where it is done."""
    body = "  %b = f32[1048576] constant(0)\n"
    for each in order.split():
        name, what = each
        pairs = ",".join(f"{{{a},{b}}}" for a, b in permutes[name])
        start = (
            f"(f32[1048576], f32[1048576]) collective-permute-start(%b), "
            f"channel_id={ord(name)}, source_target_pairs={{{pairs}}}"
        )
        done = f"f32[1048576] collective-permute-done(%{name})"
        body += f"  %{name} = {start}\n" if what == "s" else f"  %{name}d = {done}\n"
    read = program(body + "  ROOT %end = bf16[4096,4096] copy(%a)\n")
    collectives = analyze(read, mw.place("dp:4", "v5e:2x2" if chip == "v5e" else "h100:4"))
    return step_time(read, collectives, CHIPS[chip]), collectives[0].seconds


@pytest.mark.parametrize(
    ("chip", "permutes", "order", "exposed"),
    [
        ("v5e", {"A": AROUND, "B": BACK}, "As Bs Ad Bd", 1),
        ("v5e", {"A": AROUND, "B": BACK}, "As Ad Bs Bd", 2),
        ("v5e", {"A": AROUND, "B": AROUND}, "As Bs Ad Bd", 2),  # over the same links
        ("v5e", {"A": SWAPPED, "B": SWAPPED}, "As Bs Ad Bd", 2),
        ("h100", {"A": AROUND, "B": BACK}, "As Bs Ad Bd", 2),  # NCCL: one after the other
        # What is waited for hides one that goes back, and not two of them.
        ("v5e", {"A": AROUND, "B": BACK, "C": AROUND}, "As Cs Bs Bd Ad Cd", 2),
        ("v5e", {"A": AROUND, "B": BACK, "C": AROUND}, "As Bs Cs Ad Bd Cd", 2),
    ],
)
def test_permutes_to_and_fro_run_together_on_a_tpu(chip, permutes, order, exposed):
    time, once = permuted(chip, permutes, order)
    assert once > 0
    assert time.exposed == pytest.approx(exposed * once, rel=1e-3)
    assert time.hidden + time.exposed == pytest.approx(len(permutes) * once)


def test_a_line_of_chips_has_no_way_back_free():
    placed = mw.place("dp:16", "v5e:4x4")
    around = np.array([(n, (n + 1) % 16) for n in range(16)])
    assert beside_back(around, placed) == pytest.approx(1.0)
    # Row by row, over chips whose last one is not beside the first.
    rows = np.lexsort(grid_coords(placed).T[::-1])
    assert beside_back(rows[around], placed) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("target", ["Forward", "BackwardInput", "BackwardFilter"])
def test_gradients_of_convolutions_by_cudnn_have_the_products_of_the_convolution(target):
    shapes = {"x": "f32[8,16,16,32]", "k": "f32[64,3,3,32]", "y": "f32[8,16,16,64]"}
    left, right, out = {"Forward": "xky", "BackwardInput": "ykx", "BackwardFilter": "xyk"}[target]
    read = program(
        f"  %l = {shapes[left]} constant(0)\n  %r = {shapes[right]} constant(0)\n"
        f"  %c = ({shapes[out]}, u8[0]) custom-call(%l, %r), window={{size=3x3 pad=1_1x1_1}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}"\n'
        "  ROOT %end = bf16[4096,4096] copy(%a)\n"
    )
    taps = (16 * 3 - 2) ** 2  # those in the padding meet nothing
    assert read.flops == 2 * 8 * taps * 32 * 64


def test_types_have_their_own_speed():
    gpu, tpu = speeds(CHIPS["h100"]), speeds(CHIPS["v5e"])
    assert gpu.compute(2e12, "f32") == pytest.approx(2.04 * gpu.compute(2e12, "bf16"), rel=0.01)
    assert gpu.compute(2e12, "bf16") == pytest.approx(2e12 / 833e12, rel=0.02)
    assert tpu.compute(1e12, "f32") == tpu.compute(1e12, "bf16")


def test_cores_share_their_chip():
    assert speeds(CHIPS["tpu7x"]).flops == pytest.approx(2307e12 / 2 * 0.9)


def test_hidden_communication_and_the_compilers_own_estimate_have_lines_of_their_own():
    time = StepTime(1.0, 0.5, 0.0, 0.2, 0.25, 1e12, 1e9, 4e12, compiler=1.5)
    lines = str(time).splitlines()
    assert any(line.startswith("hidden communication") and "250 ms" in line for line in lines)
    assert any(line.startswith("kernels as the compiler sees it") for line in lines)
    partial = str(dataclasses.replace(time, compiler_partial=True)).splitlines()[-1]
    assert partial.split("  ")[0] == "some kernels as the compiler sees it"
    assert partial.endswith("no code generated")


def test_slices_outside_of_a_fusion_move_the_slice_too():
    body = """\
  %stack = bf16[32,4096] constant(0)
  %n = s32[] constant(0)
  %row = bf16[1,4096] dynamic-slice(%stack, %n, %n), dynamic_slice_sizes={1,4096}
  %new = bf16[32,4096] dynamic-update-slice(%stack, %row, %n, %n)
  %start = (bf16[32,4096], bf16[32,4096], u32[]) copy-start(%new)
  %done = bf16[32,4096] copy-done(%start)
  ROOT %end = bf16[4096,4096] copy(%a)
"""
    read = program(body)
    moved = {kernel.instruction.name: kernel.bytes for kernel in kernels(read, read.entry)}
    row = 2 * 4096
    assert moved["row"] == moved["new"] == 2 * row
    assert moved["start"] == 2 * 32 * row


def test_what_a_fusion_reads_on_chip_costs_no_memory():
    # `S(1)` is the memory on a TPU's chip.
    fused = """\
%twice (p: bf16[32,4096]) -> bf16[32,4096] {
  %p = bf16[32,4096] parameter(0)
  ROOT %s = bf16[32,4096] add(%p, %p)
}

"""
    body = """\
  %near = bf16[32,4096]{1,0:S(1)} constant(0)
  %sum = bf16[32,4096] fusion(%near), kind=kLoop, calls=%twice
  ROOT %end = bf16[4096,4096] copy(%a)
"""
    read = program(body, fused)
    moved = {kernel.instruction.name: kernel.bytes for kernel in kernels(read, read.entry)}
    assert moved["sum"] == 2 * 32 * 4096


# What the GPU's compiler writes for jax.nn.dot_product_attention, shortened.
def attention(target, mask, head=128):
    config = (
        '{"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"dimensions": '
        f'["4", "8", "2048", "2048"]}}, "mask_type": "{mask}", "sliding_window_length": 0}}}}'
    )
    return (
        f"  %q = bf16[4,2048,8,{head}] constant(0)\n"
        f"  %k = (bf16[4,2048,8,{head}], f32[4,8,2048], u8[0]) custom-call(%q, %q, %q), "
        f'custom_call_target="{target}", backend_config={config}\n'
        "  ROOT %end = bf16[4096,4096] copy(%a)\n"
    )


@pytest.mark.parametrize(
    ("target", "mask", "head", "products", "efficiency"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 128, 2, 0.60),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 128, 1, 0.60),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 128, 2.5, 0.54),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 64, 1, 0.42),
        ("__cudnn$fmhaSoftmaxBackward", "NO_MASK", 64, 5, 0.41),
    ],
)
def test_attention_of_cudnn_has_its_products_and_its_own_speed(
    target, mask, head, products, efficiency
):
    read, chip = program(attention(target, mask, head)), CHIPS["h100"]
    time, speed = step_time(read, Collectives(()), chip), speeds(chip).in_step(read)
    [kernel] = time.custom
    assert kernel.flops == time.flops == products * 2 * 4 * 8 * 2048**2 * head
    assert (kernel.kind, kernel.trust) == ("cuDNN attention", "counted")
    # A little more with more keys: 2,048 of them, of which a causal mask leaves half.
    reached = efficiency * speed.clock * (0.96 if mask == "CAUSAL" else 1.0147)
    # The output is cleared first; backward, all results and a float32 copy of a gradient are, rows
    # are multiplied with their gradients, and the copy is rounded.
    array = 4 * 2048 * 8 * head * 2
    around = (12.4 if "Backward" in target else 1) * array / speed.bytes
    assert kernel.seconds - around == pytest.approx(kernel.flops / (990e12 * reached), rel=0.002)
    assert 0.8 < speed.clock <= 1


def test_a_call_that_nobody_knows_is_told():
    body = (
        '  %mine = bf16[4096,4096] custom-call(%a), custom_call_target="my_kernel"\n'
        "  ROOT %end = bf16[4096,4096] copy(%mine)\n"
    )
    time = step_time(program(body), Collectives(()), CHIPS["h100"])
    [kernel] = time.custom
    assert (kernel.trust, kernel.flops, kernel.bytes) == ("unknown", 0, 2 * 2 * 4096**2)
    assert "FLOPs unknown of mine (my_kernel)" in str(time)
    assert time.to_json()["custom_kernels"][0]["trust"] == "unknown"
    assert any(line.startswith("mine") and "unknown" in line for line in str(time).splitlines())


def seconds(body, chip="h100", before=""):
    time = step_time(program(body, before), Collectives(()), CHIPS[chip])
    return time.compute + time.memory


def test_transcendental_functions_bound_a_kernel_that_has_many():
    # On one H200 a kernel of eight sines of 2^26 numbers each takes 534 us; bytes alone are 140 us.
    chain = "".join(f"  %s{i + 1} = f32[67108864] sine(%s{i})\n" for i in range(8))
    fused = (
        f"%f (s0: f32[67108864]) -> f32[67108864] {{\n  %s0 = f32[67108864] parameter(0)\n{chain}"
    )
    fused = fused.replace("  %s8 =", "  ROOT %s8 =") + "}\n\n"
    body = (
        "  %x = f32[67108864] constant(0)\n"
        "  ROOT %y = f32[67108864] fusion(%x), kind=kLoop, calls=%f\n"
    )
    assert seconds(body, before=fused) == pytest.approx(534e-6, rel=0.1)
    assert seconds(body, chip="a100", before=fused) < 534e-6  # not measured there


def test_sorts_take_their_keys():
    # Measured on one H200: 2^24 keys in 630 us, 1,024 rows of 16,384 keys in 1,182 us, 32,768 rows
    # of 1,024 in 1,518 us, 131,072 of 256 in 1,123 us.
    less = """\
%less (p: f32[], q: f32[]) -> pred[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %l = pred[] compare(%p, %q), direction=LT
}

"""

    def sort(dims):
        return seconds(
            f"  %x = f32[{dims}] constant(0)\n"
            f"  ROOT %y = f32[{dims}] sort(%x), dimensions={{0}}, to_apply=%less\n",
            before=less,
        )

    assert sort("16777216") == pytest.approx(630e-6, rel=0.1)
    assert sort("1024,16384") == pytest.approx(1182e-6, rel=0.1)
    assert sort("32768,1024") == pytest.approx(1518e-6, rel=0.1)
    assert sort("131072,256") == pytest.approx(1123e-6, rel=0.15)


def test_a_fourier_transform_goes_over_its_rows_as_often_as_cufft_does():
    # Measured on one H200: real rows of 16,384 to complex ones 0.35 ms, back 0.99 ms with a copy
    # and scaling; complex rows of 262,144, in two passes, 0.63 ms.
    def transform(given, result, kind, length):
        body = (
            f"  %x = {given} constant(0)\n"
            f"  ROOT %y = {result} fft(%x), fft_type={kind}, fft_length={{{length}}}\n"
        )
        return seconds(body, chip="h200")

    real, spectrum, long = "f32[8192,16384]", "c64[8192,8193]", "c64[256,262144]"
    assert transform(real, spectrum, "RFFT", 16384) == pytest.approx(0.347e-3, rel=0.1)
    assert transform(spectrum, real, "IRFFT", 16384) == pytest.approx(0.994e-3, rel=0.1)
    assert transform(long, long, "FFT", 262144) == pytest.approx(0.6e-3, rel=0.1)


def test_a_softmax_with_a_mask_takes_longer_than_its_bytes():
    # The gradient of masked attention scores on one H200: 4 x 16 x 4,096 x 4,096, 6.99 ms; its
    # bytes alone take 2.5 ms.
    rows = "f32[64,4096,4096]"
    chain = "".join(f"  %m{i + 1} = {rows} multiply(%m{i}, %m{i})\n" for i in range(7))
    masks = "".join(f"  %s{i} = {rows} select(%mask, %m{i + 6}, %p0)\n" for i in range(2))
    fused = (
        f"%f (p0: {rows}, p1: bf16[64,4096,4096]) -> {rows} {{\n  %p0 = {rows} parameter(0)\n"
        "  %p1 = bf16[64,4096,4096] parameter(1)\n  %z = f32[] constant(0)\n"
        f"  %one = pred[] constant(true)\n  %mask = pred[64,4096,4096] broadcast(%one)\n"
        f"  %m0 = {rows} convert(%p1)\n{chain}{masks}"
        "  %sum = f32[64,4096] reduce(%s0, %z), dimensions={2}, to_apply=%add\n"
        f"  %wide = {rows} broadcast(%sum), dimensions={{0,1}}\n"
        f"  ROOT %end = {rows} add(%s1, %wide)\n}}\n\n"
    )
    add = (
        "%add (p: f32[], q: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n"
        "  %q = f32[] parameter(1)\n  ROOT %s = f32[] add(%p, %q)\n}\n\n"
    )
    body = (
        f"  %x = {rows} constant(0)\n  %y = bf16[64,4096,4096] constant(0)\n"
        f"  ROOT %r = {rows} fusion(%x, %y), kind=kCustom, calls=%f, "
        'backend_config={"fusion_backend_config":{"kind":"__triton"}}\n'
    )
    assert seconds(body, chip="h200", before=add + fused) == pytest.approx(6.99e-3, rel=0.15)


@pytest.mark.parametrize(
    ("shape", "dim", "measured"),
    [
        ("8192,16384", 1, 121.5e-6),  # along rows that lie in memory from end to end
        ("24576,5120", 1, 117.2e-6),
        ("128,256,4096", 1, 127.7e-6),  # along columns
    ],
)
def test_long_rows_are_reduced_faster_than_columns(shape, dim, measured):
    # Kernels of one H200, of f32.
    array = f"f32[{shape}]"
    left = ",".join(size for n, size in enumerate(shape.split(",")) if n != dim)
    fused = (
        f"%f (x: {array}) -> f32[{left}] {{\n  %x = {array} parameter(0)\n"
        f"  %z = f32[] constant(0)\n  ROOT %r = f32[{left}] reduce(%x, %z), "
        f"dimensions={{{dim}}}, to_apply=%add\n}}\n\n"
    )
    add = (
        "%add (p: f32[], q: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n"
        "  %q = f32[] parameter(1)\n  ROOT %s = f32[] add(%p, %q)\n}\n\n"
    )
    body = (
        f"  %x = {array} constant(0)\n  ROOT %r = f32[{left}] fusion(%x), kind=kInput, calls=%f\n"
    )
    assert seconds(body, chip="h200", before=add + fused) == pytest.approx(measured, rel=0.15)


def test_eight_bit_products_bring_their_operands_into_order():
    # fp8 products of 8,192 x 4,096 x 4,096 on one H200: 160 us, 112 for the weight in another
    # order and 41 for rounding; int8 alike.
    fused = (
        "%f (a: f8e4m3fn[8192,4096], b: f8e4m3fn[4096,4096]) -> f8e4m3fn[8192,4096] {\n"
        "  %a = f8e4m3fn[8192,4096] parameter(0)\n  %b = f8e4m3fn[4096,4096] parameter(1)\n"
        "  %d = bf16[8192,4096] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  ROOT %c = f8e4m3fn[8192,4096] convert(%d)\n}\n\n"
    )
    body = (
        "  %x = f8e4m3fn[8192,4096] constant(0)\n  %w = f8e4m3fn[4096,4096] constant(0)\n"
        "  ROOT %y = f8e4m3fn[8192,4096] fusion(%x, %w), kind=kCustom, calls=%f, "
        'backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}\n'
    )
    assert seconds(body, chip="h200", before=fused) == pytest.approx(313e-6, rel=0.1)


GATHER = (
    "offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, "
    "slice_sizes={1,4096}"
)


def test_a_gather_moves_the_rows_that_it_takes():
    # 8,192 rows of a table of 262 MB: 0.04 ms on one H200, 0.16 with the table counted.
    body = (
        "  %table = bf16[32000,4096] constant(0)\n  %ids = s32[8192] constant(0)\n"
        f"  ROOT %rows = bf16[8192,4096] gather(%table, %ids), {GATHER}\n"
    )
    assert seconds(body) < 60e-6
    fused = (
        "%f (t: bf16[32000,4096], i: s32[8192]) -> bf16[8192,4096] {\n"
        "  %t = bf16[32000,4096] parameter(0)\n  %i = s32[8192] parameter(1)\n"
        f"  ROOT %g = bf16[8192,4096] gather(%t, %i), {GATHER}\n}}\n\n"
    )
    call = body.partition("  ROOT")[0]
    call += "  ROOT %rows = bf16[8192,4096] fusion(%table, %ids), kind=kLoop, calls=%f\n"
    assert seconds(body) < seconds(call, before=fused) < 60e-6
    # A table that is converted on the way: its rows are read as wide as they are in memory.
    converted = fused.replace("bf16[32000,4096]", "f32[32000,4096]").replace(
        "  ROOT %g = bf16[8192,4096] gather(%t",
        "  %c = bf16[32000,4096] convert(%t)\n  ROOT %g = bf16[8192,4096] gather(%c",
    )
    call = call.replace("bf16[32000,4096]", "f32[32000,4096]")
    assert seconds(call, before=converted) == pytest.approx(
        1.5 * seconds(body) * 0.88 / 0.75, rel=0.1
    )


def test_rows_that_are_added_at_places_of_a_table_take_atomics():
    # 8,192 rows of 4,096 into bfloat16: 0.26 ms on one H200 with random places.
    body = (
        "  %table = bf16[32000,4096] constant(0)\n  %ids = s32[8192,1] constant(0)\n"
        "  %rows = bf16[8192,4096] constant(0)\n"
        "  ROOT %new = bf16[32000,4096] scatter(%table, %ids, %rows), update_window_dims={1}, "
        "inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, "
        "to_apply=%add\n"
    )
    assert seconds(body) == pytest.approx(263e-6, rel=0.15)
