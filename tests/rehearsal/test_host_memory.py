"""What a program keeps in the memory of the hosts, and what is said where offloading is lost."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.hardware.chips import CHIPS
from meshwright.hlo.instructions import HOST_SPACE, Source
from meshwright.hlo.program import read_program
from meshwright.rehearsal.host_memory import HostMemory, host_memory
from meshwright.rehearsal.host_transfers import offload_lost_line
from meshwright.rehearsal.peak import live_buffers

GIB = 2**30
STACK, LAYER = "f32[4,1024,1024]{2,1,0:S(5)}", "f32[1,1024,1024]{2,1,0}"
INDICES, FLAG = "s32[], s32[], s32[]", "u32[]{:S(2)}"
STARTED = f"(({STACK}, {LAYER}, {INDICES}), {STACK}, {FLAG})"
PROGRAM = f"""\
HloModule jit_f, is_scheduled=true, num_partitions=4

ENTRY %main (a: f32[1,1024,1024], i: s32[]) -> f32[1,1024,1024] {{
  %a = {LAYER} parameter(0)
  %i = s32[] parameter(1)
  %s = {STACK} custom-call(), custom_call_target="AllocateBuffer"
  %u.s = {STARTED} dynamic-update-slice-start(%s, %a, %i, %i, %i)
  %b = {LAYER} add(%a, %a)
  %u = {STACK} dynamic-update-slice-done(%u.s)
  %r.s = (({STACK}, {INDICES}), {LAYER}, {FLAG}) dynamic-slice-start(%u, %i, %i, %i)
  %r = {LAYER} dynamic-slice-done(%r.s)
  ROOT %c = {LAYER} add(%b, %r)
}}
"""


def test_arrays_on_the_host_are_listed_there_and_not_on_the_device():
    program = read_program(PROGRAM)
    assert [buffer.shape for buffer in live_buffers(program, space=HOST_SPACE)] == [
        "f32[4,1024,1024]"
    ]
    assert {buffer.shape for buffer in live_buffers(program)} <= {"f32[1,1024,1024]", "s32[]"}


def kept(on, size, part=None):
    hardware = mw.topology(on)
    used = hardware if part is None else mw.topology(part)
    return host_memory({"host_temp": size}, read_program(PROGRAM), used, hardware)


@pytest.mark.parametrize(
    ("on", "devices", "gigabytes"),
    [
        ("v5e:4x4", 4, 192),
        ("v5p:2x2x2", 4, 448),
        ("v6e:4x4", 4, 720),
        ("tpu7x:2x2x2", 8, 960),  # two devices a chip
        ("a3-highgpu-8g", 8, 1872),
        ("p5.48xlarge", 8, 2048),
    ],
)
def test_the_devices_of_a_host_share_its_memory(on, devices, gigabytes):
    host = kept(on, GIB)
    assert (host.devices, host.total, host.limit) == (devices, devices * GIB, gigabytes * 10**9)
    assert host.fits is True
    assert "fits the host" in str(host)
    too_much = kept(on, gigabytes * 10**9 // devices + 1)
    assert too_much.fits is False
    assert "does NOT fit the host" in str(too_much)
    assert too_much.to_json()["fits"] is False


def test_a_part_of_a_host_may_use_all_of_its_memory():
    host = kept("a3-highgpu-8g", 200 * GIB, part="h100:2")
    assert (host.devices, host.limit) == (2, 1872 * 10**9)


@pytest.mark.parametrize("on", ["h100:8", "v4:2x2x1", "p4de.24xlarge"])
def test_memory_that_is_not_known_is_said_to_be_unknown(on):
    host = kept(on, 2**50)
    assert host.limit is None and host.fits is None
    assert "how much the host has is not known" in str(host)


def test_own_figures_replace_the_tables():
    hardware = mw.topology("h100:8", speeds={"ram_gb": 256})
    host = host_memory({"host_temp": GIB}, read_program(PROGRAM), hardware, hardware)
    assert host.limit == 8 * 256 * 10**9


def test_nothing_on_the_host_is_nothing_to_tell():
    assert kept("v5e:4x4", 0) is None


OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["input"],
    offload_src="device",
    offload_dst="pinned_host",
)


def offloading(w, x):
    layer = jax.checkpoint(lambda w: jnp.tanh(checkpoint_name(x @ w, "input")), policy=OFFLOAD)
    return jax.grad(lambda w: layer(w).sum())(w)


@pytest.fixture(scope="module")
def result():
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    return mw.rehearse(offloading, shape, shape, mesh="fsdp:8", on="cpu:8")


def test_a_program_without_the_transfers_that_the_step_asks_for_is_told(result):
    assert result.offload_lost and result.host_transfers is None
    assert any("test_host_memory.py" in str(source) for source in result.offloads)
    assert "simulated CPU devices have no other memory" in str(result)
    assert result.to_json()["offload_lost"] is True


def test_a_step_that_offloads_nothing_has_lost_nothing():
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    plain = mw.rehearse(lambda w, x: x @ w, shape, shape, mesh="fsdp:8", on="cpu:8")
    assert not plain.offloads and not plain.offload_lost
    assert "offload" not in str(plain)


def test_on_a_gpu_the_words_name_the_cause_and_the_fix():
    line = offload_lost_line([Source("model.py", 12)], CHIPS["h100"])
    assert "model.py:12" in line and "jax.lax.scan" in line and "prevent_cse" in line
    assert "simulated" in offload_lost_line([None], CHIPS["h100"], stand_in=True)


def test_a_host_that_is_too_small_is_in_the_verdict(result):
    host = HostMemory(0, 0, 0, 100 * GIB, devices=4, limit=192 * 10**9)
    small = dataclasses.replace(result, host_memory=host)
    assert result.fits and not small.fits
    assert "does NOT fit the host: 400 GiB" in str(small)
    assert "does NOT fit the host" in small._repr_html_()
    assert small.to_json()["host_memory"]["total"] == 400 * GIB
    unknown = dataclasses.replace(result, host_memory=dataclasses.replace(host, limit=None))
    assert unknown.fits
    assert "is not known" in str(unknown)


def test_an_argument_on_the_host_is_on_the_device_where_there_is_no_other_memory():
    lies = NamedSharding(
        mw.abstract_mesh("fsdp:8"), PartitionSpec("fsdp"), memory_kind="pinned_host"
    )
    given = jax.ShapeDtypeStruct((64, 64), "float32", sharding=lies)
    taken = mw.rehearse(lambda x: 2 * x, given, mesh="fsdp:8", on="cpu:8")
    assert taken.memory.arguments == 64 * 64 * 4 // 8
    assert "1 array of the arguments on the host: taken to be on the device" in str(taken)
