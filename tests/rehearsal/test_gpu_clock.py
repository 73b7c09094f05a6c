"""What the kernels of a GPU have in common in a step: its clock, and what libraries do beside."""

import dataclasses

import pytest

from meshwright.calibration.measurement import kernel_class
from meshwright.calibration.probes import parts
from meshwright.hardware.chips import CHIPS
from meshwright.hlo.program import read_program
from meshwright.rehearsal.collectives.types import Collectives
from meshwright.rehearsal.kernel_speeds import speeds
from meshwright.rehearsal.kernels import kernels
from meshwright.rehearsal.step_time import step_time

H200 = CHIPS["h200"]
DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
LIBRARY = (
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
)
ARRAY = "bf16[8192,8192]"


def program(body, before=""):
    return read_program(
        f"HloModule jit_f, is_scheduled=true\n\n{before}"
        f"ENTRY %main (a: {ARRAY}, b: {ARRAY}) -> {ARRAY} {{\n"
        f"  %a = {ARRAY} parameter(0)\n  %b = {ARRAY} parameter(1)\n{body}}}\n"
    )


def product(name, of, root=False):
    return f"  {'ROOT ' if root else ''}%{name} = {ARRAY} custom-call(%{of}, %b), {LIBRARY}\n"


def copies(count):
    return "".join(f"  %c{n} = {ARRAY} copy(%a)\n" for n in range(count))


def clock(body, before=""):
    return speeds(H200).in_step(program(body, before)).clock


def kernel(body, name, before=""):
    read = program(body, before)
    return next(each for each in kernels(read, read.entry) if each.name == name)


def test_power_holds_products_at_four_fifths_of_their_speed():
    work = 2 * 8192**3
    read = program(product("p", "a", root=True))
    step = step_time(read, Collectives(()), H200)
    assert step.flops == work
    # One H200: 670 TFLOP/s in a long row of them, 833 alone.
    assert work / step.compute == pytest.approx(670e12, rel=0.03)
    assert work / speeds(H200).compute(work, "bf16") == pytest.approx(833e12, rel=0.03)


def test_a_step_that_waits_for_memory_runs_at_the_full_clock():
    assert clock(f"{copies(3)}  ROOT %e = {ARRAY} copy(%b)\n") == 1.0
    alone = clock(product("p", "a", root=True))
    beside = clock(copies(4) + product("p", "a", root=True))
    assert alone < beside < 1.0
    assert clock(copies(40) + product("p", "a", root=True)) == 1.0


def test_a_tpu_has_one_clock():
    tpu = speeds(CHIPS["v5e"])
    assert tpu.in_step(program(product("p", "a", root=True))) is tpu


RELU = f"""\
%relu (x: {ARRAY}) -> {ARRAY} {{
  %x = {ARRAY} parameter(0)
  %zero = bf16[] constant(0)
  %zeros = {ARRAY} broadcast(%zero), dimensions={{}}
  ROOT %max = {ARRAY} maximum(%x, %zeros)
}}

"""
GRADIENT = f"""\
%grad (x: {ARRAY}, g: {ARRAY}) -> {ARRAY} {{
  %x = {ARRAY} parameter(0)
  %g = {ARRAY} parameter(1)
  %zero = bf16[] constant(0)
  %zeros = {ARRAY} broadcast(%zero), dimensions={{}}
  %more = pred[8192,8192] compare(%x, %zeros), direction=GT
  ROOT %chosen = {ARRAY} select(%more, %g, %zeros)
}}

"""


@pytest.mark.parametrize(
    ("fused", "call"),
    [
        (RELU, f"  %h = {ARRAY} fusion(%a), kind=kLoop, calls=%relu\n"),
        (GRADIENT, f"  %h = {ARRAY} fusion(%a, %b), kind=kLoop, calls=%grad\n"),
    ],
)
def test_products_of_many_zeros_leave_more_of_the_clock(fused, call):
    assert kernel(call + product("p", "h", root=True), "p", fused).zeros
    other = fused.replace("maximum", "minimum").replace("select(%more, %g, %zeros)", "add(%g, %x)")
    other = other.replace("constant(0)", "constant(1)")
    assert not kernel(call + product("p", "h", root=True), "p", other).zeros
    many = clock(call + product("p", "h", root=True), fused)
    assert many > clock(call + product("p", "h", root=True), other)


def rows(width, tile=1, after=6, reductions=1):
    """Operations that nothing hides, for each element of rows, after they are reduced."""
    array = f"bf16[512,{width}]"
    fused = f"""\
%add (x: bf16[], y: bf16[]) -> bf16[] {{
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}}

%norm (x: {array}) -> {array} {{
  %x = {array} parameter(0)
  %zero = bf16[] constant(0)
"""
    for n in range(reductions):
        fused += f"  %r{n} = bf16[512] reduce(%x, %zero), dimensions={{1}}, to_apply=%add\n"
        fused += f"  %b{n} = {array} broadcast(%r{n}), dimensions={{0}}\n"
    before = f"b{reductions - 1}"
    for n in range(after):
        root = "ROOT " if n == after - 1 else ""
        fused += f"  {root}%m{n} = {array} multiply(%{before}, %x)\n"
        before = f"m{n}"
    fused += "}\n\n"
    body = (
        f"  %big = {array} constant(0)\n"
        f"  %n = {array} fusion(%big), kind=kCustom, calls=%norm, "
        'backend_config={"fusion_backend_config":{"block_level_fusion_config":'
        f'{{"num_warps":"8","output_tiles":[{{"sizes":["{tile}"]}}]}},"kind":"__triton"}}}}\n'
        f"  ROOT %e = {ARRAY} copy(%b)\n"
    )
    return kernel(body, "n", fused).row_operations / (512 * width)


def test_rows_that_fill_the_registers_are_waited_for():
    # The same norms on one H200, 4 bytes an element: with 64 elements a thread 1.83 ps, with 16 to
    # 32 of them 1.0; of 3 operations after the reduction 1.5 in place of 6 bytes' 1.5.
    assert rows(4096, tile=4) == rows(2048, tile=8) > 0
    assert rows(8192, tile=1) == rows(2048, tile=1) == rows(4096, tile=4, after=3) == 0
    assert rows(4096, tile=4, after=8) > rows(4096, tile=4)


def test_rows_that_are_padded_may_leave_room_for_a_second_block():
    # One H200, two rows in a tile: of 8,192 2.06 ps an element, of 6,144 1.34, of 7,168 2.11.
    assert rows(6144, tile=2) < rows(8192, tile=2) < rows(7168, tile=2)
    assert rows(1536, tile=8) > rows(2048, tile=8)


def test_a_row_alone_is_waited_for_at_each_reduction():
    # 16,384 elements: 1.67 ps an element with one reduction, 2.47 with two.
    assert rows(16384, reductions=2) > rows(16384) == rows(8192, tile=2, reductions=2)


def test_small_products_go_over_their_arrays_in_tiles():
    def moved(side):
        scores = f"f32[64,{side},{side}]"
        body = (
            f"  %q = bf16[64,{side},64] constant(0)\n  %k = bf16[64,64,{side}] constant(0)\n"
            f"  %s = {scores} custom-call(%q, %k), {LIBRARY}\n  ROOT %e = {ARRAY} copy(%b)\n"
        )
        return kernel(body, "s").bytes

    assert moved(196) == pytest.approx(moved(256))
    assert moved(128) < moved(192) < moved(256)


SORT = 'custom_call_target="xla.gpu.ext.cub_sort_pairs", api_version=API_VERSION_TYPED_FFI'


@pytest.mark.parametrize(
    ("keys", "values", "name"),
    [
        ("u32[4096]", "f32[4096]", "sorted"),  # numbers, by the order of their bits
        ("u32[4096]", "u64[4096]", "sorted pairs"),  # with their places
        ("u32[64,4096]", "f32[64,4096]", "sorted in long rows"),
    ],
)
def test_a_librarys_sort_has_the_speed_of_what_it_moves(keys, values, name):
    body = (
        f"  %k = {keys} constant(0)\n  %v = {values} constant(0)\n"
        f"  %s = ({keys}, {values}, u8[64]) custom-call(%k, %v), {SORT}\n"
        f"  ROOT %e = {ARRAY} copy(%b)\n"
    )
    sort = kernel(body, "s")
    assert list(sort.slow) == [name]
    assert kernel_class(program(body), sort) == "sorts"


# A product behind a tanh, as a compiler without a GPU writes it.
TRITON = f"""\
%behind (x: {ARRAY}, w: {ARRAY}) -> {ARRAY} {{
  %x = {ARRAY} parameter(0)
  %w = {ARRAY} parameter(1)
  %t = {ARRAY} tanh(%x)
  ROOT %d = {ARRAY} dot(%t, %w), {DIMS}
}}

"""
CALL = (
    f"{ARRAY} fusion(%a, %b), kind=kCustom, calls=%behind, "
    'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}\n'
)


def test_large_products_without_a_gpu_are_modelled_as_a_librarys():
    size = 2 * 8192**2
    fused = kernel(f"  ROOT %f = {CALL}", "f", TRITON)
    assert fused.fused_before == 2 * size  # the tanh reads and writes, apart from the product
    plain = TRITON.replace("dot(%t", "dot(%x")
    assert kernel(f"  ROOT %f = {CALL}", "f", plain).fused_before == 0
    step = step_time(program(f"  ROOT %f = {CALL}", TRITON), Collectives(()), H200)
    assert step.library_products == step.to_json()["library_products"] == 1
    assert "Large products, 1 a step, are modelled as cuBLASLt's" in str(step)


def test_products_that_were_tried_out_stay_as_they_are():
    body = product("p", "a") + f"  ROOT %f = {CALL}"
    assert kernel(body, "f", TRITON).fused_before == 0
    step = step_time(program(body, TRITON), Collectives(()), H200)
    assert step.library_products == 0
    assert "cuBLASLt" not in str(step)


def test_functions_are_hidden_in_part():
    fused = f"""\
%gate (x: {ARRAY}) -> {ARRAY} {{
  %x = {ARRAY} parameter(0)
  %e = {ARRAY} exponential(%x)
  ROOT %t = {ARRAY} tanh(%e)
}}

"""
    body = f"  ROOT %g = {ARRAY} fusion(%a), kind=kLoop, calls=%gate\n"
    speed = speeds(H200)
    seconds = max(speed.kernel(kernel(body, "g", fused)))
    elements = 8192**2
    apart = elements * (1 / 3.18e12 + 1 / 1.40e12), elements / 0.84e12
    assert max(apart) < seconds < sum(apart)
    slow = dataclasses.replace(speed, clock=0.5)
    assert max(slow.kernel(kernel(body, "g", fused))) > seconds


def test_figures_of_products_are_those_of_the_full_clock():
    products, _ = parts(H200, True)["products"]
    assert {probe.burst for probe in products if probe.name.startswith("product")} == {True}
    assert {probe.burst for probe in products if probe.name.startswith("sustained")} == {False}
