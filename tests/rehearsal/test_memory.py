"""Memory: does it fit, what is large, what the compiler says when it gives up, the ways out."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright._text import amount
from meshwright.hardware.chips import CHIPS
from meshwright.hlo.program import read_program
from meshwright.rehearsal.memory import as_compiled, as_refused, available
from meshwright.rehearsal.peak import live_buffers, workspace_at_peak

GIB = 2**30
SIZES = {"argument": GIB, "output": GIB, "alias": GIB, "temp": 3 * GIB, "generated_code": 0}


def test_the_peak_is_all_that_is_allocated_at_once():
    found = as_compiled(SIZES, CHIPS["v5e"], ())
    assert found.peak == 4 * GIB
    assert found.fits
    assert found.margin == 11.75 * GIB
    assert found.verdict().startswith("fits: 4 GiB of 15.75 GiB on each v5e (25%)")


def test_temporaries_of_a_tpu_are_what_is_alive_beside_its_arguments():
    # MaxText-32B on 64 v5p, as libtpu 0.0.42 reports it: accepted, and 99.2 GiB by these sizes.
    sizes = {
        "argument": 6_107_293_184,
        "output": 6_106_770_048,
        "alias": 6_106_768_896,
        "temp": 100_353_818_304,
        "generated_code": 41_987_072,
        "live": 92_948_267_648,
    }
    memory = as_compiled(sizes, CHIPS["v5p"], ())
    assert memory.peak == sizes["live"] + sizes["generated_code"]
    assert memory.fits
    assert as_compiled({**sizes, "live": 0}, CHIPS["v5p"], ()).temporaries == sizes["temp"]
    # With the gaps between arrays, where the compiler says what it assigned.
    assigned = as_compiled({**sizes, "assigned": 94 * 10**9}, CHIPS["v5p"], ())
    assert assigned.peak == 94 * 10**9 + sizes["generated_code"]
    assert as_compiled(sizes, CHIPS["h200"], ()).temporaries == sizes["temp"]


def test_the_table_and_the_bar_have_the_same_parts_which_add_up_to_the_peak():
    found = as_compiled({**SIZES, "output": 2 * GIB}, CHIPS["v5e"], ())
    drawn = [(part.name, amount(part.size)) for part in found.lane("a device").parts if part.size]
    assert drawn == [
        ("arguments", "1 GiB"),
        ("outputs beside 1 GiB aliased", "1 GiB"),
        ("temporaries", "3 GiB"),
    ]
    rows = [tuple(re.split("  +", line)) for line in str(found).splitlines()[2:]]
    assert rows == [*drawn, ("peak", "5 GiB"), ("limit", "15.75 GiB")]


def test_what_is_too_large_says_by_how_much():
    found = as_compiled({**SIZES, "temp": 20 * GIB}, CHIPS["v5e"], ())
    assert not found.fits
    assert found.margin == -5.25 * GIB
    assert "does NOT fit: 21 GiB" in str(found)
    assert "5.25 GiB too much" in str(found)


def arguments(text):
    """An argument of which every device holds a half."""
    shape = tuple(map(int, text[4:-1].split(",")))
    shape, spec = (2 * shape[0], *shape[1:]), jax.sharding.PartitionSpec("dp")
    mesh = jax.sharding.AbstractMesh((2,), ("dp",))
    return mw.explain({"w": jax.ShapeDtypeStruct(shape, "float32")}, mesh, {"w": spec}).rows


@pytest.mark.parametrize(
    "reason",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (28.97G) exceeds available HBM (15.75G).",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 28.97G of 15.75G hbm.",
    ],
)
def test_the_compilers_verdict_is_shown_in_the_same_form(reason):
    found = as_refused(reason, arguments("f32[512,1024,1024]"), CHIPS["v5e"])
    assert not found.fits
    assert found.refused
    assert found.peak == int(28.97 * GIB)
    assert found.temporaries == found.peak - 2 * GIB
    assert found.limit == int(15.75 * GIB)
    assert "the compiler refused" in str(found)
    assert found.to_json()["refused"] is True
    assert [(b.shape, b.bytes, b.made_by) for b in found.buffers] == [
        ("f32[512,1024,1024]", 2 * GIB, "argument w")
    ]


def test_a_verdict_without_numbers_is_a_verdict():
    found = as_refused(
        "RESOURCE_EXHAUSTED: out of memory", arguments("f32[256,1024,1024]"), CHIPS["v5e"]
    )
    assert not found.fits
    assert found.limit == available(CHIPS["v5e"])


def test_a_gpu_is_not_all_ours_by_default():
    nearly = as_compiled({**SIZES, "temp": 65 * GIB}, CHIPS["h100"], ())
    assert nearly.fits
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in str(nearly)
    assert as_compiled(SIZES, CHIPS["h100"], ()).note == ""


TEXT = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=1

%body (state: (s32[], f32[256])) -> (s32[], f32[256]) {
  %state = (s32[], f32[256]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[256] get-tuple-element(%state), index=1
  %wide = f32[4096] broadcast(%x), dimensions={}
  %back = f32[256] reduce(%wide, %i), dimensions={}
  ROOT %next = (s32[], f32[256]) tuple(%i, %back)
}

%condition (state.1: (s32[], f32[256])) -> pred[] {
  %state.1 = (s32[], f32[256]) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (a: f32[1024], b: f32[256]) -> (f32[1024], f32[256]) {
  %a = f32[1024] parameter(0)
  %b = f32[256] parameter(1)
  %early = f32[2048] broadcast(%b), dimensions={}
  %used = f32[256] reduce(%early, %b), dimensions={}
  %zero = s32[] constant(0)
  %start = (s32[], f32[256]) tuple(%zero, %used)
  %loop = (s32[], f32[256]) while(%start), condition=%condition, body=%body, metadata={op_name="w"}
  %out = f32[256] get-tuple-element(%loop), index=1
  %new = f32[1024] add(%a, %a)
  ROOT %both = (f32[1024], f32[256]) tuple(%new, %out)
}
"""


def test_buffers_live_from_their_making_to_their_last_use():
    found = {buffer.name: buffer.bytes for buffer in live_buffers(read_program(TEXT))}
    # In the loop: both arguments, its state and the wide value; `early` is gone, the next state
    # is written over the last one, and the result over the donated argument.
    assert found == {"a": 4096, "b": 1024, "used": 1024, "wide": 16384}


SET_ASIDE = """\
HloModule jit_f, is_scheduled=true, num_partitions=1

%body (state: (f32[256], f32[4096])) -> (f32[256], f32[4096]) {
  %state = (f32[256], f32[4096]) parameter(0)
  %x = f32[256] get-tuple-element(%state), index=0
  %all = f32[4096] get-tuple-element(%state), index=1
  %kept = f32[4096] tanh(%all), metadata={op_name="jit(f)/tanh" source_file="/m.py" source_line=7}
  ROOT %next = (f32[256], f32[4096]) tuple(%x, %kept)
}

%condition (state.1: (f32[256], f32[4096])) -> pred[] {
  %state.1 = (f32[256], f32[4096]) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (w: f32[1024], b: f32[256]) -> (f32[4096], f32[1024]) {
  %w = f32[1024] parameter(0), metadata={op_name="params['w']"}
  %b = f32[256] parameter(1), metadata={op_name="x"}
  %aside = f32[4096] custom-call(), custom_call_target="AllocateBuffer"
  %moved = (f32[1024], f32[1024], u32[]) copy-start(%w)
  %start = (f32[256], f32[4096]) tuple(%b, %aside)
  %loop = (f32[256], f32[4096]) while(%start), condition=%condition, body=%body
  %out = f32[4096] get-tuple-element(%loop), index=1
  %there = f32[1024] copy-done(%moved)
  ROOT %both = (f32[4096], f32[1024]) tuple(%out, %there)
}
"""


def test_a_buffer_without_a_name_is_whose_it_is_filled_or_copied_for():
    found = {
        b.name: (b.made_by, b.source and str(b.source))
        for b in live_buffers(read_program(SET_ASIDE))
    }
    assert found["aside"] == ("tanh", "m.py:7")  # the loop fills it
    assert found["moved"] == ("params['w']", None)


def test_the_walk_accounts_for_what_the_compiler_reports(tmp_path):
    def step(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jax.grad(lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0]))(w)

    found = mw.rehearse(
        step,
        jax.ShapeDtypeStruct((8, 256, 256), "float32"),
        jax.ShapeDtypeStruct((512, 256), "float32"),
        mesh="dp:8",
        on="cpu:8",
        cache=tmp_path,
    )
    walked = sum(buffer.bytes for buffer in found.memory.buffers)
    assert walked == pytest.approx(found.memory.peak, rel=0.15)
    assert found.memory.buffers[0].bytes == max(b.bytes for b in found.memory.buffers)


def too_large(params, batch):
    hidden = batch["x"] @ params["w"]
    grads = jax.grad(lambda w: jnp.mean((jnp.tanh(batch["x"] @ w) + hidden) ** 2))(params["w"])
    return {"w": params["w"] - grads}


@pytest.fixture(scope="module")
def tight(tmp_path_factory):
    """A step that takes more than a simulated device is said to have."""
    result = mw.rehearse(
        too_large,
        {"w": jax.ShapeDtypeStruct((16384, 16384), "float32")},
        {"x": jax.ShapeDtypeStruct((131072, 16384), "float32")},
        mesh="dp:8",
        on="cpu:8",
        cache=tmp_path_factory.mktemp("cache"),
    )
    assert not result.fits
    return result


def test_ways_out_are_listed_cheapest_first(tight):
    ways = tight.remedies()
    assert [way.what for way in ways] == [
        "donate what the step replaces",
        "shard parameters further",
        "halve the batch",
        "take a larger slice",
    ]
    assert [way.how for way in ways[:2]] == ["donate_argnums=0", "mesh='fsdp:8'"]
    assert all(way.tried is None for way in ways)
    assert "donate_argnums=0" in str(tight)


@pytest.mark.slow
def test_ways_out_are_compiled_when_asked(tight):
    ways = {way.what: way for way in tight.remedies(check=True)}
    donated = ways["donate what the step replaces"].tried
    assert donated.memory.aliased == 2**30
    assert donated.memory.peak < tight.memory.peak
    cut = ways["shard parameters further"].tried
    assert cut.memory.arguments < tight.memory.arguments
    assert str(cut.placement.spec) == "fsdp:8"
    smaller = ways["halve the batch"].tried
    assert smaller.memory.temporaries < tight.memory.temporaries
    assert "tried, " in str(ways["halve the batch"])
    assert ways["take a larger slice"].tried.fits


def test_a_remedy_that_fails_says_so(tight):
    hasty = dataclasses.replace(tight.request, timeout=1e-9, cache=None)
    ways = dataclasses.replace(tight, request=hasty).remedies(check=True)
    assert "tried, too_large: the compiler was not done" in str(ways[0])


ATTENTION = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY %main (q: bf16[2,64,8,128], k: bf16[2,64,2,128]) -> bf16[2,8,64,128] {
  %q = bf16[2,64,8,128]{3,2,1,0} parameter(0), metadata={op_name="q"}
  %k = bf16[2,64,2,128]{3,2,1,0} parameter(1), metadata={op_name="k"}
  %call = (bf16[2,8,64,128]{3,2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target=\
"__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config": \
{"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "8", "64", "64"]}}}
  ROOT %out = bf16[2,8,64,128]{3,2,1,0} get-tuple-element(%call), index=0
}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ATTENTION, 256 + 4 * 2 * 64 * 8 * 129 + 4 * 2 * 64 * 8 * 128),  # heads share keys
        (ATTENTION.replace("2,64,2,128", "2,64,8,128"), 256 + 4 * 2 * 64 * 8 * 129),
        (ATTENTION.replace("SoftmaxBackward", "Softmax"), 256),
        (ATTENTION.replace("u8[0]", "u8[4096]"), 0),  # cuDNN has said it
    ],
)
def test_the_workspace_of_cudnns_attention_is_at_the_peak(text, expected):
    program, chip = read_program(text), CHIPS["h100"]
    assert workspace_at_peak(program, chip, 0) == expected
    assert workspace_at_peak(program, CHIPS["cpu"], 0) == 0
    sizes = [b.bytes for b in live_buffers(program, chip) if b.shape == f"u8[{expected}]"]
    assert sizes == ([expected] if expected else [])
