"""Kernels of TPUs: products as their compiler expects them, copies beside them, and the fit."""

import json
import sys
from pathlib import Path

import pytest

from meshwright.hardware.chips import CHIPS
from meshwright.hlo.program import read_program
from meshwright.rehearsal import kernel_speeds
from meshwright.rehearsal.collectives.types import Collectives
from meshwright.rehearsal.kernels import kernels
from meshwright.rehearsal.step_time import step_time

CYCLES = ', backend_config={"window_config":{"estimated_cycles":"%d"}}'
DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
MULTIPLY = f"""\
%multiply (p: bf16[512,512], q: bf16[512,512]) -> bf16[512,512] {{
  %p = bf16[512,512] parameter(0)
  %q = bf16[512,512] parameter(1)
  ROOT %d = bf16[512,512] dot(%p, %q), {DIMS}
}}

"""


def program(body, before=""):
    return read_program(
        f"HloModule jit_f, is_scheduled=true, num_partitions=4\n\n{before}"
        "ENTRY %main (a: bf16[512,512]) -> bf16[512,512] {\n"
        f"  %a = bf16[512,512] parameter(0)\n{body}}}\n"
    )


def product(cycles):
    called = "fusion(%a, %a), kind=kOutput, calls=%multiply"
    return program(f"  ROOT %f = bf16[512,512] {called}{CYCLES % cycles}\n", MULTIPLY)


def test_a_product_takes_the_cycles_that_its_compiler_expects():
    time = step_time(product(3_000_000), Collectives(()), CHIPS["v5e"])
    assert time.compute == pytest.approx(2e-3 / CHIPS["v5e"].speeds["part cycles"])  # at 1.5 GHz
    assert time.memory == 0.0


def test_a_product_without_an_expectation_goes_at_the_speed_of_large_ones():
    plain = program(f"  ROOT %d = bf16[512,512] dot(%a, %a), {DIMS}\n")
    time = step_time(plain, Collectives(()), CHIPS["v6e"])
    slow = 3 * 2 * 512**2 / 1.6e12 / CHIPS["v6e"].speeds["part memory"]
    fast = 2 * 512**3 / 918e12 / CHIPS["v6e"].speeds["part products"]
    assert time.total - time.start == pytest.approx(max(slow, fast))


def test_other_kernels_take_their_bytes_and_not_their_cycles():
    copied = program(f"  ROOT %c = bf16[512,512] copy(%a){CYCLES % 9_000_000}\n")
    time = step_time(copied, Collectives(()), CHIPS["v5p"])
    part = CHIPS["v5p"].speeds["part memory"]
    assert time.memory == pytest.approx(2 * 2 * 512**2 / 2.765e12 / part)


def test_copies_to_the_memory_on_chip_run_beside_kernels():
    body = """\
  %s = (bf16[512,512]{1,0:S(1)}, bf16[512,512]{1,0}, u32[]) copy-start(%a)
  %d = bf16[512,512]{1,0:S(1)} copy-done(%s)
  ROOT %c = bf16[512,512] copy(%d)
"""
    time = step_time(program(body), Collectives(()), CHIPS["v5e"])
    part = CHIPS["v5e"].speeds["part memory"]
    assert time.memory == pytest.approx(2 * 512**2 / 0.82e12 / part)


def test_slices_for_the_memory_on_chip_run_beside_kernels():
    slices = """\
%slices (p: bf16[512,512]) -> bf16[128,512] {
  %p = bf16[512,512] parameter(0)
  ROOT %part = bf16[128,512]{1,0:S(1)} slice(%p), slice={[0:128], [0:512]}
}

"""
    start = "((bf16[512,512]{1,0}), bf16[128,512]{1,0:S(1)}, s32[]{:S(2)}) async-start(%a)"
    body = f"""\
  %s = {start}, calls=%slices
  %d = bf16[128,512]{{1,0:S(1)}} async-done(%s)
  ROOT %c = bf16[128,512] copy(%d)
"""
    time = step_time(program(body, slices), Collectives(()), CHIPS["v6e"])
    part = CHIPS["v6e"].speeds["part memory"]
    assert time.memory == pytest.approx(2 * 128 * 512 / 1.6e12 / part)


def test_a_slice_reads_what_it_takes():
    sliced = program("  ROOT %c = bf16[128,512] slice(%a), slice={[0:128], [0:512]}\n")
    time = step_time(sliced, Collectives(()), CHIPS["v5p"])
    part = CHIPS["v5p"].speeds["part memory"]
    assert time.memory == pytest.approx(2 * 2 * 128 * 512 / 2.765e12 / part)


def test_the_end_of_a_collective_that_kernels_carry_is_no_kernel():
    ends = """\
%ends (p: bf16[512,512]) -> bf16[512,512] {
  %p = bf16[512,512] parameter(0)
  ROOT %done = bf16[512,512] custom-call(%p), custom_call_target="AsyncCollectiveDone"
}

"""
    body = """\
  %f = bf16[512,512] fusion(%a), kind=kCustom, calls=%ends
  ROOT %c = bf16[512,512] copy(%f)
"""
    read = program(body, ends)
    assert [kernel.name for kernel in kernels(read, read.entry)] == ["c"]


@pytest.fixture(scope="module")
def fitting():
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import _fit_speeds

        yield _fit_speeds
    finally:
        sys.path.remove(folder)


def rows_of(fitting, constants):
    """Steps of two chips that take what the constants say."""
    rows = []
    for number in range(6):
        parts = {
            "products": 5.0 + number,
            "multiplied": 0.3,
            "vectors": 0.02 * (number % 3 + 1),
            "rest": 1.0 + 0.1 * number,
        }
        row = {"name": str(number), "chip": ("v5e", "v6e")[number % 2], "parts": parts}
        rows.append({**row, "published": fitting.modelled(row, constants)})
    return rows


def test_the_fit_finds_the_speeds_that_steps_were_made_with(fitting):
    constants = {"128": 0.95, "256": 0.8, "operations": 14.0}
    rows = rows_of(fitting, constants)
    fitted = fitting.fit(rows)
    # Attention is a small part of these steps, and is held near what is likely.
    assert fitted.pop("operations") == pytest.approx(constants.pop("operations"), rel=0.2)
    assert fitted == pytest.approx(constants, rel=0.05)
    assert max(map(abs, fitting.leave_one_out(rows))) < 0.03
    assert "by leave-one-out" in fitting.report(rows)


def test_a_row_that_is_left_out_does_not_shape_its_own_figure(fitting):
    rows = rows_of(fitting, {"128": 0.95, "256": 0.8, "operations": 14.0})
    rows[0]["published"] *= 1.5
    assert fitting.leave_one_out(rows)[0] == pytest.approx(1 / 1.5 - 1, abs=0.03)


def test_the_constants_are_those_of_the_fit(fitting):
    rows = json.loads(fitting.PARTS.read_text(encoding="utf-8"))["rows"]
    constants = fitting.fit(rows)
    operations = constants.pop("operations")
    for name, side in kernel_speeds.TPU_MULTIPLIER.items():
        table = CHIPS[name].speeds
        assert operations == pytest.approx(table["attention operations"], rel=0.02)
        assert constants[str(side)] == pytest.approx(table["part cycles"], rel=0.02)
