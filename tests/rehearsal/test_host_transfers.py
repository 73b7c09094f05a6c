"""Transfers to and from the host: which they are, and how much of their time is exposed."""

import pytest

from meshwright.hardware.chips import CHIPS
from meshwright.hlo.program import read_program
from meshwright.rehearsal.collectives.types import Collectives
from meshwright.rehearsal.host_transfers import find_host_transfers, transfers_of
from meshwright.rehearsal.kernel_speeds import speeds
from meshwright.rehearsal.step_time import step_time

HEAD = "HloModule jit_f, is_scheduled=true, num_partitions=4\n\n"
SIZE = 2 * 4096**2
DEVICE, HOST = "bf16[4096,4096]{1,0}", "bf16[4096,4096]{1,0:S(5)}"
DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def program(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    return read_program(
        f"{HEAD}{before}ENTRY %main (a: bf16[4096,4096]) -> bf16[4096,4096] {{\n"
        f"  %a = {DEVICE} parameter(0)\n{body}\n}}\n"
    )


def dot(name, of="a", root=False):
    return f"{'ROOT ' if root else ''}%{name} = {DEVICE} dot(%a, %{of}), {DIMS}"


def out(name, of):
    """A transfer to the host: its start, and its end."""
    start = f"%{name}.s = ({HOST}, {DEVICE}, u32[]) copy-start(%{of})"
    return start, f"%{name} = {HOST} copy-done(%{name}.s)"


def back(name, of):
    start = f"%{name}.s = ({DEVICE}, {HOST}, u32[]) copy-start(%{of})"
    return start, f"%{name} = {DEVICE} copy-done(%{name}.s)"


def timed(read, chip="h200"):
    return step_time(read, Collectives(()), CHIPS[chip])


def product(read, chip="h200"):
    """Seconds of a product at the clock of a step of this program."""
    speed = speeds(CHIPS[chip]).in_step(read)
    seconds = speed.compute(2 * 4096**3, "bf16")
    return seconds + speed.launch(seconds)


def bus(size=SIZE, chip="h200"):
    return speeds(CHIPS[chip]).host(size)


def between_steps(chip="h200"):
    return speeds(CHIPS[chip]).step


def test_the_bus_goes_at_its_measured_or_published_speed():
    # H200: 1 GiB to and from pinned memory at 52.7 and 53.2 GB/s.
    assert speeds(CHIPS["h200"]).bus == pytest.approx(53e9, rel=0.01)
    assert speeds(CHIPS["v5e"]).bus == 15e9
    assert speeds(CHIPS["v6e"]).bus == 32e9


def test_a_transfer_that_nothing_runs_beside_is_exposed():
    start, end = out("h", "a")
    step = program(start, end, dot("d", root=True))
    time = timed(step)
    assert time.host_exposed == pytest.approx(bus())
    assert time.host_hidden == 0.0
    assert time.total == pytest.approx(product(step) + bus() + between_steps())


def test_what_runs_between_start_and_end_hides_that_much():
    start, end = out("h", "a")
    step = program(start, dot("d"), end, dot("e", "d", root=True))
    one = timed(step)
    assert bus() > product(step)
    assert one.host_hidden == pytest.approx(product(step))
    assert one.host_exposed == pytest.approx(bus() - product(step))
    chain = [dot("d0"), dot("d1", "d0"), dot("d2", "d1"), dot("d3", "d2")]
    step = program(start, *chain, end, dot("e", "d3", root=True))
    all_of_it = timed(step)
    assert all_of_it.host_exposed == 0.0
    assert all_of_it.host_hidden == pytest.approx(bus())
    assert all_of_it.total == pytest.approx(5 * product(step) + between_steps())
    assert "hidden host transfers" in str(all_of_it)
    assert all_of_it.to_json()["parts"]["exposed host transfers"] == 0.0


def test_it_reads_the_devices_memory_once_and_takes_no_kernels_time():
    start, end = out("h", "a")
    time = timed(program(start, end, dot("d", root=True)))
    assert time.bytes == 3 * SIZE + SIZE
    assert time.memory == 0.0


def test_two_transfers_of_one_direction_queue_and_two_directions_do_not():
    first, second = out("h", "a"), out("g", "a")
    queued = timed(program(first[0], second[0], first[1], second[1], dot("d", root=True)))
    assert queued.host_exposed == pytest.approx(2 * bus())
    there = f"%p = {HOST} parameter(1)"
    other = back("r", "p")
    both = timed(program(there, first[0], other[0], first[1], other[1], dot("d", root=True)))
    assert both.host_exposed == pytest.approx(bus())
    assert both.host_hidden == pytest.approx(bus())


LOOP = f"""\
%body (p: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {{
  %p = (s32[], {DEVICE}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = {DEVICE} get-tuple-element(%p), index=1
  %y = {DEVICE} dot(%x, %x), {DIMS}
  ROOT %t = (s32[], {DEVICE}) tuple(%next, %y)
}}

%cond (q: (s32[], bf16[4096,4096])) -> pred[] {{
  %q = (s32[], {DEVICE}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant(8)
  ROOT %l = pred[] compare(%j, %n), direction=LT
}}

"""


def test_a_loop_hides_what_its_rounds_take():
    start, end = out("h", "a")
    loop = (
        "%zero = s32[] constant(0)",
        f"%in = (s32[], {DEVICE}) tuple(%zero, %a)",
        f"%w = (s32[], {DEVICE}) while(%in), condition=%cond, body=%body",
    )
    last = f"ROOT %r = {DEVICE} get-tuple-element(%w), index=1"
    hidden = timed(program(start, *loop, end, last, before=LOOP))
    exposed = timed(program(start, end, *loop, last, before=LOOP))
    assert hidden.host_exposed == 0.0
    assert exposed.host_exposed == pytest.approx(bus())
    assert exposed.total - hidden.total == pytest.approx(bus())


def test_layers_of_a_stack_on_the_host_are_counted_by_the_layer():
    # As the GPU's compiler writes them: fusions that start and end apart; TPUs have own opcodes.
    stack, layer = "bf16[8,4096,4096]{2,1,0:S(5)}", "bf16[1,4096,4096]{2,1,0}"
    fused = f"""\
%wrapped (p0: bf16[8,4096,4096], p1: bf16[1,4096,4096], p2: s32[]) -> bf16[8,4096,4096] {{
  %p0 = {stack} parameter(0)
  %p1 = {layer} parameter(1)
  %c = {layer} copy(%p1)
  %p2 = s32[] parameter(2)
  ROOT %u = {stack} dynamic-update-slice(%p0, %c, %p2, %p2, %p2)
}}

"""
    given = (
        f'%s = {stack} custom-call(), custom_call_target="AllocateBuffer"',
        "%i = s32[] constant(0)",
        f"%l = {layer} bitcast(%a)",
    )
    started = f"(({stack}, {layer}, s32[]), {stack}, u32[])"
    gpu = program(
        *given,
        f"%u.s = {started} fusion-start(%s, %l, %i), kind=kCustom, calls=%wrapped",
        dot("d"),
        f"%u = {stack} fusion-done(%u.s)",
        f"ROOT %e = {DEVICE} copy(%d)",
        before=fused,
    )
    tpu = program(
        *given,
        f"%u.s = {started} dynamic-update-slice-start(%s, %l, %i, %i, %i)",
        dot("d"),
        f"%u = {stack} dynamic-update-slice-done(%u.s)",
        f"%r.s = (({stack}, s32[]), {layer}, u32[]) dynamic-slice-start(%u, %i, %i, %i)",
        f"%r = {layer} dynamic-slice-done(%r.s)",
        f"ROOT %e = {DEVICE} bitcast(%r)",
    )
    [sent] = transfers_of(gpu)["main"]
    assert (sent.direction, sent.bytes, sent.start, sent.end) == ("to host", SIZE, "u.s", "u")
    assert timed(gpu).bytes == SIZE + 3 * SIZE + 2 * SIZE  # the transfer, the dot, the copy
    assert timed(gpu).host_hidden == pytest.approx(product(gpu))
    found = find_host_transfers(tpu, CHIPS["v5e"])
    assert (found.to_host, found.to_device, found.transfers) == (SIZE, SIZE, 2)
    assert found.seconds == pytest.approx(SIZE / 15e9)


def test_copies_to_scratch_memory_are_not_transfers_to_the_host():
    scratch = DEVICE.replace("{1,0}", "{1,0:T(8,128)S(1)}")
    read = program(
        f"%c.s = ({scratch}, {DEVICE}, u32[]{{:S(2)}}) copy-start(%a)",
        f"%c = {scratch} copy-done(%c.s)",
        f"ROOT %e = {DEVICE} copy(%c)",
    )
    assert find_host_transfers(read, CHIPS["v5e"]) is None
    assert timed(read, "v5e").host_exposed == 0.0


def test_a_plain_copy_to_the_host_is_waited_for():
    time = timed(program(f"%h = {HOST} copy(%a)", dot("d", root=True)))
    assert time.host_exposed == pytest.approx(bus())
    assert time.memory == 0.0


def test_a_bus_of_unknown_speed_is_said_to_be_unknown():
    start, end = out("h", "a")
    read = program(start, end, dot("d", root=True))
    found = find_host_transfers(read, CHIPS["tpu7x"])
    assert found.seconds is None
    assert "is not known here" in str(found)
    assert timed(read, "tpu7x").host_exposed == 0.0
