"""What a GPU's libraries need while they run, against what an H200 was measured to allocate."""

import json
from pathlib import Path

import pytest

from meshwright.hardware.chips import CHIPS
from meshwright.hlo.program import read_program
from meshwright.rehearsal.peak import live_buffers, workspace_at_peak

MEASURED = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "data" / "h200_steps.json").read_text()
)
H200 = CHIPS["h200"]

# `sorting` of benchmarks/gpu_steps.py as XLA makes it where there is no GPU: jnp.sort, argsort and
# top_k, each with places at the end that keep the order stable.
SORTS = """HloModule jit_step, is_scheduled=true

%numpy_order (a: f32[], b: f32[], i: s32[], j: s32[]) -> pred[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  %i = s32[] parameter(2)
  %j = s32[] parameter(3)
  %less = pred[] compare(%a, %b), direction=LT
  %more = pred[] compare(%b, %a), direction=LT
  %same = pred[] compare(%less, %more), direction=EQ
  %first = pred[] compare(%i, %j), direction=LT
  ROOT %chosen = pred[] select(%same, %first, %less)
}

%greater (c: f32[], d: f32[], k: s32[], l: s32[]) -> pred[] {
  %c = f32[] parameter(0)
  %d = f32[] parameter(1)
  %k = s32[] parameter(2)
  %l = s32[] parameter(3)
  ROOT %gt = pred[] compare(%c, %d), direction=GT
}

%flat_sort (p: FLAT) -> (FLAT, PLACES) {
  %p = FLAT parameter(0)
  %places = PLACES iota(), iota_dimension=0
  ROOT %s = (FLAT, PLACES) sort(%p, %places), dimensions={0}, to_apply=%numpy_order
}

%argsort (q: ROWS) -> (ROWS, ORDER, ORDER) {
  %q = ROWS parameter(0)
  %at = ORDER iota(), iota_dimension=1
  ROOT %t = (ROWS, ORDER, ORDER) sort(%q, %at, %at), dimensions={1}, to_apply=%numpy_order
}

%top (r: ROWS) -> (ROWS, ORDER) {
  %r = ROWS parameter(0)
  %on = ORDER iota(), iota_dimension=1
  ROOT %u = (ROWS, ORDER) sort(%r, %on), dimensions={1}, to_apply=%greater
}

ENTRY %main (flat: FLAT, matrix: ROWS) -> (FLAT, ORDER, BEST, WHERE) {
  %matrix = ROWS parameter(1)
  %f2 = (ROWS, ORDER) fusion(%matrix), kind=kCustom, calls=%top
  %g0 = ROWS get-tuple-element(%f2), index=0
  %best = BEST slice(%g0), slice={[0:8], [0:64]}
  %g1 = ORDER get-tuple-element(%f2), index=1
  %where = WHERE slice(%g1), slice={[0:8], [0:64]}
  %f1 = (ROWS, ORDER, ORDER) fusion(%matrix), kind=kCustom, calls=%argsort
  %order = ORDER get-tuple-element(%f1), index=1
  %flat = FLAT parameter(0)
  %f0 = (FLAT, PLACES) fusion(%flat), kind=kCustom, calls=%flat_sort
  %sorted = FLAT get-tuple-element(%f0), index=0
  ROOT %out = (FLAT, ORDER, BEST, WHERE) tuple(%sorted, %order, %best, %where)
}
"""


def sorts(count, rows, width):
    shapes = {
        "FLAT": f"f32[{count}]{{0}}",
        "PLACES": f"s32[{count}]{{0}}",
        "ROWS": f"f32[{rows},{width}]{{1,0}}",
        "ORDER": f"s32[{rows},{width}]{{1,0}}",
        "BEST": f"f32[{rows},64]{{1,0}}",
        "WHERE": f"s32[{rows},64]{{1,0}}",
    }
    text = SORTS
    for name, shape in shapes.items():
        text = text.replace(name, shape)
    return read_program(text)


@pytest.mark.parametrize(
    ("step", "sizes", "allocated"),
    [
        ("sort", (2**24, 1024, 16384), 336068680),
        ("sort, long", (2**26, 8192, 4096), 1077936664),  # its rows are not CUB's
    ],
)
def test_what_sorts_take_is_what_was_measured(step, sizes, allocated):
    peak = allocated + workspace_at_peak(sorts(*sizes), H200, allocated)
    assert peak == pytest.approx(MEASURED[step]["peak"], rel=0.001)


def test_short_sorts_take_nothing_beside_their_arrays():
    program = sorts(4096, 16, 256)
    assert workspace_at_peak(program, H200, 10**9) == 0
    assert workspace_at_peak(sorts(2**24, 1024, 16384), CHIPS["v5e"], 0) == 0


def test_what_a_sort_takes_is_listed_at_the_peak():
    largest = live_buffers(sorts(2**26, 8192, 4096), H200)[0]
    assert largest.name == "f0"
    assert largest.shape.startswith("u8[")


PRODUCTS = """\
HloModule jit_step, is_scheduled=true

%dot_of (a: bf16[{rows},2048], b: bf16[2048,2048]) -> bf16[{rows},2048] {{
  %a = bf16[{rows},2048]{{1,0}} parameter(0)
  %b = bf16[2048,2048]{{1,0}} parameter(1)
  ROOT %d = bf16[{rows},2048]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{0}}
}}

ENTRY %main (x: bf16[{rows},2048], w: bf16[2048,2048]) -> {result} {{
  %x = bf16[{rows},2048]{{1,0}} parameter(0)
  %w = bf16[2048,2048]{{1,0}} parameter(1)
  %y = bf16[{rows},2048]{{1,0}} fusion(%x, %w), kind=kCustom, calls=%dot_of, \
backend_config={{"fusion_backend_config":{{"kind":"__triton_nested_gemm_fusion"}}}}
  ROOT %z = {result} {last}(%y)
}}
"""


@pytest.mark.parametrize(
    ("rows", "chip", "expected"),
    [
        (4096, "h200", 24 * 2**20),  # what its operands have
        (16384, "h200", 32 * 2**20),
        (16384, "a100", 4 * 2**20),
        (1024, "h200", 0),  # stays with Triton
    ],
)
def test_large_products_have_the_workspace_of_cublas(rows, chip, expected):
    text = PRODUCTS.format(rows=rows, result="bf16[8]", last="custom-call")
    assert workspace_at_peak(read_program(text), CHIPS[chip], 0) == expected


def test_a_result_that_is_not_written_yet_gives_the_workspace_a_place():
    text = PRODUCTS.format(rows=16384, result="f32[16384,2048]{1,0}", last="convert")
    assert workspace_at_peak(read_program(text), H200, 0) == 0


# Two fp8 products of 8,192 x 4,096 x 4,096, rounded in between (`eight_bit_products`).
EIGHT_BITS = """HloModule jit_step, is_scheduled=true

%rounded (a: X, b: W) -> X {
  %a = X parameter(0)
  %b = W parameter(1)
  %d = WIDE dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={RHS}
  ROOT %c = X convert(%d)
}

%scaled (e: X, f: W) -> WIDE {
  %e = X parameter(0)
  %f = W parameter(1)
  %g = WIDE dot(%e, %f), lhs_contracting_dims={1}, rhs_contracting_dims={RHS}
  ROOT %h = WIDE negate(%g)
}

ENTRY %main (x: X, w: W) -> WIDE {
  %x = X parameter(0)
  %w = W parameter(1)
  %one = X fusion(%x, %w), kind=kCustom, calls=%rounded, backend_config={"kind":"__triton_gemm"}
  ROOT %two = WIDE fusion(%one, %w), kind=kCustom, calls=%scaled, \
backend_config={"kind":"__triton_gemm"}
}
"""


@pytest.mark.parametrize(("contracted", "copied"), [(0, 4096**2), (1, 0)])
def test_eight_bit_products_take_a_workspace_and_their_weight_in_order(contracted, copied):
    shapes = {"WIDE": "bf16[8192,4096]", "X": "f8e4m3fn[8192,4096]", "W": "f8e4m3fn[4096,4096]"}
    text = EIGHT_BITS.replace("RHS", str(contracted))
    for name, shape in shapes.items():
        text = text.replace(f" {name} ", f" {shape} ").replace(f" {name},", f" {shape},")
        text = text.replace(f" {name})", f" {shape})")
    # The whole product has a place in the result, which is written last.
    assert workspace_at_peak(read_program(text), H200, 0) == 32 * 2**20 + copied


@pytest.mark.parametrize(
    ("given", "result", "kind", "length", "taken"),
    [
        # Measured on one H200 beside what XLA planned.
        ("f32[8192,16384]", "c64[8192,8193]", "RFFT", 16384, 0),
        ("c64[8192,8193]", "f32[8192,16384]", "IRFFT", 16384, 8192 * 8193 * 8),
        ("c64[256,262144]", "c64[256,262144]", "FFT", 262144, 256 * 262144 * 8),
    ],
)
def test_what_a_fourier_transform_takes_while_it_runs(given, result, kind, length, taken):
    program = read_program(f"""HloModule jit_step, is_scheduled=true

ENTRY %main (x: {given}) -> {result} {{
  %x = {given} parameter(0)
  ROOT %y = {result} fft(%x), fft_type={kind}, fft_length={{{length}}}
}}
""")
    assert workspace_at_peak(program, H200, 0) == taken
    assert workspace_at_peak(program, CHIPS["v5e"], 0) == 0
